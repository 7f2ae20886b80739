"""Estimates from a few independent continuations, with intervals that say how little a few continuations know.

Pure functions on plain numbers: what a branch of an episode is worth, and how sure of it one can be.
"""

import math
from collections.abc import Sequence

import msgspec

from turngate.runtime.metrics import wilson_interval

__all__ = [
    "Estimate",
    "OutcomeSplit",
    "beta_interval",
    "estimate",
    "leave_one_out_advantages",
    "newcombe_interval",
    "optimal_continuations",
    "split_by_outcome",
    "standard_error",
    "two_level_variance",
    "vine_advantages",
]

Z_95 = 1.959963984540054
_JEFFREYS = 0.5
_MAX_TERMS = 300
"""Of the continued fraction; it needs about sqrt(max(a, b)) of them."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What continuations from one state, or after one action, say about the return to come."""

    mean: float
    """NaN when nothing was sampled."""
    standard_error: float
    """Sample standard deviation (ddof 1) over the root of their number; NaN for a single one, never 0."""
    count: int
    successes: int | None = None
    """Number of returns of 1 when all returns are 0 or 1, else None."""
    truncated: int = 0
    """Continuations that were cut short and say less than the others; see `truncated_fraction`."""

    def wilson(self, *, z: float = Z_95) -> tuple[float, float]:
        """Return the Wilson interval of a success rate; (0, 1) without any. Raises: ValueError: not binary."""
        return wilson_interval(self._binary(), self.count, z=z)

    def beta(self, *, prior: float = _JEFFREYS, level: float = 0.95) -> tuple[float, float]:
        """Return the equal-tailed credible interval under a Beta(prior, prior); 1/2 is Jeffreys', 1 uniform."""
        successes = self._binary()
        return beta_interval(successes + prior, self.count - successes + prior, level=level)

    def beta_mean(self, *, prior: float = _JEFFREYS) -> float:
        """Return the posterior mean of a success rate under a Beta(prior, prior)."""
        return (self._binary() + prior) / (self.count + 2 * prior)

    @property
    def truncated_fraction(self) -> float:
        """Share of continuations that were cut short; counted as failures they would bias the estimate down."""
        return self.truncated / self.count if self.count else 0.0

    def _binary(self) -> int:
        if self.successes is None:
            raise ValueError(
                f"returns must be 0 or 1 for an interval of a success rate: got other values (mean {self.mean}, "
                f"{self.count} continuations); use standard_error"
            )
        return self.successes


def estimate(returns: Sequence[float], *, truncated: int = 0) -> Estimate:
    """Summarise the returns of independent continuations.

    Raises: ValueError: a return is not finite: leave failed continuations out, and bootstrap truncated ones.
    """
    bad = [value for value in returns if not math.isfinite(value)]
    if bad:
        raise ValueError(f"returns must be finite: got {bad[0]}; leave out continuations that failed")
    count = len(returns)
    is_binary = all(value in (0.0, 1.0) for value in returns)
    return Estimate(
        mean=math.fsum(returns) / count if count else math.nan,
        standard_error=standard_error(returns),
        count=count,
        successes=round(math.fsum(returns)) if is_binary else None,
        truncated=truncated,
    )


def standard_error(values: Sequence[float]) -> float:
    """Return s / sqrt(K) with ddof 1; NaN for fewer than two values: one sample does not know its spread."""
    return math.sqrt(_variance(values) / len(values)) if values else math.nan


def newcombe_interval(
    successes_a: int, count_a: int, successes_b: int, count_b: int, *, z: float = Z_95
) -> tuple[float, float]:
    """Return the interval of the difference of two independent success rates, a - b.

    With a after an action and b before it: the advantage. Each side is a Wilson interval's distance.
    Source: Newcombe 1998, "Interval estimation for the difference between independent proportions", method 10.
    """
    low_a, high_a = wilson_interval(successes_a, count_a, z=z)
    low_b, high_b = wilson_interval(successes_b, count_b, z=z)
    if not count_a or not count_b:
        return -1.0, 1.0
    a, b = successes_a / count_a, successes_b / count_b
    return a - b - math.hypot(a - low_a, high_b - b), a - b + math.hypot(high_a - a, b - low_b)


def leave_one_out_advantages(q_N: Sequence[float]) -> list[float]:
    """Return each sampled action's Q less the mean of the others', shape (N,); 0 for an action without others.

    The others' mean does not contain the action's own luck; the mean over all would shrink it by (N - 1) / N.
    """
    count = len(q_N)
    if count < 2:
        return [0.0] * count
    total = math.fsum(q_N)
    return [q - (total - q) / (count - 1) for q in q_N]


def vine_advantages(values_T: Sequence[float], rewards_T: Sequence[float], *, gamma: float = 1.0) -> list[float]:
    """Return r_t + gamma V(h_t+1) - V(h_t) of each turn, shape (T,), with Monte Carlo values; V after the last is 0.

    It contains the luck of the outcome that was observed. For an episode that a limit cut short, add gamma times the
    value of the state it was left in to the last reward.
    Source: Kazemnejad et al. 2024, VinePPO (arXiv 2410.01679).
    Raises: ValueError: the lengths differ.
    """
    if len(values_T) != len(rewards_T):
        raise ValueError(f"values and rewards must be per turn: got {len(values_T)} values, {len(rewards_T)} rewards")
    after_T = [*values_T[1:], 0.0]
    return [r + gamma * after - v for r, after, v in zip(rewards_T, after_T, values_T, strict=False)]


def two_level_variance(between: float, within: float, outcomes: int, continuations: int) -> float:
    """Return the variance of a mean over `outcomes` executions of an action with `continuations` each.

    Law of total variance: Var_o(E[R|o]) / outcomes + E_o[Var(R|o)] / (outcomes * continuations). More continuations
    of one outcome never average out the luck of that outcome.
    """
    if outcomes < 1 or continuations < 1:
        raise ValueError(f"outcomes and continuations must be positive: got {outcomes} and {continuations}")
    return between / outcomes + within / (outcomes * continuations)


def optimal_continuations(between: float, within: float, *, outcome_cost: float, continuation_cost: float) -> float:
    """Return how many continuations per outcome are cheapest for a given variance; not rounded, use at least 1.

    Infinite when outcomes do not differ: then one outcome serves for all. Source: two-stage sampling, Cochran 1977,
    "Sampling techniques", section 10.6.
    """
    if min(between, within, outcome_cost, continuation_cost) < 0 or continuation_cost == 0:
        raise ValueError(
            "variances and costs must not be negative, and a continuation must cost something: got "
            f"{between}, {within}, {outcome_cost}, {continuation_cost}"
        )
    if between == 0:
        return math.inf if within * outcome_cost > 0 else 1.0
    return math.sqrt(outcome_cost / continuation_cost * within / between)


class OutcomeSplit(msgspec.Struct, frozen=True, kw_only=True):
    """The mean over several outcomes of one action with several continuations each, and where its variance comes from.

    Continuations of one outcome share that outcome's luck, so no interval of a success rate fits their number.
    """

    mean: float
    """Over outcomes, each its own mean; NaN without any."""
    standard_error: float
    """From the spread of the outcomes' means; NaN for a single outcome."""
    between: float
    """Estimated Var_o(E[R|o]): the environment's luck in the outcome. Not below 0; NaN when it cannot be told."""
    within: float
    """Estimated E_o[Var(R|o)]: all luck after the outcome; NaN when no outcome has two continuations."""
    outcomes: int
    continuations: int
    """Returns in all."""

    def best_continuations(self, *, outcome_cost: float, continuation_cost: float) -> float:
        """Return how many continuations of each outcome are cheapest from here on; see `optimal_continuations`."""
        return optimal_continuations(
            self.between, self.within, outcome_cost=outcome_cost, continuation_cost=continuation_cost
        )


def split_by_outcome(returns_O_K: Sequence[Sequence[float]], *, is_final_O: Sequence[bool] = ()) -> OutcomeSplit:
    """Estimate mean and variance components from the returns of each outcome's continuations.

    Analysis of variance with one random factor; numbers of continuations may differ, outcomes weigh the same.
    Args: is_final_O: outcomes after which nothing was left to chance, such as the end of the episode: their one return
        is their mean.
    """
    final_O = is_final_O or [False] * len(returns_O_K)
    kept = [(list(returns), final) for returns, final in zip(returns_O_K, final_O, strict=True) if returns]
    means = [math.fsum(returns) / len(returns) for returns, _ in kept]
    variances = [0.0 if final else _variance(returns) for returns, final in kept]  # NaN for a single continuation
    known = [variance for variance in variances if not math.isnan(variance)]
    open_ended = [v for v, (_, final) in zip(variances, kept, strict=True) if not (final or math.isnan(v))]
    typical = math.fsum(open_ended) / len(open_ended) if open_ended else math.nan
    noise = [(typical if math.isnan(v) else v) / len(returns) for v, (returns, _) in zip(variances, kept, strict=True)]
    between = _variance(means) - math.fsum(noise) / len(noise) if len(means) > 1 else math.nan
    return OutcomeSplit(
        mean=math.fsum(means) / len(means) if means else math.nan,
        standard_error=standard_error(means),
        between=between if math.isnan(between) else max(0.0, between),
        within=math.fsum(known) / len(known) if known else math.nan,
        outcomes=len(kept),
        continuations=sum(len(returns) for returns, _ in kept),
    )


def _variance(values: Sequence[float]) -> float:
    """Return the sample variance (ddof 1), NaN for fewer than two values."""
    if len(values) < 2:
        return math.nan
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def beta_interval(a: float, b: float, *, level: float = 0.95) -> tuple[float, float]:
    """Return the equal-tailed interval of a Beta(a, b) distribution that holds `level` of its mass."""
    if not (a > 0 and b > 0 and 0 < level < 1):
        raise ValueError(f"a and b must be positive and level in (0, 1): got {a}, {b}, {level}")
    tail = (1 - level) / 2
    return _beta_quantile(tail, a, b), _beta_quantile(1 - tail, a, b)


def _beta_quantile(probability: float, a: float, b: float) -> float:
    """Invert the distribution function by bisection: monotone, and exact to the last bits of a float."""
    low, high = 0.0, 1.0
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return middle
        if _beta_cdf(middle, a, b) < probability:
            low = middle
        else:
            high = middle


def _beta_cdf(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast below the mean; above it the mirror image does
        return 1 - _beta_cdf(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / (a * _beta_fraction(x, a, b))


def _beta_fraction(x: float, a: float, b: float) -> float:
    """Return the continued fraction of I_x(a, b) (DLMF 8.17.22), by the modified Lentz method."""
    tiny = 1e-300
    value, c, d = 1.0, 1.0, 0.0
    for term in range(1, _MAX_TERMS):
        m = term // 2
        if term % 2:
            coefficient = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            coefficient = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / (1 + coefficient * d or tiny)
        c = 1 + coefficient / c or tiny
        value *= c * d
        if abs(c * d - 1) < 1e-16:
            break
    return value
