"""Credit from Monte Carlo values: every action against what the policy earns from where it was taken.

Source: Kazemnejad et al. 2024, VinePPO (arXiv 2410.01679). No critic, and no siblings: an episode teaches alone.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from turngate.learners.credit import Keep, Scored
from turngate.learners.turns import RewardsOf, action_turns, kept_trajectories, spread_turns
from turngate.learners.voting import group_handling
from turngate.runtime.group_branching import MC_VALUE
from turngate.runtime.monte_carlo import vine_advantages
from turngate.runtime.types import Batch, Trajectory

__all__ = ["valued_members", "vine_credit"]


def valued_members(batch: Batch, *, score_truncations: bool) -> tuple[Keep, dict[str, float]]:
    """Return who trains: episodes that ended, with a value before every action; and how many lack one."""
    keep: list[list[bool]] = []
    missing = 0
    for group in batch.groups:
        row: list[bool] = []
        for trajectory in group.trajectories:
            votes = group_handling(trajectory.end, score_truncations=score_truncations) == "vote"
            is_valued = votes and _is_valued(trajectory)
            missing += votes and not is_valued
            row.append(is_valued)
        keep.append(row)
    return keep, {"excluded_unvalued": float(missing)}


def vine_credit(scored: Scored, rewards: RewardsOf) -> Tensor:
    """Return r_t + V(h_t+1) - V(h_t) of every token's turn, float32 (N,); nothing follows the last.

    It contains the luck of the answer that was seen. Where a limit cut an episode short, what would have followed
    counts nothing, as in its return.
    """
    values: dict[int, dict[int, float]] = {}
    for number, trajectory in kept_trajectories(scored.batch, scored.keep):
        actions = action_turns(trajectory, rewards(trajectory))
        before = dict(zip((turn.index for turn in trajectory.turns), _values(trajectory), strict=True))
        found = vine_advantages([before[turn] for turn in actions.turns], actions.rewards_T.tolist())
        values[number] = dict(zip(actions.turns, found, strict=True))
    return spread_turns(scored.tokens, values)


def _values(trajectory: Trajectory) -> Sequence[float]:
    return [turn.scores.get(MC_VALUE, math.nan) for turn in trajectory.turns]


def _is_valued(trajectory: Trajectory) -> bool:
    """Whether every action has a value before it and a known reward."""
    pairs = list(zip(trajectory.turns, _values(trajectory), strict=True))
    is_paid = all(math.isfinite(turn.reward) for turn in trajectory.turns)
    return is_paid and trajectory.policy_tokens > 0 and all(math.isfinite(v) for turn, v in pairs if turn.length)
