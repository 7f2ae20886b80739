"""Runs compared at equal environment steps: episodes of two policies differ in length, updates hide what they cost."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from turngate.runtime.errors import ConfigError

__all__ = ["RunCurve", "equal_steps", "training_seconds"]


class RunCurve(msgspec.Struct, frozen=True):
    """How the success of a run's training rollouts went with the steps it took in environments."""

    env_steps: Sequence[float]
    """Per update: turns of its episodes."""
    success: Sequence[float]
    """Per update: success of its episodes; NaN where none began at their task's start."""

    def __post_init__(self) -> None:
        if len(self.env_steps) != len(self.success) or not self.env_steps:
            raise ConfigError(
                "a curve must have steps and success of at least one update: "
                f"got {len(self.env_steps)} and {len(self.success)}"
            )

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> "RunCurve":
        """Return the curve of a run's rows: `TrainReport.history`, or metrics.jsonl decoded."""
        kept = [(row["env_steps"], row["success"]) for row in rows]
        return cls([steps for steps, _ in kept], [math.nan if success is None else success for _, success in kept])

    @property
    def steps(self) -> list[float]:
        """Environment steps taken by the end of each update."""
        return list(accumulate(self.env_steps))

    def smooth(self, updates: int) -> list[float]:
        """Return the mean success over the latest `updates` updates, per update; NaN where nothing is known."""
        first = range(1 - updates, len(self.success) + 1 - updates)
        return [_mean(self.success[max(0, start) : start + updates]) for start in first]

    def success_at(self, steps: float, *, updates: int) -> float:
        """Return the smoothed success at the last update that had ended after so many steps; NaN before the first."""
        ended = [value for at, value in zip(self.steps, self.smooth(updates), strict=True) if at <= steps]
        return ended[-1] if ended else math.nan

    def area(self, steps: float) -> float:
        """Return the mean success over the first `steps` environment steps: the area under the curve over its width.

        Raises: ConfigError: the run took fewer, or `steps` is not positive.
        """
        if not 0 < steps <= self.steps[-1]:
            raise ConfigError(f"steps must be above 0 and at most those of the run: {self.steps[-1]:g}, got {steps:g}")
        left = steps
        total = known = 0.0
        for taken, success in zip(self.env_steps, self.success, strict=True):
            weight = min(taken, left)
            left -= weight
            if not math.isnan(success):
                total, known = total + weight * success, known + weight
        return total / known if known else math.nan


def equal_steps(curves: Iterable[RunCurve]) -> float:
    """Return the environment steps up to which all runs can be compared: those of the run that took the fewest.

    Raises: ConfigError: there are no runs.
    """
    totals = [curve.steps[-1] for curve in curves]
    if not totals:
        raise ConfigError("runs must be there to be compared: got none")
    return min(totals)


def training_seconds(rows: Iterable[Mapping[str, Any]]) -> float:
    """Return the wall time until a run's last update, without the pauses of a run that was stopped and resumed."""
    total = before = 0.0
    for row in rows:
        # The clock of a row starts anew with the process.
        total += row["seconds"] - (before if row["seconds"] >= before else 0.0)
        before = row["seconds"]
    return total


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else math.nan
