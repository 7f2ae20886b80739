"""The tank between rollouts and learner, with a gate at each end.

Submit gate: a group may start only while (eta + version + 1) * batch - (accepted + running) > 0, in groups. Consume
gate: no batch holds a trainable token older than eta. All state changes are synchronous, so no cancellation can fall
between "complete" and "stored".
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from turngate.runtime.errors import ConfigError, StalenessError
from turngate.runtime.staleness import StalenessLimit, capacity
from turngate.runtime.types import NO_VERSION, Batch, Group

__all__ = ["Buffer", "BufferStatistics"]


class BufferStatistics(msgspec.Struct, frozen=True):
    """The buffer at one moment; all counts are groups."""

    policy_version: int
    capacity: int
    running: int
    ready: int
    accepted: int
    taken: int
    dropped_stale: int
    stale_lost: int
    """Stale groups meant for critics that no batch had room for."""
    oldest_lag: int
    """Versions between the oldest ready token and the learner; 0 when nothing is ready."""


class _Ready(NamedTuple):
    group: Group
    oldest: int
    newest: int


class Buffer:
    """Finished groups waiting for the learner.

    A submitter calls `await wait_capacity()`, `submit()` for an order number, and later exactly one of `put(group)`
    or `withdraw(order)`. The learner calls `await take()`, trains, publishes, then `advance(version)`.
    """

    # State.
    policy_version: int  # the newest published version
    accepted: int  # groups ever stored and not dropped again, trained ones included
    taken: int  # groups handed to the learner
    dropped_stale: int  # groups discarded at the consume gate
    stale_lost: int  # stale groups that were to be kept, and gave way to newer ones
    _stale: deque[Group]  # discarded since the last batch, for critics
    _running: set[int]  # orders submitted and neither put nor withdrawn
    _ready: dict[int, _Ready]  # by order, in completion order
    _next_order: int
    _changed: asyncio.Event  # set, and replaced, at every change that could let a waiter go on

    def __init__(
        self,
        *,
        groups_per_batch: int,
        limit: StalenessLimit,
        policy_version: int = 0,
        next_order: int = 0,
        last_version: int | None = None,
        on_stale: Callable[[Group], None] | None = None,
        keep_stale: int = 0,
    ) -> None:
        """Start empty at `policy_version`; everything trained before counts as accepted.

        `last_version` is where the run ends: nothing is submitted that no batch could hold any more. `on_stale` is
        called with each group that policies `drop` and `mask` discard as too old. The newest `keep_stale` of them go
        with the next batch, for critics.
        """
        if groups_per_batch < 1:
            raise ConfigError(f"groups_per_batch must be 1 or more: got {groups_per_batch}")
        self.groups_per_batch = groups_per_batch
        self.limit = limit
        self.policy_version = policy_version
        self._last_version = last_version
        self.accepted = policy_version * groups_per_batch
        self.taken = self.accepted
        self.dropped_stale = 0
        self._running = set()
        self._ready = {}
        self._next_order = next_order
        self._on_stale = on_stale
        self.stale_lost = 0
        self._stale = deque(maxlen=keep_stale)
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        s = self.statistics()
        return f"<Buffer {s.ready} ready, {s.running} running, oldest {s.oldest_lag} versions behind>"

    # Submission.

    def capacity(self) -> int:
        """Return how many groups may be submitted now."""
        eta, version = self.limit.max_staleness, self.policy_version
        if self._last_version is not None:
            eta = min(eta, self._last_version - 1 - version)
        return capacity(
            max_staleness=eta,
            policy_version=version,
            batch_size=self.groups_per_batch,
            accepted=self.accepted,
            running=len(self._running),
        )

    async def wait_capacity(self) -> None:
        """Return when a group may be submitted. Cancelling it leaves nothing behind."""
        while self.capacity() <= 0:
            await self._changed.wait()

    def submit(self) -> int:
        """Reserve a place and return the group's order number."""
        if self.capacity() <= 0:
            raise RuntimeError(f"submit needs capacity: {self!r}; await wait_capacity() first")
        order = self._next_order
        self._next_order += 1
        self._running.add(order)
        return order

    def put(self, group: Group) -> bool:
        """Store a finished group; its place stays taken until the learner has consumed it.

        Returns whether it was kept: False when it was too old already.
        """
        self._running.remove(group.order)
        self._ready[group.order] = _Ready(group, *group.version_range())
        self.accepted += 1
        self._discard_stale()  # a slow group may be too old by the time it is complete
        self._notify()
        return group.order in self._ready

    def withdraw(self, order: int) -> None:
        """Give the place of a group that came to nothing back."""
        self._running.remove(order)
        self._notify()

    # Consumption.

    async def take(self) -> Batch:
        """Return the next batch, waiting until one is complete. Cancelling it takes nothing.

        Raises: StalenessError: a token older than the bound would be consumed, which the gates make impossible.
        """
        while (batch := self.take_now()) is None:
            await self._changed.wait()
        return batch

    def advance(self, policy_version: int) -> None:
        """Move to a newly published version: opens the submit gate and discards what has become too old."""
        if policy_version != self.policy_version + 1:
            raise RuntimeError(
                f"policy_version must grow by one: expected {self.policy_version + 1}, got {policy_version}"
            )
        self.policy_version = policy_version
        self._discard_stale()
        self._notify()

    @property
    def next_order(self) -> int:
        """The order number that the next submission gets."""
        return self._next_order

    def live_orders(self) -> list[int]:
        """Return the orders of groups that are submitted or ready, oldest first."""
        return sorted(self._running | self._ready.keys())

    def statistics(self) -> BufferStatistics:
        """Return the counts as they are now."""
        lags = [self._lag(ready) for ready in self._ready.values()]
        return BufferStatistics(
            policy_version=self.policy_version,
            capacity=self.capacity(),
            running=len(self._running),
            ready=len(self._ready),
            accepted=self.accepted,
            taken=self.taken,
            dropped_stale=self.dropped_stale,
            stale_lost=self.stale_lost,
            oldest_lag=max(lags, default=0),
        )

    def take_now(self) -> Batch | None:
        """Return the next batch if one is complete, else None.

        Raises: StalenessError: as `take`.
        """
        size = self.groups_per_batch
        if len(self._ready) < size:
            return None
        if self.limit.late == "wait":
            orders = self.live_orders()[:size]
            if any(order in self._running for order in orders):
                return None  # an older group is still running: nothing is thrown away, the learner waits
        else:
            orders = list(self._ready)[:size]
        if self.limit.late != "mask":
            for order in orders:
                self._require_fresh(self._ready[order])
        groups = tuple(self._ready.pop(order).group for order in orders)
        self.taken += size
        min_version = max(0, self.policy_version - self.limit.max_staleness)
        stale = tuple(self._stale)
        self._stale.clear()
        return Batch(groups=groups, policy_version=self.policy_version, min_version=min_version, stale=stale)

    def _discard_stale(self) -> None:
        if self.limit.late == "wait":
            return
        for order, ready in list(self._ready.items()):
            # `mask` can still train on the young tokens of a group; `drop` needs all of them to be young.
            version = ready.newest if self.limit.late == "mask" else ready.oldest
            if version != NO_VERSION and self.policy_version - version > self.limit.max_staleness:
                del self._ready[order]
                self.accepted -= 1
                self.dropped_stale += 1
                self._keep_stale(ready.group)
                if self._on_stale is not None:
                    self._on_stale(ready.group)

    def _keep_stale(self, group: Group) -> None:
        if not self._stale.maxlen:
            return
        if len(self._stale) == self._stale.maxlen:
            self.stale_lost += 1  # the oldest of them
        self._stale.append(group)

    def _require_fresh(self, ready: _Ready) -> None:
        lag, bound = self._lag(ready), self.limit.max_staleness
        if lag > bound:
            raise StalenessError(
                f"staleness must be at most {bound}: got {lag} (group {ready.group.id}, order {ready.group.order}, "
                f"versions {ready.oldest} to {ready.newest}, learner at {self.policy_version})"
            )

    def _lag(self, ready: _Ready) -> int:
        return 0 if ready.oldest == NO_VERSION else self.policy_version - ready.oldest

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
