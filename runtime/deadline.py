"""Deadlines for the per-turn hot path: one timer per event loop, moved for the price of an assignment."""

import asyncio
import heapq
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

__all__ = ["Alarm", "Deadline", "DeadlineExceeded"]


class DeadlineExceeded(TimeoutError):
    """A deadline passed; `what` names it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"deadline passed: {what}")
        self.what = what


class Deadline:
    """A scope whose body is cancelled, and left by DeadlineExceeded, once the time last set has passed.

    Used like `asyncio.timeout`, and nests with it and with itself. Moving the deadline later, which every turn does
    several times, only stores two values: the watch looks at them when the earlier time comes. Enter it in the task
    whose waits it should bound, once.
    """

    # Changed by set() and by the watch: when_s, what, expired, queued_s, is_open.
    __slots__ = ("_base", "_task", "_watch", "expired", "is_open", "queued_s", "what", "when_s")

    def __init__(self) -> None:
        self.when_s = self.queued_s = float("inf")
        """The time set, and the time at which the watch will look, which is never later."""
        self.what = ""
        self.expired = self.is_open = False

    def __repr__(self) -> str:
        return f"<Deadline {self.what or 'unset'} at {self.when_s:.3f}{', expired' if self.expired else ''}>"

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a Deadline must be entered inside a task")
        self._task: asyncio.Task[object] = task
        self._base = task.cancelling()
        self._watch = _watch_of(asyncio.get_running_loop())
        self._watch.opened += 1
        self.is_open = True
        return self

    def set(self, when_s: float, what: str) -> None:
        """Let the scope end at loop time `when_s`, for the reason `what`.

        Raises DeadlineExceeded when an earlier deadline has fired but somebody inside swallowed the cancellation.
        """
        if self.expired:
            raise DeadlineExceeded(self.what)
        self.when_s = when_s
        self.what = what
        if when_s < self.queued_s:
            self._watch.queue(self, when_s)

    def cancelled_from_outside(self) -> bool:
        """True when someone other than this deadline has asked the task to cancel since the scope was entered."""
        return self._task.cancelling() > self._base + self.expired

    async def take_back(self, requests: int | None = None) -> int:
        """Forget cancellations, up to `requests`, that were asked for by mistake; return how many there were."""
        task = self._task
        count = max(0, task.cancelling() - self._base - self.expired)
        count = count if requests is None else min(requests, count)
        for _ in range(count):
            task.uncancel()
        if count:
            try:
                await asyncio.sleep(0)  # one that was not delivered yet comes now; uncancel alone leaves it pending
            except asyncio.CancelledError:
                pass
        return count

    def expire(self) -> None:
        """Cancel the task; called by the watch.

        It runs as a loop callback, so the task is at a wait and the cancellation lands exactly there.
        """
        self.expired = True
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task = self._task
        del self._task  # the watch may hold this object longer than anybody needs the task's result
        self.is_open = False
        self._watch.close()
        if self.expired and task.uncancel() <= self._base and kind is asyncio.CancelledError:
            raise DeadlineExceeded(self.what) from error


class Alarm:
    """Calls a function once the time has come, unless it is closed before; on the same timer as all deadlines.

    For what belongs to no task. The loop runs the call by itself: what it raises goes to the loop's handler.
    """

    # Changed by the watch: expired, queued_s. Changed by close(): is_open.
    __slots__ = ("_call", "_watch", "expired", "is_open", "queued_s", "when_s")

    def __init__(self, when_s: float, call: Callable[[], object]) -> None:
        """Set it for loop time `when_s` of the running loop."""
        self._watch = _watch_of(asyncio.get_running_loop())
        self._call: Callable[[], object] | None = call
        self.when_s = when_s
        self.queued_s = float("inf")
        self.expired, self.is_open = False, True
        self._watch.opened += 1
        self._watch.queue(self, when_s)

    def __repr__(self) -> str:
        return f"<Alarm at {self.when_s:.3f}{'' if self.is_open else ', closed'}>"

    def expire(self) -> None:
        """Have the function called; called by the watch."""
        self.expired = True
        asyncio.get_running_loop().call_soon(self._ring)

    def _ring(self) -> None:
        if self._call is not None:
            self._call()

    def close(self) -> None:
        """Call nothing any more. Closing twice is closing once."""
        if self.is_open:
            self.is_open = False
            self._call = None  # the watch may hold this object longer than anybody needs what it would call
            self._watch.close()


class _Timed(Protocol):
    """What the watch looks after."""

    when_s: float
    queued_s: float
    expired: bool
    is_open: bool

    def expire(self) -> None: ...


class _Watch:
    """All deadlines of one loop on one heap and one timer: a fifth of the cost of an asyncio timer for each."""

    # Changed by deadlines: opened. Changed here: _heap, _timer, _armed_s, _count.
    __slots__ = ("_armed_s", "_count", "_heap", "_loop", "_timer", "opened")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # Weak, or the registry's value would keep its key alive.
        self._loop = weakref.ref(loop)
        self._heap: list[tuple[float, int, _Timed]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._armed_s = float("inf")
        self._count = 0
        self.opened = 0
        """Scopes entered and not left, alarms not closed."""

    def close(self) -> None:
        """Count a scope that was left or an alarm that was closed; with the last one goes the timer."""
        self.opened -= 1
        if self.opened == 0:
            self._heap.clear()
            self._armed_s = float("inf")
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def queue(self, deadline: _Timed, when_s: float) -> None:
        """Look at `deadline` at `when_s`."""
        if len(self._heap) > 64 + 2 * self.opened:
            # Scopes that were left stay queued until their time; without this, ten minutes' worth of requests.
            self._heap = [entry for entry in self._heap if entry[2].is_open and entry[0] == entry[2].queued_s]
            heapq.heapify(self._heap)
        deadline.queued_s = when_s
        self._count += 1
        heapq.heappush(self._heap, (when_s, self._count, deadline))
        if when_s < self._armed_s:
            self._arm(when_s)

    def _arm(self, when_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = self._running()
        self._armed_s = when_s
        self._timer = loop.call_at(when_s, self._look)

    def _running(self) -> asyncio.AbstractEventLoop:
        loop = self._loop()
        assert loop is not None, "only a running loop calls here"
        return loop

    def _look(self) -> None:
        # The loop may call a hair early, by its clock's resolution, or late, when it was busy.
        now_s = max(self._armed_s, self._running().time())
        heap = self._heap
        self._armed_s, self._timer = float("inf"), None
        while heap and heap[0][0] <= now_s:
            queued_s, _, deadline = heapq.heappop(heap)
            if not deadline.is_open or deadline.expired or queued_s != deadline.queued_s:
                continue  # left, done, or queued again for an earlier time
            if deadline.when_s <= now_s:
                deadline.expire()
            else:
                self.queue(deadline, deadline.when_s)
                heap = self._heap  # queueing may have rebuilt it
        if heap and heap[0][0] < self._armed_s:
            self._arm(heap[0][0])


_watches: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Watch]" = weakref.WeakKeyDictionary()


def _watch_of(loop: asyncio.AbstractEventLoop) -> _Watch:
    watch = _watches.get(loop)
    if watch is None:
        for known in _watches.keyrefs():  # a list, since other threads have loops too
            if (other := known()) is not None and other.is_closed():
                _watches.pop(other, None)  # alarms that nobody closed would keep it, and what they would call
        watch = _watches[loop] = _Watch(loop)
    return watch
