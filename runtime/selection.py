"""How a guided policy chooses: pi_guided(a|s) proportional to pi(a|s) exp(beta Q(s,a)), and what to record of it.

Two cases that must not be mixed up. Candidates that were *enumerated* are weighted by pi(a) exp(beta Q). Candidates
that were *drawn* from pi are weighted by exp(beta Q) alone, duplicates kept: pi is in the draws already. Pure functions
on plain numbers; the token level is in `engine/guidance.py`.
"""

import math
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from turngate.runtime.errors import GuidanceError
from turngate.runtime.seeds import derive_seed

__all__ = [
    "Strength",
    "best_of_n_kl_bound",
    "beta_for_kl",
    "enumerated_probs",
    "kl_to_base",
    "log_selection_weight",
    "pick",
    "selection_probs",
    "soft_q",
    "soft_success",
]

_BISECTIONS = 200
_BUDGET_BETA = 1e12
"""Where every beta is within the KL budget: as good as infinite, without the choice counting as greedy by intent."""
_MAX_BETA = 1e12
"""In units of the values' range: beyond it the softmax of two floats that are worth telling apart is 0 and 1."""


class Strength(NamedTuple):
    """How far values move one choice."""

    beta: float
    floor: float = 0.0
    max_kl: float | None = None
    """The most that the choice may differ from the base's; beta is lowered to it."""

    def within_budget(self, base_logprobs_A: Sequence[float], q_A: Sequence[float]) -> float:
        """Return beta, lowered to the KL budget if there is one. Raises: GuidanceError: nothing can be chosen."""
        if self.max_kl is None:
            return self.beta
        return min(self.beta, beta_for_kl(base_logprobs_A, q_A, self.max_kl), _BUDGET_BETA)


def enumerated_probs(
    base_logprobs_A: Sequence[float], q_A: Sequence[float], beta: float, *, floor: float = 0.0
) -> list[float]:
    """Return the guided probability of each distinct action, shape (A,): softmax(log pi + beta Q).

    beta 0 gives pi renormalised over the actions, infinity the best action, ties by pi. A Q of minus infinity forbids
    an action, the floor included. Log-probs are sums over an action's tokens; dividing them by its length is another
    target.
    Args: floor: mixed in uniformly, over the actions that are not forbidden.
    Raises: GuidanceError: a value is NaN or plus infinity, or every action is forbidden.
    """
    _check(q_A, beta, base_logprobs_A)
    return _floored(_softmax(_tilted(base_logprobs_A, q_A, beta)), q_A, floor)


def selection_probs(
    q_N: Sequence[float], beta: float, *, floor: float = 0.0, proposal_N: Sequence[float] = ()
) -> list[float]:
    """Return the probability of choosing each of N draws, shape (N,): softmax(beta Q) over draws, duplicates kept.

    With one draw that is the base policy, with ever more the target. A Q of minus infinity forbids a draw, the
    floor included.
    Args: floor: mixed in uniformly, w <- (1 - floor) w + floor / N, so that every draw keeps support.
        proposal_N: log pi - log proposal of each draw, when the draws came from something other than pi.
    Raises: GuidanceError: a value is NaN or plus infinity, or every draw is forbidden.
    """
    shift_N = proposal_N or [0.0] * len(q_N)
    _check(q_N, beta, shift_N)
    return _floored(_softmax(_tilted(shift_N, q_N, beta)), q_N, floor)


def log_selection_weight(probs_N: Sequence[float], chosen: int) -> float:
    """Return log(N w_i) of the chosen draw: what choosing added to the log-prob of drawing it.

    On the space of (all draws, chosen index) the importance weight back to the base policy is exactly 1 / (N w_i), for
    any N and any finite beta.
    """
    probability = probs_N[chosen]
    if not probability > 0:
        raise GuidanceError(f"the chosen draw must have been possible: got probability {probability} (draw {chosen})")
    return math.log(len(probs_N) * probability)


def pick(weights: Sequence[float], seed: int) -> int:
    """Return an index drawn by weight, from the decision's stream; never one of weight 0."""
    uniform = Random(derive_seed(seed, "selection")).random()
    total = 0.0
    last = 0
    for index, weight in enumerate(weights):
        if weight > 0:
            total += weight
            last = index
            if uniform < total:
                return index
    return last


def kl_to_base(probs_A: Sequence[float], base_logprobs_A: Sequence[float]) -> float:
    """Return KL(guided || base) over the same actions, with the base renormalised over them."""
    norm = _log_sum_exp(base_logprobs_A)
    terms = (p * (math.log(p) - lp + norm) for p, lp in zip(probs_A, base_logprobs_A, strict=True) if p > 0)
    return max(0.0, math.fsum(terms))


def beta_for_kl(base_logprobs_A: Sequence[float], q_A: Sequence[float], target_kl: float) -> float:
    """Return the beta at which KL(guided || base) is `target_kl`; infinity when no beta reaches it.

    KL grows with beta, so bisection finds it. For draws pass base log-probs of 0: the KL of the choice among them.
    """
    if not target_kl >= 0:
        raise GuidanceError(f"target_kl must be at least 0: got {target_kl}")
    _check(q_A, 0.0, base_logprobs_A)

    # In units of their range, halved so that no difference overflows: values may be of any size.
    finite = [q for q in q_A if q > -math.inf]
    best = max(finite)
    unit = best / 2 - min(finite) / 2 or 1.0
    scaled_A = [(q / 2 - best / 2) / unit for q in q_A]

    def kl(beta: float) -> float:
        return kl_to_base(enumerated_probs(base_logprobs_A, scaled_A, beta), base_logprobs_A)

    if target_kl <= kl(0.0):
        return 0.0
    if target_kl >= kl(math.inf):
        return math.inf
    low, high = 0.0, 1.0
    while kl(high) < target_kl:
        low, high = high, high * 2
        if high > _MAX_BETA:
            return math.inf
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if kl(middle) < target_kl else (low, middle)
    return (low + high) / 4 / unit


def soft_q(returns_K: Sequence[float], beta: float) -> float:
    """Return (1 / beta) log mean exp(beta R) over continuations: the KL-optimal Q where the environment has no luck.

    In a stochastic environment it is optimistic about the environment's luck: take the plain mean over outcomes there.
    As beta goes to 0 it becomes the mean. Source: Zhou et al. 2025, Q# (arXiv 2502.20548).
    """
    if not returns_K or not beta > 0 or beta == math.inf:
        raise GuidanceError(
            f"soft Q needs returns and a finite beta above 0: got {len(returns_K)} returns, beta {beta}"
        )
    best = max(returns_K)
    return best + (_log_sum_exp([beta * (value - best) for value in returns_K]) - math.log(len(returns_K))) / beta


def soft_success(success: float, beta: float) -> float:
    """Return the soft Q of a return that is 1 with probability `success`, else 0: log(1 + p (e^beta - 1)) / beta."""
    if not (0 <= success <= 1 and 0 < beta < math.inf):
        raise GuidanceError(f"success must be in [0, 1] and beta finite and above 0: got {success}, {beta}")
    if success == 0:
        return 0.0
    # log(p e^beta + (1 - p)), with the larger term taken out, so that no beta overflows.
    rest = math.log1p(-success) if success < 1 else -math.inf
    return _log_sum_exp([math.log(success) + beta, rest]) / beta


def best_of_n_kl_bound(draws: int) -> float:
    """Return ln N - (N - 1) / N, an upper bound of KL(best of N || base).

    Source: Beirami et al. 2024 (arXiv 2401.01879).
    """
    return math.log(draws) - (draws - 1) / draws


def _floored(probs_A: list[float], q_A: Sequence[float], floor: float) -> list[float]:
    if not 0 <= floor <= 1:
        raise GuidanceError(f"floor must be between 0 and 1: got {floor}")
    share = floor / sum(q > -math.inf for q in q_A)
    return [(1 - floor) * p + (share if q > -math.inf else 0.0) for p, q in zip(probs_A, q_A, strict=True)]


def _tilted(logprobs_A: Sequence[float], q_A: Sequence[float], beta: float) -> list[float]:
    """Return log-prob + beta (Q - the best Q): below infinity, however large beta and Q are."""
    best = max(q for lp, q in zip(logprobs_A, q_A, strict=True) if lp > -math.inf)
    return [lp + _tilt(beta, q, best) for lp, q in zip(logprobs_A, q_A, strict=True)]


def _tilt(beta: float, q: float, best: float) -> float:
    # 0 times infinity is NaN: equals stay equal at beta infinity, and a forbidden action stays forbidden at beta 0.
    if q >= best:  # better ones than the best are impossible by their log-prob
        return 0.0
    if q == -math.inf or beta == math.inf:
        return -math.inf
    return 2 * (beta * (q / 2 - best / 2))  # halved: the difference of two large ones is infinite


def _check(q_N: Sequence[float], beta: float, logprobs_N: Sequence[float]) -> None:
    if not q_N or len(q_N) != len(logprobs_N):
        raise GuidanceError(f"every candidate must have one Q: got {len(q_N)} for {len(logprobs_N)} candidates")
    if not beta >= 0:
        raise GuidanceError(f"beta must be at least 0: got {beta}")
    for name, values in (("Q", q_N), ("log-prob", logprobs_N)):
        for index, value in enumerate(values):
            if math.isnan(value) or value == math.inf:
                raise GuidanceError(f"{name} must be a number below infinity: got {value} (candidate {index})")
    if all(q + lp == -math.inf for q, lp in zip(q_N, logprobs_N, strict=True)):
        raise GuidanceError("at least one candidate must be possible: all are forbidden")


def _softmax(scores: Sequence[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _log_sum_exp(values: Sequence[float]) -> float:
    top = max(values)
    return top if top == -math.inf else top + math.log(math.fsum(math.exp(v - top) for v in values))
