"""Trust-region filters: which tokens are too far off-policy to be learned from at all.

Filters look at other tokens, so they are applied once per optimizer step, to all of its tokens, before it is cut into
forward passes. Target is the policy in question, behaviour the one that sampled.
"""

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from turngate.learners.offpolicy import Correction, is_weights
from turngate.learners.ratios import check_finite, check_shapes, unit_index, unit_sums
from turngate.runtime.errors import ConfigError

__all__ = [
    "M2PO",
    "OPSM",
    "Filter",
    "GeometricFilter",
    "filter_keep",
    "geometric_keep",
    "opsm_keep",
    "second_moment_keep",
]


@dataclass(frozen=True, slots=True)
class GeometricFilter:
    """Drop trajectories whose mean log-ratio left a band: sampler and learner disagree all along (2512.23075)."""

    lower: float
    upper: float
    """Bounds on exp(mean log-ratio), target over behaviour; close to 1, say 0.99 and 1.01."""

    def __post_init__(self) -> None:
        if not 0 <= self.lower <= 1 <= self.upper:
            raise ConfigError(f"bounds must hold ratio 1: got lower {self.lower}, upper {self.upper} (GeometricFilter)")


@dataclass(frozen=True, slots=True)
class M2PO:
    """Drop the tokens furthest off, over the whole optimizer step, until the rest is close (Zheng 2025, 2510.01161)."""

    threshold: float = 0.04
    """Largest mean of the squared log-ratio over the tokens kept."""

    def __post_init__(self) -> None:
        if not self.threshold > 0:
            raise ConfigError(f"threshold must be positive: got {self.threshold} (M2PO)")


@dataclass(frozen=True, slots=True)
class OPSM:
    """Drop trajectories that did badly and that the policy has left already (DeepSeek-V3.2, 2512.02556)."""

    delta: float
    """Largest mean of behaviour minus target log-prob at which a token of negative advantage still trains."""

    def __post_init__(self) -> None:
        if not self.delta >= 0:
            raise ConfigError(f"delta must be 0 or more: got {self.delta} (OPSM)")


Filter: TypeAlias = GeometricFilter | M2PO | OPSM
"""What leaves the numerator of the policy loss, and stays in its denominator, because it is too far off-policy."""


def filter_keep(
    chosen: Filter,
    target_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    trajectory_ids: Tensor,
) -> Tensor:
    """Return which of the tokens of one optimizer step a filter keeps; all of them must be given."""
    if isinstance(chosen, M2PO):
        check_finite(mask, target_logprobs=target_logprobs, behaviour_logprobs=behaviour_logprobs)
        return second_moment_keep(target_logprobs - behaviour_logprobs, mask, threshold=chosen.threshold)
    if isinstance(chosen, OPSM):
        return opsm_keep(target_logprobs, behaviour_logprobs, advantages, mask, trajectory_ids, delta=chosen.delta)
    bounds = {"lower": chosen.lower, "upper": chosen.upper}
    return geometric_keep(target_logprobs, behaviour_logprobs, mask, trajectory_ids, **bounds)


def geometric_keep(
    target_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, unit_ids: Tensor, *, lower: float, upper: float
) -> Tensor:
    """Return which tokens to keep: whole units whose geometric mean ratio lies in [lower, upper] (2512.23075)."""
    correction = Correction(level="unit_geo", mode="mask", lower=lower, upper=upper)
    return is_weights(target_logprobs, behaviour_logprobs, mask, correction, unit_ids=unit_ids).keep


def second_moment_keep(log_ratios: Tensor, mask: Tensor, *, threshold: float) -> Tensor:
    """Return which tokens to keep: drop the largest squared log-ratios until the mean of the rest is below threshold.

    Selects over all tokens given, so pass those of the whole optimizer step. Source: Zheng et al. 2025, M2PO
    (2510.01161). At least one token fails to be kept only if even the smallest is above the threshold.
    """
    check_shapes(log_ratios=log_ratios, mask=mask)
    squares_P = log_ratios[mask].detach().to(torch.float64).square()
    ascending_P, order_P = squares_P.sort(stable=True)
    means_P = ascending_P.cumsum(0) / torch.arange(1, len(ascending_P) + 1, device=mask.device)
    # Running means of a sorted sequence never fall, so the kept tokens are a prefix.
    count = int((means_P <= threshold).sum())
    kept_P = torch.zeros_like(squares_P, dtype=torch.bool)
    kept_P[order_P[:count]] = True
    keep = torch.zeros_like(mask)
    keep[mask] = kept_P
    return keep


def opsm_keep(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, mask: Tensor, unit_ids: Tensor, *, delta: float
) -> Tensor:
    """Return which tokens to keep: drop units of negative advantage whose mean(behaviour - current) exceeds delta.

    Source: off-policy sequence masking of DeepSeek-V3.2 (2512.02556).
    """
    check_shapes(logprobs=logprobs, behaviour=behaviour_logprobs, advantages=advantages, mask=mask, units=unit_ids)
    check_finite(mask, logprobs=logprobs, behaviour_logprobs=behaviour_logprobs, advantages=advantages)
    index, units = unit_index(mask, unit_ids)
    if units == 0:
        return mask
    gap = (behaviour_logprobs - logprobs.detach()).masked_fill(~mask, 0.0)
    is_far_U = unit_sums(gap, index, units) / unit_sums(torch.ones_like(gap), index, units) > delta
    return mask & ~(is_far_U[index] & (advantages < 0))
