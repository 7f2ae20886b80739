"""Deadlines for the per-turn hot path: one timer per scope, moved for the price of an assignment."""

import asyncio
from types import TracebackType
from typing import Self

__all__ = ["Deadline", "DeadlineExceeded"]


class DeadlineExceeded(TimeoutError):
    """A deadline passed; `what` names it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"deadline passed: {what}")
        self.what = what


class Deadline:
    """A scope whose body is cancelled, and left by DeadlineExceeded, once the time last set has passed.

    Used like `asyncio.timeout`, and nests with it. Moving the deadline later, which every turn does several times,
    only stores two values: the armed timer looks at them when it fires and arms itself again. Enter it in the task
    whose waits it should bound, and set a time before the first wait.
    """

    # Changed by set() and by the timer: when_s, what, expired, _timer, _armed_s.
    __slots__ = ("_armed_s", "_base", "_loop", "_task", "_timer", "expired", "what", "when_s")

    def __init__(self) -> None:
        self.when_s = float("inf")
        self.what = ""
        self.expired = False
        self._armed_s = float("inf")
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Deadline {self.what or 'unset'} at {self.when_s:.3f}{', expired' if self.expired else ''}>"

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a Deadline must be entered inside a task")
        self._task: asyncio.Task[object] = task
        self._base = task.cancelling()
        return self

    def set(self, when_s: float, what: str) -> None:
        """Let the scope end at loop time `when_s`, for the reason `what`.

        Raises DeadlineExceeded when an earlier deadline has fired but somebody inside swallowed the cancellation.
        """
        if self.expired:
            raise DeadlineExceeded(self.what)
        self.when_s = when_s
        self.what = what
        if when_s < self._armed_s:
            self._arm(when_s)

    def cancelled_from_outside(self) -> bool:
        """True when someone other than this deadline has asked the task to cancel since the scope was entered."""
        return self._task.cancelling() > self._base + self.expired

    def _arm(self, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_s = when_s
        self._timer = self._loop.call_at(when_s, self._fire)

    def _fire(self) -> None:
        # Runs as a loop callback, so the task is at a wait and the cancellation lands exactly there.
        if self.when_s > self._armed_s:
            self._timer = None
            self._armed_s = float("inf")
            if self.when_s < self._armed_s:
                self._arm(self.when_s)
            return
        self.expired = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.expired and self._task.uncancel() <= self._base and kind is asyncio.CancelledError:
            raise DeadlineExceeded(self.what) from error
