"""A learner that only counts, for tests of whatever drives learners. Importable by a spawned worker."""

import os
import time
from pathlib import Path
from typing import cast

from turngate.runtime.types import NO_VERSION, Batch, UpdateReport

__all__ = ["CountingLearner", "ReportingLearner"]


class CountingLearner:
    """Its weights are the number of updates it took, written as text; it can fail, die, or be slow on cue."""

    # State after load().
    updates: int

    def __init__(self, *, fail_at: int = -1, die_at: int = -1, update_s: float = 0.0) -> None:
        """Args: fail_at, die_at: the update, from 0, that raises or ends the process. update_s: seconds per update."""
        self.fail_at, self.die_at, self.update_s = fail_at, die_at, update_s

    def load(self, folder: Path | None) -> None:
        """Start from the count in a checkpoint, or from 0."""
        self.updates = 0 if folder is None else int((folder / "count").read_text())

    def update(self, batch: Batch) -> UpdateReport:
        """Count one, and report what the batch held."""
        if self.updates == self.fail_at:
            raise ValueError("told to fail")
        if self.updates == self.die_at:
            os._exit(7)
        time.sleep(self.update_s)
        self.updates += 1
        versions = [
            v
            for g in batch.groups
            for t in g.trajectories
            for s in t.segments
            for v in s.version_values()
            if v != NO_VERSION
        ]
        oldest = min(versions, default=batch.policy_version)
        return UpdateReport({"count": float(self.updates), "learner_lag_max": float(batch.policy_version - oldest)})

    def save_weights(self, path: Path) -> None:
        """Write the count."""
        path.write_text(str(self.updates))

    def save(self, folder: Path) -> None:
        """Write the count where `load` finds it."""
        (folder / "count").write_text(str(self.updates))


class ReportingLearner(CountingLearner):
    """Returns what it is told to as the report of each update."""

    def __init__(self, report: object) -> None:
        """Args: report: what `update` returns, an UpdateReport or not."""
        super().__init__()
        self.report = report

    def update(self, batch: Batch) -> UpdateReport:
        """Return the report."""
        return cast(UpdateReport, self.report)
