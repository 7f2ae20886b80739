"""Several calls at once, each within its deadline, and none left over when the turn is cancelled."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

__all__ = ["Call", "Ended", "run_calls"]

_left_behind: set[asyncio.Task[Any]] = set()
"""Calls that ignored their cancellation; held here, because the event loop holds tasks only weakly."""


class Call(NamedTuple):
    """A call that is ready to run."""

    invoke: Callable[[], Coroutine[Any, Any, Any]]
    timeout_s: float


class Ended(NamedTuple):
    """How a call ended: with a value, an error, or not in time."""

    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False
    left_behind: bool = False
    """True when it did not end within its grace either."""


async def run_calls(calls: Sequence[Call], *, grace_s: float) -> list[Ended]:
    """Run calls at once, each in a task of its own, and return how they ended, in the order of the calls.

    A call that is not done in time is cancelled; one that has not ended `grace_s` later is left behind, and so it is
    when this coroutine is cancelled: then all calls are, CancelledError goes on, and nothing else is left.
    """
    loop = asyncio.get_running_loop()
    now_s = loop.time()
    ended: list[Ended | None] = [None] * len(calls)
    # Changed here: when each task's time is over, and its place. A task leaves it once it is done or left behind.
    running = {loop.create_task(call.invoke()): (i, now_s + call.timeout_s) for i, call in enumerate(calls)}
    try:
        while running:
            next_s = min(until_s for _, until_s in running.values())
            done, pending = await asyncio.wait(running, timeout=max(0.0, next_s - loop.time()))
            for task in done:
                index, _ = running.pop(task)
                how = _how(task)
                ended[index] = ended[index] or how
            now_s = loop.time()
            for task in pending:
                index, until_s = running[task]
                if until_s > now_s:
                    continue
                if ended[index] is None:
                    ended[index] = Ended(timed_out=True)
                    running[task] = index, now_s + grace_s
                    task.cancel()
                else:
                    del running[task]
                    ended[index] = Ended(timed_out=True, left_behind=True)
                    _leave_behind(task)
    finally:
        if running:
            await _stop(running, grace_s)
    return [how for how in ended if how is not None]


async def _stop(tasks: "dict[asyncio.Task[Any], Any]", grace_s: float) -> None:
    """Cancel tasks and wait for their ends, at most `grace_s`; cancelled meanwhile, leave them at once."""
    for task in tasks:
        task.cancel()
    try:
        await asyncio.wait(tasks, timeout=grace_s)
    finally:
        for task in tasks:
            _leave_behind(task)


def _leave_behind(task: "asyncio.Task[Any]") -> None:
    if task.done():
        _how(task)
        return
    _left_behind.add(task)
    task.add_done_callback(_left_behind.discard)
    task.add_done_callback(_how)


def _how(task: "asyncio.Task[Any]") -> Ended:
    """Return how a task ended; looking at its exception also keeps asyncio from reporting it as unseen."""
    if task.cancelled():
        return Ended(error=RuntimeError("CancelledError: nobody had cancelled it"))
    error = task.exception()
    return Ended(error=error) if error is not None else Ended(task.result())
