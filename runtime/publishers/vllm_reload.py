"""vLLM's routes for reloading full weights in place, as its development mode offers them."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import anyio
import msgspec

from turngate.runtime.errors import ConfigError, PublishError, PublishRefused
from turngate.runtime.publishers.admin import Admin, AdminError
from turngate.runtime.publishers.folders import Version, VersionFolders, check_tensors, model_folder
from turngate.runtime.publishers.scoring import score_by_echo
from turngate.runtime.publishers.vllm_info import read_info
from turngate.runtime.weights import InFlight

__all__ = ["VLLMReload"]

_PAUSE_MODES: dict[InFlight, str] = {"continues": "keep", "pauses": "wait", "restarts": "abort"}
_CLEAN_UP_S = 60.0
"""For making the server serve again after a failure or a cancellation."""


class _Reset(msgspec.Struct):
    success: bool


class _WeightInfo(msgspec.Struct):
    weight_version: str | None = None


class VLLMReload:
    """Pauses a vLLM server, has it load a folder, drops what the old weights computed, and lets it go on.

    The order is what makes it exact: nothing runs between the first step and the last, so no key or value of the old
    weights can be reused by a request under the new ones. Frozen requests have theirs computed anew.
    """

    # Changed by serve(), keep() and undo(): _serving, _before, _is_known.

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
        """Prepare; the server is taken to serve `base_model` until something else was published."""
        if _PAUSE_MODES.get(in_flight) is None:
            raise ConfigError(f"in_flight must be one of {', '.join(_PAUSE_MODES)}: got {in_flight!r}")
        self.in_flight: InFlight = in_flight
        self.model: str | None = None
        self._admin = admin
        self._base_model = base_model
        self._folders = folders
        self._served_name = model
        self._is_tied = is_tied
        self._serving = self._before = Version(base_model, "0")
        self._is_known = True
        """Whether what it serves is `_serving`, as far as its answers tell."""

    def __repr__(self) -> str:
        return f"{self._admin.url}, vLLM reload"

    async def serve(self, path: Path, policy_version: int) -> None:
        """Load `path` in one pause.

        Cancelled: the server goes on, with the old weights or the new. Raises: PublishError, which says what serves.
        """
        await asyncio.to_thread(check_tensors, path, self._base_model)
        folder = await asyncio.to_thread(self._folders.add, path, policy_version, model_folder(self._base_model, path))
        version = Version(folder, str(policy_version))
        await self._switch(version)
        self._before, self._serving = self._serving, version

    async def keep(self) -> None:
        """Forget all folders but what serves and what it replaced."""
        await asyncio.to_thread(self._folders.keep_only, (self._serving.folder, self._before.folder))

    async def undo(self) -> str:
        """Load the weights before once more."""
        try:
            await self._switch(self._before)
        except PublishError as error:
            return f"the weights before could not be put back, and what serves is not known: {error}"
        self._serving = self._before
        return f"the weights before serve again ({self._before.folder})"

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

    async def _switch(self, version: Version) -> None:
        is_paused = False
        try:
            await self._pause()
            is_paused = True
            await self._load(version.folder)
            await self._forget()
            await self._label(version.label)
            await self._admin.post("/resume")
            self._is_known = True
        except BaseException as error:
            # A cancellation too: a server that stays paused would hold every request for ever.
            state = "what the server serves is not known, and it may be paused: POST /resume"
            with anyio.move_on_after(_CLEAN_UP_S, shield=True):
                state = await self._clean_up(error, is_paused)
            if isinstance(error, PublishError):
                raise type(error)(f"{error}; {state}") from error
            raise

    async def _clean_up(self, error: BaseException, is_paused: bool) -> str:
        """Make the server serve something known, and return what, as the end of an error message."""
        has_said_no = isinstance(error, PublishError) and not (isinstance(error, AdminError) and not error.status)
        try:
            if has_said_no and is_paused and not self._is_known:
                # Some layers may have their new weights by now, or all: from an attempt, too, whose reply was lost.
                await self._load(self._serving.folder)
                await self._forget()
                await self._label(self._serving.label)
                self._is_known = True
            else:
                await self._forget()
            await self._admin.post("/resume")
        except PublishError as failure:
            return f"what the server serves is not known, and it may be paused: {failure}; restart it"
        if not self._is_known:
            return "the new weights may be serving under the old version's name"
        return f"the old weights serve ({self._serving.folder})"

    async def _pause(self) -> None:
        try:
            await self._admin.post("/pause", params={"mode": _PAUSE_MODES[self.in_flight], "clear_cache": "false"})
        except AdminError as error:
            raise _explain(error) from error

    async def _load(self, folder: Path) -> None:
        self._is_known = False
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._admin.post("/collective_rpc", body)

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

    async def _label(self, label: str) -> None:
        try:
            await self._admin.post("/update_weight_version", {"new_version": label})
        except AdminError as error:
            if error.status != 404:  # older versions have no such route, and need none
                raise


def _explain(error: AdminError) -> PublishError:
    if error.status == 404:
        return PublishRefused(f"{error}; start vLLM with VLLM_SERVER_DEV_MODE=1, or with LoRA use mode='lora'")
    return error
