"""An event loop whose time jumps to the next timer when nothing is ready: hours of waiting in milliseconds."""

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

__all__ = ["VirtualTimeLoop", "run_virtual"]

T = TypeVar("T")

_THREAD_PATIENCE_S = 5.0
"""Real seconds to wait for a thread when no coroutine can go on, before calling it a deadlock."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Runs ready callbacks as any loop does, and never sleeps: time starts at 0 and jumps.

    asyncio's and anyio's sleeps, timeouts and deadlines work unchanged. Sockets raise RuntimeError, because a real
    network does not follow virtual time. Work in `run_in_executor` and `asyncio.to_thread` is waited for; threads of
    other makers (anyio's too) are not known here, so time may jump past them.
    """

    # Changed by the selector: now_s, jumps. Changed by run_in_executor: _threads.

    def __init__(self) -> None:
        self.now_s = 0.0
        self.jumps = 0
        """How often time moved."""
        self._threads = 0
        self._closed_to_io = False
        super().__init__(_JumpingSelector(self))
        self._closed_to_io = True

    def time(self) -> float:
        """Return virtual seconds since the loop was made."""
        return self.now_s

    def run_in_executor(  # type: ignore[override]  # the stub knows only the positional form
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run in a thread; time stands still until it is done."""
        future = super().run_in_executor(executor, func, *args)
        self._threads += 1
        future.add_done_callback(self._thread_done)
        return future

    def _thread_done(self, _future: asyncio.Future[Any]) -> None:
        self._threads -= 1

    def has_threads(self) -> bool:
        """True while work handed to an executor is under way."""
        return self._threads > 0

    def stuck(self) -> RuntimeError:
        """Describe who waits for what, when nobody can go on."""
        waiting = [f"{task.get_name()} ({task.get_coro()!r})" for task in asyncio.all_tasks(self)]
        return RuntimeError(
            f"virtual time must have a timer to jump to: nothing is ready or scheduled at {self.now_s:g} s; "
            f"waiting for ever: {'; '.join(sorted(waiting)) or 'nobody'}"
        )

    def _add_reader(self, fd: int, callback: Callable[..., Any], *args: Any) -> Any:
        self._refuse_io()
        return super()._add_reader(fd, callback, *args)  # type: ignore[misc]  # private in the stubs

    def _add_writer(self, fd: int, callback: Callable[..., Any], *args: Any) -> Any:
        self._refuse_io()
        return super()._add_writer(fd, callback, *args)  # type: ignore[misc]  # private in the stubs

    def _refuse_io(self) -> None:
        if self._closed_to_io:
            raise RuntimeError("virtual time must not meet real I/O: use a FakeTransport or a real event loop")


class _JumpingSelector(selectors.DefaultSelector):
    """Waits for nothing but threads: moves the loop's time instead."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        loop = self._loop
        events = super().select(0)
        if events or timeout == 0:
            return events
        if loop.has_threads():
            return super().select(_THREAD_PATIENCE_S)
        if timeout is None:
            if threading.active_count() > 1 and (events := super().select(_THREAD_PATIENCE_S)):
                return events
            raise loop.stuck()
        loop.now_s += timeout
        loop.jumps += 1
        return events


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time, like `asyncio.run`.

    Raises: RuntimeError: every task waits for something that no timer will bring.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
