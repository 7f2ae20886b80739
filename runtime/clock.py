"""Injected time: the seam between the runtime and the clock on the wall."""

import asyncio
import time
from typing import Protocol

__all__ = ["Clock", "LoopClock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """Seconds that only move forward; the origin means nothing."""

    def now(self) -> float:
        """Return the current time in seconds."""
        ...


class SystemClock:
    """The machine's monotonic clock; usable from any thread."""

    def now(self) -> float:
        """Return the current time in seconds."""
        return time.monotonic()


class LoopClock:
    """The running event loop's own clock: monotonic time, or virtual time under a virtual-time loop.

    The default of coroutines, so that timings agree with the deadlines and sleeps around them.
    """

    def now(self) -> float:
        """Return the current time in seconds. Raises RuntimeError outside a running loop."""
        return asyncio.get_running_loop().time()


class ManualClock:
    """A clock that stands still until it is told to advance."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Return the current time in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward; raises ValueError for a negative step."""
        if seconds < 0:
            raise ValueError(f"a clock must move forward: expected seconds >= 0, got {seconds}")
        self._now_s += seconds
