"""What a vLLM server says of itself, as far as it tells how closely its log-probs can be checked."""

from typing import Any

import msgspec

from turngate.runtime.publishers.admin import Admin, AdminError

__all__ = ["VLLMInfo", "read_info"]

_PATH = "/server_info"


class VLLMInfo(msgspec.Struct, frozen=True):
    """Empty where it does not say."""

    dtype: str = ""
    device: str = ""


class _Config(msgspec.Struct):
    model_config: dict[str, Any] = {}
    device_config: dict[str, Any] = {}


class _Told(msgspec.Struct):
    vllm_config: _Config


async def read_info(admin: Admin) -> VLLMInfo:
    """Ask a server in development mode; others do not say. Raises: PublishError: no reply, or 5xx."""
    try:
        told = await admin.get(_PATH, params={"config_format": "json"})
    except AdminError as error:
        if 400 <= error.status < 500:
            return VLLMInfo()
        raise
    config = admin.decode(told, _Told, _PATH).vllm_config
    dtype = str(config.model_config.get("dtype", "")).removeprefix("torch.")
    return VLLMInfo(dtype, str(config.device_config.get("device_type", "")))
