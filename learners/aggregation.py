"""How token losses become one number: a weight per token, fixed once per optimizer step.

    loss = sum(weight * token_loss)

The weights are computed over all tokens of the optimizer step, before it is cut into micro-batches, so neither
micro-batching, nor padding, nor the order of rows changes the loss (huggingface/trl#3231, verl#3741).
"""

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from turngate.learners.ratios import unit_index, unit_sums
from turngate.runtime.errors import ConfigError

__all__ = ["AGGREGATIONS", "Aggregation", "aggregate", "token_weights"]

Aggregation: TypeAlias = Literal[
    "token_mean",
    "token_sum",
    "prompt_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "turn_mean",
    "traj_mean",
]
"""`token_mean`: every token alike (DAPO). `prompt_mean`: every group alike. `seq_mean_token_mean`: every row alike
(GRPO). `seq_mean_token_sum[_norm]`: rows weigh by length [divided by a constant] (Dr.GRPO). `turn_mean`: every turn
alike. `traj_mean`: every trajectory alike, over all its segments."""
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


def token_weights(
    mask: Tensor,
    mode: Aggregation,
    *,
    row_ids: Tensor | None = None,
    turn_ids: Tensor | None = None,
    trajectory_ids: Tensor | None = None,
    group_ids: Tensor | None = None,
    length_constant: float | None = None,
    count_empty: bool = False,
) -> Tensor:
    """Return the weight of every token's loss, float64 in the mask's shape, 0 where the mask is False.

    Args: mask: bool (B, T), or packed (N,), of one whole optimizer step. row_ids and the other ids: integers in the
    mask's shape; only those that `mode` reads are needed, and `row_ids` defaults to the first axis of (B, T).
    length_constant: divisor of `seq_mean_token_sum_norm`, a configured length and never the padded width.
    count_empty: whether rows without a masked-in token stay in the number of rows.
    Source: algorithms of Shao et al. 2024 (2402.03300), Yu et al. 2025 (2503.14476), Liu et al. 2025 (2503.20783).
    """
    if mode not in AGGREGATIONS:
        raise ConfigError(f"aggregation must be one of {', '.join(AGGREGATIONS)}: got {mode!r}")
    if row_ids is None and mask.ndim == 2:
        row_ids = torch.arange(len(mask), device=mask.device).unsqueeze(1).expand_as(mask)
    ones = mask.to(torch.float64)

    def need(ids: Tensor | None, name: str) -> Tensor:
        if ids is None:
            raise ConfigError(f"aggregation {mode} must know {name}: got None; pass it in the mask's shape")
        return ids

    def over(*keys: Tensor) -> tuple[Tensor, int]:
        """Return the number of tokens in each token's unit, and the number of units."""
        index, units = unit_index(mask, *keys)
        sizes_U = unit_sums(ones, index, units)
        return torch.where(mask, sizes_U[index] if units else ones, 1.0), max(units, 1)

    if mode == "token_sum":
        return ones
    if mode == "token_mean":
        return ones / ones.sum().clamp_min(1.0)
    if mode == "prompt_mean":
        sizes, groups = over(need(group_ids, "group_ids"))
        return ones / sizes / groups
    if mode == "traj_mean":
        sizes, trajectories = over(need(trajectory_ids, "trajectory_ids"))
        return ones / sizes / trajectories
    if mode == "turn_mean":
        owner = trajectory_ids if trajectory_ids is not None else need(row_ids, "trajectory_ids")
        sizes, turns = over(owner, need(turn_ids, "turn_ids"))
        return ones / sizes / turns
    rows_key = need(row_ids, "row_ids")
    sizes, rows = over(rows_key)
    rows = max(int(torch.unique(rows_key).numel()), 1) if count_empty else rows
    if mode == "seq_mean_token_mean":
        return ones / sizes / rows
    if mode == "seq_mean_token_sum":
        return ones / rows
    if length_constant is None or not length_constant > 0:
        raise ConfigError(f"length_constant must be a positive length: got {length_constant}; set it in the config")
    return ones / (rows * length_constant)


def aggregate(token_loss: Tensor, weights: Tensor) -> Tensor:
    """Return sum(weights * token_loss) as a scalar; tokens of weight 0 are never read, whatever they hold."""
    inside = weights != 0
    # where, not a product: 0 * NaN from a masked token would poison loss and gradient.
    safe_loss = torch.where(inside, token_loss, torch.zeros((), dtype=token_loss.dtype, device=token_loss.device))
    return (safe_loss * weights.to(token_loss.dtype)).sum()
