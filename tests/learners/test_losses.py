"""Policy losses: numbers worked by hand, properties, and the mistakes others made."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from turngate.learners.aggregation import aggregate, token_weights
from turngate.learners.losses import (
    Clip,
    cispo_loss,
    decoupled_ppo_loss,
    ppo_loss,
    reinforce_loss,
    unit_ppo_loss,
    unit_ratio_loss,
)
from turngate.learners.ratios import ShapeError
from turngate.runtime.errors import ConfigError

CLIP = Clip(0.2, 0.28)
LOG2 = math.log(2.0)

logprob_lists = st.lists(st.floats(-6, 0), min_size=4, max_size=4)


def tokens(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def everything(x: Tensor) -> Tensor:
    return torch.ones_like(x, dtype=torch.bool)


def ppo(logp: Tensor, old: Tensor, advantages: Tensor, clip: Clip = CLIP) -> tuple[list[float], list[float]]:
    """Return losses and gradients of one row."""
    logp = logp.clone().requires_grad_()
    out = ppo_loss(logp, old, advantages, everything(logp), clip=clip)
    (grad,) = torch.autograd.grad(out.loss.sum(), logp)
    return out.loss[0].tolist(), grad[0].tolist()


def test_at_ratio_one_the_loss_is_minus_the_advantage() -> None:
    losses, grads = ppo(tokens(-1.0, -2.0), tokens(-1.0, -2.0), tokens(1.5, -0.5))
    assert losses == [-1.5, 0.5]
    assert grads == [-1.5, 0.5]


def test_b2_1_a_clipped_token_has_the_clipped_value_and_no_gradient() -> None:
    # Ratio 2 and 1/2: too far in the direction the advantage pushes.
    losses, grads = ppo(tokens(LOG2 - 3, -LOG2 - 3), tokens(-3.0, -3.0), tokens(1.0, -1.0))
    assert losses == [pytest.approx(-1.28), pytest.approx(0.8)]
    assert grads == [0.0, 0.0]


def test_moving_back_towards_the_old_policy_is_never_clipped() -> None:
    losses, grads = ppo(tokens(-LOG2 - 3, LOG2 - 3), tokens(-3.0, -3.0), tokens(1.0, -1.0))
    assert losses == [pytest.approx(-0.5), pytest.approx(2.0)]
    assert grads == [pytest.approx(-0.5), pytest.approx(2.0)]


def test_b2_2_dual_clip_caps_negative_advantages_only() -> None:
    losses, grads = ppo(tokens(-1.0, -1.0), tokens(-4.0, -4.0), tokens(-1.0, 1.0), Clip(0.2, 100.0, dual=3.0))
    assert losses == [pytest.approx(3.0), pytest.approx(-math.exp(3))]
    assert grads == [0.0, pytest.approx(-math.exp(3))]


@pytest.mark.parametrize("dual", [0.5, 1.0, float("nan")])
def test_b2_2_a_dual_clip_that_would_cut_on_policy_tokens_is_refused(dual: float) -> None:
    with pytest.raises(ConfigError, match="above 1"):
        Clip(0.2, 0.2, dual=dual)


def test_negative_clip_offsets_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 or more"):
        Clip(-0.1, 0.2)


def test_b2_3_a_column_is_never_broadcast_over_tokens() -> None:
    row = torch.zeros(2, 3)
    with pytest.raises(ShapeError, match="one shape"):
        ppo_loss(row, row, torch.zeros(2, 1), everything(row), clip=CLIP)


def test_clip_fractions_count_only_the_direction_that_lost_its_gradient() -> None:
    logp, old = tokens(LOG2 - 3, LOG2 - 3, -LOG2 - 3, -LOG2 - 3), tokens(-3.0, -3.0, -3.0, -3.0)
    out = ppo_loss(logp, old, tokens(1.0, -1.0, 1.0, -1.0), everything(logp), clip=CLIP)
    assert out.is_clipped_high[0].tolist() == [True, False, False, False]
    assert out.is_clipped_low[0].tolist() == [False, False, False, True]


def test_b2_9_masked_tokens_have_no_ratio_loss_or_gradient_whatever_they_hold() -> None:
    logp = tokens(-1.0, math.nan, math.inf).requires_grad_()
    mask = torch.tensor([[True, False, False]])
    out = ppo_loss(logp, tokens(-1.0, -math.inf, 5.0), tokens(2.0, math.nan, 1.0), mask, clip=CLIP)
    (grad,) = torch.autograd.grad(aggregate(out.loss, token_weights(mask, "token_mean")), logp)
    assert out.loss[0].tolist() == [-2.0, 0.0, 0.0]
    assert out.ratio[0].tolist() == [1.0, 1.0, 1.0]
    assert grad[0].tolist() == [-2.0, 0.0, 0.0]


def test_b2_5_losses_are_token_aligned() -> None:
    # The advantage of token s meets the log-prob of token s: shifting one of them changes the result.
    logp, old, advantages = tokens(-1.0, -2.0, -3.0), tokens(-1.5, -2.0, -3.5), tokens(1.0, 0.0, 0.0)
    losses, _ = ppo(logp, old, advantages)
    shifted, _ = ppo(logp.roll(1, dims=1), old, advantages)
    assert losses == [pytest.approx(-1.28), 0.0, 0.0]
    assert shifted[0] != pytest.approx(losses[0])


@given(logprob_lists, st.lists(st.floats(-3, 3), min_size=4, max_size=4))
def test_p4_on_policy_every_loss_has_the_gradient_of_reinforce(logprobs: list[float], advantages: list[float]) -> None:
    logp, adv = tokens(*logprobs).requires_grad_(), tokens(*advantages)
    mask, same, ones = everything(logp), logp.detach(), torch.ones_like(logp)
    losses = (
        ppo_loss(logp, same, adv, mask, clip=CLIP).loss,
        decoupled_ppo_loss(logp, same, ones, adv, mask, clip=CLIP).loss,
        cispo_loss(logp, same, adv, mask, clip=CLIP)[0],
    )
    expected = torch.autograd.grad(reinforce_loss(logp, ones, adv, mask).sum(), logp)[0]
    assert torch.equal(expected, -adv)
    for loss in losses:
        torch.testing.assert_close(torch.autograd.grad(loss.sum(), logp)[0], expected)


@given(logprob_lists, logprob_lists, st.lists(st.floats(-3, 3), min_size=4, max_size=4), st.floats(-50, 50))
def test_p2_masked_values_change_neither_loss_nor_gradient(
    logprobs: list[float], old: list[float], advantages: list[float], junk: float
) -> None:
    mask = torch.tensor([[True, False, True, True]])

    def result(value: float) -> tuple[Tensor, Tensor]:
        logp, before, adv = (tokens(*row) for row in (logprobs, old, advantages))
        for row in (logp, before, adv):
            row[0, 1] = value
        logp.requires_grad_()
        loss = aggregate(ppo_loss(logp, before, adv, mask, clip=CLIP).loss, token_weights(mask, "token_mean"))
        return loss, torch.autograd.grad(loss, logp)[0]

    (loss, grad), (other_loss, other_grad) = result(0.0), result(junk)
    assert torch.equal(loss, other_loss)
    assert torch.equal(grad, other_grad)


@given(logprob_lists, logprob_lists, st.lists(st.floats(-3, 3), min_size=4, max_size=4))
def test_p16_float32_agrees_with_float64(logprobs: list[float], old: list[float], advantages: list[float]) -> None:
    logp, before, adv = (tokens(*row) for row in (logprobs, old, advantages))
    mask, clip = everything(logp), Clip(1.0, 1e3)
    exact = ppo_loss(logp, before, adv, mask, clip=clip).loss
    single = ppo_loss(logp.float(), before.float(), adv.float(), mask, clip=clip).loss
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=2e-5, atol=2e-6)


def test_extreme_ratios_stay_finite_in_float32() -> None:
    logp = torch.tensor([[-0.1, -90.0]], requires_grad=True)
    out = ppo_loss(logp, torch.tensor([[-90.0, -0.1]]), torch.tensor([[-1.0, 1.0]]), everything(logp), clip=CLIP)
    (grad,) = torch.autograd.grad(out.loss.sum(), logp)
    assert torch.isfinite(out.loss).all()
    assert grad.tolist() == [[0.0, 0.0]]


def test_importance_weights_scale_the_decoupled_loss_and_take_no_gradient() -> None:
    logp, weights = tokens(-1.0).requires_grad_(), tokens(1.7).requires_grad_()
    loss = decoupled_ppo_loss(logp, tokens(-1.0), weights.detach(), tokens(2.0), everything(logp), clip=CLIP).loss
    assert loss.item() == pytest.approx(-3.4)
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(loss.sum(), weights)


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    logp = tokens(LOG2 - 3).requires_grad_()
    loss, coefficient = cispo_loss(logp, tokens(-3.0), tokens(1.0), everything(logp), clip=Clip(1.0, 0.28))
    assert coefficient.item() == pytest.approx(1.28)
    assert torch.autograd.grad(loss.sum(), logp)[0].item() == pytest.approx(-1.28)


def test_a_turn_is_clipped_as_a_whole() -> None:
    # Each token's ratio is 1.127, inside the range; the action's is 1.43, outside.
    logp, old = tokens(-0.4, -0.4, -0.4).requires_grad_(), tokens(-0.52, -0.52, -0.52)
    units = torch.zeros(1, 3, dtype=torch.int64)
    out = unit_ratio_loss(logp, old, tokens(1.0, 1.0, 1.0), units, everything(logp), kind="prod", clip=Clip(0.2, 0.2))
    assert out.ratios_U.tolist() == [pytest.approx(math.exp(0.36))]
    assert out.is_clipped_U.tolist() == [True]
    assert torch.autograd.grad(out.loss, logp)[0].tolist() == [[0.0, 0.0, 0.0]]


def test_geometric_ratios_do_not_grow_with_length() -> None:
    ratios = []
    for length in (1, 10):
        logp = torch.full((1, length), -1.0, dtype=torch.float64)
        zeros = torch.zeros(1, length, dtype=torch.int64)
        out = unit_ratio_loss(logp, logp - 0.1, logp * 0 + 1, zeros, everything(logp), kind="geo", clip=CLIP)
        ratios.append(out.ratios_U.item())
    assert ratios[0] == pytest.approx(ratios[1])


def test_units_weigh_alike_unless_length_is_asked_for() -> None:
    logp, adv = tokens(-1.0, -1.0, -1.0), tokens(1.0, 3.0, 3.0)
    units, mask = torch.tensor([[0, 1, 1]]), everything(logp)
    by_unit = unit_ratio_loss(logp, logp, adv, units, mask, kind="geo", clip=CLIP)
    by_length = unit_ratio_loss(logp, logp, adv, units, mask, kind="geo", clip=CLIP, reduce="length")
    assert by_unit.loss.item() == pytest.approx(-2.0)
    assert by_length.loss.item() == pytest.approx(-7 / 3)


def test_one_unit_cannot_serve_two_advantages() -> None:
    logp = tokens(-1.0, -1.0)
    with pytest.raises(ConfigError, match="constant inside a unit"):
        unit_ratio_loss(logp, logp, tokens(1.0, 2.0), torch.tensor([[0, 0]]), everything(logp), kind="geo", clip=CLIP)


def test_no_unit_at_all_gives_a_connected_zero() -> None:
    logp = tokens(-1.0).requires_grad_()
    out = unit_ratio_loss(logp, logp.detach(), logp * 0, torch.tensor([[-1]]), everything(logp), kind="prod", clip=CLIP)
    assert out.loss.item() == 0.0
    assert torch.autograd.grad(out.loss, logp)[0].tolist() == [[0.0]]


def test_b2_2_units_have_a_dual_clip_as_tokens_do() -> None:
    # RLinf#316: a configured dual clip that one of the losses never read.
    logp, old = tokens(-1.0, -1.0).requires_grad_(), tokens(-3.0, -3.0)
    units, clip = torch.zeros(1, 2, dtype=torch.int64), Clip(0.2, 0.2, dual=3.0)
    out = unit_ratio_loss(logp, old, tokens(-1.0, -1.0), units, everything(logp), kind="prod", clip=clip)
    assert out.loss.item() == pytest.approx(3.0)
    assert out.is_clipped_U.tolist() == [True]
    assert torch.autograd.grad(out.loss, logp)[0].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("kind", ["prod", "geo"])
def test_b2_3_masked_tokens_are_in_no_units_ratio_and_in_no_length(kind: str) -> None:
    # huggingface/trl#3823, MakazhanAlpamys/Soup#723: padding entered the sequence ratio.
    logp, old, adv = tokens(-1.0, -1.1, -9.0), tokens(-1.2, -1.2, -1.0), tokens(1.0, 1.0, 1.0)
    units, mask = torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[True, True, False]])
    whole = unit_ratio_loss(logp, old, adv, units, mask, kind=kind, clip=CLIP)
    alone = unit_ratio_loss(logp[:, :2], old[:, :2], adv[:, :2], units[:, :2], mask[:, :2], kind=kind, clip=CLIP)
    assert whole.loss.item() == alone.loss.item()
    assert whole.ratios_U.tolist() == alone.ratios_U.tolist()


@given(logprob_lists, logprob_lists, st.sampled_from(["prod", "geo"]))
def test_unit_losses_per_token_reduce_to_the_mean_over_units_or_by_length(
    logprobs: list[float], old: list[float], kind: str
) -> None:
    logp, before, adv = tokens(*logprobs).requires_grad_(), tokens(*old), tokens(1.5, 1.5, -0.5, 1.5)
    units, mask = torch.tensor([[0, 0, 1, 0]]), torch.tensor([[True, True, True, False]])
    clip = Clip(0.2, 0.28, dual=2.0)
    made = unit_ppo_loss(logp, before, adv, units, mask, kind=kind, clip=clip)
    alike = torch.tensor([[0.25, 0.25, 0.5, 0.0]], dtype=torch.float64)
    for weights, reduce in ((alike, "mean_over_units"), (mask / 3, "length")):
        expected = unit_ratio_loss(logp, before, adv, units, mask, kind=kind, clip=clip, reduce=reduce)
        loss = aggregate(made.loss, weights)
        assert loss.item() == pytest.approx(expected.loss.item())
        grads = [torch.autograd.grad(x, logp, retain_graph=True)[0] for x in (loss, expected.loss)]
        torch.testing.assert_close(*grads)
    clipped = made.is_clipped_high | made.is_clipped_low | made.is_clipped_dual
    assert clipped[0].tolist() == [*(bool(expected.is_clipped_U[u]) for u in (0, 0, 1)), False]


def test_unit_losses_per_token_without_any_token_are_a_connected_zero() -> None:
    logp = tokens(-1.0, math.nan).requires_grad_()
    units, none = torch.tensor([[0, 0]]), torch.zeros(1, 2, dtype=torch.bool)
    made = unit_ppo_loss(logp, logp.detach(), tokens(1.0, 1.0), units, none, kind="geo", clip=CLIP)
    assert made.loss.tolist() == [[0.0, 0.0]]
    assert torch.autograd.grad(made.loss.sum(), logp)[0].tolist() == [[0.0, 0.0]]


def test_cispo_has_a_floor_where_one_is_asked_for() -> None:
    logp = tokens(-LOG2 - 3).requires_grad_()
    _, coefficient = cispo_loss(logp, tokens(-3.0), tokens(1.0), everything(logp), clip=Clip(0.2, 4.0))
    assert coefficient.item() == pytest.approx(0.8)


def test_trls_epsilon_high_of_cispo_is_a_cap_and_ours_an_offset_from_1() -> None:
    # trl's grpo_trainer: coef = clamp(ratio, max=epsilon_high); epsilon_high=5 is Clip(1, 4) here.
    logp, old = tokens(0.0, LOG2 - 3, -3.0), tokens(-4.0, -3.0, -1.0)
    trl = (logp - old).exp().clamp(max=5.0)
    _, ours = cispo_loss(logp, old, tokens(1.0, 1.0, 1.0), everything(logp), clip=Clip(1.0, 4.0))
    _, read_as_theirs = cispo_loss(logp, old, tokens(1.0, 1.0, 1.0), everything(logp), clip=Clip(1.0, 5.0))
    torch.testing.assert_close(ours, trl)
    assert read_as_theirs[0, 0].item() == pytest.approx(6.0)
