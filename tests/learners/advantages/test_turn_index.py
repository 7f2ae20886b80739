"""Baselines per turn index: unbiased by exact enumeration, and what the tempting form does instead."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turngate.learners.advantages.turn_index import turn_index_advantages
from turngate.learners.ratios import ShapeError
from turngate.runtime.errors import ConfigError, LearnerError

TURNS = 3
P_CONTINUE = 0.6
"""A chain: each turn is paid 1, then the policy stops or goes on, for at most three turns."""


def real(*values):
    return torch.tensor(values, dtype=torch.float64)


def chains() -> list[tuple[float, list[float], list[float]]]:
    """Every trajectory of the chain: (probability, rewards, d log pi / d logit of `continue` per turn)."""
    stop, go_on = -P_CONTINUE, 1 - P_CONTINUE
    made = [(P_CONTINUE**k * (1 - P_CONTINUE), [1.0] * (k + 1), [go_on] * k + [stop]) for k in range(TURNS - 1)]
    # After the last turn there is nothing left to decide.
    return [*made, (P_CONTINUE ** (TURNS - 1), [1.0] * TURNS, [go_on] * (TURNS - 1) + [0.0])]


def expected_gradient(advantages) -> float:
    """The exact mean over all groups of two of the policy gradient per trajectory."""
    total = 0.0
    for group in product(chains(), repeat=2):
        values = advantages([real(*rewards) for _, rewards, _ in group])
        scores = torch.tensor([s for _, _, scores in group for s in scores], dtype=torch.float64)
        total += math.prod(p for p, _, _ in group) * float(torch.cat(values) @ scores) / len(group)
    return total


def over_those_alive(rewards):
    """What `peers="alive"` would be: each turn's reward against the mean of those still going, summed onwards."""
    means = [torch.stack([r[t] for r in rewards if len(r) > t]).mean() for t in range(max(map(len, rewards)))]
    return [torch.stack([sum(r[s] - means[s] for s in range(t, len(r))) for t in range(len(r))]) for r in rewards]


def test_b1_9_the_baseline_counts_ended_trajectories_and_so_leaves_the_gradient_unbiased() -> None:
    """verl#7244, wangyu-ustc/Mem-alpha#14: normalising per turn index with variable turn counts."""
    # dE[R]/d logit for E[R] = 1 + p + p^2 and dp/d logit = p (1 - p).
    true = (1 + 2 * P_CONTINUE) * P_CONTINUE * (1 - P_CONTINUE)
    assert expected_gradient(turn_index_advantages) == pytest.approx(true)
    # Turns worth going for, and the alive-only form sees nothing at all in them.
    assert expected_gradient(over_those_alive) == pytest.approx(0.0, abs=1e-12)


def test_b1_9_the_biased_form_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"biased.*verl#7244"):
        turn_index_advantages([real(1.0), real(0.0)], peers="alive")
    with pytest.raises(ConfigError, match="peers must be all"):
        turn_index_advantages([real(1.0), real(0.0)], peers="some")


def test_each_turn_is_compared_with_the_others_from_that_turn_on() -> None:
    # Returns to go: [3, 2], [1], [2, 0]; at turn 1 the second has ended and counts 0.
    advantages = turn_index_advantages([real(1.0, 2.0), real(1.0), real(2.0, 0.0)])
    torch.testing.assert_close(advantages, [real(3 - 1.5, 2 - 0.0), real(1 - 2.5), real(2 - 2.0, 0 - 1.0)])


def test_returns_are_discounted_per_turn() -> None:
    torch.testing.assert_close(turn_index_advantages([real(0.0, 2.0), real(0.0)], gamma=0.5)[0], real(1.0, 2.0))


@given(st.lists(st.lists(st.integers(-8, 8).map(float), max_size=4), min_size=2, max_size=5))
def test_p6_the_group_sums_to_zero_at_every_turn_index_when_ended_members_are_counted(rewards) -> None:
    advantages = turn_index_advantages([real(*r) for r in rewards])
    longest = max(map(len, rewards))
    returns = [[sum(r[t:]) for t in range(longest)] for r in rewards]
    for t in range(longest):
        others = [(sum(g[t] for g in returns) - g[t]) / (len(returns) - 1) for g in returns]
        padded = [float(a[t]) if len(a) > t else 0.0 - b for a, b in zip(advantages, others, strict=True)]
        assert sum(padded) == pytest.approx(0.0, abs=1e-9)


def test_members_that_do_not_count_do_not_vote() -> None:
    rewards = [real(1.0), real(0.0), real(100.0, 5.0), real(math.nan)]
    advantages = turn_index_advantages(rewards, torch.tensor([True, True, False, True]))
    assert [a.tolist() for a in advantages] == [[1.0], [-1.0], [0.0, 0.0], [0.0]]


def test_a_lone_trajectory_has_no_advantage() -> None:
    assert turn_index_advantages([real(1.0, 2.0)])[0].tolist() == [0.0, 0.0]
    assert turn_index_advantages([]) == []
    assert [len(a) for a in turn_index_advantages([real(), real()])] == [0, 0]


def test_the_dtype_of_the_rewards_is_given_back() -> None:
    assert turn_index_advantages([torch.tensor([1.0]), torch.tensor([0.0])])[0].dtype == torch.float32


def test_bad_inputs_are_refused() -> None:
    with pytest.raises(LearnerError, match="trajectory 1"):
        turn_index_advantages([real(0.0), real(math.inf)])
    with pytest.raises(ShapeError, match="valid"):
        turn_index_advantages([real(0.0)], torch.ones(2).bool())
