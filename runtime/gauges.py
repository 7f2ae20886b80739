"""What a training run measures about itself, one row per update."""

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from turngate.runtime.buffer import Buffer
from turngate.runtime.events import BatchTaken, Events, GroupDropped
from turngate.runtime.guidance_metrics import guidance_row
from turngate.runtime.ledger import Ledger
from turngate.runtime.metrics import LoopLagMeter
from turngate.runtime.outcomes import is_clean_root, outcome_row, recovery_row
from turngate.runtime.slots import Slots
from turngate.runtime.staleness import LagStats, lag_stats, policy_versions
from turngate.runtime.types import Batch, Trajectory, Turn

__all__ = ["RunGauges"]


class RunGauges:
    """Splits the learner loop's time into waiting, learning and publishing, and describes each batch."""

    # State: how long the latest wait, update and publication took, where the current interval began, and what was
    # dropped in it.
    waiting_s: float
    learning_s: float
    publishing_s: float
    _since_s: float
    _slot_seconds: float
    _dropped_rollouts: int
    _dropped_tokens: int

    def __init__(
        self, slots: Slots, loop_lag: LoopLagMeter, *, is_mistake: Callable[[Turn], bool] | None = None
    ) -> None:
        """Start measuring now; `is_mistake` says which turns count as mistakes, beside invalid and injected ones."""
        self._is_mistake = is_mistake
        self._slots, self._loop_lag = slots, loop_lag
        self.waiting_s = self.learning_s = self.publishing_s = 0.0
        self._slot_seconds = slots.held_seconds()
        self._started_s = self._since_s = time.monotonic()
        self._dropped_rollouts = self._dropped_tokens = 0

    @contextmanager
    def hearing(self, events: Events) -> Generator[None]:
        """Count what is dropped in the meantime."""
        unsubscribe = events.subscribe(GroupDropped, self.group_dropped)
        try:
            yield
        finally:
            unsubscribe()

    def group_dropped(self, event: GroupDropped) -> None:
        """Count one group that nobody will train on."""
        self._dropped_rollouts += event.rollouts
        self._dropped_tokens += event.policy_tokens

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Time the learner's wait for a batch."""
        began = time.monotonic()
        yield
        self.waiting_s = time.monotonic() - began

    @contextmanager
    def learning(self) -> Generator[None]:
        """Time one update."""
        began = time.monotonic()
        yield
        self.learning_s = time.monotonic() - began

    @contextmanager
    def publishing(self) -> Generator[None]:
        """Time one transfer of weights."""
        began = time.monotonic()
        yield
        self.publishing_s = time.monotonic() - began

    def batch_taken(self, batch: Batch) -> BatchTaken:
        """Describe a batch that was just taken."""
        trajectories = _trajectories(batch)
        lag = _lag(batch)
        return BatchTaken(
            policy_version=batch.policy_version,
            groups=len(batch.groups),
            rollouts=len(trajectories),
            policy_tokens=sum(t.policy_tokens for t in trajectories),
            staleness_min=lag.lag_min,
            staleness_mean=lag.lag_mean,
            staleness_max=lag.lag_max,
            waited_s=self.waiting_s,
        )

    def row(self, batch: Batch, buffer: Buffer, ledger: Ledger) -> dict[str, float]:
        """Return the numbers of one update and start the next interval.

        `success`, `reward`, `truncated`, `turns` and `tokens` are means over the batch's trajectories that the policy
        alone played from their task's start, NaN when there are none; how the others went is under `restart_*` and
        `injected_*`, mistakes are as `recovery_row` says, and guidance as `guidance_row` does. `env_steps` counts the
        turns of all of them: add it up to compare runs at equal steps taken in environments. `lag_*` are over the
        tokens of all of them that are young enough to train on; `*_share` are shares of the interval's wall time;
        `loop_lag_p99_ms` is how late the event loop ran its timers, over the last minute or so. Groups that were too
        old for the policy count in `groups_dropped_stale`; those of them that went with this batch for the critic in
        `groups_stale_kept`, and those that no batch had room for in `groups_stale_lost`. `dropped_tokens` is the mean
        length of the rollouts of groups that were dropped in the interval, to hold against `tokens`: a bound that drops
        the slow drops the long.
        """
        now = time.monotonic()
        wall_s = max(now - self._since_s, 1e-9)
        trajectories = _trajectories(batch)
        tokens = sum(t.policy_tokens for t in trajectories)
        lag = _lag(batch)
        spans = [new - old for old, new in (t.version_range() for t in trajectories)]
        held = self._slots.held_seconds()
        groups = buffer.statistics()
        dropped, wasted = self._dropped_rollouts, self._dropped_tokens
        row = {
            "seconds": now - self._started_s,
            **outcome_row([t for t in trajectories if is_clean_root(t)]),
            **recovery_row(trajectories, self._is_mistake),
            **guidance_row(trajectories),
            "env_steps": float(sum(len(t.turns) for t in trajectories)),
            "lag_max": float(lag.lag_max),
            "lag_mean": lag.lag_mean,
            "lag_min": float(lag.lag_min),
            "version_span_max": float(max(spans, default=0)),
            "episodes_per_s": len(trajectories) / wall_s,
            "policy_tokens_per_s": tokens / wall_s,
            "learner_busy_share": self.learning_s / wall_s,
            "learner_waiting_share": self.waiting_s / wall_s,
            "publishing_share": self.publishing_s / wall_s,
            "slots_busy_share": (held - self._slot_seconds) / wall_s / self._slots.total,
            "loop_lag_p99_ms": 1000 * self._loop_lag.quantiles_s(0.99)[0],
            "groups_ready": float(groups.ready),
            "groups_running": float(groups.running),
            "groups_capacity": float(groups.capacity),
            "groups_dropped_stale": float(buffer.dropped_stale),
            "groups_stale_kept": float(len(batch.stale)),
            "groups_stale_lost": float(buffer.stale_lost),
            "rollouts_drawn": float(ledger.drawn),
            "rollouts_trained": float(ledger.trained),
            "rollouts_dropped": float(sum(ledger.dropped.values())),
            **{f"rollouts_dropped_{reason}": float(count) for reason, count in ledger.dropped.items()},
            "dropped_rollouts": float(dropped),
            "dropped_tokens": wasted / dropped if dropped else math.nan,
            "dropped_tokens_share": wasted / max(wasted + tokens, 1),
        }
        self._since_s, self._slot_seconds = now, held
        self._dropped_rollouts = self._dropped_tokens = 0
        return row


def _trajectories(batch: Batch) -> list[Trajectory]:
    return [t for group in batch.groups for t in group.trajectories]


def _lag(batch: Batch) -> LagStats:
    """Staleness of the tokens that may be trained on."""
    versions = policy_versions(s for t in _trajectories(batch) for s in t.segments)
    return lag_stats([v for v in versions if v >= batch.min_version], batch.policy_version)
