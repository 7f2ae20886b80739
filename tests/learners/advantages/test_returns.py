"""Return-to-go over policy tokens, and whitening."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turngate.learners.advantages.returns import masked_whiten, reward_to_go
from turngate.learners.ratios import ShapeError
from turngate.runtime.errors import LearnerError


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


@given(st.lists(st.tuples(st.booleans(), st.integers(-8, 8).map(float)), max_size=8))
def test_returns_are_those_of_the_policy_tokens_alone(tokens: list[tuple[bool, float]]) -> None:
    rewards, mask = torch.tensor([r for _, r in tokens]), torch.tensor([m for m, _ in tokens], dtype=torch.bool)
    earned: list[float] = []
    for is_policy, reward in tokens:
        if is_policy:
            earned.append(reward)
        elif earned:
            earned[-1] += reward
    expected = [sum(0.5**k * r for k, r in enumerate(earned[t:])) for t in range(len(earned))]
    assert reward_to_go(rewards, mask, gamma=0.5)[mask].tolist() == expected


def test_rows_of_no_tokens_and_no_rows_give_nothing() -> None:
    assert reward_to_go(torch.zeros(0, 3), torch.zeros(0, 3).bool(), gamma=1.0).shape == (0, 3)
    assert reward_to_go(torch.zeros(2, 0), torch.zeros(2, 0).bool(), gamma=1.0).shape == (2, 0)


def test_long_rows_are_summed_without_losing_digits() -> None:
    rewards = torch.full((10_000,), 0.1)
    first = reward_to_go(rewards, torch.ones(10_000).bool(), gamma=1.0)[0]
    assert first.item() == pytest.approx(float(rewards.double().sum()), rel=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_p17_what_is_not_finite_is_refused_where_it_counts(bad: float) -> None:
    mask = torch.tensor([True, False])
    with pytest.raises(LearnerError, match="finite"):
        reward_to_go(torch.tensor([0.0, bad]), mask, gamma=1.0)
    with pytest.raises(LearnerError, match="finite"):
        masked_whiten(torch.tensor([bad, 0.0]), mask)
    assert masked_whiten(torch.tensor([1.0, bad]), mask).tolist() == [0.0, 0.0]


def test_whitened_advantages_are_detached() -> None:
    assert not masked_whiten(torch.tensor([1.0, 2.0], requires_grad=True), torch.ones(2).bool()).requires_grad
