"""Small statistics, metrics as JSON lines, and a meter of the event loop's lag."""

import asyncio
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from turngate.runtime.clock import Clock, SystemClock
from turngate.runtime.events import (
    BatchTaken,
    EvaluationFinished,
    Event,
    Events,
    GroupDropped,
    GroupFinished,
    RolloutFinished,
    UpdateFinished,
    WeightsPublished,
)
from turngate.runtime.types import Trajectory

__all__ = ["LoopLagMeter", "MetricsWriter", "RunningMean", "quantiles", "wilson_interval"]

_Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the standard normal distribution."""


def wilson_interval(successes: int, trials: int, *, z: float = _Z_95) -> tuple[float, float]:
    """Return the Wilson score interval of a success rate, 95 % by default; (0, 1) without trials.

    Stays inside [0, 1] and is honest near its ends, where the normal interval is not.
    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference", eq. 5.
    Raises: ValueError: not 0 <= successes <= trials.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"successes must be between 0 and trials: got {successes} of {trials}")
    if trials == 0:
        return 0.0, 1.0
    rate = successes / trials
    spread = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    middle, scale = rate + z * z / (2 * trials), 1 + z * z / trials
    low = (middle - spread) / scale if successes else 0.0  # exactly so: rounding leaves 1e-17
    return low, (middle + spread) / scale if successes < trials else 1.0


def quantiles(values: Iterable[float], levels: Sequence[float]) -> list[float]:
    """Return the quantiles at `levels` in [0, 1], interpolated linearly between order statistics; NaN when empty."""
    ordered = sorted(values)
    if not ordered:
        return [math.nan] * len(levels)
    found: list[float] = []
    for level in levels:
        if not 0 <= level <= 1:
            raise ValueError(f"quantile levels must be between 0 and 1: got {level}")
        position = level * (len(ordered) - 1)
        low = math.floor(position)
        high = min(low + 1, len(ordered) - 1)
        found.append(ordered[low] + (ordered[high] - ordered[low]) * (position - low))
    return found


class RunningMean:
    """Count, mean and variance of a stream of numbers, in one pass (Welford 1962)."""

    __slots__ = ("_squares", "count", "mean")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    def __repr__(self) -> str:
        return f"<RunningMean {self.mean:.6g} +- {self.std:.3g} over {self.count}>"

    def add(self, value: float) -> None:
        """Take one more number into account."""
        self.count += 1
        change = value - self.mean
        self.mean += change / self.count
        self._squares += change * (value - self.mean)

    @property
    def std(self) -> float:
        """Sample standard deviation; 0 for fewer than two numbers."""
        return math.sqrt(self._squares / (self.count - 1)) if self.count > 1 else 0.0


class MetricsWriter:
    """Writes what happens as JSON lines: one object per event, with `event` and `time_s` (seconds since the start).

        with MetricsWriter(path, events): ...

    Lines are appended, and flushed one by one when `flush_every` is 1.
    """

    def __init__(self, path: Path, events: Events, *, clock: Clock | None = None, flush_every: int = 1) -> None:
        """Open `path` for appending and subscribe to every event that is worth a line (turns are not)."""
        self._file = path.open("ab")
        self._clock = clock or SystemClock()
        self._started_s = self._clock.now()
        self._flush_every = flush_every
        self._encode = msgspec.json.Encoder().encode
        self.lines = 0
        """Lines written so far."""
        self._unsubscribe = [events.subscribe(kind, self._listener(kind)) for kind in _ROWS]

    def __repr__(self) -> str:
        return f"<MetricsWriter {self._file.name}, {self.lines} lines>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, event: str, row: Mapping[str, Any]) -> None:
        """Append one line."""
        line = {"event": event, "time_s": round(self._clock.now() - self._started_s, 6), **row}
        self._file.write(self._encode(line) + b"\n")
        self.lines += 1
        if self.lines % self._flush_every == 0:
            self._file.flush()

    def close(self) -> None:
        """Stop listening and close the file; calling it again does nothing."""
        while self._unsubscribe:
            self._unsubscribe.pop()()
        self._file.close()

    def _listener(self, kind: type[Event]) -> Callable[[Any], None]:
        name, row = Events.SLOTS[kind], _ROWS[kind]
        return lambda event: self.write(name, row(event))


def _fields(event: msgspec.Struct) -> dict[str, Any]:
    return msgspec.structs.asdict(event)


def _rollout_row(event: RolloutFinished) -> dict[str, Any]:
    return _trajectory_row(event.trajectory)


def _trajectory_row(trajectory: Trajectory) -> dict[str, Any]:
    oldest, newest = trajectory.version_range()
    return {
        "trajectory_id": trajectory.id,
        "task_id": trajectory.task.id,
        "end": trajectory.end,
        "reward": trajectory.reward,
        "turns": len(trajectory.turns),
        "policy_tokens": trajectory.policy_tokens,
        "oldest_version": oldest,
        "newest_version": newest,
        "seconds": trajectory.ended_s - trajectory.started_s,
        "restarted_from": trajectory.restarted_from,
        "injected_turns": sum(turn.injected for turn in trajectory.turns),
        "error": trajectory.error,
    }


def _group_row(event: GroupFinished) -> dict[str, Any]:
    group = event.group
    rewards = [trajectory.reward for trajectory in group.trajectories]
    return {
        "group_id": group.id,
        "task_id": group.task.id,
        "order": group.order,
        "restarted_from": group.restarted_from,
        "rewards": rewards,
    }


def _update_row(event: UpdateFinished) -> dict[str, Any]:
    # The run's clock is `seconds` in the metrics; in an event it is how long the event took.
    return {**event.metrics, "policy_version": event.policy_version, "seconds": event.seconds}


_ROWS: dict[type[Event], Callable[[Any], Mapping[str, Any]]] = {
    RolloutFinished: _rollout_row,
    GroupFinished: _group_row,
    GroupDropped: _fields,
    BatchTaken: _fields,
    UpdateFinished: _update_row,
    WeightsPublished: _fields,
    EvaluationFinished: _fields,
}
"""What a line says about each event; starts and turns would be too many lines."""


class LoopLagMeter:
    """How late the event loop runs its timers: the time a ready coroutine waits while something hogs the loop.

        async with LoopLagMeter() as lag: ...
        lag.quantiles_s(0.5, 0.99)

    One timer every `interval_s`; the newest `size` lags are kept.
    """

    # Changed by the timer: _lags, _next, worst_s.

    def __init__(self, *, interval_s: float = 0.01, size: int = 8192) -> None:
        self._interval_s = interval_s
        self._size = size
        self._lags = array("d")
        self._next = 0
        self._timer: asyncio.TimerHandle | None = None
        self.worst_s = 0.0
        """The longest lag since the start."""

    def __repr__(self) -> str:
        p50, p99 = self.quantiles_s(0.5, 0.99)
        return f"<LoopLagMeter p50 {1000 * p50:.2f} ms, p99 {1000 * p99:.2f} ms, worst {1000 * self.worst_s:.2f} ms>"

    async def __aenter__(self) -> Self:
        self._arm(asyncio.get_running_loop())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def quantiles_s(self, *levels: float) -> list[float]:
        """Return the lags at these quantiles in seconds; NaN before the first measurement."""
        return quantiles(self._lags, levels)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        due_s = loop.time() + self._interval_s
        self._timer = loop.call_at(due_s, self._measure, loop, due_s)

    def _measure(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        lag_s = max(0.0, loop.time() - due_s)
        self.worst_s = max(self.worst_s, lag_s)
        if len(self._lags) < self._size:
            self._lags.append(lag_s)
        else:
            self._lags[self._next] = lag_s
        self._next = (self._next + 1) % self._size
        self._arm(loop)
