"""Policy losses: token-aligned arrays in, a loss per token out. Reduce with `learners.aggregation`.

All functions are pure, work in float32 and float64, on (B, T) or packed (N,) arrays, and differentiate with respect to
`logprobs` only: every other input is a constant. Masked-out positions give loss 0 and gradient 0 whatever they hold.
`GRPO` uses `ppo_loss`, `decoupled_ppo_loss` and `reinforce_loss`; `cispo_loss` and `unit_ratio_loss` are for learners
of your own.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from turngate.learners.ratios import LOG_RATIO_CLAMP, check_shapes, log_ratio, unit_index, unit_sums
from turngate.runtime.errors import ConfigError

__all__ = [
    "Clip",
    "Granularity",
    "TokenLoss",
    "UnitLoss",
    "UnitReduce",
    "cispo_loss",
    "decoupled_ppo_loss",
    "ppo_loss",
    "reinforce_loss",
    "unit_ratio_loss",
]

Granularity: TypeAlias = Literal["prod", "geo"]
"""`prod`: the unit's likelihood ratio (whole-action PPO). `geo`: its geometric mean per token (GSPO)."""
UnitReduce: TypeAlias = Literal["mean_over_units", "length"]
"""`mean_over_units`: every unit alike. `length`: units weigh by their number of tokens."""


@dataclass(frozen=True, slots=True)
class Clip:
    """The trust region around ratio 1, as offsets. There is no default that fits every granularity."""

    low: float = 0.2
    """Ratios below 1 - low are clipped when the advantage is negative."""
    high: float = 0.28
    """Ratios above 1 + high are clipped when the advantage is positive (clip-higher: DAPO, 2503.14476)."""
    dual: float | None = None
    """Cap on the ratio when the advantage is negative; above 1, usually 3 (Ye et al. 2020, 1912.09729)."""

    def __post_init__(self) -> None:
        if not (self.low >= 0 and self.high >= 0):
            raise ConfigError(f"clip offsets must be 0 or more: got low {self.low}, high {self.high}")
        if self.dual is not None and not self.dual > 1:
            raise ConfigError(f"dual clip must be above 1: got {self.dual}; below, it clips on-policy tokens")


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss per token, and where its gradient was removed. All in the shape of the inputs."""

    loss: Tensor
    ratio: Tensor
    """Detached; 1 where the mask is False."""
    is_clipped_high: Tensor
    is_clipped_low: Tensor
    is_clipped_dual: Tensor
    """bool; direction aware: only tokens that lost their gradient, for the reason named."""


@dataclass(frozen=True, slots=True)
class UnitLoss:
    """A loss over units (turns, sequences) and how each fared."""

    loss: Tensor
    """Scalar."""
    ratios_U: Tensor
    is_clipped_U: Tensor
    """Per unit, in the order of (row, unit id); detached."""


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: Clip,
    log_ratio_clamp: float = LOG_RATIO_CLAMP,
) -> TokenLoss:
    """Return the clipped surrogate per token.

    Source: Schulman et al. 2017 (1707.06347) with asymmetric and dual clip. At ratio 1 the loss is -A.
    Raises: ShapeError: the inputs differ in shape.
    """
    logprobs, old_logprobs, advantages = _inside(mask, logprobs, old_logprobs, advantages)
    ratio = log_ratio(logprobs, old_logprobs, clamp=log_ratio_clamp).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip.low, 1 + clip.high) * advantages)
    fixed = ratio.detach()
    is_dual = torch.zeros_like(mask)
    if clip.dual is not None:
        is_dual = mask & (advantages < 0) & (fixed > clip.dual)
        surrogate = torch.where(is_dual, clip.dual * advantages, surrogate)
    return TokenLoss(
        loss=-surrogate,
        ratio=fixed,
        is_clipped_high=mask & (advantages > 0) & (fixed > 1 + clip.high),
        is_clipped_low=mask & (advantages < 0) & (fixed < 1 - clip.low),
        is_clipped_dual=is_dual,
    )


def decoupled_ppo_loss(
    logprobs: Tensor, proximal_logprobs: Tensor, weights: Tensor, advantages: Tensor, mask: Tensor, *, clip: Clip
) -> TokenLoss:
    """Return the clipped surrogate around the proximal policy, times the weight of proximal over behaviour.

    Source: Hilton et al. 2022 (2110.00641); Fu et al. 2025 (2505.24298) eq. 5. Exactly one correction per gap: the
    ratio covers current over proximal, `weights` (see `offpolicy.is_weights`) covers proximal over behaviour.
    """
    (weights,) = _inside(mask, weights)
    surrogate = ppo_loss(logprobs, proximal_logprobs, advantages, mask, clip=clip)
    return TokenLoss(
        loss=weights * surrogate.loss,
        ratio=surrogate.ratio,
        is_clipped_high=surrogate.is_clipped_high,
        is_clipped_low=surrogate.is_clipped_low,
        is_clipped_dual=surrogate.is_clipped_dual,
    )


def reinforce_loss(logprobs: Tensor, weights: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return -weight * A * logprob per token, with detached weights of current over behaviour."""
    logprobs, weights, advantages = _inside(mask, logprobs, weights, advantages)
    return -weights.detach() * advantages * logprobs


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip: Clip
) -> tuple[Tensor, Tensor]:
    """Return (loss, coefficient) per token: the clipped ratio is a detached weight, so no token loses its gradient.

    Source: MiniMax-M1 2025 (2506.13585) eqs. 4-5. Offsets are from 1; `Clip(low=1)` means no lower bound, the
    canonical form.
    """
    logprobs, old_logprobs, advantages = _inside(mask, logprobs, old_logprobs, advantages)
    ratio = log_ratio(logprobs, old_logprobs).detach().exp()
    coefficient = ratio.clamp(1 - clip.low, 1 + clip.high) * mask
    return -coefficient * advantages * logprobs, coefficient


def unit_ratio_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    unit_ids: Tensor,
    mask: Tensor,
    *,
    kind: Granularity,
    clip: Clip,
    reduce: UnitReduce = "mean_over_units",
    row_ids: Tensor | None = None,
) -> UnitLoss:
    """Return the clipped surrogate with one ratio per unit: a turn, or a whole sequence.

    Product ratios grow like exp(length * drift), so long actions are clipped more; geometric ratios are free of length
    but are not the action's likelihood ratio, and need a clip range about 100 times smaller.
    Source: Zheng et al. 2025 GSPO (2507.18071); Li et al. 2025 Turn-PPO (2512.17008), ST-PPO (2511.20718).
    Args: unit_ids: integers, distinct within a row, -1 on tokens of no unit. row_ids: needed for packed arrays.
    Raises: ShapeError: shapes differ. ConfigError: the advantage is not constant inside a unit.
    """
    if kind not in ("prod", "geo") or reduce not in ("mean_over_units", "length"):
        raise ConfigError(f"kind must be prod or geo, reduce mean_over_units or length: got {kind!r}, {reduce!r}")
    mask = mask & (unit_ids >= 0)
    logprobs, old_logprobs, advantages = _inside(mask, logprobs, old_logprobs, advantages)
    rows = _row_ids(mask) if row_ids is None else row_ids
    index, units = unit_index(mask, rows, unit_ids)
    if units == 0:
        return UnitLoss((logprobs * 0).sum(), logprobs.new_empty(0), mask.new_empty(0))
    inside_P = index[mask]
    advantages_U = advantages.new_zeros(units).scatter(0, inside_P, advantages[mask])
    if not torch.equal(advantages_U[inside_P], advantages[mask]):
        raise ConfigError("the advantage must be constant inside a unit: one ratio cannot serve two advantages")
    sums_U = unit_sums(log_ratio(logprobs, old_logprobs), index, units)
    sizes_U = unit_sums(torch.ones_like(logprobs), index, units)
    log_ratios_U = (sums_U if kind == "prod" else sums_U / sizes_U).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    ratios_U = log_ratios_U.exp().to(logprobs.dtype)
    surrogate_U = torch.minimum(ratios_U * advantages_U, ratios_U.clamp(1 - clip.low, 1 + clip.high) * advantages_U)
    weights_U = torch.full_like(sizes_U, 1 / units) if reduce == "mean_over_units" else sizes_U / sizes_U.sum()
    fixed_U = ratios_U.detach()
    is_clipped_U = ((advantages_U > 0) & (fixed_U > 1 + clip.high)) | ((advantages_U < 0) & (fixed_U < 1 - clip.low))
    return UnitLoss(-(weights_U.to(logprobs.dtype) * surrogate_U).sum(), fixed_U, is_clipped_U)


def _row_ids(mask: Tensor) -> Tensor:
    if mask.ndim != 2:
        raise ConfigError(f"row_ids must be given for packed arrays: got a mask of {mask.ndim} dimensions")
    return torch.arange(len(mask), device=mask.device).unsqueeze(1).expand_as(mask)


def _inside(mask: Tensor, *arrays: Tensor) -> list[Tensor]:
    """Return the arrays with 0 where the mask is False, so that nothing masked can reach a gradient."""
    check_shapes(mask=mask, **{f"array_{i}": array for i, array in enumerate(arrays)})
    return [array.masked_fill(~mask, 0.0) for array in arrays]
