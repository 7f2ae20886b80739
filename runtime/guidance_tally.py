"""What guidance has done: counted decision by decision, told as statistics."""

import logging
import math
from collections import Counter

import msgspec

from turngate.runtime.selection import kl_to_base
from turngate.runtime.types import Decision

__all__ = ["GuidanceStatistics", "GuidanceTally", "decision_kl"]

_WARN_AFTER = 16
"""Decisions without any guidance after which somebody should be told: single failures are in the records."""
_log = logging.getLogger("turngate.guidance")


class GuidanceStatistics(msgspec.Struct, frozen=True):
    """What guidance has done so far; means are over decisions that values chose, NaN before the first."""

    decisions: int
    """Made by values or, where these failed, by the base; what beta 0 leaves to the base is none."""
    guided: int
    fallbacks: dict[str, int]
    """Decisions that the base made, by reason."""
    draws: int
    distinct_mean: float
    """Different actions among the candidates of a decision."""
    kl_mean: float
    """KL of the choice among the draws from a uniform one: what guidance moved, as far as N draws can show. Of
    enumerated candidates: KL from the base policy over them."""
    value_s: float
    """Seconds spent on values."""


class GuidanceTally:
    """The mutable counts; variants of one guidance share them."""

    # Changed by its methods: all of it.
    __slots__ = ("_distinct", "_drawn", "_fallbacks", "_kl", "_told", "_value_s", "guided")

    def __init__(self) -> None:
        self.guided = 0
        self._drawn = self._distinct = 0
        self._kl = self._value_s = 0.0
        self._fallbacks: Counter[str] = Counter()
        self._told: set[str] = set()

    @property
    def decisions(self) -> int:
        """Decisions made."""
        return self.guided + self._fallbacks.total()

    def drawn(self, draws: int) -> None:
        """Count draws of the base."""
        self._drawn += draws

    def decided(self, decision: Decision) -> None:
        """Count what was decided."""
        self._value_s += decision.seconds
        if decision.fallback:
            self._fallbacks[decision.reason] += 1
            if self.guided == 0 and self._fallbacks.total() == _WARN_AFTER:
                self.tell_once(
                    f"no decision of the first {_WARN_AFTER} was guided, the base acts alone: {decision.fallback}"
                )
            return
        self.guided += 1
        self._distinct += decision.distinct
        self._kl += decision_kl(decision)

    def tell_once(self, what: str) -> None:
        """Log a warning, the first time that it is due."""
        if what not in self._told:
            self._told.add(what)
            _log.warning(what)

    def statistics(self) -> GuidanceStatistics:
        """Return the counts as they are now."""
        guided = self.guided or math.nan
        return GuidanceStatistics(
            decisions=self.decisions,
            guided=self.guided,
            fallbacks=dict(self._fallbacks),
            draws=self._drawn,
            distinct_mean=self._distinct / guided,
            kl_mean=self._kl / guided,
            value_s=self._value_s,
        )


def decision_kl(decision: Decision) -> float:
    """Return KL of a choice from what the base would have done with the same candidates.

    Among draws the base takes each alike; enumerated candidates it takes by their log-probs.
    """
    base = [c.logprob if decision.is_enumerated else 0.0 for c in decision.candidates]
    return kl_to_base([c.weight for c in decision.candidates], base)
