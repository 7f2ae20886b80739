"""vLLM's routes for LoRA adapters: one adapter per version, each under its own name."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from turngate.runtime.errors import ConfigError, PublishError, PublishRefused
from turngate.runtime.publishers.admin import Admin, AdminError
from turngate.runtime.publishers.folders import VersionFolders, adapter_folder
from turngate.runtime.publishers.scoring import score_by_alternatives, served_models
from turngate.runtime.publishers.vllm_info import read_info
from turngate.runtime.weights import InFlight

__all__ = ["VLLMAdapters"]

_PREFIX = "policy-"


class VLLMAdapters:
    """Loads an adapter per version and unloads old ones.

    Why not one name, replaced in place: requests under way would go on with keys and values of the old adapter, and
    the server could not say which tokens came from which. Under names of their own each request has one version.
    """

    # Changed by serve(), keep() and undo(): model, _folders_of, _previous.

    in_flight: InFlight = "continues"

    def __init__(self, admin: Admin, folders: VersionFolders, *, keep: int, base: str | None) -> None:
        """Prepare; `keep` older adapters stay loaded beside the newest. Raises: ConfigError: `keep` is below 1."""
        if keep < 1:
            raise ConfigError(
                f"keep_adapters must be 1 or more: got {keep}; requests under way still name the last one"
            )
        self.model: str | None = base
        self._admin = admin
        self._folders = folders
        self._keep = keep
        self._folder_of: dict[str, Path] = {}
        self._previous = base

    def __repr__(self) -> str:
        return f"{self._admin.url}, vLLM adapters, {self.model or 'none yet'}"

    async def serve(self, path: Path, policy_version: int) -> None:
        """Load the adapter in `path`. Nothing that serves is touched: requests get it once they name it.

        Cancelled: it may be loaded; no request names it yet. Raises: PublishError: what served before still does.
        """
        name = f"{_PREFIX}{policy_version}"
        fill = await asyncio.to_thread(adapter_folder, path)
        folder = await asyncio.to_thread(self._folders.add, path, policy_version, fill)
        await self._unload(name)  # what an attempt before left, or a publication of the same version
        try:
            await self._admin.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        except AdminError as error:
            raise _explain(error) from error
        self._folder_of[name] = folder
        self._previous, self.model = (self._previous if self.model == name else self.model), name

    async def keep(self) -> None:
        """Unload all but the newest adapters."""
        loaded = await self._loaded()
        for version in loaded[: -1 - self._keep]:
            await self._unload(f"{_PREFIX}{version}")
        kept = {f"{_PREFIX}{version}" for version in loaded[-1 - self._keep :]}
        self._folder_of = {name: folder for name, folder in self._folder_of.items() if name in kept}
        # Adapters of an earlier process are left where they are: their folders are not ours to judge.
        await asyncio.to_thread(self._folders.keep_only, list(self._folder_of.values()))

    async def undo(self) -> str:
        """Unload the newest adapter; requests have never named it."""
        name, self.model = self.model, self._previous
        try:
            await self._unload(name or "")
        except PublishError as error:
            return f"what served before still does; the adapter {name} could not be unloaded: {error}"
        return "what served before still does"

    async def served_version(self) -> int:
        """Return the newest version that is loaded, 0 when there is none."""
        return max(await self._loaded(), default=0)

    async def is_exact(self) -> bool:
        """Whether the server computes in float32, as far as it says."""
        return (await read_info(self._admin)).dtype == "float32"

    async def score(self, token_ids: Sequence[int], *, timeout_s: float = 60.0) -> list[float]:
        """Return log-probs under the newest adapter, of the base model before the first."""
        return await score_by_alternatives(self._admin, self.model, token_ids, timeout_s)

    async def _loaded(self) -> list[int]:
        numbers = [name.removeprefix(_PREFIX) for name in await served_models(self._admin) if name.startswith(_PREFIX)]
        return sorted(int(number) for number in numbers if number.isdecimal())

    async def _unload(self, name: str) -> None:
        try:
            await self._admin.post("/v1/unload_lora_adapter", {"lora_name": name})
        except AdminError as error:
            if error.status != 404:  # it is not loaded, which is what we wanted
                raise


def _explain(error: AdminError) -> PublishError:
    if error.status in (404, 405):
        return PublishRefused(
            f"{error}; start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, or publish full "
            "weights with mode='reload'"
        )
    return error
