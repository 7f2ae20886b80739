"""How good a critic is: explained variance per turn index, calibration and ranking of success probabilities.

A number that the data does not define is None in the functions and absent from the metrics, never NaN or 0: a critic
with nothing to explain is neither good nor bad. Everything in float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turngate.envs.base import End
from turngate.learners.ratios import check_shapes
from turngate.runtime.errors import ConfigError, LearnerError

__all__ = [
    "SuccessPredictions",
    "ValuePredictions",
    "bootstrap_share",
    "brier_score",
    "expected_calibration_error",
    "explained_variance",
    "success_auc",
    "success_metrics",
    "token_turn_gap",
    "value_metrics",
]


@dataclass(frozen=True, slots=True)
class ValuePredictions:
    """What a critic said about P turns, and what came of them."""

    values_P: Tensor
    returns_P: Tensor
    """Observed returns (or targets, if that is what should be explained)."""
    turn_index_P: Tensor
    """Integer index of the turn inside its trajectory, from 0."""


@dataclass(frozen=True, slots=True)
class SuccessPredictions:
    """Success probabilities of P turns, and whether the trajectories they belong to succeeded."""

    probabilities_P: Tensor
    is_success_P: Tensor
    """bool; one entry per turn, the same for all turns of a trajectory."""
    turn_index_P: Tensor


def explained_variance(values_P: Tensor, returns_P: Tensor) -> float | None:
    """Return 1 - Var(returns - values) / Var(returns); None when fewer than two returns differ.

    1 is perfect, 0 no better than a constant, negative worse. A constant offset of the values goes unnoticed.
    """
    values, returns = _finite(values=values_P, returns=returns_P)
    if len(returns) < 2 or bool((returns == returns[0]).all()):
        return None
    return 1.0 - float((returns - values).var(correction=0) / returns.var(correction=0))


def brier_score(probabilities_P: Tensor, is_success_P: Tensor) -> float | None:
    """Return the mean squared error of success probabilities; None without predictions. 0.25 is what 1/2 gets."""
    probabilities, outcomes = _probabilities(probabilities_P, is_success_P)
    return float((probabilities - outcomes).square().mean()) if len(outcomes) else None


def expected_calibration_error(probabilities_P: Tensor, is_success_P: Tensor, *, bins: int = 10) -> float | None:
    """Return the mean over predictions of |mean prediction - success rate| of their bin; None without predictions.

    Bins are equally wide on [0, 1], closed on the left, the last one on both sides. Biased upwards where bins hold few
    predictions. Source: Naeini et al. 2015; Guo et al. 2017 (1706.04599).
    """
    if bins < 1:
        raise ConfigError(f"bins must be 1 or more: got {bins}")
    probabilities, outcomes = _probabilities(probabilities_P, is_success_P)
    if not len(outcomes):
        return None
    bin_P = (probabilities * bins).floor().clamp(max=bins - 1).to(torch.int64)
    # n_b / n * |mean prediction - mean outcome| is |sum of differences| / n.
    gaps = torch.zeros(bins, dtype=torch.float64, device=bin_P.device).index_add(0, bin_P, probabilities - outcomes)
    return float(gaps.abs().sum()) / len(outcomes)


def success_auc(scores_P: Tensor, is_success_P: Tensor) -> float | None:
    """Return the probability that a success scores above a failure, ties counted half; None when one is missing.

    Computed from ranks (Mann-Whitney); any score that grows with the value will do.
    """
    scores, outcomes = _finite(scores=scores_P, is_success=is_success_P)
    is_success = outcomes > 0
    n_success = int(is_success.sum())
    n_failure = len(outcomes) - n_success
    if not n_success or not n_failure:
        return None
    _, inverse_P, counts = scores.unique(return_inverse=True, return_counts=True)
    # Tied scores share the mean of their ranks, counted from 1.
    ranks = counts.cumsum(0) - (counts - 1) / 2
    rank_sum = float(ranks[inverse_P][is_success].to(torch.float64).sum())
    return (rank_sum - n_success * (n_success + 1) / 2) / (n_success * n_failure)


def bootstrap_share(ends: Sequence[End]) -> float | None:
    """Return the fraction of trajectories whose targets hold a predicted value: the truncated of those that count.

    None when none counts; failures of the machinery have no target.
    """
    counted = [end for end in ends if not end.is_failure]
    return sum(end.is_truncation for end in counted) / len(counted) if counted else None


def token_turn_gap(last_token_targets_P: Tensor, turn_targets_P: Tensor) -> float | None:
    """Return the largest distance between Q of an action's last token and Q of the action, which are one number.

    None without actions. Anything above rounding says that the two levels were computed from different ends, values
    or rewards.
    """
    of_tokens, of_turns = _finite(last_token_targets=last_token_targets_P, turn_targets=turn_targets_P)
    return float((of_tokens - of_turns).abs().max()) if len(of_turns) else None


def value_metrics(predictions: ValuePredictions, *, max_turns: int = 8) -> dict[str, float]:
    """Return explained variance over all turns and per turn index below `max_turns`, with the number of turns of each.

    Over all turns a critic that only knows how far the episode is looks good; per index it does not.
    """
    values, returns, index = predictions.values_P, predictions.returns_P, predictions.turn_index_P
    check_shapes(values=values, returns=returns, turn_index=index)
    metrics = {"value_turns": float(len(values))}
    found = {"value_explained_variance": explained_variance(values, returns)}
    for t in range(max_turns):
        at = index == t
        if bool(at.any()):
            metrics[f"value_turns_at_{t}"] = float(at.sum())
            found[f"value_explained_variance_turn_{t}"] = explained_variance(values[at], returns[at])
    return metrics | _defined(found)


def success_metrics(predictions: SuccessPredictions, *, bins: int = 10) -> dict[str, float]:
    """Return how far success probabilities can be believed: over all turns, and over trajectories at their first turn.

    `success_prediction_turns` and `first_turn_trajectories` are the denominators.
    """
    probabilities, is_success = predictions.probabilities_P, predictions.is_success_P
    check_shapes(probabilities=probabilities, is_success=is_success, turn_index=predictions.turn_index_P)
    first = predictions.turn_index_P == 0
    metrics = {"success_prediction_turns": float(len(probabilities)), "first_turn_trajectories": float(first.sum())}
    found = {
        "value_brier": brier_score(probabilities, is_success),
        "value_ece": expected_calibration_error(probabilities, is_success, bins=bins),
        "value_auc": success_auc(probabilities, is_success),
        "first_turn_auc": success_auc(probabilities[first], is_success[first]),
    }
    if bool(first.any()):
        value, rate = (float(x[first].to(torch.float64).mean()) for x in (probabilities, is_success))
        metrics |= {"first_turn_value": value, "first_turn_success_rate": rate, "first_turn_value_gap": value - rate}
    return metrics | _defined(found)


def _defined(found: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in found.items() if value is not None}


def _probabilities(probabilities_P: Tensor, is_success_P: Tensor) -> tuple[Tensor, Tensor]:
    probabilities, outcomes = _finite(probabilities=probabilities_P, is_success=is_success_P)
    if bool(((probabilities < 0) | (probabilities > 1)).any()):
        low, high = float(probabilities.min()), float(probabilities.max())
        raise LearnerError(f"probabilities must lie in [0, 1]: got {low} to {high}; pass sigmoid(logit), not the logit")
    return probabilities, outcomes


def _finite(**arrays: Tensor) -> list[Tensor]:
    """Return flat float64 arrays of one shape."""
    check_shapes(**arrays)
    flat = {name: array.detach().to(torch.float64).flatten() for name, array in arrays.items()}
    for name, array in flat.items():
        if not bool(torch.isfinite(array).all()):
            raise LearnerError(f"{name} must be finite: got {float(array[~torch.isfinite(array)][0])}")
    return list(flat.values())
