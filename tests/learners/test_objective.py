"""The loss a learner chose: what is clipped, over which unit, with which correction, and what is refused."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from turngate.learners.aggregation import token_weights
from turngate.learners.batch import TokenBatch
from turngate.learners.filters import M2PO, OPSM, GeometricFilter
from turngate.learners.losses import Clip
from turngate.learners.objective import Objective, UpdateData
from turngate.learners.off_policy_choice import OffPolicy
from turngate.learners.offpolicy import Correction
from turngate.runtime.engine.model import Scores
from turngate.runtime.errors import ConfigError, LearnerError

LOG2 = math.log(2.0)
WIDE = Clip(1.0, 1e6)
UNITS = ("turn_prod", "turn_geo", "sequence_geo")


def values(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def token_batch(
    turns: Sequence[Sequence[int]],
    trajectories: Sequence[int],
    behaviour: Tensor,
    versions: Sequence[int] | None = None,
) -> TokenBatch:
    """Return rows of trained tokens, each behind one token of context; `behaviour` covers the trained ones."""
    turn_ids, rows, owners, mask = [], [], [], []
    for row, (ids, owner) in enumerate(zip(turns, trajectories, strict=True)):
        turn_ids += [-1, *ids]
        mask += [False] + [True] * len(ids)
        rows += [row] * (len(ids) + 1)
        owners += [owner] * (len(ids) + 1)
    mask_N = torch.tensor(mask)
    logprobs_N = torch.zeros(len(mask), dtype=torch.float64)
    logprobs_N[mask_N] = behaviour
    versions_N = torch.full((len(mask),), -1)
    versions_N[mask_N] = torch.tensor(versions) if versions is not None else 0
    return TokenBatch(
        token_ids_N=torch.zeros(len(mask), dtype=torch.int64),
        mask_N=mask_N,
        generated_N=mask_N,
        behaviour_logprobs_N=logprobs_N,
        versions_N=versions_N,
        turn_ids_N=torch.tensor(turn_ids),
        row_ids_N=torch.tensor(rows),
        trajectory_ids_N=torch.tensor(owners),
        group_ids_N=torch.zeros(len(mask), dtype=torch.int64),
        row_lengths=tuple(len(ids) + 1 for ids in turns),
        row_trajectories=tuple(trajectories),
        trajectory_names=tuple(f"t{i}" for i in range(max(trajectories) + 1)),
    )


# Two turns of two tokens and one of one, in two trajectories of one row each.
TURNS, OWNERS = [[0, 0, 1], [0, 0]], [0, 1]


def update_data(
    proximal: Tensor, advantages: Tensor, *, tokens: TokenBatch | None = None, mode: Any = "token_mean", **more: Any
) -> UpdateData:
    """Return an update on five trained tokens, sampled at -2 each unless `tokens` says otherwise."""
    tokens = token_batch(TURNS, OWNERS, torch.full((5,), -2.0, dtype=torch.float64)) if tokens is None else tokens
    full = {"proximal_N": proximal, "advantages_N": advantages}
    for name, part in full.items():
        full[name] = torch.zeros(len(tokens.mask_N), dtype=torch.float64).masked_scatter(tokens.mask_N, part)
    silent = torch.zeros_like(tokens.mask_N)
    return UpdateData(tokens, **full, **({"reference_N": None, "is_silent_N": silent, "mode": mode} | more))


def loss_and_grad(objective: Objective, data: UpdateData, logprobs: Tensor) -> tuple[float, list[float]]:
    """Return loss and gradient of one step in one forward pass."""
    tokens, leaf = data.tokens, logprobs.clone().requires_grad_()
    ids = {"row_ids": tokens.row_ids_N, "turn_ids": tokens.turn_ids_N, "trajectory_ids": tokens.trajectory_ids_N}
    weights_N = token_weights(tokens.mask_N, data.mode, group_ids=tokens.group_ids_N, **ids)
    importance_N = objective.importance(data, tokens.mask_N)
    at_P = tokens.mask_N.nonzero().squeeze(-1)
    loss, _ = objective.loss(Scores(leaf, None, None), data, at_P, weights_N[at_P], importance_N[at_P])
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.item(), grad.tolist()


NOW = values(-1.5, -2.0, -1.0, -2.5, -2.0)
PROXIMAL = values(-1.75, -2.0, -1.5, -2.0, -2.25)
GOOD = values(1.0, 1.0, 1.0, -1.0, -1.0)


def test_decoupled_weighs_the_start_of_the_update_over_the_sampler_once() -> None:
    _, grad = loss_and_grad(Objective(clip=WIDE, off_policy="decoupled"), update_data(PROXIMAL, GOOD), NOW)
    signs, caps = GOOD.tolist(), [math.exp(0.25), 1.0, math.exp(0.5), 1.0, math.exp(-0.25)]
    ratios = (NOW - PROXIMAL).exp().tolist()
    assert grad == [pytest.approx(-s * r * w / 5) for s, r, w in zip(signs, ratios, caps, strict=True)]


def test_without_a_choice_it_clips_around_the_sampler() -> None:
    data = update_data(PROXIMAL, GOOD)
    assert Objective().choice.kind == "bypass"
    assert loss_and_grad(Objective(), data, NOW) == loss_and_grad(Objective(off_policy="bypass"), data, NOW)


def test_names_are_shorthands_for_values() -> None:
    for name in ("decoupled", "bypass", "reinforce", "none"):
        assert Objective(off_policy=name).choice == getattr(OffPolicy, name)()
    correction = Correction(upper=5.0)
    assert Objective(off_policy=OffPolicy.decoupled(correction)).choice.correction == correction


def test_a_turn_of_product_ratio_has_one_clip_and_weighs_like_any_other_turn() -> None:
    # The first turn's ratio is exp(0.5) = 1.65: outside, although its second token did not move. The others are inside.
    data = update_data(values(-2, -2, -2, -2, -2), GOOD, mode="turn_mean")
    now = values(-1.5, -2.0, -1.9, -2.1, -2.0)
    loss, grad = loss_and_grad(Objective(surrogate="turn_prod", clip=Clip(0.2, 0.28)), data, now)
    inside, lone = math.exp(0.1), math.exp(-0.1)
    assert loss == pytest.approx((-1.28 - inside + lone) / 3)
    assert grad == [0.0, 0.0, pytest.approx(-inside / 3), pytest.approx(lone / 3), pytest.approx(lone / 3)]


def test_geometric_ratios_of_sequences_divide_the_gradient_by_their_length() -> None:
    data = update_data(values(-2, -2, -2, -2, -2), GOOD, mode="traj_mean")
    loss, grad = loss_and_grad(Objective(surrogate="sequence_geo", clip=WIDE), data, NOW)
    first, second = math.exp(1.5 / 3), math.exp(-0.5 / 2)
    assert loss == pytest.approx((-first + second) / 2)
    assert grad == [pytest.approx(-first / 3 / 2)] * 3 + [pytest.approx(second / 2 / 2)] * 2


def test_a_sequence_runs_over_all_segments_of_its_trajectory() -> None:
    tokens = token_batch(TURNS, [0, 0], torch.full((5,), -2.0, dtype=torch.float64))
    data = update_data(values(-2, -2, -2, -2, -2), values(1, 1, 1, 1, 1), tokens=tokens, mode="traj_mean")
    loss, grad = loss_and_grad(Objective(surrogate="sequence_geo", clip=WIDE), data, NOW)
    assert loss == pytest.approx(-math.exp(1.0 / 5))
    assert grad == [pytest.approx(-math.exp(1.0 / 5) / 5)] * 5


def test_part_of_a_sequence_in_a_forward_pass_is_refused() -> None:
    data = update_data(PROXIMAL, GOOD, mode="traj_mean")
    objective, at_P = Objective(surrogate="sequence_geo", clip=WIDE), torch.tensor([1, 2])
    assert objective.needs_whole_trajectories
    with pytest.raises(LearnerError, match="whole in one forward pass"):
        objective.loss(Scores(NOW[:2], None, None), data, at_P, torch.ones(2), torch.ones(2))


@pytest.mark.parametrize("surrogate", UNITS)
def test_a_token_mean_lets_units_weigh_by_length(surrogate: Any) -> None:
    data = update_data(values(-2, -2, -2, -2, -2), GOOD)
    by_length, _ = loss_and_grad(Objective(surrogate=surrogate, clip=WIDE), data, values(-2, -2, -2, -2, -2))
    assert by_length == pytest.approx((-3 + 2) / 5)


@pytest.mark.parametrize("surrogate", UNITS)
def test_a_unit_has_one_advantage(surrogate: Any) -> None:
    data = update_data(PROXIMAL, values(1.0, 2.0, 1.0, 1.0, 1.0))
    with pytest.raises(ConfigError, match="constant inside a unit"):
        Objective(surrogate=surrogate, clip=WIDE).importance(data, data.tokens.mask_N)


def test_default_aggregations_fit_the_unit() -> None:
    one_row = update_data(PROXIMAL, GOOD).tokens
    two_rows = token_batch(TURNS, [0, 0], NOW)
    assert [Objective().default_mode(t) for t in (one_row, two_rows)] == ["token_mean", "traj_mean"]
    modes = [Objective(surrogate=s, clip=WIDE).default_mode(one_row) for s in UNITS]
    assert modes == ["turn_mean", "turn_mean", "traj_mean"]


def test_stale_units_are_weighed_as_units() -> None:
    # Proximal over sampler: exp(1.5) for the first sequence, cut at 2; exp(-0.5) for the second.
    data = update_data(NOW, GOOD, mode="turn_mean")
    product = Objective(surrogate="turn_prod", clip=WIDE, off_policy="decoupled").importance(data, data.tokens.mask_N)
    turns = [math.exp(0.5)] * 2 + [2.0] + [math.exp(-0.5)] * 2
    assert product[data.tokens.mask_N].tolist() == [pytest.approx(w) for w in turns]
    mean = Objective(surrogate="sequence_geo", clip=WIDE, off_policy="decoupled").importance(data, data.tokens.mask_N)
    assert (
        mean[data.tokens.mask_N].tolist() == [pytest.approx(math.exp(0.5))] * 3 + [pytest.approx(math.exp(-0.25))] * 2
    )


def test_cispo_keeps_the_gradient_of_every_token() -> None:
    data = update_data(values(-2, -2, -2, -2, -2), GOOD)
    objective = Objective(surrogate="cispo", clip=Clip(1.0, 0.28), off_policy="decoupled")
    _, grad = loss_and_grad(objective, data, NOW)
    coefficients = [1.28, 1.0, 1.28, math.exp(-0.5), 1.0]
    assert grad == [pytest.approx(-a * c / 5) for a, c in zip(GOOD.tolist(), coefficients, strict=True)]


def test_interpolated_proximal_splits_the_way_by_lag_and_covers_it_once() -> None:
    # Lag 2: half of the way from sampler to current is weight, half ratio. Lag 0 and 1: all of it is ratio.
    tokens = token_batch(TURNS, OWNERS, torch.full((5,), -2.0, dtype=torch.float64), versions=[8, 8, 10, 9, 10])
    data = update_data(PROXIMAL, GOOD, tokens=tokens, policy_version=10)
    objective = Objective(clip=WIDE, off_policy=OffPolicy.decoupled(Correction(upper=None), proximal="interpolated"))
    _, grad = loss_and_grad(objective, data, NOW)
    whole_way = (NOW + 2).exp().tolist()
    assert grad == [pytest.approx(-a * r / 5) for a, r in zip(GOOD.tolist(), whole_way, strict=True)]
    narrow = Objective(clip=Clip(0.2, 0.3), off_policy=objective.off_policy)
    clipped = [g == 0.0 for g in loss_and_grad(narrow, data, NOW)[1]]
    assert clipped == [False, False, True, True, False]  # exp(0.25) of lag 2 is inside, exp(1) of lag 0 is not


def test_interpolation_needs_the_version_lag_is_counted_from() -> None:
    objective = Objective(off_policy=OffPolicy.decoupled(proximal="interpolated"))
    with pytest.raises(LearnerError, match="policy_version"):
        loss_and_grad(objective, update_data(PROXIMAL, GOOD), NOW)


@pytest.mark.parametrize(
    ("chosen", "kept"),
    [
        (GeometricFilter(0.5, 1.2), [0, 0, 0, 1, 1]),  # geometric means exp(0.5) and exp(-0.25)
        (OPSM(0.2), [1, 1, 1, 0, 0]),  # the bad trajectory lies 0.25 behind the sampler
        (OPSM(0.3), [1, 1, 1, 1, 1]),
        (M2PO(0.13), [1, 1, 0, 1, 1]),  # squares 1/4, 0, 1, 1/4, 0: without the 1 their mean is 1/8
    ],
)
@pytest.mark.parametrize("name", ["decoupled", "bypass", "reinforce"])
def test_filters_take_tokens_out_of_the_numerator_only(chosen: Any, kept: list[int], name: Any) -> None:
    data = update_data(NOW, GOOD)
    plain, filtered = OffPolicy(kind=name), OffPolicy(kind=name, filters=(chosen,))
    _, before = loss_and_grad(Objective(clip=WIDE, off_policy=plain), data, NOW)
    _, after = loss_and_grad(Objective(clip=WIDE, off_policy=filtered), data, NOW)
    assert after == [pytest.approx(g * k) for g, k in zip(before, kept, strict=True)]


def test_b2_11_filters_are_judged_once_over_the_step_and_not_per_forward_pass() -> None:
    data = update_data(NOW, GOOD)
    objective = Objective(clip=WIDE, off_policy=OffPolicy.bypass(filters=(M2PO(0.31),)))
    whole = objective.importance(data, data.tokens.mask_N)
    rows = [objective.importance(data, data.tokens.rows_mask([r])) for r in (0, 1)]
    assert whole.sum() == 5  # squares 1/4, 0, 1 and 1/4, 0: the mean over both rows is 0.3
    assert (rows[0] + rows[1]).sum() == 4  # that of the first row alone 0.42


def test_b2_12_a_step_that_rejects_everything_has_a_connected_zero() -> None:
    data = update_data(NOW, GOOD)
    objective = Objective(off_policy=OffPolicy.decoupled(filters=(GeometricFilter(1.0, 1.0), OPSM(0.0))))
    assert loss_and_grad(objective, data, NOW) == (0.0, [0.0] * 5)


def test_b2_13_stale_samples_weigh_in_the_kl_term_as_in_the_surrogate() -> None:
    # Ratio 2 of current over sampler on every token: the unbiased gradient is ratio * k1, k2's is ratio * k1 as well.
    tokens = token_batch(TURNS, OWNERS, values(-2, -2, -2, -2, -2) - LOG2)
    reference = torch.full((len(tokens.mask_N),), -3.0, dtype=torch.float64)
    data = update_data(values(-2, -2, -2, -2, -2), GOOD * 0, tokens=tokens, reference_N=reference)
    now = values(-2, -2, -2, -2, -2)
    for place in ("loss_k2", "loss_ratio_k3"):
        for name in ("decoupled", "bypass", "reinforce"):
            objective = Objective(clip=WIDE, off_policy=name, kl_coef=1.0, kl_in=place)
            assert loss_and_grad(objective, data, now)[1] == [pytest.approx(2 * 1.0 / 5)] * 5


def test_b2_13_k1_in_the_loss_is_refused() -> None:
    # Its expected gradient is 0 on-policy: a penalty that penalises nothing (huggingface/trl#4967, OpenRLHF#1309).
    with pytest.raises(ConfigError, match="kl_in must be reward, loss_k2 or loss_ratio_k3: got 'loss_k1'"):
        Objective(kl_coef=0.1, kl_in="loss_k1")


def test_whole_trajectories_are_active_where_units_span_rows() -> None:
    tokens = token_batch(TURNS, [0, 0], NOW)
    data = update_data(PROXIMAL, values(1, 1, 1, 0, 0), tokens=tokens)
    per_token, unit = OffPolicy.reinforce(), OffPolicy.reinforce(Correction("unit_geo"))
    assert Objective(off_policy=per_token).active_mask(data, tokens.mask_N).sum() == 3
    assert Objective(off_policy=unit).active_mask(data, tokens.mask_N).sum() == 5


@pytest.mark.parametrize("where", ["advantages_N", "proximal_N"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_p17_what_is_not_finite_is_named_before_the_first_pass(where: str, bad: float) -> None:
    data = update_data(PROXIMAL.clone(), GOOD.clone())
    getattr(data, where)[2] = bad
    with pytest.raises(LearnerError, match=r"must be finite where the mask is True: got .* \(index \(2,\)\)"):
        Objective().importance(data, data.tokens.mask_N)
    getattr(data, where)[2] = 0.0
    getattr(data, where)[0] = bad  # context
    assert torch.isfinite(Objective(off_policy="decoupled").importance(data, data.tokens.mask_N)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"surrogate": "gspo"}, "surrogate must be one of clip, cispo"),
        ({"surrogate": "cispo"}, "no range fits every granularity; Clip"),
        ({"surrogate": "turn_geo"}, "no range fits"),
        ({"surrogate": "sequence_geo"}, "GSPO uses"),
        ({"surrogate": "cispo", "clip": Clip(1.0, 4.0, dual=3.0)}, "dual clip must be None"),
        ({"surrogate": "cispo", "clip": WIDE, "off_policy": "reinforce"}, "no ratio to clip"),
        ({"surrogate": "turn_prod", "clip": WIDE, "off_policy": "none"}, "no ratio to clip"),
        (
            {"surrogate": "turn_geo", "clip": WIDE, "off_policy": OffPolicy.decoupled(Correction())},
            "one weight per turn",
        ),
        (
            {
                "surrogate": "sequence_geo",
                "clip": WIDE,
                "off_policy": OffPolicy.decoupled(Correction("unit_geo", unit="turn")),
            },
            "one weight per trajectory",
        ),
        ({"surrogate": "turn_geo", "clip": WIDE, "off_policy": OffPolicy.bypass(filters=(M2PO(),))}, "which drops"),
        ({"off_policy": "sometimes"}, "off_policy must be"),
    ],
)
def test_objectives_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Objective(**options)
