"""Waiting times: equal for equal arguments, and of the right mean and tail."""

import pytest

from turngate.envs.latency import HeavyTail, compute_latency_s


def test_a_number_is_the_same_for_every_step():
    assert [compute_latency_s(0.25, seed=1, step=n) for n in range(3)] == [0.25, 0.25, 0.25]


def test_equal_arguments_give_equal_waits_and_others_differ():
    tail = HeavyTail(mean_s=1.0)
    assert compute_latency_s(tail, 1, 2) == compute_latency_s(tail, 1, 2)
    assert len({compute_latency_s(tail, seed, step) for seed in range(5) for step in range(5)}) == 25


def test_the_distribution_is_pareto_with_the_wanted_mean():
    tail = HeavyTail(mean_s=2.0, shape=3.0)
    waits = sorted(compute_latency_s(tail, seed, 0) for seed in range(20_000))
    assert sum(waits) / len(waits) == pytest.approx(2.0, rel=0.05)
    # Lomax with shape 3 and scale 4: the median is 4 (2^(1/3) - 1), the 99th percentile 4 (100^(1/3) - 1).
    assert waits[10_000] == pytest.approx(1.0397, rel=0.05)
    assert waits[19_800] == pytest.approx(14.566, rel=0.15)


def test_waits_are_cut_at_the_maximum():
    tail = HeavyTail(mean_s=1.0, shape=1.1, max_s=3.0)
    assert max(compute_latency_s(tail, seed, 0) for seed in range(1000)) == 3.0


@pytest.mark.parametrize("bad", [{"mean_s": -1.0}, {"mean_s": 1.0, "shape": 1.0}, {"mean_s": 1.0, "max_s": 0.0}])
def test_impossible_distributions_are_refused(bad):
    with pytest.raises(ValueError, match="HeavyTail must have"):
        HeavyTail(**bad)
