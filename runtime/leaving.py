"""Calls that can be left: no code that is not ours can hold our task for ever.

A coroutine that swallows every cancellation outlives any deadline, because `Task.cancel` only asks. The call is
therefore driven from here, wait by wait: once it has been cancelled and a grace has passed, it is left behind, at no
cost to calls that behave.
"""

import asyncio
import logging
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import CoroutineType
from typing import Any, ParamSpec, TypeVar

__all__ = ["Exited", "LeavableCalls"]

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("turngate.rollout")


class Exited(Exception):
    """The call raised what is no Exception (SystemExit, GeneratorExit, a group of them); `cause` is it.

    Such an error would end the event loop and all siblings with it.
    """

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(type(cause).__name__))
        self.cause = cause


class LeavableCalls:
    """Makes the calls of one owner, one at a time, in the task that awaits `run`."""

    # Changed by run(): own_cancels.
    __slots__ = ("_grace_s", "_owner", "own_cancels")

    def __init__(self, owner: str, *, grace_s: float) -> None:
        """Call for `owner`, named in the log; a call cancelled longer than `grace_s` ago is left."""
        self._owner, self._grace_s = owner, grace_s
        self.own_cancels = 0
        """How often a call asked, while it ran, that the very task it runs in be cancelled."""

    @types.coroutine
    def run(
        self, what: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
    ) -> Generator[Any, Any, T]:
        """Await `call(*args)`. Exceptions pass through, CancelledError and KeyboardInterrupt too.

        Cancelled: so is the call; when it is still there after the grace it is closed, logged, and CancelledError
        raised. Raises: Exited: the call raised any other BaseException.
        """
        task = asyncio.current_task()
        assert task is not None, "a call is awaited in a task"
        steps: Coroutine[Any, Any, T] | None = None
        self.own_cancels = 0
        thrown: BaseException | None = None
        grace: _Grace | None = None
        try:
            while True:
                # 1. Let it run up to its next wait.
                requests = task.cancelling()
                try:
                    if steps is None:
                        steps = _steps(call(*args, **kwargs))
                    wait = steps.send(None) if thrown is None else steps.throw(thrown)
                except StopIteration as done:
                    if steps is None:
                        raise RuntimeError("StopIteration raised by a plain function") from done
                    result: T = done.value
                    return result
                except (Exception, asyncio.CancelledError, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    raise Exited(error) from error
                finally:
                    if task.cancelling() > requests:  # nobody else can have asked: nobody else ran
                        self.own_cancels += task.cancelling() - requests
                # 2. Wait for what it waits for. A cancellation goes to it, like everything else the loop throws.
                thrown = None
                while True:
                    try:
                        if _is_plain(wait):
                            yield wait
                        else:
                            yield from _wait_beside(wait)
                        break
                    except GeneratorExit:
                        raise
                    except asyncio.CancelledError as error:
                        if grace is None:
                            grace = _Grace(task, self._grace_s, error)
                        elif grace.is_over:
                            self._leave(what, steps)
                            raise grace.cancelled from None
                        if _is_plain(wait) or not wait.cancel(*error.args):
                            thrown = error
                            break
                    except BaseException as error:
                        thrown = error
                        break
        finally:
            if grace is not None:
                grace.end()
            grace = thrown = None  # they hold errors, and errors this frame: a cycle

    def _leave(self, what: str, steps: Any) -> None:
        _log.error(
            "%s: %s ignored its cancellation for %g s and was left behind; it must let CancelledError through",
            self._owner, what, self._grace_s,
        )  # fmt: skip
        try:
            steps.close()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            _log.error("%s: %s could not even be closed: %s", self._owner, what, type(error).__name__)


class _Grace:
    """Wakes a task by one more cancellation once the time is over; takes the request back when it ends."""

    __slots__ = ("_task", "_timer", "cancelled", "is_over")

    def __init__(self, task: "asyncio.Task[Any]", seconds: float, cancelled: asyncio.CancelledError) -> None:
        self._task = task
        self.cancelled = cancelled
        """The first cancellation: who asked for it knows it again by its text."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self._pass)
        self.is_over = False

    def _pass(self) -> None:
        self.is_over = True
        self._task.cancel()

    def end(self) -> None:
        self._timer.cancel()
        if self.is_over:
            self._task.uncancel()


def _steps(call: Awaitable[T]) -> Coroutine[Any, Any, T]:
    """Return what `await call` would drive; one that cannot be awaited raises TypeError when driven."""
    return call if isinstance(call, CoroutineType) else _await(call)


async def _await(call: Awaitable[T]) -> T:
    if not isinstance(call, Awaitable):
        raise TypeError(f"it must return something to await: got {type(call).__name__}; write it as `async def`")
    return await call


def _is_plain(wait: Any) -> bool:
    """True for waits that a cancellation always ends: not tasks and gatherings, which may swallow it."""
    return wait is None or type(wait) is asyncio.Future or not asyncio.isfuture(wait)


def _wait_beside(wait: "asyncio.Future[Any]") -> Generator[Any, Any, None]:
    """Suspend the task until `wait` is done, or the task cancelled: a task waited for may swallow that."""
    wait._asyncio_future_blocking = False  # as Task does when it receives it
    gate: asyncio.Future[None] = wait.get_loop().create_future()

    def open_gate(_: "asyncio.Future[Any]") -> None:
        if not gate.done():
            gate.set_result(None)

    wait.add_done_callback(open_gate)
    yield from gate
