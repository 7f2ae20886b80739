"""Who votes in a group and who trains: from how each episode ended, as data, never guessed from lengths."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from turngate.envs.base import End
from turngate.learners.advantages.group import GroupAdvantage, GroupScheme, batch_reward_std, group_advantages
from turngate.runtime.errors import RecordError
from turngate.runtime.types import Batch, Group, Trajectory

__all__ = ["BatchAdvantages", "CriticHandling", "GroupHandling", "assess", "critic_handling", "group_handling"]

CriticHandling: TypeAlias = Literal["reward", "bootstrap", "drop"]
GroupHandling: TypeAlias = Literal["vote", "exclude"]


def critic_handling(end: End) -> CriticHandling:
    """Return what a value target does at this end: nothing follows, bootstrap, or the episode does not count."""
    if end.is_terminal:
        return "reward"
    return "bootstrap" if end.is_truncation else "drop"


def group_handling(end: End, *, score_truncations: bool = False) -> GroupHandling:
    """Return whether an episode votes and trains in its group when there is no critic."""
    return "vote" if end.is_terminal or (end.is_truncation and score_truncations) else "exclude"


@dataclass(frozen=True, slots=True)
class BatchAdvantages:
    """Group statistics of a whole batch."""

    advantages_I: torch.Tensor
    """float32 (trajectories,), groups in order, members in order; 0 for those that do not count."""
    keep: list[list[bool]]
    """Per group and member: whether its tokens belong in the loss."""
    is_degenerate_Q: torch.Tensor
    """bool (groups,): the rewards, without penalties, do not tell the members apart."""
    metrics: dict[str, float]


def assess(
    batch: Batch,
    scheme: GroupScheme,
    *,
    min_group_fraction: float = 0.5,
    score_truncations: bool = False,
    penalties_I: torch.Tensor | None = None,
    return_of: Callable[[Trajectory], float] = lambda trajectory: trajectory.reward,
) -> BatchAdvantages:
    """Return every trajectory's advantage within its group.

    Members that failed or were cut short neither vote nor train. A group with fewer than
    max(2, min_group_fraction * size) members left is dropped whole and counted: what is left of it is a biased sample.
    Args: penalties_I: subtracted from the returns, so that baseline and advantage see the same. Which groups are
    degenerate, and the metrics, are told from the returns without them. return_of: what an episode is compared by.
    Raises: RecordError: a return is infinite.
    """
    rewards = [_rewards(group, return_of) for group in batch.groups]
    valid: list[torch.Tensor] = []
    n_short = 0
    for group, rewards_G in zip(batch.groups, rewards, strict=True):
        valid_G = torch.tensor([_is_valid(t, score_truncations) for t in group.trajectories], dtype=torch.bool)
        is_short = int((valid_G & ~rewards_G.isnan()).sum()) < max(2.0, min_group_fraction * len(valid_G))
        n_short += is_short and len(valid_G) > 1
        valid.append(torch.zeros_like(valid_G) if is_short and len(valid_G) > 1 else valid_G)
    results = _compare(rewards, valid, scheme)
    advantages = [r.advantages_G for r in results]
    if penalties_I is not None:
        penalties = penalties_I.to(torch.float64).split([len(r) for r in rewards])
        penalised = _compare([r - p for r, p in zip(rewards, penalties, strict=True)], valid, scheme)
        # Where the rewards say nothing, differences of the penalty are no signal either: divided by their own
        # deviation they would push as hard as a success (huggingface/trl#7068). A lone member that keeps its reward
        # has no such divisor.
        advantages = [
            r.advantages_G if r.is_degenerate and r.n_valid > 1 else p.advantages_G
            for r, p in zip(results, penalised, strict=True)
        ]
    return BatchAdvantages(
        advantages_I=torch.cat(advantages).to(torch.float32) if advantages else torch.zeros(0),
        keep=[[bool(k) for k in r.keep_G] for r in results],
        is_degenerate_Q=torch.tensor([r.is_degenerate for r in results], dtype=torch.bool),
        metrics=_metrics(batch, rewards, results, n_short),
    )


def _compare(
    rewards: Sequence[torch.Tensor], valid: Sequence[torch.Tensor], scheme: GroupScheme
) -> list[GroupAdvantage]:
    std = batch_reward_std(rewards, valid) if scheme.scale == "batch" else None
    return [group_advantages(r, v, scheme=scheme, batch_std=std) for r, v in zip(rewards, valid, strict=True)]


def _rewards(group: Group, return_of: Callable[[Trajectory], float]) -> torch.Tensor:
    rewards_G = torch.tensor([return_of(trajectory) for trajectory in group.trajectories], dtype=torch.float64)
    for trajectory, reward in zip(group.trajectories, rewards_G.tolist(), strict=True):
        if reward in (float("inf"), float("-inf")):
            raise RecordError(f"reward must be finite: got {reward} (trajectory {trajectory.id}); fix the environment")
    return rewards_G


def _is_valid(trajectory: Trajectory, score_truncations: bool) -> bool:
    return group_handling(trajectory.end, score_truncations=score_truncations) == "vote"


def _metrics(
    batch: Batch, rewards: Sequence[torch.Tensor], results: Sequence[GroupAdvantage], n_short: int
) -> dict[str, float]:
    trajectories = [t for group in batch.groups for t in group.trajectories]
    counted = [r.keep_G for r in results]
    kept_R = torch.cat([r[k] for r, k in zip(rewards, counted, strict=True)]) if results else torch.zeros(0)

    def fraction(count: float, of: int) -> float:
        return count / of if of else 0.0

    return {
        # Of all groups on offer: one in which nobody votes teaches as little as one of equals.
        "degenerate_fraction": fraction(sum(r.is_degenerate for r in results), len(results)),
        "incomplete_groups": float(n_short),
        "valid_members_mean": fraction(sum(r.n_valid for r in results), len(results)),
        "excluded_truncated": float(sum(t.end.is_truncation for t in trajectories)),
        "excluded_failed": float(sum(t.end.is_failure for t in trajectories)),
        "excluded_unscorable": float(sum(int(r.isnan().sum()) for r in rewards)),
        "group_reward_mean": float(kept_R.mean()) if len(kept_R) else 0.0,
        "group_reward_std": float(kept_R.std()) if len(kept_R) > 1 else 0.0,
    }
