"""What a few continuations say, and how little."""

import math
import random

import pytest

from turngate.runtime.monte_carlo import (
    beta_interval,
    estimate,
    leave_one_out_advantages,
    newcombe_interval,
    optimal_continuations,
    split_by_outcome,
    standard_error,
    two_level_variance,
    vine_advantages,
)


def test_six_of_eight_is_three_quarters_with_a_wide_interval():
    found = estimate([1, 1, 1, 0, 1, 1, 0, 1])
    assert (found.mean, found.successes, found.count) == (0.75, 6, 8)
    assert [round(x, 3) for x in found.wilson()] == [0.409, 0.929]
    assert [round(x, 3) for x in found.beta()] == [0.408, 0.944]


def test_one_continuation_does_not_know_its_spread():
    assert math.isnan(standard_error([1.0]))
    assert math.isnan(estimate([0.3]).standard_error)
    assert estimate([1.0]).wilson() == pytest.approx((0.2065, 1.0), abs=1e-4)


def test_no_continuations_say_nothing():
    found = estimate([])
    assert math.isnan(found.mean)
    assert found.wilson() == (0.0, 1.0)


def test_returns_that_are_no_success_rate_have_no_wilson_interval():
    found = estimate([0.3, 1.0])
    assert found.successes is None
    with pytest.raises(ValueError, match="returns must be 0 or 1 for an interval"):
        found.wilson()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_return_that_is_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match="returns must be finite"):
        estimate([1.0, bad])


def test_truncated_continuations_are_reported():
    assert estimate([1, 0, 0, 0], truncated=1).truncated_fraction == 0.25


def test_eight_against_eight_does_not_settle_the_sign():
    low, high = newcombe_interval(6, 8, 3, 8)
    assert low < 0 < high
    assert newcombe_interval(0, 0, 3, 8) == (-1.0, 1.0)


@pytest.mark.parametrize(("a", "b"), [(0.5, 8.5), (6.5, 2.5), (1.0, 1.0), (400.5, 3.5), (5000.0, 5000.0)])
def test_beta_intervals_hold_their_mass(a, b):
    rng = random.Random(0)
    low, high = beta_interval(a, b)
    inside = sum(low <= rng.betavariate(a, b) <= high for _ in range(20_000)) / 20_000
    assert abs(inside - 0.95) < 0.008


def test_a_uniform_beta_has_its_quantiles_in_plain_sight():
    assert beta_interval(1.0, 1.0) == pytest.approx((0.025, 0.975), abs=1e-15)


def test_leaving_one_out_takes_the_others_mean():
    assert leave_one_out_advantages([0.75, 0.25, 0.5, 0.5]) == pytest.approx([1 / 3, -1 / 3, 0, 0])
    assert leave_one_out_advantages([0.7]) == [0.0]


def test_vine_advantages_of_an_episode_sum_to_its_surprise():
    values, rewards = [0.3, 0.45, 0.4, 0.9], [0.0, 0.0, 0.0, 1.0]
    assert sum(vine_advantages(values, rewards)) == pytest.approx(1.0 - 0.3)
    with pytest.raises(ValueError, match="per turn"):
        vine_advantages([0.1], [])


def test_b5_1_continuations_of_one_outcome_do_not_average_its_luck_out():
    shared, fresh = two_level_variance(0.12, 0.09, 1, 8), two_level_variance(0.12, 0.09, 8, 1)
    assert shared == pytest.approx(5 * fresh)
    assert two_level_variance(0.12, 0.09, 1, 10**6) > 0.12


def test_one_outcome_serves_when_outcomes_do_not_differ():
    assert optimal_continuations(0.0, 0.1, outcome_cost=1.0, continuation_cost=1.0) == math.inf
    assert optimal_continuations(0.12, 0.09, outcome_cost=5.0, continuation_cost=1.0) == pytest.approx(1.936, abs=1e-3)


def test_variance_components_by_hand():
    split = split_by_outcome([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    assert (split.mean, split.outcomes, split.continuations) == (0.5, 3, 6)
    assert split.within == pytest.approx(0.5 / 3)  # sample variances 0, 1/2, 0
    assert split.between == pytest.approx(0.25 - 0.25 / 3)  # of the means 1, 1/2, 0, less the noise in them
    assert split.standard_error == pytest.approx(math.sqrt(0.25 / 3))


def test_an_outcome_that_leaves_nothing_to_chance_has_no_variance_within():
    split = split_by_outcome([[1.0], [0.0, 1.0]], is_final_O=[True, False])
    assert (split.mean, split.within) == (0.75, 0.25)
    assert split.between == pytest.approx(max(0.0, 0.125 - (0 + 0.25) / 2))


def test_components_that_cannot_be_told_are_nan_and_never_below_zero():
    single = split_by_outcome([[1.0], [0.0]])
    assert math.isnan(single.within)
    assert math.isnan(single.between)
    assert single.standard_error == 0.5
    assert math.isnan(split_by_outcome([]).mean)
    assert split_by_outcome([[0.0, 1.0], [1.0, 0.0]]).between == 0.0


def test_components_are_unbiased_where_nothing_is_clipped():
    """Outcomes of 0.9 and 0.1, numbers of continuations that differ."""
    rng, found = random.Random(5), []
    for _ in range(2000):
        chances = [rng.choice((0.9, 0.1)) for _ in range(6)]
        found.append(
            split_by_outcome([[float(rng.random() < p) for _ in range(2 + i % 3)] for i, p in enumerate(chances)])
        )
    assert sum(split.within for split in found) / 2000 == pytest.approx(0.09, abs=0.006)
    assert sum(split.between for split in found) / 2000 == pytest.approx(0.16, abs=0.01)


def test_intervals_are_as_wide_as_asked_for():
    found = estimate([1, 1, 1, 0, 1, 1, 0, 1])
    assert found.wilson(z=1.0) == pytest.approx((0.575236, 0.869208), abs=1e-6)
    assert found.beta(prior=1.0, level=0.5) == pytest.approx((0.60946, 0.80449), abs=1e-5)
    assert (found.beta_mean(), found.beta_mean(prior=1.0)) == (6.5 / 9, 0.7)
    narrow, wide = newcombe_interval(6, 8, 3, 8, z=1.0), newcombe_interval(6, 8, 3, 8)
    low_a, high_a = found.wilson(z=1.0)
    low_b, high_b = estimate([1, 1, 1, 0, 0, 0, 0, 0]).wilson(z=1.0)
    assert narrow[0] == pytest.approx(0.375 - math.hypot(0.75 - low_a, high_b - 0.375))
    assert narrow[1] == pytest.approx(0.375 + math.hypot(high_a - 0.75, 0.375 - low_b))
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_nothing_against_something_says_nothing():
    assert newcombe_interval(0, 0, 3, 8) == newcombe_interval(6, 8, 0, 0) == (-1.0, 1.0)
    assert (estimate([]).truncated_fraction, estimate([0, 1, 0, 1], truncated=3).truncated_fraction) == (0.0, 0.75)


def test_vine_advantages_discount_what_follows():
    assert vine_advantages([1.0, 2.0], [0.5, 1.0], gamma=0.5) == [0.5 + 0.5 * 2.0 - 1.0, 1.0 - 2.0]


def test_variances_and_costs_that_mean_nothing_are_refused():
    for outcomes, continuations in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="must be positive"):
            two_level_variance(0.1, 0.1, outcomes, continuations)
    for bad in ((-0.1, 0.1, 1.0, 1.0), (0.1, -0.1, 1.0, 1.0), (0.1, 0.1, -1.0, 1.0), (0.1, 0.1, 1.0, 0.0)):
        with pytest.raises(ValueError, match="must not be negative"):
            optimal_continuations(*bad[:2], outcome_cost=bad[2], continuation_cost=bad[3])
    for a, b, level in ((0.0, 1.0, 0.9), (1.0, -1.0, 0.9), (1.0, 1.0, 1.0)):
        with pytest.raises(ValueError, match="must be positive and level in"):
            beta_interval(a, b, level=level)


def test_where_more_continuations_buy_nothing_one_is_best():
    assert optimal_continuations(0.0, 0.0, outcome_cost=1.0, continuation_cost=1.0) == 1.0
    assert optimal_continuations(0.0, 0.1, outcome_cost=0.0, continuation_cost=1.0) == 1.0
