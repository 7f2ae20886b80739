"""A critic: V of every context an agent acted from, and of every prefix of what it said there.

Either a model of its own, started from the policy's weights, or a value head on the policy's trunk. The value at a
token is that of the state before it: V(h_t) sits at a turn's first token, V of a prefix at the tokens after.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from turngate.learners.batch import TokenBatch, length_sorted, microbatches, minibatches
from turngate.learners.checkpoint import read_state, write_state
from turngate.learners.optimizers import MuonAdamW
from turngate.learners.policy_model import TrainableModel, mark_value_kind, with_value_head
from turngate.learners.value_losses import value_bce, value_loss_clipped
from turngate.learners.voting import critic_handling
from turngate.runtime.engine.config import ValueKind
from turngate.runtime.engine.packing import Ints, pack
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.types import NO_TURN, Trajectory

__all__ = [
    "Critic",
    "CriticConfig",
    "ValueReader",
    "ValueTargets",
    "after_actions",
    "last_values",
    "read_values",
    "with_value_head",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """How values are represented and learned."""

    place: Literal["separate", "trunk"] = "separate"
    """A model of its own, or a head on the policy's trunk: cheaper, and the two pull at the same features."""
    kind: ValueKind = "success"
    """`success` is trained by cross-entropy on returns within [0, 1], `scalar` by clipped regression."""
    epochs: int = 2
    minibatches: int = 4
    """Of a separate critic: optimizer steps per pass over a batch."""
    muon_lr: float | None = 5e-3
    adamw_lr: float = 2e-3
    value_clip: float | None = 0.2
    """Scalar values move at most so far from what they were before the update; None lets them."""
    action_values: bool = False
    """Learn Q(h_t, a_t), too: the value once an action is complete and not yet answered. Needed for Retrace."""
    coef: float = 0.5
    """Weight of a trunk head's loss beside the policy's."""
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.place not in ("separate", "trunk"):
            raise ConfigError(f"critic place must be separate or trunk: got {self.place!r}")
        if self.action_values and self.place != "separate":
            raise ConfigError("action_values must have a critic of its own: got place='trunk'; use place='separate'")
        if self.kind not in ("success", "scalar"):
            raise ConfigError(f"critic kind must be success or scalar: got {self.kind!r}")
        for name in ("epochs", "minibatches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive: got {getattr(self, name)} (CriticConfig)")
        for name in ("coef", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive: got {getattr(self, name)} (CriticConfig)")
        if self.value_clip is not None and not self.value_clip > 0:
            raise ConfigError(f"value_clip must be positive or None: got {self.value_clip}")

    def to_value(self, outputs: Tensor) -> Tensor:
        """Return values from what the head puts out, same shape."""
        return outputs.sigmoid() if self.kind == "success" else outputs

    def loss(self, outputs_P: Tensor, targets_P: Tensor, old_P: Tensor) -> Tensor:
        """Return the loss (P,) per position; targets and the values before the update are constants."""
        mask_P = torch.ones_like(outputs_P, dtype=torch.bool)
        if self.kind == "success":
            return value_bce(outputs_P, targets_P, mask_P).loss
        return value_loss_clipped(outputs_P, old_P, targets_P, mask_P, eps=self.value_clip).loss


@dataclass(frozen=True, slots=True)
class ValueTargets:
    """What the values of a token batch are trained towards; (N,) arrays over it."""

    targets_N: Tensor
    """float32."""
    mask_N: Tensor
    """bool; the positions with a target."""
    old_N: Tensor
    """Values before the update, for clipping."""


@torch.no_grad()
def read_values(model: TrainableModel, tokens: TokenBatch, config: CriticConfig, *, microbatch_tokens: int) -> Tensor:
    """Return V of the state before every masked-in token, float32 (N,); 0 elsewhere.

    Raises: LearnerError: a value is not finite.
    """
    values_N = torch.zeros(len(tokens.mask_N))
    for micro in microbatches(tokens, range(len(tokens.row_lengths)), microbatch_tokens):
        values_N[micro.positions_P] = config.to_value(_outputs(model.values(micro.packed)))
    if not torch.isfinite(values_N).all():
        at = int((~torch.isfinite(values_N)).nonzero()[0])
        raise LearnerError(f"values must be finite: got {float(values_N[at])} ({tokens.where(at)}); lower the rates")
    return values_N


@torch.no_grad()
def last_values(
    model: TrainableModel, contexts: Sequence[Ints], config: CriticConfig, *, microbatch_tokens: int
) -> Tensor:
    """Return V of the state after all ids of each context, float32 (len(contexts),).

    Raises: LearnerError: a context is empty, leaves no room in the model for the token after it, or holds an id that
    is not in the vocabulary.
    """
    values_K = torch.zeros(len(contexts))
    lengths = [len(ids) for ids in contexts]
    if lengths and not (min(lengths) >= 1 and max(lengths) < model.config.max_context):
        raise LearnerError(
            f"contexts must hold 1 to {model.config.max_context - 1} tokens: got {min(lengths)} to {max(lengths)}"
        )
    for number, ids in enumerate(contexts):
        ids_T = np.asarray(ids, np.int64)
        if not 0 <= ids_T.min() <= ids_T.max() < model.config.vocab_size:
            raise LearnerError(
                f"token ids must be in the vocabulary of {model.config.vocab_size}: got {ids_T.min()} to {ids_T.max()} "
                f"(last context {number})"
            )
    for indices in length_sorted([n + 1 for n in lengths], microbatch_tokens):
        # The model reads a value where it predicts a token; which one is never looked at.
        rows = [np.append(np.asarray(contexts[i], np.int64), 0) for i in indices]
        masks = [[0] * lengths[i] + [1] for i in indices]
        values_K[torch.tensor(indices)] = config.to_value(_outputs(model.values(pack(rows, masks))))
    if not torch.isfinite(values_K).all():
        raise LearnerError("values must be finite: got NaN or infinity for a last context; lower the critic's rates")
    return values_K


def _outputs(values_M: Tensor | None) -> Tensor:
    if values_M is None:
        raise LearnerError("the critic's model must have a value head: it has none; see with_value_head")
    return values_M


def after_actions(tokens: TokenBatch, *, max_length: int) -> TokenBatch:
    """Return the batch with its mask on the token after each masked-in action: a value read there is Q(h_t, a_t).

    Every row gets one more token, which is never looked at. An action that another follows without anything between is
    left out, and so is one that fills a row of `max_length`. Turn and trajectory ids at the mask are the action's.
    """
    starts = tokens.row_starts()
    lengths = np.asarray(tokens.row_lengths, np.int64)
    is_long_R = lengths < max_length
    # Where each old token lies in the longer rows; the new last token of a row repeats its first.
    new_lengths = lengths + is_long_R
    source = np.concatenate(
        [np.append(np.arange(s, s + n), np.full(int(m), s)) for s, n, m in zip(starts, lengths, is_long_R, strict=True)]
        or [np.empty(0, np.int64)]
    )
    is_new = np.zeros(len(source), bool)
    is_new[(np.cumsum(new_lengths) - 1)[is_long_R]] = True
    at_N, new_N = torch.from_numpy(source), torch.from_numpy(is_new)
    mask_N, turn_N = tokens.mask_N[at_N] & ~new_N, tokens.turn_ids_N[at_N].masked_fill(new_N, NO_TURN)
    row_N = tokens.row_ids_N[at_N]
    # The token after: in the same row, and no token of an action itself.
    follows_N = torch.zeros_like(mask_N)
    follows_N[1:] = mask_N[:-1] & ~mask_N[1:] & (row_N[1:] == row_N[:-1])
    turns_N = torch.full_like(turn_N, NO_TURN)
    turns_N[1:] = torch.where(follows_N[1:], turn_N[:-1], NO_TURN)
    return replace(
        tokens,
        token_ids_N=tokens.token_ids_N[at_N],
        mask_N=follows_N,
        generated_N=follows_N,
        behaviour_logprobs_N=torch.zeros(len(at_N)),
        versions_N=tokens.versions_N[at_N],
        turn_ids_N=turns_N,
        row_ids_N=row_N,
        trajectory_ids_N=tokens.trajectory_ids_N[at_N],
        group_ids_N=tokens.group_ids_N[at_N],
        row_lengths=tuple(int(n) for n in new_lengths),
    )


@dataclass(frozen=True, slots=True)
class ValueReader:
    """Reads values off a model as it is when asked."""

    model: TrainableModel
    config: CriticConfig
    microbatch_tokens: int

    def values(self, tokens: TokenBatch) -> Tensor:
        """Return V before every masked-in token; see `read_values`."""
        return read_values(self.model, tokens, self.config, microbatch_tokens=self.microbatch_tokens)

    def bootstraps(self, trajectories: Sequence[Trajectory]) -> list[float | None]:
        """Return V of the last context of every episode that was cut short, None for the others; see `last_values`."""
        cut = [i for i, t in enumerate(trajectories) if critic_handling(t.end) == "bootstrap"]
        contexts = [np.frombuffer(trajectories[i].last_context, np.int32) for i in cut]
        values_K = last_values(self.model, contexts, self.config, microbatch_tokens=self.microbatch_tokens)
        found = dict(zip(cut, values_K.tolist(), strict=True))
        return [found.get(i) for i in range(len(trajectories))]


class Critic:
    """A critic that is a model of its own.

    State: the model's weights, the optimizer's, the generator's, and `version`, the number of `learn` calls.
    """

    def __init__(self, model: TrainableModel, config: CriticConfig, *, seed: int, microbatch_tokens: int) -> None:
        self.model, self.config, self._microbatch_tokens = model, config, microbatch_tokens
        mark_value_kind(model, config.kind)
        self.reader = ValueReader(model, config, microbatch_tokens)
        self.optimizer = MuonAdamW(model, muon_lr=config.muon_lr, adamw_lr=config.adamw_lr)
        self.generator = torch.Generator().manual_seed(seed)
        self.version = 0

    def __repr__(self) -> str:
        return f"<Critic {self.config.kind}, version {self.version}>"

    def values(self, tokens: TokenBatch) -> Tensor:
        """Return V before every masked-in token; see `read_values`."""
        return self.reader.values(tokens)

    def learn(self, tokens: TokenBatch, targets: ValueTargets, *, epochs: int | None = None) -> dict[str, float]:
        """Take a few optimizer steps towards the targets and return how they went.

        Raises: LearnerError: loss or gradient is not finite; the weights are those of the last complete step.
        """
        tokens = tokens.masked(targets.mask_N)
        losses: list[float] = []
        norms: list[float] = []
        for _ in range(self.config.epochs if epochs is None else epochs):
            for rows in minibatches(tokens, self.config.minibatches, self.generator):
                count = int(tokens.rows_mask(rows).sum())
                if not count:
                    continue
                self.optimizer.zero_grad()  # of a step that was left half-way by an error
                total = 0.0
                for micro in microbatches(tokens, rows, self._microbatch_tokens):
                    at_P = micro.positions_P
                    outputs_P = _outputs(self.model.values(micro.packed))
                    loss = self.config.loss(outputs_P, targets.targets_N[at_P], targets.old_N[at_P]).sum() / count
                    torch.autograd.backward(loss)
                    total += float(loss.detach())
                norms.append(self._step(total))
                losses.append(total)
        self.version += 1
        return {
            "value_loss": sum(losses) / max(len(losses), 1),
            "value_grad_norm": sum(norms) / max(len(norms), 1),
        }

    def _step(self, loss: float) -> float:
        norm = self.optimizer.clip_grad_norm(self.config.max_grad_norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.optimizer.zero_grad()
            raise LearnerError(
                f"the critic's loss and gradient must be finite: got {loss} and norm {norm} at version {self.version}; "
                "lower its learning rates"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def save(self, folder: Path) -> None:
        """Write the model folder and `critic.pt`; each file whole or not at all."""
        self.model.save(folder)
        state = {"optimizer": self.optimizer.state_dict(), "generator": self.generator.get_state()}
        write_state(folder / "critic.pt", state | {"version": self.version})

    def restore(self, folder: Path) -> None:
        """Go on from what `save` wrote beside the weights. Raises: LearnerError: it cannot be read."""

        def apply(saved: dict[str, Any]) -> None:
            self.optimizer.load_state_dict(saved["optimizer"])
            self.generator.set_state(saved["generator"])
            self.version = saved["version"]

        read_state(folder / "critic.pt", apply)
