"""Between tokens and turns: which token belongs to which turn is read from turn ids alone.

Neither rewards nor mask edges say where a turn begins: turns may earn nothing, start at position 0, or follow each
other without an observation between them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from turngate.learners.ratios import ShapeError, check_shapes
from turngate.runtime.errors import LearnerError
from turngate.runtime.types import NO_TURN

__all__ = ["broadcast_turns", "join_turns", "split_turns", "turns_of"]


def turns_of(turn_ids_T: Tensor) -> list[int]:
    """Return the ids of the turns that have tokens, in order.

    Args: turn_ids_T: one trajectory's tokens, segments laid end to end; NO_TURN on context.
    Raises: LearnerError: the ids of policy tokens do not rise along the trajectory.
    """
    ids, _ = _runs(turn_ids_T)
    return [int(turn) for turn in ids.tolist()]


def split_turns(values_T: Tensor, turn_ids_T: Tensor) -> list[Tensor]:
    """Return the values at each turn's tokens, (L_u,) per turn that has any; those on context are left out.

    The first of a turn's token values is V of its context: nothing of the action stands before it.
    """
    check_shapes(values=values_T, turn_ids=turn_ids_T)
    _, lengths = _runs(turn_ids_T)
    return list(values_T[turn_ids_T != NO_TURN].split(lengths.tolist()))


def join_turns(per_turn: Sequence[Tensor], turn_ids_T: Tensor) -> Tensor:
    """Return (T,) with each turn's values at its tokens, 0 on context: what `split_turns` took apart."""
    _, lengths = _runs(turn_ids_T)
    if (got := [len(values_L) for values_L in per_turn]) != lengths.tolist():
        raise ShapeError(f"values per turn must have the turns' lengths: expected {lengths.tolist()}, got {got}")
    joined_T = torch.zeros(turn_ids_T.shape, dtype=per_turn[0].dtype if per_turn else torch.float32)
    if per_turn:
        joined_T = joined_T.to(per_turn[0].device)
        joined_T[turn_ids_T != NO_TURN] = torch.cat(list(per_turn))
    return joined_T


def broadcast_turns(advantages_U: Tensor, turn_ids: Tensor) -> Tensor:
    """Return each turn's advantage on all of its tokens, 0 on context, in the shape of `turn_ids`.

    Args: advantages_U: indexed by turn id. turn_ids: integers of any shape, NO_TURN on context.
    """
    if advantages_U.ndim != 1:
        raise ShapeError(f"advantages must be one per turn: expected shape (U,), got {tuple(advantages_U.shape)}")
    if turn_ids.numel() and not NO_TURN <= int(turn_ids.min()) <= int(turn_ids.max()) < len(advantages_U):
        got = f"{int(turn_ids.min())} to {int(turn_ids.max())}"
        raise ShapeError(
            f"turn ids must have an advantage each: expected {NO_TURN} to {len(advantages_U) - 1}, got {got}"
        )
    # One more entry, a zero, is what NO_TURN reads.
    return torch.cat([advantages_U.detach(), advantages_U.new_zeros(1)])[turn_ids.to(torch.int64)]


def _runs(turn_ids_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return the turn ids in order and the number of tokens of each."""
    if turn_ids_T.ndim != 1:
        raise ShapeError(
            f"turn_ids must be those of one trajectory: expected shape (T,), got {tuple(turn_ids_T.shape)}"
        )
    ids, lengths = torch.unique_consecutive(turn_ids_T[turn_ids_T != NO_TURN], return_counts=True)
    if len(ids) and (int(ids[0]) < 0 or not bool((ids[1:] > ids[:-1]).all())):
        raise LearnerError(
            f"turn ids must rise along a trajectory: got {ids.tolist()}; lay its segments end to end, in order"
        )
    return ids, lengths
