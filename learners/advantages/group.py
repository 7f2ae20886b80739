"""Group-relative advantages: a trajectory against its siblings, sampled for the same task from the same start."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from turngate.learners.ratios import check_shapes
from turngate.runtime.errors import ConfigError, LearnerError

__all__ = [
    "GROUP_PRESETS",
    "Baseline",
    "GroupAdvantage",
    "GroupScheme",
    "Scale",
    "batch_reward_std",
    "group_advantages",
    "sample_advantages",
]

Baseline: TypeAlias = Literal["none", "mean", "loo"]
"""What is subtracted: nothing, the group mean, or the mean of the others (leave one out)."""
Scale: TypeAlias = Literal["none", "std_pop", "std_sample", "batch"]
"""What divides: nothing, the group's standard deviation (ddof 0 or 1), or that of the whole batch's rewards."""

_DEGENERATE = 1e-8
"""Rewards that differ by less than this, relative to their size, differ by rounding only."""


@dataclass(frozen=True, slots=True)
class GroupScheme:
    """One way to compare siblings."""

    baseline: Baseline = "mean"
    scale: Scale = "none"
    eps: float = 1e-6
    """Added to the divisor. 1e-6 as verl; TRL uses 1e-4, AReaL 1e-5."""
    singleton: Literal["zero", "raw"] = "zero"
    """What a lone valid member gets: nothing to compare with is no signal, so `zero`; `raw` keeps its reward."""

    def __post_init__(self) -> None:
        if self.baseline not in ("none", "mean", "loo"):
            raise ConfigError(f"baseline must be none, mean or loo: got {self.baseline!r}")
        if self.scale not in ("none", "std_pop", "std_sample", "batch"):
            raise ConfigError(f"scale must be none, std_pop, std_sample or batch: got {self.scale!r}")
        if self.singleton not in ("zero", "raw"):
            raise ConfigError(f"singleton must be zero or raw: got {self.singleton!r}")
        if not self.eps >= 0:
            raise ConfigError(f"eps must be 0 or more: got {self.eps}")


GROUP_PRESETS: dict[str, GroupScheme] = {
    "grpo": GroupScheme("mean", "std_sample"),
    "dr_grpo": GroupScheme("mean", "none"),
    "rloo": GroupScheme("loo", "none"),
    "batch_std": GroupScheme("mean", "batch"),
}
"""GRPO: Shao et al. 2024 (2402.03300). Dr.GRPO: Liu et al. 2025 (2503.20783). RLOO: Ahmadian et al. 2024 (2402.14740).
batch_std: TRL's scale_rewards="batch"."""


@dataclass(frozen=True, slots=True)
class GroupAdvantage:
    """What group statistics say about each member."""

    advantages_G: Tensor
    """In the dtype of the rewards; 0 for members that do not count."""
    keep_G: Tensor
    """bool; members whose tokens belong in the loss. Degenerate groups keep theirs, with advantage 0."""
    n_valid: int
    is_degenerate: bool
    """True when the members cannot be told apart: all advantages are exactly 0."""


def group_advantages(
    rewards_G: Tensor, valid_G: Tensor | None = None, *, scheme: GroupScheme, batch_std: float | None = None
) -> GroupAdvantage:
    """Return the advantages of one group.

    Args: rewards_G: undiscounted returns; NaN marks a member that could not be scored. valid_G: False for members
    that neither vote nor train (truncated without a critic, failed). batch_std: for `scale="batch"`.
    Raises: LearnerError: a reward is infinite.
    """
    valid_G = torch.ones_like(rewards_G, dtype=torch.bool) if valid_G is None else valid_G
    check_shapes(rewards=rewards_G, valid=valid_G)
    if torch.isinf(rewards_G).any():
        raise LearnerError(f"rewards must be finite: got {rewards_G.tolist()}; fix the environment's reward")
    keep_G = valid_G & ~torch.isnan(rewards_G)
    votes_N = rewards_G[keep_G].to(torch.float64)
    advantages_N, is_degenerate = _of_valid(votes_N, scheme, batch_std)
    advantages_G = torch.zeros_like(rewards_G)
    advantages_G[keep_G] = advantages_N.to(rewards_G.dtype)
    return GroupAdvantage(advantages_G, keep_G, len(votes_N), is_degenerate)


def sample_advantages(traj_of_sample: Sequence[int], rewards_I: Tensor, *, scheme: GroupScheme) -> Tensor:
    """Return the advantage of each training sample (turn, segment): its trajectory's, with one vote per trajectory.

    Several samples of one trajectory must not vote several times, or long trajectories set the baseline
    (microsoft/agent-lightning#444).
    """
    return group_advantages(rewards_I, scheme=scheme).advantages_G[torch.tensor(traj_of_sample, dtype=torch.int64)]


def batch_reward_std(rewards: Sequence[Tensor], valid: Sequence[Tensor]) -> float:
    """Return the standard deviation (ddof 1) over all countable rewards of a batch; 0 for fewer than two."""
    counted = [r[v & ~torch.isnan(r)].to(torch.float64) for r, v in zip(rewards, valid, strict=True)]
    return float(torch.cat(counted).std()) if sum(map(len, counted)) > 1 else 0.0


def _of_valid(rewards_N: Tensor, scheme: GroupScheme, batch_std: float | None) -> tuple[Tensor, bool]:
    n = len(rewards_N)
    if n < 2:
        return (rewards_N if scheme.singleton == "raw" else torch.zeros_like(rewards_N)), True
    spread = float(rewards_N.max() - rewards_N.min())
    if spread <= _DEGENERATE * max(1.0, float(rewards_N.abs().max())):
        return torch.zeros_like(rewards_N), True
    deviations_N = rewards_N - rewards_N.mean()
    centred_N = {"none": rewards_N, "mean": deviations_N, "loo": deviations_N * n / (n - 1)}[scheme.baseline]
    return centred_N / _divisor(deviations_N, scheme, batch_std), False


def _divisor(deviations_N: Tensor, scheme: GroupScheme, batch_std: float | None) -> float | Tensor:
    if scheme.scale == "none":
        return 1.0
    if scheme.scale == "batch":
        if batch_std is None:
            raise ConfigError("batch_std must be given for scale='batch': got None; see batch_reward_std")
        return batch_std + scheme.eps
    # The members' own spread, also under leave-one-out: that of the peers vanishes for one outlier among equals.
    ddof = 1 if scheme.scale == "std_sample" else 0
    return (deviations_N.square().sum() / (len(deviations_N) - ddof)).sqrt() + scheme.eps
