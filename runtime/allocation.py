"""Where to spend continuations: which actions, how many each, and when to stop. Pure decisions, no I/O."""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence

import msgspec

from turngate.runtime.errors import ConfigError
from turngate.runtime.monte_carlo import Estimate

__all__ = [
    "HalvingRound",
    "SequentialStop",
    "disagreement",
    "expected_best_of_noisy_means",
    "highest",
    "neyman_allocation",
    "successive_halving",
    "value_changes",
]


class HalvingRound(msgspec.Struct, frozen=True):
    """One round of successive halving."""

    arms: tuple[int, ...]
    pulls_each: int
    means: tuple[float, ...]
    """Over all pulls so far, aligned with `arms`."""
    kept: tuple[int, ...]
    """Best first."""


def successive_halving(
    pull: Callable[[int, int], Sequence[float]], arms: int, budget: int
) -> tuple[int, list[HalvingRound]]:
    """Spend `budget` pulls on finding the best arm; return it and the rounds.

    Every round gives the arms still in it the same number of pulls and keeps the better half, rounded up; ties go to
    the lower index. The winner's mean is optimistic: estimate it again on fresh pulls before reporting it.
    Args: pull: (arm, count) -> `count` new returns of that arm, fewer where some failed; an arm without any is worst.
    Source: Karnin et al. 2013, "Almost optimal exploration in multi-armed bandits", algorithm 1, with means over all
        pulls.
    Raises: ValueError: the budget does not reach for one pull of each arm in the first round; a return is not finite.
    """
    rounds_planned = max(1, math.ceil(math.log2(arms))) if arms > 0 else 0
    if arms < 1 or budget < arms * rounds_planned:
        raise ValueError(
            f"budget must give every arm a pull in the first of {rounds_planned} rounds: expected at least "
            f"{arms * rounds_planned}, got {budget} for {arms} arms"
        )
    returns: list[list[float]] = [[] for _ in range(arms)]
    left = list(range(arms))
    rounds: list[HalvingRound] = []
    while len(left) > 1:
        pulls = budget // (len(left) * rounds_planned)
        for arm in left:
            returns[arm] += pull(arm, pulls)
            if bad := [value for value in returns[arm] if not math.isfinite(value)]:
                raise ValueError(f"returns must be finite: got {bad[0]} of arm {arm}")
        means = {arm: math.fsum(found) / len(found) if (found := returns[arm]) else -math.inf for arm in left}
        kept = sorted(left, key=lambda arm: (-means[arm], arm))[: math.ceil(len(left) / 2)]
        rounds.append(HalvingRound(tuple(left), pulls, tuple(means[arm] for arm in left), tuple(kept)))
        left = kept
    return left[0], rounds


def neyman_allocation(sigmas: Sequence[float], total: int, *, at_least: int = 1) -> list[int]:
    """Return how many of `total` samples each stratum gets: `at_least` each, the rest in proportion to its spread.

    Remainders go to the largest fractions, ties to the lower index. Without any spread the rest is dealt evenly.
    Source: Neyman 1934, "On the two different aspects of the representative method".
    Raises: ValueError: `total` does not reach, or a spread is negative or not finite.
    """
    if any(not (sigma >= 0 and math.isfinite(sigma)) for sigma in sigmas):
        raise ValueError(f"sigmas must be finite and not negative: got {list(sigmas)}")
    rest = total - at_least * len(sigmas)
    if rest < 0 or not sigmas:
        raise ValueError(f"total must give {at_least} to each of {len(sigmas)} strata: got {total}")
    scale = math.fsum(sigmas)
    shares = [rest * sigma / scale if scale > 0 else rest / len(sigmas) for sigma in sigmas]
    counts = [math.floor(share) for share in shares]
    by_fraction = sorted(range(len(sigmas)), key=lambda i: (counts[i] - shares[i], i))
    for index in by_fraction[: rest - sum(counts)]:
        counts[index] += 1
    return [at_least + count for count in counts]


class SequentialStop(msgspec.Struct, frozen=True, kw_only=True):
    """When enough continuations have been run. Means that were stopped on are biased: choose by them, then estimate
    again to report."""

    half_width: float = 0.15
    """Of the Wilson interval; precise enough."""
    threshold: float | None = None
    """Stop once the interval lies on one side of it: the sign of Q - threshold is decided."""
    at_least: int = 4
    at_most: int = 32

    def __post_init__(self) -> None:
        if not self.half_width >= 0:
            raise ConfigError(f"half_width must be 0 or more: got {self.half_width} (SequentialStop)")
        if not 1 <= self.at_least <= self.at_most:
            raise ConfigError(
                f"at_least must be between 1 and at_most {self.at_most}: got {self.at_least} (SequentialStop)"
            )

    def is_enough(self, so_far: Estimate) -> bool:
        """Whether to stop. Returns that are not 0 or 1 use twice the standard error in the interval's place."""
        if so_far.count >= self.at_most:
            return True
        if so_far.count < self.at_least:
            return False
        if so_far.successes is not None:
            low, high = so_far.wilson()
        else:
            low, high = so_far.mean - 2 * so_far.standard_error, so_far.mean + 2 * so_far.standard_error
        if (high - low) / 2 <= self.half_width:
            return True
        # Written so that the NaN of a single return, which does not know its spread, decides nothing.
        return self.threshold is not None and (self.threshold < low or high < self.threshold)


def highest(scores: Sequence[float], *, share: float | None = None, threshold: float | None = None) -> list[int]:
    """Return the indices worth branching at, in order: the top `share` of them, or all above `threshold`.

    Scores are entropies (`turn_surprisal`), `value_changes`, `disagreement` of critics; NaN scores nothing. A share of
    anything is at least one index.
    """
    if (share is None) == (threshold is None):
        raise ValueError(f"say either share or threshold: got {share} and {threshold}")
    known = [index for index, score in enumerate(scores) if not math.isnan(score)]
    if threshold is not None:
        return [index for index in known if scores[index] > threshold]
    assert share is not None
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1]: got {share}")
    count = math.ceil(share * len(known))
    return sorted(sorted(known, key=lambda index: (-scores[index], index))[:count])


def value_changes(values_T: Sequence[float]) -> list[float]:
    """Return |V(h_t+1) - V(h_t)| of each turn, shape (T,), from a critic's value before each: where something happened.

    NaN for the last turn, after which no value is known.
    """
    changes = [abs(after - before) for before, after in itertools.pairwise(values_T)]
    return [*changes, math.nan] if values_T else []


def disagreement(values_C_T: Sequence[Sequence[float]]) -> list[float]:
    """Return the standard deviation over critics of their values of each turn, shape (T,): where they do not know.

    Raises: ValueError: fewer than two critics, or they valued different turns.
    """
    if len(values_C_T) < 2 or len({len(values_T) for values_T in values_C_T}) > 1:
        raise ValueError(
            f"two critics or more must value the same turns: got values of {[len(one) for one in values_C_T]} turns"
        )
    return [statistics.stdev(values_C) for values_C in zip(*values_C_T, strict=True)]


def expected_best_of_noisy_means(arms: int, pulls: int, success: float) -> float:
    """Return the expectation of the largest of `arms` sample means of `pulls` flips, all of the same `success` rate.

    It is above `success`: choosing by an estimate and reporting the same estimate flatters (the winner's curse).
    """
    below = 0.0  # probability that every arm has at most k successes
    cumulative, expected = 0.0, 0.0
    for k in range(pulls + 1):
        cumulative += math.comb(pulls, k) * success**k * (1 - success) ** (pulls - k)
        at_most = cumulative**arms
        expected += (at_most - below) * k / pulls
        below = at_most
    return expected
