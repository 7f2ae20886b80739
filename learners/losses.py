"""Policy losses: token-aligned arrays in, a loss per token out. Reduce with `learners.aggregation`.

All functions are pure, work in float32 and float64, on (B, T) or packed (N,) arrays, and differentiate with respect to
`logprobs` only: every other input is a constant. Masked-out positions give loss 0 and gradient 0 whatever they hold; a
masked-in value that is not finite is an error. `learners.objective` chooses among them for the learners.
"""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from turngate.learners.ratios import (
    LOG_RATIO_CLAMP,
    log_ratio,
    masked_in,
    unit_constants,
    unit_index,
    unit_sums,
)
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
    "unit_ppo_loss",
    "unit_ratio_loss",
    "weighted",
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
    Raises: ShapeError: the inputs differ in shape. LearnerError: a masked-in value is not finite.
    """
    logprobs, old_logprobs, advantages = masked_in(
        mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages
    )
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
    return weighted(ppo_loss(logprobs, proximal_logprobs, advantages, mask, clip=clip), weights, mask)


def weighted(surrogate: TokenLoss, weights: Tensor, mask: Tensor) -> TokenLoss:
    """Return the surrogate times detached weights, one per token; what was clipped stays as it is."""
    (weights,) = masked_in(mask, weights=weights.detach())
    return replace(surrogate, loss=weights * surrogate.loss)


def reinforce_loss(logprobs: Tensor, weights: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return -weight * A * logprob per token, with detached weights of current over behaviour."""
    logprobs, weights, advantages = masked_in(mask, logprobs=logprobs, weights=weights, advantages=advantages)
    return -weights.detach() * advantages * logprobs


def cispo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip: Clip
) -> tuple[Tensor, Tensor]:
    """Return (loss, coefficient) per token: the clipped ratio is a detached weight, so no token loses its gradient.

    Source: MiniMax-M1 2025 (2506.13585) eqs. 4-5. Offsets are from 1; `Clip(low=1)` means no lower bound, the
    canonical form.
    """
    logprobs, old_logprobs, advantages = masked_in(
        mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages
    )
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
    if reduce not in ("mean_over_units", "length"):
        raise ConfigError(f"reduce must be mean_over_units or length: got {reduce!r}")
    mask = mask & (unit_ids >= 0)
    rows = _row_ids(mask) if row_ids is None else row_ids
    index, units = unit_index(mask, rows, unit_ids)
    made = _unit_surrogates(logprobs, old_logprobs, advantages, mask, index, units, kind=kind, clip=clip)
    if units == 0:
        return UnitLoss(made.surrogates_U.sum(), made.ratios_U, made.is_high_U)
    weights_U = torch.full_like(made.sizes_U, 1 / units)
    if reduce == "length":
        weights_U = made.sizes_U / made.sizes_U.sum()
    loss = -(weights_U.to(logprobs.dtype) * made.surrogates_U).sum()
    return UnitLoss(loss, made.ratios_U, made.is_high_U | made.is_low_U | made.is_dual_U)


def unit_ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    unit_ids: Tensor,
    mask: Tensor,
    *,
    kind: Granularity,
    clip: Clip,
) -> TokenLoss:
    """Return to every token the surrogate, ratio and clipping of its unit, to be reduced like any token loss.

    Token weights that add up to 1/U over each unit (`turn_mean`, `traj_mean`) make it `unit_ratio_loss` with
    `mean_over_units`; `token_mean` makes it the one with `length`.
    Args: unit_ids: integers >= 0, distinct over the whole array. All masked-in tokens of a unit must be given.
    Raises: as `unit_ratio_loss`.
    """
    index, units = unit_index(mask, unit_ids)
    made = _unit_surrogates(logprobs, old_logprobs, advantages, mask, index, units, kind=kind, clip=clip)
    if units == 0:
        loss = torch.zeros_like(logprobs) + made.surrogates_U.sum()
        return TokenLoss(loss, torch.ones_like(logprobs), ~mask & mask, ~mask & mask, ~mask & mask)
    return TokenLoss(
        loss=torch.where(mask, -made.surrogates_U[index], 0.0),
        ratio=torch.where(mask, made.ratios_U[index], 1.0),
        is_clipped_high=mask & made.is_high_U[index],
        is_clipped_low=mask & made.is_low_U[index],
        is_clipped_dual=mask & made.is_dual_U[index],
    )


@dataclass(frozen=True, slots=True)
class _Units:
    """(U,) arrays; only the surrogates carry a gradient. Without any unit the surrogates are one connected zero."""

    surrogates_U: Tensor
    ratios_U: Tensor
    sizes_U: Tensor
    is_high_U: Tensor
    is_low_U: Tensor
    is_dual_U: Tensor


def _unit_surrogates(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    index: Tensor,
    units: int,
    *,
    kind: Granularity,
    clip: Clip,
) -> _Units:
    if kind not in ("prod", "geo"):
        raise ConfigError(f"kind must be prod or geo: got {kind!r}")
    logprobs, old_logprobs, advantages = masked_in(
        mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages
    )
    if units == 0:
        none = mask.new_empty(0)
        empty = logprobs.new_empty(0)
        return _Units((logprobs * 0).sum().unsqueeze(0), empty, empty, none, none, none)
    advantages_U = unit_constants(advantages, index, units)
    sums_U = unit_sums(log_ratio(logprobs, old_logprobs), index, units)
    sizes_U = unit_sums(torch.ones_like(logprobs), index, units)
    logs_U = (sums_U if kind == "prod" else sums_U / sizes_U).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    ratios_U = logs_U.exp().to(logprobs.dtype)
    surrogates_U = torch.minimum(ratios_U * advantages_U, ratios_U.clamp(1 - clip.low, 1 + clip.high) * advantages_U)
    fixed_U = ratios_U.detach()
    is_dual_U = torch.zeros_like(fixed_U, dtype=torch.bool)
    if clip.dual is not None:
        is_dual_U = (advantages_U < 0) & (fixed_U > clip.dual)
        surrogates_U = torch.where(is_dual_U, clip.dual * advantages_U, surrogates_U)
    return _Units(
        surrogates_U=surrogates_U,
        ratios_U=fixed_U,
        sizes_U=sizes_U,
        is_high_U=(advantages_U > 0) & (fixed_U > 1 + clip.high),
        is_low_U=(advantages_U < 0) & (fixed_U < 1 - clip.low),
        is_dual_U=is_dual_U,
    )


def _row_ids(mask: Tensor) -> Tensor:
    if mask.ndim != 2:
        raise ConfigError(f"row_ids must be given for packed arrays: got a mask of {mask.ndim} dimensions")
    return torch.arange(len(mask), device=mask.device).unsqueeze(1).expand_as(mask)
