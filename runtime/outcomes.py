"""How a batch's episodes went, told apart by where they started and by who acted.

Success means success of the policy from the task's start. Episodes that start from a kept state, or in which something
else acted, are easier or harder than that, so they have figures of their own.
"""

import math
from collections.abc import Callable, Sequence

from turngate.envs.base import End
from turngate.runtime.recovery import PlayedEpisode, recovery_metrics
from turngate.runtime.types import Trajectory, Turn

__all__ = ["is_clean_root", "outcome_row", "played_episode", "recovery_row"]


def is_clean_root(trajectory: Trajectory) -> bool:
    """Return whether the policy alone played this episode, from its task's start."""
    return trajectory.restarted_from is None and not any(turn.injected for turn in trajectory.turns)


def outcome_row(trajectories: Sequence[Trajectory], prefix: str = "") -> dict[str, float]:
    """Return success, reward, truncated, turns and generated tokens as means over the trajectories; NaN over none."""
    n = len(trajectories)
    sums = {
        "success": sum(t.end is End.success for t in trajectories),
        "reward": sum(t.reward for t in trajectories),
        "truncated": sum(t.end.is_truncation for t in trajectories),
        "turns": sum(len(t.turns) for t in trajectories),
        "tokens": sum(t.policy_tokens for t in trajectories),
    }
    return {prefix + name: total / n if n else math.nan for name, total in sums.items()}


def recovery_row(
    trajectories: Sequence[Trajectory], is_mistake: Callable[[Turn], bool] | None = None
) -> dict[str, float]:
    """Return how episodes from task starts go after mistakes, and how those went that started from a kept state.

    A turn is a mistake when it was invalid or injected, or `is_mistake` says so. `mistake_rate` is the policy's own
    mistakes over its own turns, `recovery_rate` success over the episodes with a mistake, `clean_success` over those
    without. Figures of restarts and of injected episodes are there only when the batch has some.
    """
    roots = [t for t in trajectories if t.restarted_from is None]
    restarts = [t for t in trajectories if t.restarted_from is not None]
    injected = [t for t in roots if not is_clean_root(t)]
    found = recovery_metrics([played_episode(t, is_mistake) for t in roots])
    row = {
        "mistake_rate": found.self_inflicted_rate_per_turn,
        "recovery_rate": found.episode_recovery_rate,
        "clean_success": found.clean_success_rate,
    }
    if injected:
        row["injected_share"] = len(injected) / len(trajectories)
        row["injected_success"] = outcome_row(injected)["success"]
        row["recovery_rate_injected"] = found.injected_recovery_rate
        row["recovery_rate_self_inflicted"] = found.self_inflicted_recovery_rate
    if restarts:
        row["restart_share"] = len(restarts) / len(trajectories)
        row |= outcome_row(restarts, "restart_")
    return row


def played_episode(trajectory: Trajectory, is_mistake: Callable[[Turn], bool] | None = None) -> PlayedEpisode:
    """Return an episode as the recovery metrics read it, its mistakes by the environment's word."""
    return PlayedEpisode(
        success=trajectory.end is End.success,
        flags=tuple(
            not turn.valid or turn.injected or (is_mistake is not None and bool(is_mistake(turn)))
            for turn in trajectory.turns
        ),
        injected=tuple(turn.injected for turn in trajectory.turns),
    )
