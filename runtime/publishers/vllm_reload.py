"""vLLM's routes for reloading full weights in place, as its development mode offers them."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from turngate.runtime.errors import PublishRefused
from turngate.runtime.publishers.admin import Admin, AdminError
from turngate.runtime.publishers.folder_server import FolderServer
from turngate.runtime.publishers.folders import Version, VersionFolders
from turngate.runtime.publishers.scoring import score_by_echo
from turngate.runtime.publishers.vllm_info import read_info
from turngate.runtime.weights import InFlight

__all__ = ["VLLMReload"]

_PAUSE_MODES: dict[InFlight, str] = {"continues": "keep", "pauses": "wait", "restarts": "abort"}


class _Reset(msgspec.Struct):
    success: bool


class _WeightInfo(msgspec.Struct):
    weight_version: str | None = None


class VLLMReload(FolderServer):
    """Pauses a vLLM server, has it load a folder, drops what the old weights computed, and lets it go on.

    The order is what makes it exact: nothing runs between the first step and the last, so no key or value of the old
    weights can be reused by a request under the new ones. Frozen requests have theirs computed anew.
    """

    go_on_route = "/resume"

    def __init__(
        self,
        admin: Admin,
        base_model: Path,
        folders: VersionFolders,
        *,
        in_flight: InFlight,
        model: str | None,
        is_tied: bool,
    ) -> None:
        """Prepare. Args: model: the name under which it serves; None asks. is_tied: its head is its embedding."""
        super().__init__(admin, base_model, folders, in_flight)
        self._served_name, self._is_tied = model, is_tied

    def __repr__(self) -> str:
        return f"{self._admin.url}, vLLM reload"

    async def served_version(self) -> int:
        """Return the version that was set by the last publication since the server started, 0 when there was none."""
        try:
            told = await self._admin.get("/weight_info")
        except AdminError as error:
            if error.status == 404:  # an older vLLM, or not in development mode: publishing will tell
                return 0
            raise
        version = self._admin.decode(told, _WeightInfo, "/weight_info").weight_version or ""
        return int(version) if version.isdecimal() else 0

    async def is_exact(self) -> bool:
        """Whether the server computes in float32, or ties its head on a CPU, where old heads have stayed."""
        info = await read_info(self._admin)
        return info.dtype == "float32" or (self._is_tied and info.device == "cpu")

    async def score(self, token_ids: Sequence[int], *, timeout_s: float = 60.0) -> list[float]:
        """Return log-probs under what serves now."""
        return await score_by_echo(self._admin, self._served_name, token_ids, timeout_s)

    async def _hold(self) -> None:
        try:
            await self._admin.post("/pause", params={"mode": _PAUSE_MODES[self.in_flight], "clear_cache": "false"})
        except AdminError as error:
            if error.status == 404:
                raise PublishRefused(
                    f"{error}; start vLLM with VLLM_SERVER_DEV_MODE=1, or with LoRA use mode='lora'"
                ) from error
            raise

    async def _load(self, version: Version) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(version.folder)}}
        await self._admin.post("/collective_rpc", body)
        await self._forget()
        try:
            await self._admin.post("/update_weight_version", {"new_version": version.label})
        except AdminError as error:
            if error.status != 404:  # older versions have no such route, and need none
                raise

    async def _go_on(self) -> None:
        await self._admin.post("/resume")

    async def _forget(self) -> None:
        """Drop every cached key and value; running requests compute theirs anew when they go on."""
        running = "true" if self.in_flight == "continues" else "false"
        told = await self._admin.post(
            "/reset_prefix_cache", params={"reset_running_requests": running, "reset_external": "true"}
        )
        if not told:
            return  # before 0.12 it said nothing, and raised when it failed
        if not self._admin.decode(told, _Reset, "/reset_prefix_cache").success:
            raise AdminError(
                "the prefix cache must be empty after an update: the server kept it, and would answer from keys and "
                "values of the old weights"
            )
