"""What the batcher counts."""

from collections import deque
from collections.abc import Callable

from turngate.runtime.engine.cache import PrefixCache
from turngate.runtime.engine.request import BatcherStatistics

__all__ = ["Counters"]

_RATE_WINDOW_S = 1.0
"""Long enough to smooth over prefills, short enough to show what happens now."""


class Counters:
    """Counters since the start, and a recent rate. Mutable: the batcher adds to them as it goes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start at zero; `clock` tells monotonic seconds."""
        self.clock = clock
        self.steps = 0
        self.finished = 0
        self.cancelled = 0
        self.rejected = 0
        self.generated_tokens = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.recomputed_tokens = 0
        self.guided_tokens = 0
        self.busy_s = 0.0
        self._marks: deque[tuple[float, int]] = deque([(0.0, 0)])

    def end_step(self, started_s: float) -> None:
        """Book one step, and remember enough of the past for the rate."""
        self.steps += 1
        self.busy_s += self.clock() - started_s
        self._marks.append((self.busy_s, self.generated_tokens))
        while len(self._marks) > 2 and self._marks[1][0] < self.busy_s - _RATE_WINDOW_S:
            self._marks.popleft()

    def tokens_per_s(self) -> float:
        """Return generated tokens per busy second over about the last second of work."""
        (then_s, before), (now_s, after) = self._marks[0], self._marks[-1]
        return (after - before) / (now_s - then_s) if now_s > then_s else 0.0

    def statistics(self, running: int, waiting: int, policy_version: int, cache: PrefixCache) -> BatcherStatistics:
        """Return everything as one value, with the load the owner reports."""
        return BatcherStatistics(
            running=running,
            waiting=waiting,
            policy_version=policy_version,
            steps=self.steps,
            finished=self.finished,
            cancelled=self.cancelled,
            rejected=self.rejected,
            generated_tokens=self.generated_tokens,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            recomputed_tokens=self.recomputed_tokens,
            guided_tokens=self.guided_tokens,
            busy_s=self.busy_s,
            tokens_per_s=self.tokens_per_s(),
            cache_entries=len(cache),
            cache_tokens=cache.tokens,
        )
