"""Publishing to an SGLang server. Written from its documentation; no SGLang has run against it here."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from turngate.runtime.errors import EndpointError, PublishRefused
from turngate.runtime.publishers.admin import Admin
from turngate.runtime.publishers.checked import CheckedPublisher
from turngate.runtime.publishers.folder_server import FolderServer
from turngate.runtime.publishers.folders import Version, VersionFolders, is_tied
from turngate.runtime.weights import InFlight, check_in_flight

__all__ = ["SGLangPublisher"]


class _Updated(msgspec.Struct):
    success: bool
    message: str = ""


class _ModelInfo(msgspec.Struct):
    weight_version: str | None = None


class _Meta(msgspec.Struct):
    input_token_logprobs: list[tuple[float | None, int, str | None]]


class _Scored(msgspec.Struct):
    meta_info: _Meta


class SGLangPublisher(CheckedPublisher):
    """Publishes to an SGLang server: POST /update_weights_from_disk with a folder per version.

    Server and publisher must share a file system. Its cache of prefixes is flushed with every update.
    """

    def __init__(
        self,
        url: str,
        *,
        base_model: Path | str,
        in_flight: InFlight = "continues",
        api_key: str | None = None,
        folder: Path | str | None = None,
        timeout_s: float = 300.0,
        attempts: int = 4,
        retry_delay_s: float = 0.5,
        canary_tolerance: float | Literal["auto"] = "auto",
    ) -> None:
        """Prepare to publish to the server at `url`.

        Args: base_model: the folder that the server was started with. in_flight: what becomes of requests under way.
            `continues`: they are retracted, and go on with what they have, computed anew by the new weights;
            `pauses`: they finish first; `restarts`: they are aborted. folder: where the versions are laid out, on the
            server's file system; None: `served` beside the weights.
            The other settings are explained at CheckedPublisher.
        Raises: ConfigError: a setting cannot work, or `base_model` is no model folder.
        """
        check_in_flight(in_flight, ("continues", "pauses", "restarts"))
        base = Path(base_model).absolute()
        folders = VersionFolders(Path(folder).absolute() if folder is not None else None)
        super().__init__(
            _SGLangControl(Admin(url, api_key=api_key), base, folders, in_flight),
            timeout_s=timeout_s,
            attempts=attempts,
            retry_delay_s=retry_delay_s,
            canary_tolerance=canary_tolerance,
            is_tied=is_tied(base),
        )


class _SGLangControl(FolderServer):
    """The control routes of an SGLang server."""

    go_on_route = "/continue_generation"

    def __repr__(self) -> str:
        return f"{self._admin.url}, SGLang"

    async def served_version(self) -> int:
        told = await self._admin.get("/get_model_info")
        version = self._admin.decode(told, _ModelInfo, "/get_model_info").weight_version or ""
        return int(version) if version.isdecimal() else 0

    async def is_exact(self) -> bool:
        return False  # it does not say

    async def score(self, token_ids: Sequence[int], *, timeout_s: float = 60.0) -> list[float]:
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        async with asyncio.timeout(timeout_s):
            told = await self._admin.post("/generate", body)
        found = self._admin.decode(told, _Scored, "/generate").meta_info.input_token_logprobs
        logprobs = [logprob for logprob, _, _ in found]
        if len(logprobs) != len(token_ids):
            raise EndpointError(f"input_token_logprobs must cover the prompt: got {len(logprobs)} of {len(token_ids)}")
        return [logprob or 0.0 for logprob in logprobs]  # the first has no context, and is null

    async def _hold(self) -> None:
        # To keep requests alive they are retracted, as only then may the cache be flushed. Otherwise the server itself
        # lets requests finish, and holds new ones back, unless told to abort them.
        if self.in_flight == "continues":
            await self._admin.post("/pause_generation", {"mode": "retract"})

    async def _load(self, version: Version) -> None:
        body = {
            "model_path": str(version.folder),
            "abort_all_requests": self.in_flight == "restarts",
            "weight_version": version.label,
            "flush_cache": True,
        }
        told = await self._admin.post("/update_weights_from_disk", body)
        updated = self._admin.decode(told, _Updated, "/update_weights_from_disk")
        if not updated.success:
            raise PublishRefused(f"the server must load {version.folder}: got {updated.message!r}")

    async def _forget(self) -> None:
        pass  # an update is one request, which flushes by itself

    async def _go_on(self) -> None:
        if self.in_flight == "continues":
            await self._admin.post("/continue_generation", {})
