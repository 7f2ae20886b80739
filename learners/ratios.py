"""Log-ratios and ratios between policies, clamped where an exponential would stop meaning anything."""

import torch
from torch import Tensor

from turngate.runtime.errors import ConfigError, LearnerError

__all__ = [
    "LOG_RATIO_CLAMP",
    "ShapeError",
    "check_finite",
    "check_shapes",
    "log_ratio",
    "masked_in",
    "unit_constants",
    "unit_index",
    "unit_sums",
]

LOG_RATIO_CLAMP = 20.0
"""exp(20) is 5e8: beyond it a ratio carries no information and float32 sums lose everything else."""


class ShapeError(LearnerError, ValueError):
    """Arrays that must align do not."""


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, *, clamp: float = LOG_RATIO_CLAMP) -> Tensor:
    """Return the log-ratio per token, clamped to [-clamp, clamp]; the gradient is zero where it is clamped."""
    return (logprobs - old_logprobs).clamp(-clamp, clamp)


def check_shapes(**arrays: Tensor) -> None:
    """Raise ShapeError unless all arrays have one shape: broadcasting (B, 1) against (B, T) is never meant."""
    shapes = {name: tuple(array.shape) for name, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        raise ShapeError(f"token arrays must have one shape: got {shapes}; align and expand them first")


def check_finite(mask: Tensor, **arrays: Tensor) -> None:
    """Raise LearnerError unless every masked-in value is finite; what is masked out may hold anything."""
    for name, array in arrays.items():
        bad = mask & ~torch.isfinite(array.detach())
        if bad.any():
            at = tuple(bad.nonzero()[0].tolist())
            raise LearnerError(
                f"{name} must be finite where the mask is True: got {float(array.detach()[at])} (index {at}); "
                "mask the token or look at where the value comes from"
            )


def masked_in(mask: Tensor, **arrays: Tensor) -> list[Tensor]:
    """Return the arrays with 0 where the mask is False, so that nothing masked can reach a gradient.

    Raises: ShapeError: they differ in shape. LearnerError: a masked-in value is not finite.
    """
    check_shapes(mask=mask, **arrays)
    check_finite(mask, **arrays)
    return [array.masked_fill(~mask, 0.0) for array in arrays.values()]


def unit_index(mask: Tensor, *keys: Tensor) -> tuple[Tensor, int]:
    """Number the distinct combinations of `keys` among masked-in tokens, in the order of the keys.

    Args: mask: (..., ) bool. keys: integer arrays of the mask's shape, the most significant first.
    Returns: index of the mask's shape, -1 where the mask is False; number of units.
    """
    check_shapes(mask=mask, **{f"key_{i}": key for i, key in enumerate(keys)})
    index = torch.full(mask.shape, -1, dtype=torch.int64, device=mask.device)
    if not mask.any():
        return index, 0
    stacked_PK = torch.stack([key[mask].to(torch.int64) for key in keys], dim=-1)
    units, inverse_P = torch.unique(stacked_PK, dim=0, return_inverse=True)
    index[mask] = inverse_P
    return index, len(units)


def unit_sums(values: Tensor, index: Tensor, units: int) -> Tensor:
    """Return the sum of `values` over each unit, shape (units,), accumulated in float64; index -1 is in none."""
    inside = index >= 0
    sums_U = torch.zeros(units, dtype=torch.float64, device=values.device)
    return sums_U.index_add(0, index[inside], values[inside].to(torch.float64))


def unit_constants(values: Tensor, index: Tensor, units: int) -> Tensor:
    """Return the one value of each unit, shape (units,). Raises: ConfigError: a unit holds two different ones."""
    inside_P = index[index >= 0]
    values_P = values[index >= 0]
    values_U = values.new_zeros(units).scatter(0, inside_P, values_P)
    if not torch.equal(values_U[inside_P], values_P):
        raise ConfigError(
            "the advantage must be constant inside a unit: one ratio cannot serve two advantages; use smaller units, "
            "or advantages per turn or trajectory"
        )
    return values_U
