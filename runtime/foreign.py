"""Calls into code that is not ours: whatever it does wrong is a typed error of one episode, and of no other."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeAlias, TypeVar

import anyio

from turngate.runtime.answers import describe_error
from turngate.runtime.deadline import Deadline
from turngate.runtime.errors import EnvError, ToolError, TurngateError
from turngate.runtime.leaving import Exited, LeavableCalls

__all__ = ["ForeignCalls"]

P = ParamSpec("P")
T = TypeVar("T")
ErrorKind: TypeAlias = "type[EnvError] | type[ToolError]"


class ForeignCalls:
    """The calls that one episode makes, one at a time, within its deadline."""

    __slots__ = ("_calls", "_deadline")

    def __init__(self, owner: str, deadline: Deadline, *, grace_s: float) -> None:
        """Call for `owner`; a call that outlives its cancellation by `grace_s` is left behind."""
        self._calls, self._deadline = LeavableCalls(owner, grace_s=grace_s), deadline

    async def run(
        self,
        what: str,
        kind: ErrorKind,
        call: Callable[P, Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Await a call to code that is not ours; whatever it does wrong becomes an error of `kind`."""
        try:
            result = await self._calls.run(what, call, *args, **kwargs)
        except asyncio.CancelledError as error:
            await self._check_own_cancels(what, kind)
            if self._deadline.expired or self._deadline.cancelled_from_outside():
                raise
            raise kind(f"{what} must not raise CancelledError: nobody cancelled it") from error
        except Exception as error:
            await self._settle_cancels(what, kind)
            if isinstance(error, ToolError) or (kind is ToolError and isinstance(error, TurngateError)):
                raise
            raised = error.cause if isinstance(error, Exited) else error
            raise kind(f"{what} must not raise: got {describe_error(raised)}") from error
        if self._deadline.cancelled_from_outside():
            await self._settle_cancels(what, kind)
        return result

    async def _settle_cancels(self, what: str, kind: ErrorKind) -> None:
        """Bring the task's count of cancellations in order after a call that ended as if there had been none."""
        await self._check_own_cancels(what, kind)
        if not _in_cancelled_scope():
            # A leftover, and counted as ours it would spoil every deadline: asyncio.TaskGroup leaves one behind before
            # Python 3.13. Or one from outside that the call swallowed, which asyncio leaves to it.
            await self._deadline.take_back()

    async def _check_own_cancels(self, what: str, kind: ErrorKind) -> None:
        """Raise `kind` when it was the call itself that had our task cancelled, and nobody else."""
        if await self._deadline.take_back(self._calls.own_cancels) and not _in_cancelled_scope():
            raise kind(f"{what} must not cancel the task that it runs in: it did")


def _in_cancelled_scope() -> bool:
    """True when an anyio scope around this task was cancelled; it repeats its cancellation at every wait."""
    return anyio.current_effective_deadline() == -math.inf
