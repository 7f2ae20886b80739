"""Where a critic is read on recorded episodes, and what it is trained towards there: see `value_fit`."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turngate.learners.batch import check_trajectory, length_sorted
from turngate.learners.policy_model import TrainableModel
from turngate.learners.turns import RewardsOf, action_turns
from turngate.runtime.branching import Branches, TurnBranches
from turngate.runtime.engine.config import ValueKind
from turngate.runtime.engine.packing import pack
from turngate.runtime.errors import LearnerError, RecordError
from turngate.runtime.types import Segment, Trajectory

__all__ = ["FitRow", "Reader", "branches_by_trajectory", "episode_rows", "read_rows", "row_outputs"]

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class FitRow:
    """One segment with a place to read a value at every sampled token and behind every action."""

    ids_T: NDArray[np.int64]
    mask_T: NDArray[np.bool_]
    targets_P: NDArray[np.float32]
    """What the values are trained towards: returns, or means over continuations."""
    returns_P: NDArray[np.float32]
    """What the episode was paid from there on; what the critic is judged by."""
    is_end_P: NDArray[np.bool_]
    """Behind an action."""
    turns_P: NDArray[np.int64]
    task: str
    branched: int
    """Turns whose targets are means over continuations."""


@dataclass(frozen=True, slots=True)
class Reader:
    """What reads the rows: a critic of some kind and size."""

    kind: ValueKind
    max_context: int
    vocab_size: int


def episode_rows(
    trajectory: Trajectory, reader: Reader, *, rewards: RewardsOf, branches: Branches | None = None
) -> list[FitRow]:
    """Return a row for each segment that holds an action; none where the episode says nothing of returns.

    That is an episode with a reward that cannot be told (NaN), or whose first action lies beyond the model's context.
    Raises: LearnerError: ids or returns are not what the reader can take. RecordError: the record contradicts itself.
    """
    check_trajectory(trajectory)
    turns = action_turns(trajectory, rewards(trajectory))
    to_go_T = turns.rewards_T.flip(0).cumsum(0).flip(0).tolist()
    if any(math.isnan(value) for value in to_go_T):
        return []
    returns = dict(zip(turns.turns, to_go_T, strict=True))
    rows = (_row(segment, trajectory, returns, branches, reader) for segment in trajectory.segments)
    return [row for row in rows if row is not None]


def branches_by_trajectory(branches: Sequence[Branches], trajectories: Sequence[Trajectory]) -> dict[str, Branches]:
    """Return the branches by the id of their trajectory. Raises: LearnerError: two trajectories have that id."""
    found: dict[str, Branches] = {}
    for one in branches:
        name, other = one.trajectory.id, found.get(one.trajectory.id, one)
        found[name] = Branches(trajectory=one.trajectory, q=other.q | one.q, v=other.v | one.v)
    counts = Counter(t.id for t in trajectories)
    if shared := [name for name in found if counts[name] > 1]:
        raise LearnerError(
            f"trajectories must have ids of their own to be matched with branches: got {counts[shared[0]]} called "
            f"{shared[0]}; give rollouts a trajectory_id"
        )
    return found


def row_outputs(critic: TrainableModel, rows: Sequence[FitRow]) -> Tensor:
    """Return what the head puts out at every place of these rows, in one pass."""
    outputs = critic.values(pack([row.ids_T for row in rows], [row.mask_T for row in rows]))
    if outputs is None:
        raise LearnerError("the critic's model must have a value head: it has none")
    return outputs


@torch.no_grad()
def read_rows(critic: TrainableModel, rows: Sequence[FitRow], microbatch_tokens: int) -> Tensor:
    """Return what the head puts out at every place of all rows, in their order, without a gradient."""
    outputs: list[Tensor] = [torch.empty(0)] * len(rows)
    for indices in length_sorted([len(row.ids_T) for row in rows], microbatch_tokens):
        found = row_outputs(critic, [rows[i] for i in indices])
        for i, part in zip(indices, found.split([len(rows[i].targets_P) for i in indices]), strict=True):
            outputs[i] = part
    return torch.cat(outputs)


def _row(
    segment: Segment,
    trajectory: Trajectory,
    returns: dict[int, float],
    branches: Branches | None,
    reader: Reader,
) -> FitRow | None:
    generated_T = np.frombuffer(segment.policy_mask, np.uint8) != 0
    if not generated_T.any():
        return None
    ids_T = np.append(np.frombuffer(segment.token_ids, np.int32).astype(np.int64), 0)
    turns_T = np.append(np.frombuffer(segment.turn_ids, np.int32).astype(np.int64), -1)
    sampled_T = np.append(generated_T, False)
    end_T = np.zeros_like(sampled_T)
    end_T[1:] = sampled_T[:-1] & ~sampled_T[1:]
    mask_T = (sampled_T | end_T)[: reader.max_context]
    at_P = np.flatnonzero(mask_T)
    if not len(at_P):
        return None  # the model's context ends before the first action
    _check_ids(ids_T, generated_T, reader, trajectory)
    # A place behind an action belongs to it; where the next action follows at once, to that one's first token.
    own_P = np.where(sampled_T[at_P], turns_T[at_P], turns_T[at_P - 1])
    returns_P = np.array([returns[int(turn)] for turn in own_P])
    targets_P, branched = _branched(returns_P, own_P, branches)
    for values_P in (returns_P, targets_P):
        _check_returns(values_P, reader, trajectory)
    last = int(at_P[-1]) + 1
    return FitRow(
        ids_T=ids_T[:last],
        mask_T=mask_T[:last],
        targets_P=targets_P.astype(np.float32),
        returns_P=returns_P.astype(np.float32),
        is_end_P=end_T[at_P],
        turns_P=own_P,
        task=trajectory.task.id,
        branched=branched,
    )


def _branched(
    returns_P: NDArray[np.float64], turns_P: NDArray[np.int64], branches: Branches | None
) -> tuple[NDArray[np.float64], int]:
    """Return the targets, and how many turns have some from branches.

    V of a turn stands before its first token. Q stands behind the action, and is an unbiased target of every prefix
    of it as well: the rest of the action is one draw of what the policy says there.
    """
    if branches is None:
        return returns_P, 0
    targets_P, branched = returns_P.copy(), 0
    for turn in np.unique(turns_P):
        at = np.flatnonzero(turns_P == turn)
        q, v = (_mean(side.get(int(turn))) for side in (branches.q, branches.v))
        if q is not None:
            targets_P[at] = q
        if v is not None:
            targets_P[at[0]] = v
        branched += q is not None or v is not None
    return targets_P, branched


def _mean(found: TurnBranches | None) -> float | None:
    """Return the mean over continuations; None when none of them came to an end."""
    return None if found is None or not found.estimate.count else found.estimate.mean


def _check_ids(
    ids_T: NDArray[np.int64], generated_T: NDArray[np.bool_], reader: Reader, trajectory: Trajectory
) -> None:
    if ids_T.min() < 0 or ids_T.max() >= reader.vocab_size:
        raise LearnerError(
            f"episodes must be of the model's own vocabulary: expected ids in [0, {reader.vocab_size}), got "
            f"{ids_T.min()} to {ids_T.max()} (trajectory {trajectory.id}); fit the critic to the model that acted"
        )
    if generated_T[0]:  # nothing predicts it: there is no state to value before it
        raise RecordError(
            f"the first token of a segment must be context: got a sampled one (trajectory {trajectory.id})"
        )


def _check_returns(values_P: NDArray[np.float64], reader: Reader, trajectory: Trajectory) -> None:
    least, most = float(values_P.min()), float(values_P.max())
    if reader.kind == "success" and not (least >= 0 and most <= 1):
        raise LearnerError(
            f"returns must lie in [0, 1] for kind success: got {least} to {most} (trajectory {trajectory.id}); use "
            "kind='scalar', or rewards=... that pay an outcome"
        )
    if not max(abs(least), abs(most)) <= _LARGEST:
        raise LearnerError(
            f"returns must fit a float32: got {least} to {most} (trajectory {trajectory.id}); scale the rewards"
        )
