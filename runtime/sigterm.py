"""SIGTERM, which schedulers and service managers send before SIGKILL, as a clean end of a coroutine."""

import asyncio
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

__all__ = ["exit_on_sigterm"]

_EXIT_STATUS = 128 + signal.SIGTERM
"""What shells report for a process that ended by the signal."""


@contextmanager
def exit_on_sigterm() -> Generator[None]:
    """Let SIGTERM cancel the current task in this block, and turn the cancellation into SystemExit once it got out.

    So the block, and those around it, clean up as they do on Ctrl-C. A second SIGTERM ends the process at once. Does
    nothing outside the main thread, on loops that cannot handle signals, or when the application handles SIGTERM.
    """
    task, heard = asyncio.current_task(), 0
    assert task is not None, "exit_on_sigterm is used in a coroutine"

    def hear() -> None:
        nonlocal heard
        heard += 1
        if heard > 1:
            loop.remove_signal_handler(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        task.cancel()

    loop = asyncio.get_running_loop()
    if not _install(loop, hear):
        yield
        return
    try:
        yield
    except asyncio.CancelledError:
        if not heard or task.uncancel() > 0:
            raise  # somebody else wants the task cancelled, too, and is waiting for that
        raise SystemExit(_EXIT_STATUS) from None
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _install(loop: asyncio.AbstractEventLoop, hear: Callable[[], None]) -> bool:
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return False
    try:
        loop.add_signal_handler(signal.SIGTERM, hear)
    except (NotImplementedError, RuntimeError):
        return False
    return True
