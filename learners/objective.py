"""What one optimizer step minimises: the surrogate of the policy, its weights, and the regularisers beside it."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from turngate.learners.aggregation import Aggregation, aggregate
from turngate.learners.batch import TokenBatch
from turngate.learners.kl import kl_terms
from turngate.learners.losses import Clip, TokenLoss, decoupled_ppo_loss, ppo_loss, reinforce_loss
from turngate.learners.offpolicy import Correction, is_weights
from turngate.learners.ratios import log_ratio
from turngate.runtime.engine.model import Scores
from turngate.runtime.errors import ConfigError

__all__ = ["KLPlace", "Objective", "OffPolicy", "UpdateData"]

OffPolicy: TypeAlias = Literal["decoupled", "bypass", "reinforce", "none"]
"""`decoupled`: clip around the policy at the start of the update, weigh it over the sampler (AReaL). `bypass`: clip
around the sampler itself. `reinforce`: no clip, weigh current over sampler. `none`: plain REINFORCE, -A * logprob,
without weight, ratio or clip, as if the data were on-policy and this the only step on it; `clip` has no effect then.
To leave out the correction alone, use `decoupled` with `Correction(lower=1.0, upper=1.0)`: all weights are 1, ratio and
clip stay."""
KLPlace: TypeAlias = Literal["reward", "loss_k2", "loss_ratio_k3"]
"""`reward`: subtract k1, detached, from the return, in groups whose returns differ without it. The others differentiate
an estimator whose gradient is that of KL(current || reference); k1 in the loss has none and is not offered."""


@dataclass(frozen=True, slots=True)
class UpdateData:
    """What all optimizer steps of one update share; (N,) arrays over the token batch."""

    tokens: TokenBatch
    advantages_N: Tensor
    proximal_N: Tensor
    """Log-probs under the weights at the start of the update."""
    reference_N: Tensor | None
    """Log-probs under the reference policy, when there is one."""
    is_silent_N: Tensor
    """Tokens of degenerate groups: no advantage, and so no other force either (huggingface/trl#7068)."""
    mode: Aggregation


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One way to turn advantages into a loss. Exactly one correction covers each gap between policies."""

    clip: Clip = field(default=Clip())
    off_policy: OffPolicy = "decoupled"
    correction: Correction | None = None
    """Weights of `decoupled` and `reinforce`; None stands for token-level truncation at 2."""
    kl_coef: float = 0.0
    kl_in: KLPlace = "reward"
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.off_policy not in ("decoupled", "bypass", "reinforce", "none"):
            raise ConfigError(f"off_policy must be decoupled, bypass, reinforce or none: got {self.off_policy!r}")
        if self.off_policy in ("bypass", "none") and self.correction is not None:
            raise ConfigError(
                f"correction must be None with off_policy={self.off_policy!r}: the ratio already holds it, and applied "
                "twice it biases every token; use off_policy='decoupled'"
            )
        if self.off_policy == "reinforce" and self.correction and not _is_per_token(self.correction):
            raise ConfigError("correction must be per token and not normalised with off_policy='reinforce'")
        if self.kl_in not in ("reward", "loss_k2", "loss_ratio_k3"):
            raise ConfigError(f"kl_in must be reward, loss_k2 or loss_ratio_k3: got {self.kl_in!r}")

    @property
    def has_kl_loss(self) -> bool:
        """True when the loss holds a KL term."""
        return self.kl_coef != 0 and self.kl_in != "reward"

    def active_mask(self, data: UpdateData, mask_N: Tensor) -> Tensor:
        """Return which tokens of a step can move the policy at all; rows without any are left out of the passes."""
        has_advantage_N = data.advantages_N != 0
        if self.has_kl_loss or self.entropy_coef != 0:
            # A lone member that keeps its reward has an advantage in a group that is degenerate.
            return mask_N & (has_advantage_N | ~data.is_silent_N)
        return mask_N & has_advantage_N

    def importance(self, data: UpdateData, mask_N: Tensor) -> Tensor:
        """Return the weights of proximal over behaviour for one optimizer step, before it is cut into passes."""
        if self.off_policy != "decoupled":
            return mask_N.to(torch.float32)
        units_N, behaviour_N = data.tokens.trajectory_ids_N, data.tokens.behaviour_logprobs_N
        correction = self.correction or Correction()
        return is_weights(data.proximal_N, behaviour_N, mask_N, correction, unit_ids=units_N).weights

    def loss(
        self, scores: Scores, data: UpdateData, at_P: Tensor, weights_P: Tensor, importance_P: Tensor
    ) -> tuple[Tensor, TokenLoss]:
        """Return one forward pass's share of the step's loss, and its surrogate per token.

        Args: at_P: positions of the scored tokens in the token batch. weights_P: their aggregation weights.
        """
        surrogate = self._surrogate(scores.logprobs_M, data, at_P, importance_P)
        loss = aggregate(surrogate.loss, weights_P)
        if self.has_kl_loss and data.reference_N is not None:
            kl = kl_terms(scores.logprobs_M, data.reference_N[at_P])
            ratio_P = log_ratio(scores.logprobs_M, data.proximal_N[at_P]).exp()
            loss = loss + self.kl_coef * aggregate(kl.k2 if self.kl_in == "loss_k2" else ratio_P * kl.k3, weights_P)
        if scores.entropy_M is not None:
            loss = loss - self.entropy_coef * aggregate(scores.entropy_M, weights_P)
        return loss, surrogate

    def _surrogate(self, logprobs_P: Tensor, data: UpdateData, at_P: Tensor, importance_P: Tensor) -> TokenLoss:
        advantages_P, behaviour_P = data.advantages_N[at_P], data.tokens.behaviour_logprobs_N[at_P]
        proximal_P, mask_P = data.proximal_N[at_P], torch.ones_like(at_P, dtype=torch.bool)
        if self.off_policy == "decoupled":
            return decoupled_ppo_loss(logprobs_P, proximal_P, importance_P, advantages_P, mask_P, clip=self.clip)
        if self.off_policy == "bypass":
            return ppo_loss(logprobs_P, behaviour_P, advantages_P, mask_P, clip=self.clip)
        if self.off_policy == "reinforce":
            importance_P = is_weights(logprobs_P, behaviour_P, mask_P, self.correction or Correction()).weights
        loss_P = reinforce_loss(logprobs_P, importance_P, advantages_P, mask_P)
        ratio_P = log_ratio(logprobs_P.detach(), proximal_P).exp()
        return TokenLoss(loss_P, ratio_P, ~mask_P, ~mask_P, ~mask_P)


def _is_per_token(correction: Correction) -> bool:
    """True when weights can be taken within one forward pass: units and their mean span several."""
    return correction.level == "token" and not correction.normalise
