r"""Exactly-once accounting of rollouts.

    draw -> queued -> start -> running -> finish -> finished -> admit -> admitted -> train -> trained
                 \____________\________________\___________________\-> drop(reason) -> dropped

`drawn = trained + dropped + live` holds after every call.
"""

import enum
from collections import Counter
from collections.abc import Iterable

import msgspec

__all__ = ["Ledger", "LedgerTotals", "Stage"]


class Stage(enum.Enum):
    """Where a live rollout is."""

    queued = "queued"
    running = "running"
    finished = "finished"
    admitted = "admitted"


class LedgerTotals(msgspec.Struct, frozen=True):
    """The ledger's counts at one moment."""

    drawn: int = 0
    trained: int = 0
    dropped: dict[str, int] = {}
    """By reason."""
    live: dict[str, int] = {}
    """By stage."""


_NEXT = {Stage.queued: Stage.running, Stage.running: Stage.finished, Stage.finished: Stage.admitted}


class Ledger:
    """Counts every rollout drawn until it is trained on or dropped for a named reason."""

    # State: totals since the start of the run (or the run it resumes), and the stage of each live rollout.
    drawn: int
    trained: int
    dropped: Counter[str]
    live: dict[str, Stage]

    def __init__(self, totals: LedgerTotals | None = None) -> None:
        """Start empty, or from the totals of an earlier run, whose live rollouts count as dropped (`interrupted`)."""
        totals = totals or LedgerTotals()
        self.drawn = totals.drawn
        self.trained = totals.trained
        self.dropped = Counter(totals.dropped)
        if lost := sum(totals.live.values()):
            self.dropped["interrupted"] += lost
        self.live = {}

    def __repr__(self) -> str:
        dropped = sum(self.dropped.values())
        return f"<Ledger {self.drawn} drawn = {self.trained} trained + {dropped} dropped + {len(self.live)} live>"

    def draw(self, rollout_id: str) -> None:
        """Count a new rollout, queued."""
        if rollout_id in self.live:
            raise RuntimeError(f"rollout ids must be unique: {rollout_id} is already {self.live[rollout_id].value}")
        self.drawn += 1
        self.live[rollout_id] = Stage.queued

    def start(self, rollout_id: str) -> None:
        """queued -> running."""
        self._advance(rollout_id, Stage.queued)

    def finish(self, rollout_id: str) -> None:
        """running -> finished."""
        self._advance(rollout_id, Stage.running)

    def admit(self, rollout_ids: Iterable[str]) -> None:
        """finished -> admitted to the buffer."""
        for rollout_id in rollout_ids:
            self._advance(rollout_id, Stage.finished)

    def train(self, rollout_ids: Iterable[str]) -> None:
        """admitted -> trained: the learner consumed the batch it was in.

        What the learner made of it (a truncated member may not vote, a stale token carries no loss) is in its metrics.
        """
        for rollout_id in rollout_ids:
            self._leave(rollout_id, Stage.admitted)
            self.trained += 1

    def drop(self, rollout_ids: Iterable[str], reason: str) -> None:
        """Any live stage -> dropped, counted under `reason`."""
        for rollout_id in rollout_ids:
            self._leave(rollout_id, None)
            self.dropped[reason] += 1

    def totals(self) -> LedgerTotals:
        """Return the counts as they are now."""
        live = Counter(stage.value for stage in self.live.values())
        return LedgerTotals(self.drawn, self.trained, dict(self.dropped), dict(live))

    def check(self) -> None:
        """Raise RuntimeError when the accounts do not balance."""
        if self.drawn != self.trained + sum(self.dropped.values()) + len(self.live):
            raise RuntimeError(f"ledger must balance: {self!r}; a rollout was lost or counted twice")

    def _advance(self, rollout_id: str, expected: Stage) -> None:
        stage = self.live.get(rollout_id)
        if stage is not expected:
            raise RuntimeError(f"rollout {rollout_id} must be {expected.value}: it is {_name(stage)}")
        self.live[rollout_id] = _NEXT[expected]

    def _leave(self, rollout_id: str, expected: Stage | None) -> None:
        stage = self.live.get(rollout_id)
        if stage is None or (expected is not None and stage is not expected):
            wanted = "live" if expected is None else expected.value
            raise RuntimeError(f"rollout {rollout_id} must be {wanted}: it is {_name(stage)}")
        del self.live[rollout_id]


def _name(stage: Stage | None) -> str:
    return "not live" if stage is None else stage.value
