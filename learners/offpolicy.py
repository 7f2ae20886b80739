"""Corrections for data that another policy sampled: importance weights and proximal log-probs.

Three policies: behaviour (the sampler, with its lag and its arithmetic), proximal (the anchor of the clip), current.
What a learner does about their gaps is one `OffPolicy` value (`learners.off_policy_choice`).
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from turngate.learners.ratios import LOG_RATIO_CLAMP, check_finite, check_shapes, log_ratio, unit_index, unit_sums
from turngate.runtime.errors import ConfigError

__all__ = [
    "Correction",
    "CorrectionUnit",
    "ImportanceWeights",
    "WeightLevel",
    "WeightMode",
    "interpolated_proximal",
    "is_weights",
]

WeightLevel: TypeAlias = Literal["token", "unit_prod", "unit_geo"]
"""One weight per token, per unit (product of its ratios), or per unit (geometric mean)."""
WeightMode: TypeAlias = Literal["truncate", "mask"]
"""`truncate`: min(weight, upper). `mask`: 0 outside [lower, upper]; rejected tokens stay in the denominator."""
CorrectionUnit: TypeAlias = Literal["trajectory", "turn"]
"""What a unit is: a trajectory over all its segments, or one turn of it."""


@dataclass(frozen=True, slots=True)
class Correction:
    """How proximal over behaviour is weighed. Bounds are on that ratio, target over behaviour (not its inverse)."""

    level: WeightLevel = "token"
    mode: WeightMode = "truncate"
    upper: float | None = 2.0
    lower: float | None = None
    normalise: bool = False
    """Scale the weights of the optimizer step to mean 1 after truncation."""
    unit: CorrectionUnit = "trajectory"
    """What the unit levels multiply over; tokens of one unit share one weight."""

    def __post_init__(self) -> None:
        if self.level not in ("token", "unit_prod", "unit_geo"):
            raise ConfigError(f"correction level must be token, unit_prod or unit_geo: got {self.level!r}")
        if self.mode not in ("truncate", "mask"):
            raise ConfigError(f"correction mode must be truncate or mask: got {self.mode!r}")
        if self.unit not in ("trajectory", "turn"):
            raise ConfigError(f"correction unit must be trajectory or turn: got {self.unit!r}")
        if self.upper is not None and not self.upper >= 1:
            raise ConfigError(f"upper must be a ratio of at least 1: got {self.upper}; it bounds target over behaviour")
        if self.lower is not None and not 0 <= self.lower <= 1:
            raise ConfigError(f"lower must be a ratio from 0 to 1: got {self.lower}; it bounds target over behaviour")


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    """Detached weights in the shape of the inputs, 0 where masked or rejected."""

    weights: Tensor
    keep: Tensor
    """bool; False on context and on rejected tokens."""
    raw: Tensor
    """The same before truncation and rejection, for metrics; 1 where masked."""
    is_truncated: Tensor
    """bool; the bounds changed or rejected the weight."""


def is_weights(
    target_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    correction: Correction,
    *,
    unit_ids: Tensor | None = None,
) -> ImportanceWeights:
    """Return importance weights of target over behaviour.

    Source: Ionides 2008 (truncation); IcePop and MIS (masking). Unit levels run over all segments of a trajectory, so
    `unit_ids` are trajectory (or turn) numbers in the shape of the inputs; by default each row of (B, T) is a unit.
    Raises: ShapeError: the inputs differ in shape. LearnerError: a masked-in value is not finite.
    """
    check_shapes(target_logprobs=target_logprobs, behaviour_logprobs=behaviour_logprobs, mask=mask)
    check_finite(mask, target_logprobs=target_logprobs, behaviour_logprobs=behaviour_logprobs)
    target, behaviour = (x.detach().masked_fill(~mask, 0.0) for x in (target_logprobs, behaviour_logprobs))
    logs = log_ratio(target, behaviour)
    index, units = torch.full_like(mask, -1, dtype=torch.int64), 0
    if correction.level != "token":
        index, units = unit_index(mask, _units(mask) if unit_ids is None else unit_ids)
        sums_U = unit_sums(logs, index, units)
        if correction.level == "unit_geo":
            sums_U = sums_U / unit_sums(torch.ones_like(logs), index, units)
        of_unit = sums_U.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).to(logs.dtype)
        logs = torch.where(mask, of_unit[index], 0.0) if units else logs
    raw = logs.exp()
    lower = 0.0 if correction.lower is None else correction.lower
    upper = torch.inf if correction.upper is None else correction.upper
    is_outside = mask & ((raw < lower) | (raw > upper))
    keep = mask & ~is_outside if correction.mode == "mask" else mask
    weights = torch.where(keep, raw.clamp(lower, upper), torch.zeros_like(raw))
    if correction.normalise:
        weights = weights / _mean_weight(weights, keep, index, units)
    return ImportanceWeights(weights, keep, raw, is_outside)


def interpolated_proximal(
    logprobs: Tensor, behaviour_logprobs: Tensor, versions: Tensor, *, policy_version: int
) -> tuple[Tensor, Tensor]:
    """Return (proximal log-probs, alpha): between behaviour and current, by lag, without another forward pass.

    Source: Li et al. 2025, A-3PO (2512.06547). alpha = (lag - 1) / lag; lag 0 and context keep behaviour.
    """
    check_shapes(logprobs=logprobs, behaviour=behaviour_logprobs, versions=versions)
    lag = (policy_version - versions).clamp_min(0).masked_fill(versions < 0, 0).to(logprobs.dtype)
    alpha = ((lag - 1) / lag.clamp_min(1)).clamp_min(0)
    return behaviour_logprobs + alpha * (logprobs.detach() - behaviour_logprobs), alpha


def _units(mask: Tensor) -> Tensor:
    if mask.ndim != 2:
        raise ConfigError("unit_ids must be given for packed arrays: without them there are no units to multiply over")
    return torch.arange(len(mask), device=mask.device).unsqueeze(1).expand_as(mask)


def _mean_weight(weights: Tensor, keep: Tensor, index: Tensor, units: int) -> Tensor:
    """Return the mean over kept tokens, or over kept units when weights are per unit; 1 when nothing is kept."""
    if units:
        sizes_U = unit_sums(keep.to(weights.dtype), index, units)
        means_U = (unit_sums(weights, index, units) / sizes_U.clamp_min(1))[sizes_U > 0]
        return means_U.mean().to(weights.dtype) if len(means_U) else weights.new_ones(())
    kept_P = weights[keep]
    return kept_P.mean() if len(kept_P) and kept_P.sum() > 0 else weights.new_ones(())
