"""The part of a learner that changes while it learns: weights, optimizer, generator, counters; saved and restored."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turngate.learners.batch import TokenBatch, microbatches
from turngate.learners.checkpoint import read_state, write_state
from turngate.learners.hacking import HackingMonitor
from turngate.learners.losses import TokenLoss
from turngate.learners.optimizers import MuonAdamW, Schedule
from turngate.learners.panels_batch import quantiles_of
from turngate.learners.policy_model import ScoringModel, TrainableModel
from turngate.runtime.errors import LearnerError

__all__ = ["PolicyState", "StepTally", "score_tokens"]


@dataclass(slots=True)
class StepTally:
    """Sums over the optimizer steps of one update."""

    loss: float = 0.0
    value_loss: float = 0.0
    """The part of it that a value head on the trunk learns by, its coefficient included."""
    steps: int = 0
    tokens: int = 0
    """Trained tokens, counted once per step they were in."""
    grad_norms: list[float] = field(default_factory=list[float])
    """Before clipping; steps without any gradient are left out."""
    clipped: tuple[int, int, int] = (0, 0, 0)
    ratio_max: float = 0.0
    ratios: list[Tensor] = field(default_factory=list[Tensor])
    """Of the tokens in forward passes, before clipping."""
    rejected: int = 0
    """Trained tokens whose weight was 0, counted once per step."""

    def add(self, loss: Tensor, surrogate: TokenLoss) -> None:
        """Count one forward pass."""
        self.loss += float(loss.detach())
        high, low, dual = self.clipped
        self.clipped = (
            high + int(surrogate.is_clipped_high.sum()),
            low + int(surrogate.is_clipped_low.sum()),
            dual + int(surrogate.is_clipped_dual.sum()),
        )
        self.ratio_max = max(self.ratio_max, float(surrogate.ratio.max()))
        self.ratios.append(surrogate.ratio)

    def metrics(self) -> dict[str, float]:
        """Return means over steps, and fractions of all trained tokens."""
        high, low, dual = (count / max(self.tokens, 1) for count in self.clipped)
        return {
            "loss": self.loss / max(self.steps, 1),
            **({"value_loss": self.value_loss / max(self.steps, 1)} if self.value_loss else {}),
            "grad_norm": sum(self.grad_norms) / max(len(self.grad_norms), 1),
            "grad_norm_max": max(self.grad_norms, default=0.0),
            "optimizer_steps": float(len(self.grad_norms)),
            "clip_high_fraction": high,
            "clip_low_fraction": low,
            "clip_dual_fraction": dual,
            "rejected_fraction": self.rejected / max(self.tokens, 1),
            "ratio_max": self.ratio_max,
            "ratio_tokens": float(sum(map(len, self.ratios))),
        } | quantiles_of(torch.cat(self.ratios) if self.ratios else torch.zeros(0), "ratio")


class PolicyState:
    """A model that is being trained.

    State: the model's weights, the optimizer's, the generator's, the monitor's, and counters. The reference never
    changes.
    """

    def __init__(
        self,
        model: TrainableModel,
        optimizer: MuonAdamW,
        *,
        seed: int,
        reference: ScoringModel | None,
        monitor: HackingMonitor | None = None,
    ) -> None:
        self.model, self.optimizer, self.reference = model, optimizer, reference
        self.generator = torch.Generator().manual_seed(seed)
        self.monitor = monitor or HackingMonitor()
        self.updates = 0
        self.parity_batches = 0
        """Batches that passed the parity check."""
        self.low_ess_batches = 0
        """Batches in a row whose effective sample size was too small."""

    def __repr__(self) -> str:
        return f"<PolicyState {self.updates} updates>"

    def step(self, max_grad_norm: float, schedule: Schedule, tally: StepTally) -> None:
        """Apply the accumulated gradients.

        Raises: LearnerError: loss or gradient is not finite; the weights are those of the last complete optimizer step,
        which may be of this very update.
        """
        grad_norm = self.optimizer.clip_grad_norm(max_grad_norm)
        if not (math.isfinite(grad_norm) and math.isfinite(tally.loss)):
            self.optimizer.zero_grad()
            raise LearnerError(
                f"loss and gradient must be finite: got {tally.loss} and norm {grad_norm} in update {self.updates}; "
                "the weights are those of the last complete optimizer step; lower the learning rates and look at "
                "ratio_max and entropy"
            )
        self.optimizer.step(schedule.factor(self.updates))
        self.optimizer.zero_grad()
        tally.grad_norms.append(grad_norm)

    def save(self, folder: Path) -> None:
        """Write everything needed to go on exactly from here; each file whole or not at all."""
        self.model.save(folder / "model")
        state = {"optimizer": self.optimizer.state_dict(), "generator": self.generator.get_state()}
        counters = {
            "updates": self.updates,
            "parity_batches": self.parity_batches,
            "low_ess_batches": self.low_ess_batches,
        }
        write_state(folder / "learner.pt", state | counters | {"hacking": self.monitor.state_dict()})

    def restore(self, folder: Path) -> None:
        """Go on from what `save` wrote. Raises: LearnerError: it cannot be read or is another model's."""

        def apply(saved: dict[str, Any]) -> None:
            self.optimizer.load_state_dict(saved["optimizer"])
            self.generator.set_state(saved["generator"])
            self.updates, self.parity_batches = saved["updates"], saved["parity_batches"]
            # Checkpoints from before there was a monitor go on with an empty window.
            self.low_ess_batches = saved.get("low_ess_batches", 0)
            self.monitor.load_state_dict(saved.get("hacking", {"window": []}))

        read_state(folder / "learner.pt", apply)


@torch.no_grad()
def score_tokens(
    model: ScoringModel, tokens: TokenBatch, *, temperature: float, microbatch_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies (N,) of the trained tokens; 0 elsewhere.

    Raises: LearnerError: a segment is longer than the model's context, or a log-prob is not finite.
    """
    longest = max(tokens.row_lengths, default=0)
    if longest > model.config.max_context:
        raise LearnerError(
            f"segments must fit the model: expected at most {model.config.max_context} tokens, got {longest}; "
            "raise max_context or limit the rollouts' tokens"
        )
    logprobs_N, entropy_N = torch.zeros(len(tokens.mask_N)), torch.zeros(len(tokens.mask_N))
    for micro in microbatches(tokens, range(len(tokens.row_lengths)), microbatch_tokens):
        scores = model.score(micro.packed, temperature=temperature, with_entropy=True)
        assert scores.entropy_M is not None
        logprobs_N[micro.positions_P] = scores.logprobs_M
        entropy_N[micro.positions_P] = scores.entropy_M
    if not torch.isfinite(logprobs_N).all():
        at = int((~torch.isfinite(logprobs_N)).nonzero()[0])
        raise LearnerError(
            f"log-probs must be finite: got {float(logprobs_N[at])} ({tokens.where(at)}); look at the weights"
        )
    return logprobs_N, entropy_N
