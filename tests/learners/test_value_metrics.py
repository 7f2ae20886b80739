"""Whether critics can be believed, by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turngate.envs.base import End
from turngate.learners.ratios import ShapeError
from turngate.learners.value_metrics import (
    SuccessPredictions,
    ValuePredictions,
    bootstrap_share,
    brier_score,
    expected_calibration_error,
    explained_variance,
    success_auc,
    success_metrics,
    token_turn_gap,
    value_metrics,
)
from turngate.runtime.errors import ConfigError, LearnerError

F64 = torch.float64
predictions = st.lists(st.tuples(st.floats(0, 1, allow_subnormal=False), st.booleans()), min_size=1, max_size=20)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def test_explained_variance_is_one_for_the_truth_and_zero_for_a_constant() -> None:
    returns = tensor(0.0, 1.0, 1.0)
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(tensor(0.4, 0.4, 0.4), returns) == pytest.approx(0.0)
    # Variances 2/9 and, of the errors (0, 2, 0), 8/9.
    assert explained_variance(tensor(0.0, -1.0, 1.0), returns) == pytest.approx(-3.0)


def test_explained_variance_is_undefined_when_there_is_nothing_to_explain() -> None:
    assert explained_variance(tensor(), tensor()) is None
    assert explained_variance(tensor(0.5), tensor(1.0)) is None
    # 0.1 has no exact mean in floating point: a variance of 1e-34 must not count as one.
    assert explained_variance(tensor(0.5, 0.2, 0.3), tensor(0.1, 0.1, 0.1)) is None


def test_explained_variance_per_turn_index_shows_what_all_turns_together_hide() -> None:
    # Values follow the turn index alone: good over all turns, blind within each.
    out = value_metrics(
        ValuePredictions(tensor(0.0, 0.0, 5.0, 5.0), tensor(-0.1, 0.1, 4.9, 5.1), torch.tensor([0, 0, 1, 1]))
    )
    assert out["value_explained_variance"] > 0.99
    assert out["value_explained_variance_turn_0"] == pytest.approx(0.0)
    assert out["value_explained_variance_turn_1"] == pytest.approx(0.0)
    assert (out["value_turns"], out["value_turns_at_0"], out["value_turns_at_1"]) == (4.0, 2.0, 2.0)


def test_turn_indices_nobody_reached_or_asked_for_have_no_metric() -> None:
    out = value_metrics(ValuePredictions(tensor(0.0, 1.0), tensor(0.0, 1.0), torch.tensor([0, 5])), max_turns=3)
    assert set(out) == {"value_turns", "value_turns_at_0", "value_explained_variance"}
    assert value_metrics(ValuePredictions(tensor(), tensor(), torch.tensor([], dtype=torch.int64))) == {
        "value_turns": 0.0
    }


def test_brier_score_by_hand() -> None:
    assert brier_score(tensor(0.8, 0.4), torch.tensor([True, False])) == pytest.approx((0.04 + 0.16) / 2)
    assert brier_score(tensor(), torch.tensor([], dtype=torch.bool)) is None


def test_calibration_error_by_hand() -> None:
    # Two bins: (0.1, 0.3) with one success of two errs by 0.3, (0.9,) by 0.1; weights 2/3 and 1/3.
    error = expected_calibration_error(tensor(0.1, 0.3, 0.9), torch.tensor([False, True, True]), bins=2)
    assert error == pytest.approx(0.3 * 2 / 3 + 0.1 / 3)
    assert expected_calibration_error(tensor(), torch.tensor([], dtype=torch.bool)) is None


def test_certain_predictions_fall_into_the_last_bin() -> None:
    assert expected_calibration_error(tensor(1.0, 0.95), torch.tensor([True, True]), bins=10) == pytest.approx(0.025)


@given(predictions, st.integers(1, 7))
def test_calibration_error_agrees_with_a_loop_over_bins(rows: list[tuple[float, bool]], bins: int) -> None:
    total = 0.0
    for b in range(bins):
        inside = [(p, y) for p, y in rows if min(math.floor(p * bins), bins - 1) == b]
        if inside:
            gap = sum(p for p, _ in inside) / len(inside) - sum(y for _, y in inside) / len(inside)
            total += len(inside) / len(rows) * abs(gap)
    probabilities, outcomes = zip(*rows, strict=True)
    got = expected_calibration_error(tensor(*probabilities), torch.tensor(outcomes), bins=bins)
    assert got == pytest.approx(total, abs=1e-12)


@given(predictions)
def test_auc_is_the_share_of_pairs_ranked_right(rows: list[tuple[float, bool]]) -> None:
    # Rounding makes ties.
    scores = [round(p, 1) for p, _ in rows]
    wins = [(s > f) + 0.5 * (s == f) for s, (_, a) in zip(scores, rows, strict=True) if a
            for f, (_, b) in zip(scores, rows, strict=True) if not b]  # fmt: skip
    got = success_auc(tensor(*scores), torch.tensor([y for _, y in rows]))
    assert got == (pytest.approx(sum(wins) / len(wins)) if wins else None)


def test_first_turn_values_are_compared_with_the_success_rate() -> None:
    out = success_metrics(
        SuccessPredictions(
            tensor(0.6, 0.9, 0.2), torch.tensor([True, True, False]), turn_index_P=torch.tensor([0, 1, 0])
        )
    )
    assert out["first_turn_value"] == pytest.approx(0.4)
    assert out["first_turn_success_rate"] == 0.5
    assert out["first_turn_value_gap"] == pytest.approx(-0.1)
    assert (out["success_prediction_turns"], out["first_turn_trajectories"]) == (3.0, 2.0)
    assert out["value_brier"] == pytest.approx((0.16 + 0.01 + 0.04) / 3)
    assert out["value_auc"] == out["first_turn_auc"] == 1.0


def test_undefined_numbers_are_absent() -> None:
    none = success_metrics(SuccessPredictions(tensor(), torch.tensor([], dtype=torch.bool), torch.tensor([])))
    assert none == {"success_prediction_turns": 0.0, "first_turn_trajectories": 0.0}
    all_won = success_metrics(SuccessPredictions(tensor(0.5), torch.tensor([True]), torch.tensor([1])))
    assert set(all_won) == {"success_prediction_turns", "first_turn_trajectories", "value_brier", "value_ece"}


def test_the_share_of_bootstrapped_trajectories_is_over_those_that_count() -> None:
    assert bootstrap_share([End.success, End.turn_limit, End.env_error, End.failure, End.budget]) == 0.25
    assert bootstrap_share([End.cancelled]) is None


def test_the_gap_between_token_and_turn_targets_is_the_largest() -> None:
    assert token_turn_gap(tensor(0.5, 0.25), tensor(0.5, 0.75)) == 0.5
    assert token_turn_gap(tensor(), tensor()) is None


def test_nonsense_is_refused() -> None:
    success = torch.tensor([True])
    with pytest.raises(LearnerError, match="not the logit"):
        brier_score(tensor(1.5), success)
    with pytest.raises(LearnerError, match="values must be finite"):
        explained_variance(tensor(math.nan), tensor(0.0))
    with pytest.raises(ConfigError, match="bins must be 1 or more"):
        expected_calibration_error(tensor(0.5), success, bins=0)
    with pytest.raises(ShapeError):
        success_auc(tensor(0.5, 0.5), success)
