"""Between tokens and turns, by turn ids."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turngate.learners.advantages.turns import broadcast_turns, join_turns, split_turns, turns_of
from turngate.learners.ratios import ShapeError
from turngate.runtime.errors import LearnerError

# Two segments laid end to end; turn 2 was injected and has no tokens.
IDS = torch.tensor([-1, 0, 0, 1, -1, -1, 3, 3, -1])


def test_turn_advantages_stand_on_every_token_of_the_turn_and_nowhere_else() -> None:
    spread = broadcast_turns(torch.tensor([1.0, 2.0, 9.0, 4.0]), IDS)
    assert spread.tolist() == [0.0, 1.0, 1.0, 2.0, 0.0, 0.0, 4.0, 4.0, 0.0]


def test_rows_are_broadcast_by_their_own_ids() -> None:
    assert broadcast_turns(torch.tensor([1.0, 2.0]), torch.tensor([[0, -1], [1, 1]])).tolist() == [[1, 0], [2, 2]]


def test_broadcast_advantages_are_detached() -> None:
    assert not broadcast_turns(torch.zeros(4, requires_grad=True), IDS).requires_grad


@pytest.mark.parametrize("ids", [[0, 4], [-2, 0]])
def test_an_id_without_an_advantage_is_refused(ids: list[int]) -> None:
    with pytest.raises(ShapeError, match="turn ids"):
        broadcast_turns(torch.zeros(4), torch.tensor(ids))


def test_tokens_without_turns_get_nothing() -> None:
    assert broadcast_turns(torch.zeros(0), torch.tensor([-1, -1])).tolist() == [0.0, 0.0]
    assert split_turns(torch.zeros(2), torch.tensor([-1, -1])) == []
    assert join_turns([], torch.tensor([-1, -1])).tolist() == [0.0, 0.0]
    assert turns_of(torch.zeros(0, dtype=torch.int64)) == []


def test_turns_without_tokens_are_skipped() -> None:
    assert turns_of(IDS) == [0, 1, 3]
    assert [v.tolist() for v in split_turns(torch.arange(9), IDS)] == [[1, 2], [3], [6, 7]]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=6))
def test_joining_restores_what_was_split(layout: list[tuple[int, int]]) -> None:
    ids = torch.tensor([i for n, (gap, size) in enumerate(layout) for i in [-1] * gap + [n] * size], dtype=torch.int64)
    values = torch.arange(1.0, len(ids) + 1)
    assert torch.equal(join_turns(split_turns(values, ids), ids), torch.where(ids >= 0, values, 0.0))


def test_tokens_of_a_turn_must_stand_together_and_in_order() -> None:
    for ids in ([1, 1, 0], [0, 1, 0], [-3, 0]):
        with pytest.raises(LearnerError, match="rise"):
            turns_of(torch.tensor(ids))


def test_misaligned_arrays_are_refused() -> None:
    with pytest.raises(ShapeError, match="one shape"):
        split_turns(torch.zeros(3), IDS)
    with pytest.raises(ShapeError, match="lengths"):
        join_turns([torch.zeros(2)], IDS)
    with pytest.raises(ShapeError, match="one trajectory"):
        turns_of(IDS.unsqueeze(0))
    with pytest.raises(ShapeError, match="one per turn"):
        broadcast_turns(torch.zeros(1, 4), IDS)
