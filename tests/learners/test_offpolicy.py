"""Importance weights, proximal log-probs and filters."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from turngate.learners.aggregation import aggregate, token_weights
from turngate.learners.losses import Clip, decoupled_ppo_loss
from turngate.learners.offpolicy import Correction, interpolated_proximal, is_weights
from turngate.learners.ratios import ShapeError
from turngate.runtime.errors import ConfigError

LOG2 = math.log(2.0)
TOKEN = Correction()


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def everything(x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.bool)


def test_truncation_caps_the_weight_and_keeps_the_token() -> None:
    target, behaviour = row(2 * LOG2 - 5, -5.0, -LOG2 - 5), row(-5.0, -5.0, -5.0)
    out = is_weights(target, behaviour, everything(target), TOKEN)
    assert out.weights[0].tolist() == [2.0, 1.0, pytest.approx(0.5)]
    assert out.raw[0, 0].item() == pytest.approx(4.0)
    assert out.is_truncated[0].tolist() == [True, False, False]
    assert out.keep.all()


def test_b2_8_bounds_are_on_target_over_behaviour() -> None:
    # The target makes the first token twice as likely: its ratio is 2, not 1/2.
    target, behaviour = row(LOG2 - 5, -LOG2 - 5), row(-5.0, -5.0)
    out = is_weights(target, behaviour, everything(target), Correction(mode="mask", upper=1.5, lower=0.1))
    assert out.keep[0].tolist() == [False, True]


def test_b2_11_rejected_tokens_stay_in_the_denominator() -> None:
    target, behaviour = row(3.0 - 5, -5.0), row(-5.0, -5.0)
    mask = everything(target)
    out = is_weights(target, behaviour, mask, Correction(mode="mask", upper=2.0, lower=0.5))
    loss = decoupled_ppo_loss(target, target, out.weights, row(1.0, 1.0), mask, clip=Clip()).loss
    assert aggregate(loss, token_weights(mask, "token_mean")).item() == pytest.approx(-0.5)


def test_b2_12_rejecting_everything_gives_a_connected_zero() -> None:
    logp = row(-1.0, -1.0).requires_grad_()
    mask = everything(logp)
    out = is_weights(row(5.0, 5.0), row(-5.0, -5.0), mask, Correction(mode="mask", normalise=True))
    loss = aggregate(
        decoupled_ppo_loss(logp, logp.detach(), out.weights, row(1.0, 1.0), mask, clip=Clip()).loss,
        token_weights(mask, "token_mean"),
    )
    assert loss.item() == 0.0
    assert torch.autograd.grad(loss, logp)[0].abs().sum().item() == 0.0


def test_unit_products_run_over_all_segments_of_a_trajectory() -> None:
    # Two rows of one trajectory, each with a ratio of 2: the trajectory's is 4.
    target, behaviour = torch.full((2, 1), LOG2 - 5), torch.full((2, 1), -5.0)
    correction = Correction(level="unit_prod", upper=100.0)
    same = torch.zeros(2, 1, dtype=torch.int64)
    together = is_weights(target, behaviour, everything(target), correction, unit_ids=same)
    apart = is_weights(target, behaviour, everything(target), correction)
    assert together.weights.flatten().tolist() == [pytest.approx(4.0)] * 2
    assert apart.weights.flatten().tolist() == [pytest.approx(2.0)] * 2


def test_geometric_units_are_free_of_length() -> None:
    target = torch.full((1, 8), -5.0 + 0.1)
    out = is_weights(target, torch.full((1, 8), -5.0), everything(target), Correction(level="unit_geo"))
    assert out.weights[0, 0].item() == pytest.approx(math.exp(0.1), rel=1e-5)


def test_normalised_weights_have_mean_one_after_truncation() -> None:
    target, behaviour = row(LOG2 - 5, -5.0, 9.0), row(-5.0, -5.0, -5.0)
    mask = torch.tensor([[True, True, False]])
    out = is_weights(target, behaviour, mask, Correction(normalise=True))
    assert out.weights[0].tolist() == [pytest.approx(4 / 3), pytest.approx(2 / 3), 0.0]


def test_normalised_units_have_mean_one_over_units_not_tokens() -> None:
    target, behaviour = torch.tensor([[LOG2 - 5, -5.0, -5.0], [-5.0, 0, 0]]), torch.full((2, 3), -5.0)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    out = is_weights(target, behaviour, mask, Correction(level="unit_prod", normalise=True))
    assert (out.weights[0, 0] + out.weights[1, 0]).item() == pytest.approx(2.0)


@given(st.lists(st.floats(-8, 0), min_size=3, max_size=3), st.floats(allow_nan=True, allow_infinity=True))
def test_p2_masked_values_do_not_matter(values: list[float], junk: float) -> None:
    mask = torch.tensor([[True, False, True]])

    def result(value: float) -> Tensor:
        target = row(*values)
        target[0, 1] = value
        return is_weights(target, row(-1.0, value, -2.0), mask, TOKEN).weights

    assert torch.equal(result(0.0), result(junk))


def test_weights_are_detached() -> None:
    target = row(-1.0).requires_grad_()
    assert not is_weights(target, row(-2.0), everything(target), TOKEN).weights.requires_grad


def test_interpolated_proximal_moves_towards_the_current_policy_with_lag() -> None:
    logp, behaviour = row(-1.0, -1.0, -1.0, -1.0), row(-3.0, -3.0, -3.0, -3.0)
    versions = torch.tensor([[10, 9, 8, -1]])
    proximal, alpha = interpolated_proximal(logp, behaviour, versions, policy_version=10)
    assert alpha[0].tolist() == [0.0, 0.0, 0.5, 0.0]
    assert proximal[0].tolist() == [-3.0, -3.0, -2.0, -3.0]


@pytest.mark.parametrize(
    "wrong", [{"level": "turn"}, {"mode": "drop"}, {"upper": 0.5}, {"lower": 1.5}, {"unit": "row"}]
)
def test_corrections_that_cannot_work_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Correction(**wrong)


def test_packed_arrays_need_units() -> None:
    logp = torch.zeros(3)
    with pytest.raises(ConfigError, match="unit_ids"):
        is_weights(logp, logp, everything(logp), Correction(level="unit_prod"))


def test_misaligned_arrays_are_refused() -> None:
    with pytest.raises(ShapeError, match="one shape"):
        is_weights(torch.zeros(2, 3), torch.zeros(2, 1), torch.ones(2, 3).bool(), TOKEN)
