"""Fit a critic to recorded episodes, offline: what guides a frozen policy, or scores its actions.

Monte Carlo targets: at every token the policy sampled, and once more behind each action, the value is trained towards
what the episode was paid from then on. Behind an action it is Q(h, a), in between the value of the prefix, so that one
critic serves guidance of whole actions and of single tokens. Where turns were branched from, the means over their
continuations take the place of the one return that was seen.
"""

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from turngate.learners.batch import length_sorted
from turngate.learners.critic import ValueKind
from turngate.learners.optimizers import MuonAdamW, Schedule
from turngate.learners.policy_model import ModelChoice, TrainableModel, model_source
from turngate.learners.turns import RewardsOf, action_turns, recorded_rewards
from turngate.learners.value_metrics import brier_score, explained_variance, success_auc
from turngate.runtime.branching import Branches, TurnBranches
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.engine.packing import pack
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.seeds import derive_seed
from turngate.runtime.types import Segment, Trajectory

__all__ = ["ValueFitConfig", "ValueFitReport", "fit_critic"]

_log = logging.getLogger("turngate.value_fit")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueFitConfig:
    """How a critic is fitted."""

    kind: ValueKind = "success"
    """`success`: returns lie in [0, 1] and the head's logit is trained by cross-entropy; `scalar`: by squares."""
    extra_layers: int = 1
    """Layers of the critic on top of the embedded model's own. What a policy finds out where it decides, in its last
    layer, cannot be looked up from the tokens behind: a layer more can. They start as the identity. Models of
    transformers take none."""
    action_weight: float = 1.0
    """Weight of the places behind actions beside those at tokens, of which there are several times as many. Above 1 the
    critic is better at whole actions, at the expense of prefixes."""
    epochs: int = 4
    batch_trajectories: int = 32
    """Episodes per optimizer step."""
    muon_lr: float | None = 5e-3
    adamw_lr: float = 2e-3
    schedule: Schedule = field(default=Schedule(warmup_updates=20, decay_start=0.0, decay_to=0.1))
    """Over optimizer steps; its length is the fit's."""
    held_out: float = 0.15
    """Share of tasks that are never trained on: they measure, and choose the epoch that is kept."""
    max_grad_norm: float = 1.0
    microbatch_tokens: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("success", "scalar"):
            raise ConfigError(f"kind must be success or scalar: got {self.kind!r} (ValueFitConfig)")
        for name in ("epochs", "batch_trajectories", "microbatch_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more: got {getattr(self, name)} (ValueFitConfig)")
        if self.extra_layers < 0:
            raise ConfigError(f"extra_layers must be 0 or more: got {self.extra_layers} (ValueFitConfig)")
        if not (self.action_weight > 0 and math.isfinite(self.action_weight)):
            raise ConfigError(f"action_weight must be positive: got {self.action_weight} (ValueFitConfig)")
        if not 0 < self.held_out < 1:
            raise ConfigError(f"held_out must be above 0 and below 1: got {self.held_out} (ValueFitConfig)")
        if not self.max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm must be positive: got {self.max_grad_norm} (ValueFitConfig)")


class ValueFitReport(msgspec.Struct, frozen=True, kw_only=True):
    """How good the critic is, on episodes of tasks it was not trained on. None where that is not defined."""

    episodes: int
    held_out: int
    excluded: int
    """Episodes that say nothing about returns: truncated, failed, or without token ids."""
    success: float
    """Share of training episodes with a return above 0."""
    epoch: int
    """The one that was kept, from 1."""
    losses: tuple[float, ...]
    """Held-out loss after each epoch."""
    branched: int = 0
    """Turns, of both sides, whose targets are means over continuations."""
    auc: float | None
    """Of Q behind actions, against whether the episode was paid anything from then on."""
    auc_by_turn: dict[int, float]
    brier: float | None
    explained_variance: float | None


@dataclass(frozen=True, slots=True)
class _Row:
    """One segment with a place to read a value at every sampled token and behind every action."""

    ids_T: NDArray[np.int64]
    mask_T: NDArray[np.bool_]
    targets_P: NDArray[np.float32]
    """What the values are trained towards: returns, or means over continuations."""
    returns_P: NDArray[np.float32]
    """What the episode was paid from there on; what the critic is judged by."""
    is_end_P: NDArray[np.bool_]
    """Behind an action."""
    turns_P: NDArray[np.int64]
    task: str
    branched: int


def fit_critic(
    model: ModelChoice,
    trajectories: Sequence[Trajectory],
    folder: Path,
    *,
    config: ValueFitConfig = ValueFitConfig(),
    rewards: RewardsOf = recorded_rewards,
    branches: Sequence[Branches] = (),
) -> ValueFitReport:
    """Train a copy of `model` with a value head on episodes and write it to `folder`; `Engine.start(critic=folder)`.

    Only episodes with a terminal end are used: what was cut short has no return yet. Continuations of branches are
    episodes like any others, of which only their own turns train: add them to `trajectories`, if they are to.
    Args: rewards: what returns are sums of. branches: of some of the trajectories, found by id; where Q or V of a turn
        was estimated, it is the target in place of the return.
    Raises: LearnerError: too few episodes, returns outside [0, 1] for kind `success`, or a loss that is not finite.
    ConfigError: branches, which are paid what the environment pays, together with other rewards.
    """
    if branches and rewards is not recorded_rewards:
        raise ConfigError("branches must go with the environment's own rewards: got rewards=...; leave one of them out")
    usable = [t for t in trajectories if t.end.is_terminal and t.trainable and t.policy_tokens]
    found = _by_trajectory(branches, usable)
    source = model_source(model)
    critic = _deepened(source.load(None, value_head=True), config.extra_layers, config.seed)
    context = critic.config.max_context
    rows = [[_row(s, t, rewards, found.get(t.id), config, context) for s in t.segments] for t in usable]
    train, held = _split([[row for row in own if row is not None] for own in rows], config)
    optimizer = MuonAdamW(critic, muon_lr=config.muon_lr, adamw_lr=config.adamw_lr)
    steps = config.epochs * math.ceil(len(train) / config.batch_trajectories)
    schedule = msgspec.structs.replace(config.schedule, total_updates=steps)
    generator = torch.Generator().manual_seed(config.seed)
    losses: list[float] = []
    best: dict[str, Tensor] = {}
    step = 0
    for epoch in range(config.epochs):
        order = torch.randperm(len(train), generator=generator).tolist()
        for start in range(0, len(order), config.batch_trajectories):
            picked = [row for i in order[start : start + config.batch_trajectories] for row in train[i]]
            _step(critic, picked, optimizer, config, schedule.factor(step))
            step += 1
        held_rows = [row for own in held for row in own]
        outputs, targets = _read(critic, held_rows, config), _targets(held_rows)
        weights = _weights(held_rows, config)
        losses.append(float((_loss(outputs, targets, config) * weights).sum() / weights.sum()))
        if not math.isfinite(losses[-1]):
            raise LearnerError(f"held-out loss must be finite: got {losses[-1]} in epoch {epoch + 1}; lower the rates")
        _log.info(f"epoch {epoch + 1}: held-out loss {losses[-1]:.4f}")
        if losses[-1] == min(losses):
            best = {name: tensor.detach().clone() for name, tensor in critic.state_dict().items()}
    critic.load_state_dict(best)
    critic.save(folder)
    source.copy_companions(folder)
    return _report(critic, train, held, losses, len(trajectories) - len(usable), config)


def _deepened(model: TrainableModel, extra: int, seed: int) -> TrainableModel:
    """Return the model with more layers on top, silent ones: it computes what it did."""
    if not extra or not isinstance(model, PolicyModel):
        return model
    config = msgspec.structs.replace(model.config, layers=model.config.layers + extra)
    deeper = PolicyModel(config, seed=derive_seed(seed, "extra layers") % 2**31)
    deeper.load_state_dict(model.state_dict(), strict=False)
    return deeper


def _by_trajectory(branches: Sequence[Branches], trajectories: Sequence[Trajectory]) -> dict[str, Branches]:
    """Return the branches by the id of their trajectory. Raises: LearnerError: two trajectories have that id."""
    found: dict[str, Branches] = {}
    for one in branches:
        name, other = one.trajectory.id, found.get(one.trajectory.id, one)
        found[name] = Branches(trajectory=one.trajectory, q=other.q | one.q, v=other.v | one.v)
    counts = Counter(t.id for t in trajectories)
    if shared := [name for name in found if counts[name] > 1]:
        raise LearnerError(
            f"trajectories must have ids of their own to be matched with branches: got {counts[shared[0]]} called "
            f"{shared[0]}; give rollouts a trajectory_id"
        )
    return found


def _row(
    segment: Segment,
    trajectory: Trajectory,
    rewards: RewardsOf,
    branches: Branches | None,
    config: ValueFitConfig,
    max_context: int,
) -> _Row | None:
    generated_T = np.frombuffer(segment.policy_mask, np.uint8) != 0
    if not generated_T.any():
        return None
    turns = action_turns(trajectory, rewards(trajectory))
    to_go_T = turns.rewards_T.flip(0).cumsum(0).flip(0).tolist()
    returns = dict(zip(turns.turns, to_go_T, strict=True))
    ids_T = np.append(np.frombuffer(segment.token_ids, np.int32).astype(np.int64), 0)
    turns_T = np.append(np.frombuffer(segment.turn_ids, np.int32).astype(np.int64), -1)
    sampled_T = np.append(generated_T, False)
    end_T = np.zeros_like(sampled_T)
    end_T[1:] = sampled_T[:-1] & ((~sampled_T[1:]) | (turns_T[1:] != turns_T[:-1]))
    mask_T = (sampled_T | end_T)[:max_context]
    at_P = np.flatnonzero(mask_T)
    # A place behind an action belongs to it; where the next action follows at once, to that one's first token.
    own_P = np.where(sampled_T[at_P], turns_T[at_P], turns_T[at_P - 1])
    if not len(at_P):
        return None  # the model's context ends before the first action
    returns_P = np.array([returns[int(turn)] for turn in own_P], np.float32)
    is_end_P = end_T[at_P] & ~sampled_T[at_P]
    targets_P, branched = _branched(returns_P, own_P, branches)
    for values_P in (returns_P, targets_P):
        if config.kind == "success" and not ((values_P >= 0) & (values_P <= 1)).all():
            raise LearnerError(
                f"returns must lie in [0, 1] for kind success: got {values_P.min()} to {values_P.max()} (trajectory "
                f"{trajectory.id}); use kind='scalar', or rewards=... that pay an outcome"
            )
    last = int(at_P[-1]) + 1
    return _Row(ids_T[:last], mask_T[:last], targets_P, returns_P, is_end_P, own_P, trajectory.task.id, branched)


def _branched(
    returns_P: NDArray[np.float32], turns_P: NDArray[np.int64], branches: Branches | None
) -> tuple[NDArray[np.float32], int]:
    """Return the targets, and how many turns have some from branches.

    V of a turn stands before its first token. Q stands behind the action, and is an unbiased target of every prefix
    of it as well: the rest of the action is one draw of what the policy says there.
    """
    if branches is None:
        return returns_P, 0
    targets_P, branched = returns_P.copy(), 0
    for turn in np.unique(turns_P):
        at = np.flatnonzero(turns_P == turn)
        q, v = (_mean(side.get(int(turn))) for side in (branches.q, branches.v))
        if q is not None:
            targets_P[at] = q
        if v is not None:
            targets_P[at[0]] = v
        branched += q is not None or v is not None
    return targets_P, branched


def _mean(found: TurnBranches | None) -> float | None:
    """Return the mean over continuations; None when none of them came to an end."""
    return None if found is None or not found.estimate.count else found.estimate.mean


def _split(rows: list[list[_Row]], config: ValueFitConfig) -> tuple[list[list[_Row]], list[list[_Row]]]:
    """Part the episodes by task, so that no task is on both sides."""
    found = [own for own in rows if own]
    share = {own[0].task: derive_seed(config.seed, "held out", own[0].task) / 2**63 for own in found}
    held = [own for own in found if share[own[0].task] < config.held_out]
    train = [own for own in found if share[own[0].task] >= config.held_out]
    if not train or not held:
        raise LearnerError(
            f"a critic needs episodes with terminal ends of several tasks: got {len(train)} to train on and "
            f"{len(held)} held out"
        )
    return train, held


def _step(
    critic: TrainableModel, rows: Sequence[_Row], optimizer: MuonAdamW, config: ValueFitConfig, factor: float
) -> None:
    optimizer.zero_grad()
    count = float(_weights(rows, config).sum())
    total = 0.0
    for indices in length_sorted([len(row.ids_T) for row in rows], config.microbatch_tokens):
        picked = [rows[i] for i in indices]
        losses = _loss(_outputs(critic, picked), _targets(picked), config)
        loss = (losses * _weights(picked, config)).sum() / count
        torch.autograd.backward(loss)
        total += float(loss.detach())
    norm = optimizer.clip_grad_norm(config.max_grad_norm)
    if not (math.isfinite(total) and math.isfinite(norm)):
        raise LearnerError(f"loss and gradient must be finite: got {total} and norm {norm}; lower the learning rates")
    optimizer.step(factor)


def _outputs(critic: TrainableModel, rows: Sequence[_Row]) -> Tensor:
    outputs = critic.values(pack([row.ids_T for row in rows], [row.mask_T for row in rows]))
    if outputs is None:
        raise LearnerError("the critic's model must have a value head: it has none")
    return outputs


def _targets(rows: Sequence[_Row]) -> Tensor:
    return torch.from_numpy(np.concatenate([row.targets_P for row in rows]))


def _weights(rows: Sequence[_Row], config: ValueFitConfig) -> Tensor:
    is_end = torch.from_numpy(np.concatenate([row.is_end_P for row in rows]))
    return torch.where(is_end, config.action_weight, 1.0)


def _loss(outputs: Tensor, targets: Tensor, config: ValueFitConfig) -> Tensor:
    if config.kind == "success":
        return functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    return functional.mse_loss(outputs, targets, reduction="none")


@torch.no_grad()
def _read(critic: TrainableModel, rows: Sequence[_Row], config: ValueFitConfig) -> Tensor:
    """Return what the head puts out at every place of all rows, in their order."""
    outputs: list[Tensor] = [torch.empty(0)] * len(rows)
    for indices in length_sorted([len(row.ids_T) for row in rows], config.microbatch_tokens):
        found = _outputs(critic, [rows[i] for i in indices])
        for i, part in zip(indices, found.split([len(rows[i].targets_P) for i in indices]), strict=True):
            outputs[i] = part
    return torch.cat(outputs)


def _report(
    critic: TrainableModel,
    train: Sequence[Sequence[_Row]],
    held: Sequence[Sequence[_Row]],
    losses: Sequence[float],
    excluded: int,
    config: ValueFitConfig,
) -> ValueFitReport:
    rows = [row for own in held for row in own]
    outputs, returns = _read(critic, rows, config), torch.from_numpy(np.concatenate([row.returns_P for row in rows]))
    values = outputs.sigmoid() if config.kind == "success" else outputs
    is_end = torch.from_numpy(np.concatenate([row.is_end_P for row in rows]))
    turns = torch.from_numpy(np.concatenate([row.turns_P for row in rows]))[is_end]
    q, paid = values[is_end], returns[is_end]
    by_turn = {int(t): success_auc(q[turns == t], paid[turns == t] > 0) for t in turns.unique()}
    is_binary = config.kind == "success"
    return ValueFitReport(
        episodes=len(train),
        held_out=len(held),
        excluded=excluded,
        success=sum(bool(own[0].returns_P[0] > 0) for own in train) / len(train),
        epoch=losses.index(min(losses)) + 1,
        losses=tuple(losses),
        branched=sum(row.branched for own in (*train, *held) for row in own),
        auc=success_auc(q, paid > 0),
        auc_by_turn={turn: auc for turn, auc in by_turn.items() if auc is not None},
        brier=brier_score(q, paid > 0) if is_binary else None,
        explained_variance=explained_variance(q, paid),
    )
