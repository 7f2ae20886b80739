"""Where continuations are spent."""

import math
import random

import pytest

from turngate.runtime.allocation import (
    SequentialStop,
    disagreement,
    expected_best_of_noisy_means,
    highest,
    neyman_allocation,
    successive_halving,
    value_changes,
)
from turngate.runtime.errors import ConfigError
from turngate.runtime.monte_carlo import estimate


def test_halving_never_spends_more_than_its_budget_and_finds_a_clear_winner():
    rng, spent = random.Random(1), [0]

    def pull(arm, count):
        spent[0] += count
        return [float(rng.random() < (0.9 if arm == 3 else 0.2)) for _ in range(count)]

    winner, rounds = successive_halving(pull, 7, 200)
    assert winner == 3
    assert spent[0] <= 200
    assert [len(r.arms) for r in rounds] == [7, 4, 2]


def test_ties_go_to_the_lower_index():
    assert successive_halving(lambda arm, count: [0.5] * count, 4, 40)[0] == 0
    assert successive_halving(lambda arm, count: [], 1, 5) == (0, [])


def test_a_budget_that_cannot_try_every_arm_is_refused():
    with pytest.raises(ValueError, match="expected at least 24, got 10 for 8 arms"):
        successive_halving(lambda arm, count: [0.0] * count, 8, 10)


def test_an_arm_whose_pulls_all_failed_is_the_worst_and_a_return_that_is_no_number_is_refused():
    winner, rounds = successive_halving(lambda arm, count: [] if arm < 2 else [-5.0] * count, 3, 30)
    assert winner == 2
    assert rounds[0].means == (-math.inf, -math.inf, -5.0)
    with pytest.raises(ValueError, match="returns must be finite: got nan of arm 0"):
        successive_halving(lambda arm, count: [math.nan] * count, 2, 10)


def test_neyman_gives_to_spread_and_spends_all():
    assert neyman_allocation([0.5, 0.1, 0.0, 0.4], 32, at_least=2) == [14, 4, 2, 12]
    assert neyman_allocation([0.0, 0.0], 5) == [3, 2]
    for total in range(3, 40):
        assert sum(neyman_allocation([0.3, 0.2, 0.9], total)) == total


@pytest.mark.parametrize("sigmas", [[math.nan], [-1.0], []])
def test_neyman_refuses_what_is_no_spread(sigmas):
    with pytest.raises(ValueError, match="must"):
        neyman_allocation(sigmas, 10)


def test_sampling_stops_when_the_sign_is_decided_or_the_cap_is_reached():
    stop = SequentialStop(half_width=0.05, threshold=0.5, at_least=4, at_most=16)
    assert not stop.is_enough(estimate([1, 1]))
    assert stop.is_enough(estimate([1] * 6))
    assert not stop.is_enough(estimate([1, 0] * 4))
    assert stop.is_enough(estimate([1, 0] * 8))


@pytest.mark.parametrize("bad", [{"half_width": -0.1}, {"half_width": math.nan}, {"at_least": 0}, {"at_least": 33}])
def test_stops_that_cannot_be_kept_are_refused(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        SequentialStop(**bad)


def test_a_single_return_that_is_no_success_rate_decides_nothing():
    stop = SequentialStop(at_least=1, threshold=0.5)
    assert not stop.is_enough(estimate([0.3]))
    assert stop.is_enough(estimate([0.3, 0.3]))


def test_sampling_stops_when_it_is_precise_enough():
    assert SequentialStop(half_width=0.3).is_enough(estimate([1, 0, 1, 0, 1, 0, 1, 0]))
    assert not SequentialStop(half_width=0.1).is_enough(estimate([0.1, 0.9, 0.5, 0.4]))
    assert SequentialStop(half_width=0.1).is_enough(estimate([0.5, 0.51, 0.5, 0.49]))


def test_gates_pick_the_highest_scores_in_order():
    scores = [0.1, 0.9, math.nan, 0.5, 0.5]
    assert highest(scores, share=0.5) == [1, 3]
    assert highest(scores, share=0.01) == [1]
    assert highest(scores, threshold=0.45) == [1, 3, 4]
    with pytest.raises(ValueError, match="either share or threshold"):
        highest(scores)


def test_gates_by_values_look_where_they_jump_and_where_critics_differ():
    changes = value_changes([0.5, 0.6, 0.1, 0.2])
    assert changes[:3] == pytest.approx([0.1, 0.5, 0.1])
    assert math.isnan(changes[3])
    assert highest(changes, share=0.3) == [1]
    assert value_changes([]) == []
    assert disagreement([[0.1, 0.5], [0.1, 0.9], [0.1, 0.7]]) == pytest.approx([0.0, 0.2])
    for bad in ([[0.1]], [[0.1], [0.1, 0.2]]):
        with pytest.raises(ValueError, match="must value the same turns"):
            disagreement(bad)


def test_the_best_of_noisy_means_flatters():
    assert expected_best_of_noisy_means(3, 2, 0.5) == pytest.approx(0.78125)
    assert expected_best_of_noisy_means(1, 8, 0.3) == pytest.approx(0.3)


def test_gates_are_strict_about_thresholds_in_the_order_of_turns_and_refuse_nonsense():
    assert highest([0.5, 0.6, 0.5], threshold=0.5) == [1]
    assert highest([0.1, 0.5, 0.2, 0.9], share=0.5) == [1, 3]
    for share in (0.0, 1.5, -1.0):
        with pytest.raises(ValueError, match="share must be in"):
            highest([0.1, 0.2], share=share)
    with pytest.raises(ValueError, match="either share or threshold"):
        highest([0.1], share=0.5, threshold=0.5)


def test_the_smallest_budget_that_reaches_is_enough_and_one_less_is_not():
    winner, rounds = successive_halving(lambda arm, count: [float(arm == 5)] * count, 8, 24)
    assert (winner, [one.pulls_each for one in rounds]) == (5, [1, 2, 4])
    assert [one.means[-1] for one in rounds] == [0.0, 0.0, 0.0]
    for arms, budget in ((8, 23), (0, 10)):
        with pytest.raises(ValueError, match="budget must give every arm a pull"):
            successive_halving(lambda arm, count: [0.0] * count, arms, budget)
    with pytest.raises(ValueError, match="total must give 1 to each of 2 strata: got 1"):
        neyman_allocation([0.1, 0.2], 1)


def test_a_stop_may_come_with_the_least_and_returns_of_any_size_have_two_standard_errors():
    stop = SequentialStop(half_width=0.01, threshold=0.5, at_least=6)
    assert stop.is_enough(estimate([1] * 6))
    assert not stop.is_enough(estimate([1] * 5))
    two = estimate([0.4, 0.6])  # 0.5, standard error 0.1
    assert SequentialStop(half_width=0.21, at_least=2).is_enough(two)
    assert not SequentialStop(half_width=0.15, at_least=2).is_enough(two)
