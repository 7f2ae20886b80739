"""Cancel a coroutine at every one of its waits, and see that nothing is left behind."""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

import msgspec

from turngate.runtime.testing.virtual_time import VirtualTimeLoop, run_virtual

__all__ = ["Outcome", "cancel_at_every_tick", "cancel_everywhere"]

T = TypeVar("T")


class Outcome(msgspec.Struct, frozen=True):
    """How one run ended that was cancelled at its `point`-th wait."""

    point: int
    late: bool
    """False: cancelled while waiting. True: cancelled when the wait was over but the task had not run yet."""
    cancelled: bool
    result: Any = None
    leaked: tuple[str, ...] = ()
    """Tasks still alive once the coroutine had ended."""


def cancel_everywhere(make: Callable[[], Coroutine[Any, Any, Any]], check: Callable[[Outcome], None]) -> int:
    """Run `make()` anew for every wait, cancelled there, and call `check` after each; return how many waits there are.

    Each run has its own virtual-time loop. Both moments are tried: while the wait is on, and just after it is over,
    where a careless `finally` or a half-done transfer loses things. Raises AssertionError when a task outlives a run.
    """
    point, cancelled = 0, True
    while cancelled:
        point += 1
        cancelled = False
        for late in (False, True):
            outcome = _run_cancelled(make, point, late)
            if outcome.leaked:
                raise AssertionError(f"tasks must end with the coroutine: {outcome.leaked} outlive {outcome}")
            check(outcome)
            cancelled = cancelled or outcome.cancelled
    return point - 1


def cancel_at_every_tick(make: Callable[[], Coroutine[Any, Any, Any]], check: Callable[[int], None]) -> int:
    """Run `make()` anew for every turn of its event loop, cancelled then wherever its tasks are; return how many.

    For coroutines whose work is done by tasks of theirs, whose waits `cancel_everywhere` does not see. `check` is told
    the turn after each cancelled run. Raises AssertionError when a task outlives a run.
    """
    ticks = 1  # before the first the coroutine has not begun
    while not run_virtual(_is_done_by(make, ticks)):
        check(ticks)
        ticks += 1
    return ticks


async def _is_done_by(make: Callable[[], Coroutine[Any, Any, Any]], ticks: int) -> bool:
    task = asyncio.ensure_future(make())
    for _ in range(ticks):
        await asyncio.sleep(0)
    is_done = task.done()
    task.cancel()
    await asyncio.wait({task})
    if leaked := asyncio.all_tasks() - {asyncio.current_task()}:
        raise AssertionError(f"tasks must end with the coroutine: {leaked} outlive one cancelled at tick {ticks}")
    return is_done


def _run_cancelled(make: Callable[[], Coroutine[Any, Any, Any]], point: int, late: bool) -> Outcome:
    async def main() -> Outcome:
        task = asyncio.ensure_future(_drive(_CancelAt(make(), point, late)))
        await asyncio.wait({task})
        cancelled = task.cancelled()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        leaked = tuple(sorted(repr(other) for other in others))
        return Outcome(point, late, cancelled, None if cancelled else task.result(), leaked)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main())


async def _drive(awaitable: "_CancelAt[T]") -> T:
    return await awaitable


class _CancelAt(Generic[T]):
    """Passes a coroutine's waits on to its task, and cancels the task at the `point`-th."""

    def __init__(self, coro: Coroutine[Any, Any, T], point: int, late: bool) -> None:
        self._coro, self._point, self._late = coro, point, late

    def __await__(self) -> Generator[Any, Any, T]:
        waits = 0
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                wait = self._coro.send(value) if error is None else self._coro.throw(error)
            except StopIteration as stop:
                result: T = stop.value
                return result
            waits += 1
            if waits == self._point:
                self._cancel(wait)
            value = error = None
            try:
                value = yield wait
            except BaseException as thrown:
                error = thrown

    def _cancel(self, wait: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        if not self._late:
            task.cancel()
        elif wait is None:  # a bare yield, as asyncio.sleep(0) does
            task.get_loop().call_soon(task.cancel)
        else:
            # Called before the task's own callback: the task finds its wait done and itself cancelled.
            wait.add_done_callback(lambda _future: task.cancel())
