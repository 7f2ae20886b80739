"""Return-to-go with a baseline per turn index: turn 3 against the siblings' turn 3."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from turngate.learners.advantages.group import GroupScheme, group_advantages
from turngate.learners.advantages.steps import step_returns
from turngate.learners.ratios import ShapeError
from turngate.runtime.errors import ConfigError, LearnerError

__all__ = ["Peers", "turn_index_advantages"]

Peers: TypeAlias = Literal["all", "alive"]
"""Whose return-to-go makes the baseline at turn t: that of all others, or of those still going at t."""

_LEAVE_ONE_OUT = GroupScheme("loo", "none")


def turn_index_advantages(
    rewards: Sequence[Tensor], valid_G: Tensor | None = None, *, gamma: float = 1.0, peers: Peers = "all"
) -> list[Tensor]:
    """Return `A_it = G_it - mean of the others' G_jt`, (T_i,) per trajectory; G_jt is 0 once trajectory j has ended.

    The baseline must not depend on what trajectory i does from t on, and counts everyone: a trajectory that is over
    will earn nothing more, which is its return. A group of one gets 0.
    Args: rewards: (T_i,) per trajectory of one group; NaN marks one that could not be scored. valid_G: False for those
    that neither vote nor train.
    Raises: ConfigError: peers is `alive`, which is biased. ShapeError; LearnerError: an infinite reward.
    """
    if peers == "alive":
        raise ConfigError(
            "peers must be all: got 'alive'; a baseline over the trajectories still going at each turn subtracts as "
            "many terms as the policy chooses to take turns, so stopping itself is rewarded or punished and the "
            "gradient is biased (verl#7244); 'all' counts ended trajectories as 0 and is not"
        )
    if peers != "all":
        raise ConfigError(f"peers must be all: got {peers!r}")
    if valid_G is not None and valid_G.shape != (len(rewards),):
        raise ShapeError(f"valid must be one per trajectory: expected ({len(rewards)},), got {tuple(valid_G.shape)}")
    lengths = [len(rewards_T) for rewards_T in rewards]
    returns_GT = torch.zeros(len(rewards), max(lengths, default=0), dtype=torch.float64)
    for i, rewards_T in enumerate(rewards):
        if torch.isinf(rewards_T).any():
            raise LearnerError(
                f"rewards must be finite: got {rewards_T.tolist()} (trajectory {i}); fix the environment"
            )
        returns_GT[i, : lengths[i]] = step_returns(rewards_T.to(torch.float64), gamma=gamma)
    scored_G = ~returns_GT.isnan().any(dim=1)
    valid_G = scored_G if valid_G is None else valid_G & scored_G
    columns = [group_advantages(column_G, valid_G, scheme=_LEAVE_ONE_OUT).advantages_G for column_G in returns_GT.T]
    advantages_TG = torch.stack(columns) if columns else returns_GT.T
    return [advantages_TG[: lengths[i], i].to(rewards_T) for i, rewards_T in enumerate(rewards)]
