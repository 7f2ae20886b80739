"""Losses of critics: value estimates and targets in, a loss per element out. Reduce with `learners.aggregation`.

All functions are pure, work in float32 and float64, on arrays of any one shape, and differentiate with respect to the
critic's output only: targets and old values are constants. Masked-out positions give loss 0 and gradient 0 whatever
they hold.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from turngate.learners.ratios import masked_in
from turngate.runtime.errors import ConfigError

__all__ = ["SuccessLoss", "ValueLoss", "value_bce", "value_loss_clipped"]


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Squared error per element, and where the clip took its gradient. Both in the shape of the inputs."""

    loss: Tensor
    is_clipped: Tensor
    """bool; the value moved further than `eps` and the clipped error is the larger one: no gradient."""


@dataclass(frozen=True, slots=True)
class SuccessLoss:
    """Cross-entropy per element, and which targets were no probabilities. Both in the shape of the inputs."""

    loss: Tensor
    is_clamped: Tensor
    """bool; the target lay outside [0, 1] and was clamped."""

    @property
    def clamped(self) -> int:
        """Number of clamped targets. Many of them mean that the returns are no success probabilities."""
        return int(self.is_clamped.sum())


def value_loss_clipped(
    values: Tensor, old_values: Tensor, targets: Tensor, mask: Tensor, *, eps: float | None = 0.2
) -> ValueLoss:
    """Return 0.5 * max((v - y)^2, (v_old + clip(v - v_old, -eps, eps) - y)^2) per element.

    Source: the value clip of the PPO implementation of Dhariwal et al. 2017 (OpenAI baselines); whether it helps is
    disputed (Andrychowicz et al. 2020, 2006.05990), so `eps=None` is plain squared error.
    Args: old_values: predictions before the update, in the unit of the returns. mask: bool, True where it counts.
    Raises: ShapeError: the inputs differ in shape. LearnerError: a masked-in number is not finite.
    """
    if eps is not None and not eps > 0:
        raise ConfigError(f"eps must be above 0: got {eps}; None leaves the value clip out")
    values, old_values, targets = masked_in(mask, values=values, old_values=old_values, targets=targets)
    old_values, targets = old_values.detach(), targets.detach()
    plain = (values - targets).square()
    if eps is None:
        return ValueLoss(0.5 * plain, torch.zeros_like(mask))
    moved = values - old_values
    clipped = (old_values + moved.clamp(-eps, eps) - targets).square()
    # Within eps both are the same number but for rounding, which must not count.
    is_clipped = mask & (moved.detach().abs() > eps) & (clipped > plain).detach()
    return ValueLoss(0.5 * torch.where(is_clipped, clipped, plain), is_clipped)


def value_bce(logits: Tensor, targets: Tensor, mask: Tensor) -> SuccessLoss:
    """Return the cross-entropy -y log V - (1 - y) log(1 - V) per element, V = sigmoid(logit).

    For binary terminal rewards without discount or shaping: the value is a success probability. Soft targets are
    allowed; bootstrapped and lambda-return targets overshoot [0, 1] a little, so they are clamped and counted rather
    than refused: outside, the loss would be minimised at an infinite logit.
    Source: Farebrother et al. 2024 (2403.03950) on classification losses for values.
    Args: mask: bool, True where it counts.
    Raises: ShapeError: the inputs differ in shape. LearnerError: a masked-in number is not finite.
    """
    logits, targets = masked_in(mask, logits=logits, targets=targets)
    targets = targets.detach()
    is_clamped = mask & ((targets < 0) | (targets > 1))
    loss = functional.binary_cross_entropy_with_logits(logits, targets.clamp(0, 1), reduction="none")
    # A masked-out logit is 0, and its cross-entropy log 2.
    return SuccessLoss(torch.where(mask, loss, 0.0), is_clamped)
