"""Episodes as sequences of actions: which turns the policy took, what each was paid, where its tokens lie."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from turngate.learners.batch import TokenBatch
from turngate.runtime.errors import RecordError
from turngate.runtime.types import Batch, Trajectory

__all__ = [
    "ActionTurns",
    "RewardsOf",
    "action_turns",
    "kept_trajectories",
    "recorded_rewards",
    "spread_turns",
    "turn_tokens",
]

RewardsOf: TypeAlias = Callable[[Trajectory], Sequence[float]]
"""What a learner pays for each recorded turn of a trajectory, NaN where it cannot be told."""


def recorded_rewards(trajectory: Trajectory) -> Sequence[float]:
    """Return what the environment paid for each turn: the sum of all its components."""
    return [turn.reward for turn in trajectory.turns]


@dataclass(frozen=True, slots=True)
class ActionTurns:
    """The turns of one trajectory in which the policy said something."""

    turns: tuple[int, ...]
    """Turn ids, ascending."""
    rewards_T: Tensor
    """float64; what each was paid. A turn without tokens of the policy is part of the transition: what it earned
    belongs to the action before."""
    orphaned: float
    """What was paid before the policy's first action: nobody's credit, and left out."""


def action_turns(trajectory: Trajectory, rewards: Sequence[float]) -> ActionTurns:
    """Return the policy's turns with their rewards.

    Raises: RecordError: a reward is infinite, or not one came for every turn.
    """
    if len(rewards) != len(trajectory.turns):
        raise RecordError(
            f"every turn must have a reward: expected {len(trajectory.turns)}, got {len(rewards)} "
            f"(trajectory {trajectory.id})"
        )
    turns: list[int] = []
    paid: list[float] = []
    orphaned = 0.0
    for turn, reward in zip(trajectory.turns, rewards, strict=True):
        if reward in (float("inf"), float("-inf")):
            raise RecordError(
                f"reward must be finite: got {reward} (trajectory {trajectory.id}, turn {turn.index}); fix the "
                "environment"
            )
        if turn.length:
            turns.append(turn.index)
            paid.append(reward)
        elif paid:
            paid[-1] += reward
        elif reward == reward:  # what cannot be told is nobody's either
            orphaned += reward
    return ActionTurns(tuple(turns), torch.tensor(paid, dtype=torch.float64), orphaned)


def kept_trajectories(batch: Batch, keep: Sequence[Sequence[bool]]) -> Iterator[tuple[int, Trajectory]]:
    """Yield the number, as in `trajectory_ids_N`, and the record of every kept trajectory."""
    number = 0
    for group, kept in zip(batch.groups, keep, strict=True):
        for trajectory, is_kept in zip(group.trajectories, kept, strict=True):
            if is_kept:
                yield number, trajectory
            number += 1


def turn_tokens(tokens: TokenBatch) -> dict[int, dict[int, Tensor]]:
    """Return the positions of the masked-in tokens, in order, by trajectory number and turn id, both ascending."""
    mask_N = tokens.mask_N.numpy()
    positions_P = np.flatnonzero(mask_N)
    trajectories_P, turns_P = tokens.trajectory_ids_N.numpy()[mask_N], tokens.turn_ids_N.numpy()[mask_N]
    order_P = np.lexsort((positions_P, turns_P, trajectories_P))
    positions_P, trajectories_P, turns_P = positions_P[order_P], trajectories_P[order_P], turns_P[order_P]
    is_new_P = np.ones(len(order_P), dtype=bool)
    is_new_P[1:] = (np.diff(trajectories_P) != 0) | (np.diff(turns_P) != 0)
    edges = [*np.flatnonzero(is_new_P), len(order_P)]
    found: dict[int, dict[int, Tensor]] = {}
    for start, end in pairwise(edges):
        turns = found.setdefault(int(trajectories_P[start]), {})
        turns[int(turns_P[start])] = torch.from_numpy(positions_P[start:end])
    return found


def spread_turns(tokens: TokenBatch, values: dict[int, dict[int, float]]) -> Tensor:
    """Return float32 (N,): each masked-in token gets its turn's value; 0 elsewhere."""
    spread_N = torch.zeros(len(tokens.mask_N))
    for number, turns in turn_tokens(tokens).items():
        for turn, positions_P in turns.items():
            spread_N[positions_P] = values[number][turn]
    return spread_N
