"""Losses of critics, by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turngate.learners.aggregation import aggregate, token_weights
from turngate.learners.ratios import ShapeError
from turngate.learners.value_losses import value_bce, value_loss_clipped
from turngate.runtime.errors import ConfigError, LearnerError

F64 = torch.float64
numbers = st.floats(-3, 3, allow_subnormal=False)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def everything(values: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(values, dtype=torch.bool)


def test_the_larger_error_counts_and_a_clipped_one_has_no_gradient() -> None:
    # From 0.3 to 0.9 towards a target of 0.2: clipped 0.5 errs less, so the plain error keeps its gradient. From 0.3 to
    # 0.9 towards 1.0: clipped 0.5 errs more, 0.5 * 0.25, and is a constant.
    values = tensor(0.9, 0.9).requires_grad_()
    out = value_loss_clipped(values, tensor(0.3, 0.3), tensor(0.2, 1.0), everything(values), eps=0.2)
    assert out.loss.tolist() == pytest.approx([0.245, 0.125])
    assert out.is_clipped.tolist() == [False, True]
    out.loss.sum().backward()
    assert values.grad.tolist() == pytest.approx([0.7, 0.0])


@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=8), st.floats(0.01, 1))
def test_the_clipped_loss_is_the_formula_and_never_below_the_plain_one(
    rows: list[tuple[float, float, float]], eps: float
) -> None:
    v, v_old, y = (torch.tensor(column, dtype=F64) for column in zip(*rows, strict=True))
    loss = value_loss_clipped(v, v_old, y, everything(v), eps=eps).loss.tolist()
    for got, (value, old, target) in zip(loss, rows, strict=True):
        limited = old + max(-eps, min(eps, value - old))
        assert got == pytest.approx(0.5 * max((value - target) ** 2, (limited - target) ** 2), abs=1e-12)


def test_without_eps_it_is_half_the_squared_error() -> None:
    out = value_loss_clipped(tensor(2.0), tensor(-9.0), tensor(0.5), torch.tensor([True]), eps=None)
    assert out.loss.item() == 1.125
    assert not out.is_clipped.any()


def test_rounding_inside_the_clip_range_does_not_count_as_clipped() -> None:
    # -0.05 + (0.17 + 0.05) is 0.17000000000000004.
    values = tensor(0.17).requires_grad_()
    out = value_loss_clipped(values, tensor(-0.05), tensor(0.0), torch.tensor([True]), eps=0.5)
    assert not out.is_clipped.any()
    out.loss.sum().backward()
    assert values.grad.item() == pytest.approx(0.17)


def test_cross_entropy_by_hand_and_its_gradient_is_probability_minus_target() -> None:
    logits = tensor(math.log(3.0), 0.0).requires_grad_()
    out = value_bce(logits, tensor(1.0, 0.25), everything(logits))
    assert out.loss.tolist() == pytest.approx([-math.log(0.75), math.log(2.0)])
    out.loss.sum().backward()
    assert logits.grad.tolist() == pytest.approx([-0.25, 0.25])


def test_targets_outside_the_unit_interval_are_clamped_and_counted() -> None:
    logits = tensor(0.5, 0.5, 0.5)
    out = value_bce(logits, tensor(1.2, -0.1, 1.0), everything(logits))
    assert out.is_clamped.tolist() == [True, True, False]
    assert out.clamped == 2
    assert out.loss[0] == out.loss[2]


def test_extreme_logits_give_finite_losses() -> None:
    logits = torch.tensor([1e4, -1e4], requires_grad=True)
    out = value_bce(logits, torch.tensor([0.0, 1.0]), everything(logits))
    assert out.loss.tolist() == pytest.approx([1e4, 1e4])
    out.loss.sum().backward()
    assert logits.grad.tolist() == [1.0, -1.0]


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_p2_masked_elements_cost_nothing_whatever_they_hold(poison: float) -> None:
    values = tensor(0.4, poison).requires_grad_()
    mask = torch.tensor([True, False])
    regression = value_loss_clipped(values, tensor(0.1, poison), tensor(1.0, poison), mask)
    success = value_bce(values, tensor(1.0, poison), mask)
    (grad,) = torch.autograd.grad(regression.loss.sum() + success.loss.sum(), values)
    assert regression.loss[1] == success.loss[1] == 0.0
    assert grad[1] == 0.0
    assert grad[0] != 0.0
    assert not success.is_clamped[1]


def test_targets_and_old_values_are_constants() -> None:
    values, old, target = (tensor(x).requires_grad_() for x in (0.9, 0.3, 1.0))
    mask = torch.tensor([True])
    (value_loss_clipped(values, old, target, mask).loss + value_bce(values, target, mask).loss).sum().backward()
    assert old.grad is None
    assert target.grad is None


def test_weights_of_the_whole_step_reduce_the_loss() -> None:
    mask = torch.tensor([[True, True], [True, False]])
    values, targets = torch.zeros(2, 2, dtype=F64), torch.tensor([[1.0, 3.0], [2.0, 9.0]], dtype=F64)
    loss = value_loss_clipped(values, values, targets, mask, eps=None).loss
    assert aggregate(loss, token_weights(mask, "token_mean")).item() == pytest.approx((0.5 + 4.5 + 2.0) / 3)
    assert aggregate(loss, token_weights(mask, "seq_mean_token_mean")).item() == pytest.approx((2.5 + 2.0) / 2)


def test_no_element_at_all_gives_a_loss_of_exactly_zero() -> None:
    values, mask = torch.zeros(3, requires_grad=True), torch.zeros(3, dtype=torch.bool)
    loss = aggregate(value_bce(values, values, mask).loss, token_weights(mask, "token_sum"))
    loss.backward()
    assert loss.item() == 0.0
    assert values.grad.tolist() == [0.0, 0.0, 0.0]


@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=8))
def test_p16_float32_agrees_with_float64(rows: list[tuple[float, float, float]]) -> None:
    single = [torch.tensor(column, dtype=torch.float32) for column in zip(*rows, strict=True)]
    double = [column.to(F64) for column in single]
    mask = everything(single[0])
    for fn in (lambda v, o, y: value_loss_clipped(v, o, y, mask), lambda v, _, y: value_bce(v, y, mask)):
        loss = fn(*single).loss
        assert loss.dtype == torch.float32
        assert loss.tolist() == pytest.approx(fn(*double).loss.tolist(), rel=2e-5, abs=2e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_p17_numbers_that_are_none_are_refused_by_name(bad: float) -> None:
    mask = torch.tensor([True])
    with pytest.raises(LearnerError, match="targets must be finite"):
        value_bce(tensor(0.0), tensor(bad), mask)
    with pytest.raises(LearnerError, match="values must be finite"):
        value_loss_clipped(tensor(bad), tensor(0.0), tensor(0.0), mask)


def test_shapes_must_match_and_eps_be_positive() -> None:
    mask = torch.tensor([[True], [True]])
    with pytest.raises(ShapeError, match="one shape"):
        value_bce(torch.zeros(2, 1), torch.zeros(2), mask)
    with pytest.raises(ConfigError, match="eps must be above 0"):
        value_loss_clipped(tensor(0.0), tensor(0.0), tensor(0.0), torch.tensor([True]), eps=0.0)
