"""Where tools run: slots that bound how many calls of a tool run at once, and threads that may be left behind."""

import asyncio
import contextvars
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

__all__ = ["DaemonThreads", "Slots", "run_in_thread"]

T = TypeVar("T")


class Slots:
    """Bounds how many run at once, first come, first served; counts anew in every event loop.

    A loop that is gone takes its counts along, so that a thread that hangs for ever costs the next run nothing.
    """

    def __init__(self, limit: int) -> None:
        """Let `limit` run at once."""
        self.limit = limit
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopSlots] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"<Slots {self.limit}>"

    def here(self) -> "_LoopSlots":
        """Return the slots of the running loop."""
        loop = asyncio.get_running_loop()
        slots = self._loops.get(loop)
        if slots is None:
            slots = self._loops[loop] = _LoopSlots(self.limit)
        return slots


class _LoopSlots:
    """The slots of one loop. Mutable state: `free`, and `_waiting`, which is empty unless `free` is 0."""

    __slots__ = ("_waiting", "free")

    def __init__(self, limit: int) -> None:
        self.free = limit
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> None:
        """Wait for a slot. Cancelled: none is taken, one that was just handed over goes to the next."""
        if self.free:
            self.free -= 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release()
            elif waiter in self._waiting:
                self._waiting.remove(waiter)  # behind a tool that hangs they would pile up
            raise

    def release(self) -> None:
        """Give a slot back."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
        self.free += 1


class DaemonThreads(Executor):
    """A thread per call, which does not keep the process alive: a pool would wait for a hung one at exit, for ever."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run in a new thread. Raises: RuntimeError: the system has no more threads."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # from here on it runs to its end, wanted or not

        def work() -> None:
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=work, daemon=True, name=f"tool {getattr(fn, '__name__', '')}").start()
        return future


_THREADS = DaemonThreads()


async def run_in_thread(call: Callable[[], T], release: Callable[[], None]) -> T:
    """Return what `call` returns, in a thread, in this context; `release` is called in the loop once the thread ends.

    Cancelled: returns at once; the thread goes on and its result is dropped. `call` must not raise: futures cannot
    carry every exception.
    """
    loop = asyncio.get_running_loop()
    context = contextvars.copy_context()

    def work() -> T:
        try:
            return context.run(call)
        finally:
            try:
                loop.call_soon_threadsafe(release)
            except RuntimeError:
                pass  # the loop is closed, and what was to be released has gone with it

    try:
        future = loop.run_in_executor(_THREADS, work)
    except BaseException:
        release()  # no thread could be started
        raise
    return await future
