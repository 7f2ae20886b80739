"""Fit a critic to recorded episodes, offline: what guides a frozen policy, or scores its actions.

Monte Carlo targets: at every token the policy sampled, and once more behind each action, the value is trained towards
what the episode was paid from then on. Behind an action it is Q(h, a), in between the value of the prefix, so that one
critic serves guidance of whole actions and of single tokens. Where turns were branched from, the means over their
continuations take the place of the one return that was seen.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from turngate.learners.batch import length_sorted
from turngate.learners.model_folder import beside
from turngate.learners.optimizers import MuonAdamW, Schedule
from turngate.learners.policy_model import ModelChoice, TrainableModel, mark_value_kind, model_source
from turngate.learners.threads import one_thread
from turngate.learners.turns import RewardsOf, recorded_rewards
from turngate.learners.value_metrics import brier_score, explained_variance, success_auc
from turngate.learners.value_rows import FitRow, Reader, branches_by_trajectory, episode_rows, read_rows, row_outputs
from turngate.runtime.branching import Branches
from turngate.runtime.engine.config import ValueKind
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.seeds import derive_seed, require_seed
from turngate.runtime.types import Trajectory

__all__ = ["ValueFitConfig", "ValueFitProgress", "ValueFitReport", "fit_critic"]

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
        require_seed(self.seed, "ValueFitConfig")


class ValueFitProgress(msgspec.Struct, frozen=True):
    """What one epoch came to."""

    epoch: int
    """From 1."""
    held_out_loss: float
    seconds: float
    """Since the start of the fit."""


class ValueFitReport(msgspec.Struct, frozen=True, kw_only=True):
    """How good the critic is, on episodes of tasks it was not trained on. None where that is not defined."""

    episodes: int
    held_out: int
    excluded: int
    """Episodes that say nothing about returns: truncated, failed, without token ids, with rewards that cannot be told,
    or whose first action lies beyond the model's context."""
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


def fit_critic(
    model: ModelChoice,
    trajectories: Sequence[Trajectory],
    folder: Path | str,
    *,
    config: ValueFitConfig = ValueFitConfig(),
    rewards: RewardsOf = recorded_rewards,
    branches: Sequence[Branches] = (),
    progress: Callable[[ValueFitProgress], None] | None = None,
) -> ValueFitReport:
    """Train a copy of `model` with a value head on episodes and write it to `folder`; `Engine.start(critic=folder)`.

    Only episodes with a terminal end are used: what was cut short has no return yet. Continuations of branches are
    episodes like any others, of which only their own turns train: add them to `trajectories`, if they are to.
    The folder must be new, and appears once everything is in it, or not at all.
    Args: rewards: what returns are sums of. branches: of some of the trajectories, found by id; where Q or V of a turn
        was estimated, it is the target in place of the return. progress: called after each epoch, as `print`.
    Raises: LearnerError: too few episodes, returns outside [0, 1] for kind `success`, ids of another vocabulary, or a
    loss that is not finite. ConfigError: the folder holds something, or branches, which are paid what the environment
    pays, come together with other rewards.
    """
    if branches and rewards is not recorded_rewards:
        raise ConfigError("branches must go with the environment's own rewards: got rewards=...; leave one of them out")
    folder = _new_folder(folder)
    usable = [t for t in trajectories if t.end.is_terminal and t.trainable and t.policy_tokens]
    found = branches_by_trajectory(branches, usable)
    if unused := found.keys() - {t.id for t in usable}:
        _log.warning(
            "branches should be of the trajectories: %d of %d are of some that were not given or have no return, such "
            "as %s, and are not used",
            len(unused), len(found), min(unused),
        )  # fmt: skip
    source = model_source(model)
    critic = _deepened(source.load(None, value_head=True), config.extra_layers, config.seed)
    mark_value_kind(critic, config.kind)
    reader = Reader(config.kind, critic.config.max_context, critic.config.vocab_size)
    rows = [episode_rows(t, reader, rewards=rewards, branches=found.get(t.id)) for t in usable]
    train, held = _split(rows, config)
    with one_thread() if isinstance(critic, PolicyModel) else nullcontext():
        losses = _train(critic, train, held, config, progress)
    with beside(folder) as made:
        critic.save(made)
        source.copy_companions(made)
        made.rename(folder)
    return _report(critic, train, held, losses, len(trajectories) - len(train) - len(held), config)


def _train(
    critic: TrainableModel,
    train: Sequence[Sequence[FitRow]],
    held: Sequence[Sequence[FitRow]],
    config: ValueFitConfig,
    progress: Callable[[ValueFitProgress], None] | None,
) -> list[float]:
    """Leave `critic` as it was after its best epoch; return the held-out loss after each."""
    began_s = time.monotonic()
    optimizer = MuonAdamW(critic, muon_lr=config.muon_lr, adamw_lr=config.adamw_lr)
    steps = config.epochs * math.ceil(len(train) / config.batch_trajectories)
    schedule = msgspec.structs.replace(config.schedule, total_updates=steps)
    generator = torch.Generator().manual_seed(config.seed)
    held_rows = [row for own in held for row in own]
    losses: list[float] = []
    best: dict[str, Tensor] = {}
    step = 0
    for epoch in range(config.epochs):
        order = torch.randperm(len(train), generator=generator).tolist()
        for start in range(0, len(order), config.batch_trajectories):
            picked = [row for i in order[start : start + config.batch_trajectories] for row in train[i]]
            _step(critic, picked, optimizer, config, schedule.factor(step))
            step += 1
        outputs, targets = read_rows(critic, held_rows, config.microbatch_tokens), _targets(held_rows)
        weights = _weights(held_rows, config)
        losses.append(float((_loss(outputs, targets, config) * weights).sum() / weights.sum()))
        if not math.isfinite(losses[-1]):
            raise LearnerError(f"held-out loss must be finite: got {losses[-1]} in epoch {epoch + 1}; lower the rates")
        if progress is not None:
            progress(ValueFitProgress(epoch + 1, losses[-1], time.monotonic() - began_s))
        if losses[-1] == min(losses):
            best = {name: tensor.detach().clone() for name, tensor in critic.state_dict().items()}
    critic.load_state_dict(best)
    return losses


def _new_folder(folder: Path | str) -> Path:
    """Return the folder to write to. Raises: ConfigError: there is something, such as the policy itself."""
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"a critic's folder must be new: {folder} holds something; remove it, or choose another")
    return folder


def _deepened(model: TrainableModel, extra: int, seed: int) -> TrainableModel:
    """Return the model with more layers on top, silent ones: it computes what it did."""
    if not extra or not isinstance(model, PolicyModel):
        return model
    config = msgspec.structs.replace(model.config, layers=model.config.layers + extra)
    deeper = PolicyModel(config, seed=derive_seed(seed, "extra layers") % 2**31)
    deeper.load_state_dict(model.state_dict(), strict=False)
    return deeper


def _split(rows: list[list[FitRow]], config: ValueFitConfig) -> tuple[list[list[FitRow]], list[list[FitRow]]]:
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
    critic: TrainableModel, rows: Sequence[FitRow], optimizer: MuonAdamW, config: ValueFitConfig, factor: float
) -> None:
    optimizer.zero_grad()
    count = float(_weights(rows, config).sum())
    total = 0.0
    for indices in length_sorted([len(row.ids_T) for row in rows], config.microbatch_tokens):
        picked = [rows[i] for i in indices]
        losses = _loss(row_outputs(critic, picked), _targets(picked), config)
        loss = (losses * _weights(picked, config)).sum() / count
        torch.autograd.backward(loss)
        total += float(loss.detach())
    norm = optimizer.clip_grad_norm(config.max_grad_norm)
    if not (math.isfinite(total) and math.isfinite(norm)):
        raise LearnerError(f"loss and gradient must be finite: got {total} and norm {norm}; lower the learning rates")
    optimizer.step(factor)


def _targets(rows: Sequence[FitRow]) -> Tensor:
    return torch.from_numpy(np.concatenate([row.targets_P for row in rows]))


def _weights(rows: Sequence[FitRow], config: ValueFitConfig) -> Tensor:
    is_end = torch.from_numpy(np.concatenate([row.is_end_P for row in rows]))
    return torch.where(is_end, config.action_weight, 1.0)


def _loss(outputs: Tensor, targets: Tensor, config: ValueFitConfig) -> Tensor:
    if config.kind == "success":
        return functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    return functional.mse_loss(outputs, targets, reduction="none")


def _report(
    critic: TrainableModel,
    train: Sequence[Sequence[FitRow]],
    held: Sequence[Sequence[FitRow]],
    losses: Sequence[float],
    excluded: int,
    config: ValueFitConfig,
) -> ValueFitReport:
    rows = [row for own in held for row in own]
    outputs = read_rows(critic, rows, config.microbatch_tokens)
    returns = torch.from_numpy(np.concatenate([row.returns_P for row in rows]))
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
