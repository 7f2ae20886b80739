"""What servers that load their weights from a folder have in common: what serves, and how a failure ends."""

import asyncio
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import anyio

from turngate.runtime.errors import PublishError
from turngate.runtime.publishers.admin import Admin, AdminError
from turngate.runtime.publishers.folders import Version, VersionFolders, check_tensors, model_folder
from turngate.runtime.weights import InFlight

__all__ = ["FolderServer"]

_CLEAN_UP_S = 60.0
"""For making the server serve again after a failure or a cancellation."""


class FolderServer(ABC):
    """Replaces a server's weights in place: it is held, loads a whole model's folder, and goes on.

    A subclass has the server's routes, and says how it is asked what it serves (the rest of `ServerControl`).
    """

    # Changed by serve() and undo(): _serving, _before, _is_known.

    model: str | None = None
    go_on_route: ClassVar[str]
    """What makes a server that is held go on, for people who have to."""

    def __init__(self, admin: Admin, base_model: Path, folders: VersionFolders, in_flight: InFlight) -> None:
        """Prepare; the server is taken to serve `base_model` until something else was published."""
        self.in_flight: InFlight = in_flight
        self._admin = admin
        self._base_model = base_model
        self._folders = folders
        self._serving = self._before = Version(base_model, "0")
        self._is_known = True
        """Whether what it serves is `_serving`, as far as its answers tell."""

    async def serve(self, path: Path, policy_version: int) -> None:
        """Load `path` while the server is held.

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

    @abstractmethod
    async def _hold(self) -> None:
        """Have the server do nothing with requests until it goes on; those under way as `in_flight` says."""

    @abstractmethod
    async def _load(self, version: Version) -> None:
        """Load a folder, drop what the weights before have computed, and tell the server the version's label."""

    @abstractmethod
    async def _forget(self) -> None:
        """Drop what the weights before have computed, where `_load` may have been cut off before it did."""

    @abstractmethod
    async def _go_on(self) -> None:
        """Undo `_hold`."""

    async def _switch(self, version: Version) -> None:
        is_held = False
        try:
            await self._hold()
            is_held = True
            self._is_known = False
            await self._load(version)
            await self._go_on()
            self._is_known = True
        except BaseException as error:
            # A cancellation too: a server that stays held would keep every request waiting for ever.
            state = f"what the server serves is not known, and it may be paused: POST {self.go_on_route}"
            with anyio.move_on_after(_CLEAN_UP_S, shield=True):
                state = await self._clean_up(error, is_held)
            if isinstance(error, PublishError):
                raise type(error)(f"{error}; {state}") from error
            raise

    async def _clean_up(self, error: BaseException, is_held: bool) -> str:
        """Make the server serve something known, and return what, as the end of an error message."""
        has_said_no = isinstance(error, PublishError) and not (isinstance(error, AdminError) and not error.status)
        try:
            if has_said_no and is_held and not self._is_known:
                # Some layers may have their new weights by now, or all: from an attempt, too, whose reply was lost.
                await self._load(self._serving)
                self._is_known = True
            else:
                await self._forget()
            await self._go_on()
        except PublishError as failure:
            return f"what the server serves is not known, and it may be paused: {failure}; restart it"
        if not self._is_known:
            return "the new weights may be serving under the old version's name"
        return f"the old weights serve ({self._serving.folder})"
