"""Return-to-go over policy tokens, and whitening."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turngate.learners.advantages.returns import masked_whiten, reward_to_go
from turngate.learners.ratios import ShapeError


def test_b1_14_observation_tokens_neither_reset_nor_discount_the_return() -> None:
    rewards = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0])
    mask = torch.tensor([1, 0, 0, 0, 1]).bool()
    assert reward_to_go(rewards, mask, gamma=0.5).tolist() == [0.5, 0.0, 0.0, 0.0, 1.0]


def test_a_reward_on_an_observation_belongs_to_the_token_before_it() -> None:
    rewards, mask = torch.tensor([0.0, 2.0, 0.0]), torch.tensor([1, 0, 1]).bool()
    assert reward_to_go(rewards, mask, gamma=0.5).tolist() == [2.0, 0.0, 0.0]


def test_rows_do_not_leak_into_each_other() -> None:
    rewards, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2).bool()
    assert reward_to_go(rewards, mask, gamma=1.0).tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_whitened_values_have_mean_zero_and_deviation_one() -> None:
    x, mask = torch.tensor([1.0, 2.0, 6.0, 999.0], dtype=torch.float64), torch.tensor([1, 1, 1, 0]).bool()
    y = masked_whiten(x, mask)
    assert y[mask].mean().item() == pytest.approx(0.0, abs=1e-12)
    assert y[mask].std().item() == pytest.approx(1.0, rel=1e-6)
    assert y[3] == 0


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6), st.floats(-1e6, 1e6))
def test_p2_masked_entries_change_nothing(values: list[float], masked: float) -> None:
    mask = torch.tensor([True] * len(values) + [False])
    one, other = (masked_whiten(torch.tensor([*values, last], dtype=torch.float64), mask) for last in (0.0, masked))
    assert torch.equal(one, other)


def test_a_single_entry_has_no_spread_and_becomes_zero() -> None:
    assert masked_whiten(torch.tensor([3.0, 1.0]), torch.tensor([True, False])).tolist() == [0.0, 0.0]


def test_misaligned_masks_are_refused() -> None:
    with pytest.raises(ShapeError, match="one shape"):
        masked_whiten(torch.zeros(2, 3), torch.ones(2, 1).bool())
