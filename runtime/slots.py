"""A bounded number of live rollouts, granted oldest group first."""

import asyncio
import heapq
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from turngate.runtime.errors import ConfigError

__all__ = ["Slots"]


class Slots:
    """Permits for live rollouts. The waiter with the lowest priority number goes first, ties in order of arrival."""

    # State.
    held: int  # permits out now
    waiting: int  # rollouts in line
    _line: list[tuple[int, int, asyncio.Future[None]]]  # heap of (priority, arrival, grant), cancelled ones included
    _arrivals: int
    _held_s: float  # permit-seconds up to _counted_s
    _counted_s: float

    def __init__(self, total: int) -> None:
        """Offer `total` permits."""
        if total < 1:
            raise ConfigError(f"max_concurrent must be 1 or more: got {total}")
        self.total = total
        self.held = 0
        self.waiting = 0
        self._line = []
        self._arrivals = 0
        self._held_s, self._counted_s = 0.0, time.monotonic()

    def __repr__(self) -> str:
        return f"<Slots {self.held}/{self.total} held, {self.waiting} waiting>"

    def held_seconds(self) -> float:
        """Permit-seconds held since the start: divide a difference by wall time and `total` for utilisation."""
        self._count(0)
        return self._held_s

    @asynccontextmanager
    async def hold(self, priority: int = 0) -> AsyncGenerator[None]:
        """Hold one permit; it is given back however the body ends. Cancelling the wait leaves nothing behind."""
        await self._acquire(priority)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, priority: int) -> None:
        if self.held < self.total and not self.waiting:
            self._count(1)
            return
        grant: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arrivals += 1
        heapq.heappush(self._line, (priority, self._arrivals, grant))
        self.waiting += 1
        try:
            await grant
        except asyncio.CancelledError:
            if grant.done() and not grant.cancelled():
                self._release()  # granted and cancelled in the same tick: pass it on
            else:
                self.waiting -= 1  # its entry stays in line and is skipped: taking it out would cost a search
            raise

    def _release(self) -> None:
        self._count(-1)
        while self._line and self.held < self.total:
            grant = heapq.heappop(self._line)[2]
            if not grant.done():
                self.waiting -= 1
                self._count(1)
                grant.set_result(None)

    def _count(self, change: int) -> None:
        now = time.monotonic()
        self._held_s += self.held * (now - self._counted_s)
        self._counted_s = now
        self.held += change
