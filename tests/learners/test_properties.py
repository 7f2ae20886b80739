"""Properties of the whole way from records to gradients, for every surrogate a learner can choose.

Three policies take part: one sampled the records, one is the start of the update, one is being trained. All of it in
float64, so that what must be equal is equal to many digits.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from turngate.learners.aggregation import token_weights
from turngate.learners.batch import TokenBatch, lay_out, microbatches
from turngate.learners.filters import M2PO, OPSM, GeometricFilter
from turngate.learners.losses import Clip, cispo_loss, ppo_loss, reinforce_loss, unit_ppo_loss, unit_ratio_loss
from turngate.learners.objective import Objective, UpdateData
from turngate.learners.off_policy_choice import OffPolicy
from turngate.learners.offpolicy import Correction, is_weights
from turngate.runtime.engine.model import PolicyModel, Scores
from turngate.runtime.errors import LearnerError
from turngate.runtime.types import Batch, Segment, Trajectory

CLIPS = {
    "clip": Clip(0.2, 0.28, dual=3.0),
    "cispo": Clip(1.0, 0.5),
    "turn_prod": Clip(0.2, 0.28),
    "turn_geo": Clip(0.05, 0.05),
    "sequence_geo": Clip(0.01, 0.01),
}
FILTERS = (GeometricFilter(0.9, 1.045), OPSM(0.03))
OBJECTIVES = {
    surrogate: Objective(surrogate=surrogate, clip=clip, off_policy="decoupled") for surrogate, clip in CLIPS.items()
} | {
    "bypass": Objective(off_policy="bypass"),
    "filtered": Objective(off_policy=OffPolicy.bypass(filters=FILTERS)),
    "filtered-units": Objective(
        surrogate="sequence_geo", clip=CLIPS["sequence_geo"], off_policy=OffPolicy.decoupled(filters=FILTERS)
    ),
    "m2po": Objective(off_policy=OffPolicy.decoupled(Correction(normalise=True), filters=(M2PO(0.01),))),
    "interpolated": Objective(off_policy=OffPolicy.decoupled(proximal="interpolated")),
    "interpolated-units": Objective(
        surrogate="sequence_geo", clip=CLIPS["sequence_geo"], off_policy=OffPolicy.decoupled(proximal="interpolated")
    ),
    "reinforce": Objective(off_policy="reinforce"),
    "reinforce-units": Objective(off_policy=OffPolicy.reinforce(Correction("unit_prod"))),
    "none": Objective(off_policy="none"),
    "kl": Objective(off_policy="decoupled", kl_coef=0.1, kl_in="loss_ratio_k3", entropy_coef=0.01),
    "kl-units": Objective(surrogate="turn_geo", clip=CLIPS["turn_geo"], kl_coef=0.1, kl_in="loss_k2"),
}
every_objective = pytest.mark.parametrize("name", OBJECTIVES)
FIELDS = {"token_ids": "i4", "policy_mask": "u1", "logprobs": "f4", "versions": "i4", "turn_ids": "i4"}
few = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
REWARDS = [[1.0, 0.0, 0.5], [0.25, 1.0]]


@dataclass(frozen=True)
class World:
    """Records of a sampler, and three policies near it."""

    batch: Batch
    rewritten: Batch
    """The same with contexts that are rewritten at each turn: several rows per trajectory."""
    proximal: PolicyModel
    current: PolicyModel
    reference: PolicyModel


@cache
def world_of(make_model: Any, sample_batch: Any) -> World:
    sampler = make_model(0)
    proximal, current, reference = (make_model(0) for _ in range(3))
    generator = torch.Generator().manual_seed(7)
    for model, size in ((proximal, 0.02), (current, 0.04), (reference, 0.02)):
        model.double()
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(size * noise)
    batches = [sample_batch(sampler, REWARDS, policy_version=3, version=1, drop_early_turns=drop) for drop in (0, 1)]
    return World(batches[0], batches[1], proximal, current, reference)


@pytest.fixture
def world(lab: Any) -> World:
    return world_of(lab.make_model, lab.sample_batch)


def token_batch(batch: Batch) -> TokenBatch:
    return lay_out(batch, [[True] * len(group.trajectories) for group in batch.groups], vocabulary_size=24)


@torch.no_grad()
def scored(model: PolicyModel, tokens: TokenBatch) -> Tensor:
    """Return log-probs (N,) row by row, without any padding."""
    logprobs_N = torch.zeros(len(tokens.mask_N), dtype=torch.float64)
    for row in range(len(tokens.row_lengths)):
        for micro in microbatches(tokens, [row], 1):
            logprobs_N[micro.positions_P] = model.score(micro.packed).logprobs_M
    return logprobs_N


def update_data(world: World, batch: Batch, objective: Objective) -> UpdateData:
    """Return one update whose advantages differ per trajectory and, where units allow it, per turn."""
    tokens = token_batch(batch)
    by_name = {f"t{i}": 0.7 * math.cos(2.5 * i) for i in range(len(tokens.trajectory_names))}
    per_trajectory_I = torch.tensor([by_name[name] for name in tokens.trajectory_names], dtype=torch.float64)
    advantages_N = per_trajectory_I[tokens.trajectory_ids_N]
    if objective.surrogate != "sequence_geo" and not objective.choice.filters:
        advantages_N = advantages_N + 0.3 * tokens.turn_ids_N
    return UpdateData(
        tokens,
        advantages_N=advantages_N * tokens.mask_N,
        proximal_N=scored(world.proximal, tokens),
        reference_N=scored(world.reference, tokens),
        is_silent_N=torch.zeros_like(tokens.mask_N),
        mode="turn_mean" if objective.surrogate.startswith("turn") else "traj_mean",
        policy_version=batch.policy_version,
    )


def weights_of(data: UpdateData) -> Tensor:
    tokens = data.tokens
    return token_weights(
        tokens.mask_N,
        data.mode,
        row_ids=tokens.row_ids_N,
        turn_ids=tokens.turn_ids_N,
        trajectory_ids=tokens.trajectory_ids_N,
        group_ids=tokens.group_ids_N,
    )


def step(model: PolicyModel, objective: Objective, data: UpdateData, max_tokens: int) -> tuple[float, Tensor]:
    """Return loss and gradient of one optimizer step, cut into forward passes as a learner does."""
    tokens = data.tokens
    weights_N, importance_N = weights_of(data), objective.importance(data, tokens.mask_N)
    active = tokens.row_ids_N[objective.active_mask(data, tokens.mask_N)].unique().tolist()
    model.zero_grad()
    total = 0.0
    for micro in microbatches(tokens, active, max_tokens, whole_trajectories=objective.needs_whole_trajectories):
        at_P = micro.positions_P
        scores = model.score(micro.packed, with_entropy=objective.entropy_coef != 0)
        loss, _ = objective.loss(scores, data, at_P, weights_N[at_P], importance_N[at_P])
        torch.autograd.backward(loss)
        total += loss.item()
    return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def same(one: tuple[float, Tensor], other: tuple[float, Tensor]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-9, abs=1e-12)
    assert one[1].abs().max() > 1e-6
    torch.testing.assert_close(one[1], other[1], rtol=1e-7, atol=1e-12)


@every_objective
@few
@given(data=st.data())
def test_p1_order_padding_packing_and_micro_batches_change_no_gradient(world: World, name: str, data: Any) -> None:
    objective, batch = OBJECTIVES[name], data.draw(st.sampled_from([world.batch, world.rewritten]))
    whole = step(world.current, objective, update_data(world, batch, objective), 10_000)
    groups = [
        msgspec.structs.replace(group, trajectories=tuple(data.draw(st.permutations(group.trajectories))))
        for group in data.draw(st.permutations(batch.groups))
    ]
    moved = msgspec.structs.replace(batch, groups=tuple(groups))
    cap = data.draw(st.integers(1, 80))
    same(whole, step(world.current, objective, update_data(world, moved, objective), cap))


def split(trajectory: Trajectory, cut: int) -> Trajectory:
    """Return an append-only trajectory in two segments: turns before `cut`, and the rest behind them as context."""
    (segment,) = trajectory.segments
    columns = [np.frombuffer(getattr(segment, name), dtype).tolist() for name, dtype in FIELDS.items()]
    end = trajectory.turns[cut].start
    first = Segment.of(*(column[:end] for column in columns))
    for column, blank in zip(columns[1:], (0, 0.0, -1, -1), strict=True):
        column[:end] = [blank] * end
    turns = [msgspec.structs.replace(turn, segment=int(turn.index >= cut)) for turn in trajectory.turns]
    return msgspec.structs.replace(trajectory, turns=tuple(turns), segments=(first, Segment.of(*columns)))


@every_objective
@few
@given(cut=st.integers(1, 3), cap=st.integers(1, 80))
def test_p3_splitting_a_trajectory_into_segments_changes_no_gradient(
    world: World, name: str, cut: int, cap: int
) -> None:
    objective = OBJECTIVES[name]
    groups = [
        msgspec.structs.replace(g, trajectories=tuple(split(t, min(cut, len(t.turns) - 1)) for t in g.trajectories))
        for g in world.batch.groups
    ]
    in_parts = msgspec.structs.replace(world.batch, groups=tuple(groups))
    one, other = (update_data(world, batch, objective) for batch in (world.batch, in_parts))
    assert len(other.tokens.row_lengths) == 2 * len(one.tokens.row_lengths)
    same(step(world.current, objective, one, 10_000), step(world.current, objective, other, cap))


# --- the same with given log-probs instead of a model


def pass_of(objective: Objective, data: UpdateData, logprobs_P: Tensor) -> tuple[Tensor, Tensor]:
    """Return loss and gradient with respect to the log-probs of the trained tokens."""
    at_P = data.tokens.mask_N.nonzero().squeeze(-1)
    leaf_P = logprobs_P.detach().clone().requires_grad_()
    scores = Scores(leaf_P, torch.zeros_like(leaf_P) if objective.entropy_coef else None, None)
    weights_N, importance_N = weights_of(data), objective.importance(data, data.tokens.mask_N)
    loss, _ = objective.loss(scores, data, at_P, weights_N[at_P], importance_N[at_P])
    return loss.detach(), torch.autograd.grad(loss, leaf_P)[0]


def current_logprobs(world: World, data: UpdateData) -> Tensor:
    return scored(world.current, data.tokens)[data.tokens.mask_N]


@every_objective
@few
@given(junk=st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -7.0]))
def test_p2_values_on_context_change_nothing(world: World, name: str, junk: float) -> None:
    objective = OBJECTIVES[name]
    data = update_data(world, world.batch, objective)
    context_N = ~data.tokens.mask_N
    tokens = replace(
        data.tokens,
        behaviour_logprobs_N=data.tokens.behaviour_logprobs_N.masked_fill(context_N, junk),
        versions_N=data.tokens.versions_N.masked_fill(context_N, 99),
        turn_ids_N=data.tokens.turn_ids_N.masked_fill(context_N, 2),
    )
    arrays = {n: getattr(data, n).masked_fill(context_N, junk) for n in ("advantages_N", "proximal_N", "reference_N")}
    logprobs_P = current_logprobs(world, data)
    one, other = (
        pass_of(objective, data, logprobs_P),
        pass_of(objective, replace(data, tokens=tokens, **arrays), logprobs_P),
    )
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if "filter" not in n and "kl" not in n])
def test_p4_where_all_policies_are_one_the_gradient_is_that_of_reinforce(world: World, name: str) -> None:
    objective = OBJECTIVES[name]
    data = update_data(world, world.batch, objective)
    mask_N = data.tokens.mask_N
    same_N = scored(world.proximal, data.tokens)
    data = replace(data, tokens=replace(data.tokens, behaviour_logprobs_N=same_N), proximal_N=same_N)
    _, grad_P = pass_of(objective, data, same_N[mask_N])
    weights_N = weights_of(data)
    if objective.surrogate == "turn_prod":
        # The log-prob of an action is the sum over its tokens: all of them share the weight of the turn.
        keys = torch.stack([data.tokens.trajectory_ids_N, data.tokens.turn_ids_N], -1)
        weights_N = torch.stack([weights_N[(keys == key).all(-1) & mask_N].sum() for key in keys])
    torch.testing.assert_close(grad_P, -(weights_N * data.advantages_N)[mask_N])


def bounded(low: float, high: float, size: int) -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(low, high, width=32), min_size=size, max_size=size)


@given(now=bounded(-3, 3, 5), sampled=bounded(-3, 3, 5), reference=bounded(-3, 3, 5))
@pytest.mark.parametrize("place", ["loss_k2", "loss_ratio_k3"])
@pytest.mark.parametrize("choice", ["decoupled", "bypass", "reinforce"])
def test_p13_the_kl_term_has_the_gradient_of_the_divergence_on_stale_samples_too(
    choice: Any, place: Any, now: list[float], sampled: list[float], reference: list[float]
) -> None:
    """By enumeration: every token of a small vocabulary is a sample, weighted by how likely the sampler draws it."""
    logits = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    logp, mu, ref = (
        torch.log_softmax(torch.as_tensor(x, dtype=torch.float64), -1) for x in (logits, sampled, reference)
    )
    (expected,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)
    uncapped = None if choice == "bypass" else Correction(upper=None)
    off_policy = OffPolicy(kind=choice, correction=uncapped)
    objective = Objective(off_policy=off_policy, kl_coef=1.0, kl_in=place)
    tokens = enumeration(mu)
    zero, nothing = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.bool)
    proximal = torch.log_softmax(0.5 * (logp + mu), -1).detach()
    data = UpdateData(tokens, zero, proximal, ref, nothing, "token_mean")
    importance = objective.importance(data, tokens.mask_N)
    loss, _ = objective.loss(Scores(logp, None, None), data, torch.arange(5), mu.exp(), importance)
    (grad,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(grad, expected, rtol=1e-7, atol=1e-10)


def enumeration(behaviour: Tensor) -> TokenBatch:
    """Return one trained token per entry, each its own row and trajectory."""
    size = len(behaviour)
    numbers, ones = torch.arange(size), torch.ones(size, dtype=torch.bool)
    return TokenBatch(
        token_ids_N=numbers,
        mask_N=ones,
        generated_N=ones,
        behaviour_logprobs_N=behaviour,
        versions_N=numbers * 0,
        turn_ids_N=numbers * 0,
        row_ids_N=numbers,
        trajectory_ids_N=numbers,
        group_ids_N=numbers * 0,
        row_lengths=(1,) * size,
        row_trajectories=tuple(range(size)),
        trajectory_names=tuple(f"t{i}" for i in range(size)),
    )


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if "filter" not in n and n != "m2po"])
@few
@given(data=st.data())
def test_p16_float32_agrees_with_float64(world: World, name: str, data: Any) -> None:
    # Filters are left out: a token at the very threshold may fall on either side of it.
    objective = OBJECTIVES[name]
    exact = update_data(world, world.batch, objective)
    noise = data.draw(bounded(-1.5, 0.0, exact.tokens.policy_tokens))
    logprobs_P = current_logprobs(world, exact) + torch.tensor(noise, dtype=torch.float64)
    arrays = {n: getattr(exact, n).float() for n in ("advantages_N", "proximal_N", "reference_N")}
    single = replace(exact, **arrays)
    one, other = pass_of(objective, exact, logprobs_P)[0], pass_of(objective, single, logprobs_P.float())[0]
    assert other.dtype == torch.float32
    torch.testing.assert_close(other.double(), one, rtol=2e-5, atol=2e-6)


UNIT_IDS = torch.tensor([[0, 0, 1, 1]])
BAD = st.sampled_from([math.nan, math.inf, -math.inf])
LOSSES: dict[str, Callable[[list[Tensor], Tensor], Tensor]] = {
    "ppo": lambda a, mask: ppo_loss(a[0], a[1], a[2], mask, clip=CLIPS["clip"]).loss,
    "cispo": lambda a, mask: cispo_loss(a[0], a[1], a[2], mask, clip=CLIPS["cispo"])[0],
    "reinforce": lambda a, mask: reinforce_loss(a[0], a[1], a[2], mask),
    "unit": lambda a, mask: unit_ratio_loss(a[0], a[1], a[2], UNIT_IDS, mask, kind="geo", clip=CLIPS["clip"]).loss,
    "unit_token": lambda a, mask: unit_ppo_loss(a[0], a[1], a[2], UNIT_IDS, mask, kind="prod", clip=CLIPS["clip"]).loss,
    "weights": lambda a, mask: is_weights(a[0], a[1], mask, Correction("unit_geo")).weights + a[2].nan_to_num() * 0,
}


@pytest.mark.parametrize("loss", LOSSES)
@given(which=st.integers(0, 2), where=st.integers(0, 3), bad=BAD)
def test_p17_what_is_not_finite_raises_inside_and_is_ignored_outside(
    loss: str, which: int, where: int, bad: float
) -> None:
    arrays = [torch.tensor([[x, x, 2 * x, 2 * x]], dtype=torch.float64) for x in (-1.0, -1.2, 0.5)]
    arrays[which][0, where] = bad
    mask = torch.ones(1, 4, dtype=torch.bool)
    if not (loss == "weights" and which == 2):  # which takes two arrays only
        with pytest.raises(
            LearnerError, match=rf"must be finite where the mask is True: got .* \(index \(0, {where}\)\)"
        ):
            LOSSES[loss](arrays, mask)
    mask[0, where] = False
    assert torch.isfinite(LOSSES[loss](arrays, mask)).all()


def places(objective: Objective) -> Iterator[str]:
    yield from ("advantages_N", "proximal_N", "behaviour")
    if objective.has_kl_loss:
        yield "reference_N"


@every_objective
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_p17_a_step_on_values_that_are_not_finite_never_starts(world: World, name: str, bad: float) -> None:
    objective = OBJECTIVES[name]
    for place in places(objective):
        data = update_data(world, world.batch, objective)
        at = int(data.tokens.mask_N.nonzero()[3])
        values_N = data.tokens.behaviour_logprobs_N if place == "behaviour" else getattr(data, place)
        values_N[at] = bad
        with pytest.raises(LearnerError, match=rf"must be finite .*index \({at},\)"):
            objective.importance(data, data.tokens.mask_N)
