"""Recovery as a critic sees it, and priorities of restarts; the plain functions live where the runtime can use them.

With noisy values, drops are noise too. Metrics by value therefore stand beside those by the environment's word, which
the runtime reports, under names of their own.
"""

from collections.abc import Sequence

from turngate.envs.base import End
from turngate.runtime.errors import LearnerError
from turngate.runtime.recovery import (
    EpisodeMistakes,
    PlayedEpisode,
    RecoveryMetrics,
    beta_learnability,
    find_mistakes,
    mixed_with_uniform,
    recovery_metrics,
    restart_weights,
)
from turngate.runtime.types import Trajectory

__all__ = [
    "EpisodeMistakes",
    "PlayedEpisode",
    "RecoveryMetrics",
    "beta_learnability",
    "find_mistakes",
    "mixed_with_uniform",
    "recovery_metrics",
    "restart_weights",
    "value_recovery_metrics",
    "valued_episode",
]


def value_recovery_metrics(
    trajectories: Sequence[Trajectory], values: Sequence[Sequence[float | None]], *, tau: float
) -> dict[str, float]:
    """Return recovery metrics in which a mistake is a drop of V(h_t) by `tau` or more from one turn to the next.

    Only terminal episodes from task starts count: others have no outcome to end in, or began amid a mistake.
    Args: values: per trajectory and turn V(h_t) before the turn, as `valued_episode` takes them.
    Raises: LearnerError: values and turns do not belong together. ConfigError: as `find_mistakes`.
    """
    if len(values) != len(trajectories):
        raise LearnerError(f"values must be given per trajectory: expected {len(trajectories)} rows, got {len(values)}")
    pairs = zip(trajectories, values, strict=True)
    episodes = [valued_episode(t, v) for t, v in pairs if t.restarted_from is None and t.end.is_terminal and t.turns]
    found = recovery_metrics(episodes, tau=tau)
    return {
        "value_mistake_rate": found.mistake_rate_per_turn,
        "value_mistake_rate_self_inflicted": found.self_inflicted_rate_per_turn,
        "value_state_recovery_rate": found.state_recovery_rate,
        "value_recovery_latency": found.mean_latency,
        "value_recovery_rate": found.episode_recovery_rate,
        "value_clean_success": found.clean_success_rate,
    }


def valued_episode(trajectory: Trajectory, values: Sequence[float | None]) -> PlayedEpisode:
    """Return a terminal episode with the value before each turn, and the outcome after the last.

    None stands for a value that nobody estimated, as before injected turns, which have no tokens. It is taken to be the
    one before, so that a drop is blamed on the turn that something else chose and not on the policy's.
    Raises: LearnerError: not one value came for every turn, or none is known.
    """
    if len(values) != len(trajectory.turns):
        raise LearnerError(
            f"values must be given per turn: expected {len(trajectory.turns)}, got {len(values)} "
            f"(trajectory {trajectory.id}); None stands for those that are not known"
        )
    latest = next((v for v in values if v is not None), None)
    if latest is None:
        raise LearnerError(f"a value must be known: got none of {len(values)} turns (trajectory {trajectory.id})")
    filled: list[float] = []
    for value in values:
        latest = latest if value is None else value
        filled.append(latest)
    success = trajectory.end is End.success
    return PlayedEpisode(
        success=success,
        values=(*filled, trajectory.outcome),
        injected=tuple(turn.injected for turn in trajectory.turns),
    )
