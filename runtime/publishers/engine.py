"""Publishing to an embedded engine."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from turngate.runtime.errors import PublishError, PublishRefused
from turngate.runtime.json_ids import DECODE_ERRORS
from turngate.runtime.publishers.admin import Admin, AdminError
from turngate.runtime.publishers.checked import CheckedPublisher
from turngate.runtime.publishers.scoring import score_by_echo
from turngate.runtime.weights import InFlight

__all__ = ["EnginePublisher"]

_PATH = "/admin/weights"


class _Health(msgspec.Struct):
    policy_version: int


class EnginePublisher(CheckedPublisher):
    """Publishes to an embedded engine: POST /admin/weights with the path of the file.

    The engine must see the same file system. It switches between two decode steps: generation continues.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        attempts: int = 4,
        retry_delay_s: float = 0.1,
        canary_tolerance: float | Literal["auto"] = "auto",
    ) -> None:
        """Prepare to publish to the engine at `url`; see CheckedPublisher for the limits."""
        super().__init__(
            _EngineControl(Admin(url, api_key=api_key)),
            timeout_s=timeout_s,
            attempts=attempts,
            retry_delay_s=retry_delay_s,
            canary_tolerance=canary_tolerance,
        )


class _EngineControl:
    """The control routes of an embedded engine."""

    in_flight: InFlight = "continues"
    model: str | None = None

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    def __repr__(self) -> str:
        return self._admin.url + _PATH

    async def serve(self, path: Path, policy_version: int) -> None:
        body = {"path": os.fspath(path), "policy_version": policy_version}
        try:
            told = await self._admin.post(_PATH, body)
        except AdminError as error:
            raise type(error)(f"{error}; the old version keeps serving") from error
        # A 200 alone proves little: servers have answered 200 and kept the old weights.
        try:
            served = msgspec.json.decode(told, type=dict[str, Any]).get("policy_version")
        except DECODE_ERRORS:
            served = None
        if served != policy_version:
            raise PublishRefused(f"the version must be confirmed by the engine: got {told[:200]!r}; is it Turngate's?")

    async def keep(self) -> None:
        pass

    async def undo(self) -> str:
        return "the engine serves them all the same: it keeps no older ones"

    async def served_version(self) -> int:
        try:
            return self._admin.decode(await self._admin.get("/health"), _Health, "/health").policy_version
        except PublishError as error:
            raise PublishError(f"the engine must say what it serves: {error}") from error

    async def is_exact(self) -> bool:
        return True

    async def score(self, token_ids: Sequence[int], *, timeout_s: float = 60.0) -> list[float]:
        return await score_by_echo(self._admin, None, token_ids, timeout_s)
