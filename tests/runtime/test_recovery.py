"""Mistakes, recoveries and learnability, with numbers worked by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.runtime.errors import ConfigError
from turngate.runtime.recovery import (
    PlayedEpisode,
    beta_learnability,
    find_mistakes,
    mixed_with_uniform,
    recovery_metrics,
    restart_weights,
)


def test_a_mistake_is_a_drop_of_tau_and_is_recovered_at_its_old_level() -> None:
    found = find_mistakes(PlayedEpisode(success=True, values=(0.5, 0.25, 0.375, 0.5, 1.0)), tau=0.25)
    assert (found.mistakes, found.latency, found.injected) == ((0,), (2,), (False,))
    assert find_mistakes(PlayedEpisode(success=True, values=(0.5, 0.25, 1.0)), tau=0.26).mistakes == ()


def test_a_drop_that_is_never_made_good_has_no_latency() -> None:
    assert find_mistakes(PlayedEpisode(success=False, values=(0.5, 0.75, 0.0)), tau=0.5).latency == (None,)


def test_the_environments_word_replaces_value_drops() -> None:
    episode = PlayedEpisode(success=True, flags=(False, True, False), values=(0.9, 0.1, 0.2, 1.0))
    assert find_mistakes(episode, tau=0.1).mistakes == (1,)
    assert find_mistakes(PlayedEpisode(success=True, flags=(True, False))).latency == (None,)


def test_injected_and_self_inflicted_mistakes_are_told_apart() -> None:
    metrics = recovery_metrics(
        [
            PlayedEpisode(success=True, flags=(True, False, False, False), injected=(True, False, False, False)),
            PlayedEpisode(success=False, flags=(True, True), injected=(True, False)),
            PlayedEpisode(success=False, flags=(True, False)),
            PlayedEpisode(success=True, flags=(False, False)),
        ]
    )
    assert metrics.mistake_rate_per_turn == 4 / 10
    assert metrics.self_inflicted_rate_per_turn == 2 / 8
    assert metrics.injected_recovery_rate == 1 / 2
    assert metrics.self_inflicted_recovery_rate == 0.0
    assert (metrics.episode_recovery_rate, metrics.clean_success_rate) == (1 / 3, 1.0)
    assert math.isnan(metrics.state_recovery_rate)  # nobody knows values
    assert math.isnan(metrics.mean_latency)


def test_rates_over_nothing_are_nan() -> None:
    metrics = recovery_metrics([])
    rates = [getattr(metrics, name) for name in metrics.__struct_fields__ if name != "per_episode"]
    assert len(rates) == 8
    assert all(map(math.isnan, rates))


@pytest.mark.parametrize(
    ("episode", "tau", "says"),
    [
        (PlayedEpisode(success=True, values=(0.5, math.nan)), 0.1, "values must be finite"),
        (
            PlayedEpisode(success=True, values=(0.5, 1.0), flags=(True, False)),
            0.1,
            "must belong together: got 2 values",
        ),
        (PlayedEpisode(success=True, values=(0.5, 1.0)), 0.0, "tau must be positive"),
    ],
)
def test_episodes_that_make_no_sense_are_refused(episode: PlayedEpisode, tau: float, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        recovery_metrics([episode], tau=tau)


def test_weights_are_learnability_over_a_uniform_floor() -> None:
    # p (1 - p) = 0, 0.25, 0.1875; their sum is 0.4375.
    assert restart_weights([0.0, 0.5, 0.25], floor=0.3) == pytest.approx([0.1, 0.5, 0.4])


def test_weights_without_any_learnability_are_uniform() -> None:
    assert restart_weights([0.0, 1.0], floor=0.0) == [0.5, 0.5]
    assert restart_weights([], floor=0.5) == []


def test_the_posterior_keeps_weight_on_what_was_never_tried() -> None:
    assert beta_learnability(0, 0) == pytest.approx(1 / 6)
    assert beta_learnability(2, 4) == pytest.approx(9 / 42)
    assert beta_learnability(0, 8) == beta_learnability(8, 8) == pytest.approx(9 / 110)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(0, 1))
def test_weights_are_a_distribution_that_forgets_nothing(rates: list[float], floor: float) -> None:
    weights = restart_weights(rates, floor=floor)
    assert sum(weights) == pytest.approx(1)
    assert min(weights) >= floor / len(rates) * (1 - 1e-9)


@pytest.mark.parametrize("bad", [(3, 2, 1.0, 1.0), (-1, 2, 1.0, 1.0), (0, 0, 0.0, 1.0), (0, 0, 1.0, math.nan)])
def test_counts_and_priors_that_make_no_sense_are_refused(bad: tuple[int, int, float, float]) -> None:
    successes, tries, a, b = bad
    with pytest.raises(ConfigError, match="learnability needs"):
        beta_learnability(successes, tries, a=a, b=b)


@pytest.mark.parametrize(("scores", "floor"), [([1.0], 1.5), ([1.0], math.nan), ([-1.0], 0.1), ([math.nan], 0.1)])
def test_scores_and_floors_that_make_no_sense_are_refused(scores: list[float], floor: float) -> None:
    with pytest.raises(ConfigError, match="must be"):
        mixed_with_uniform(scores, floor=floor)
    with pytest.raises(ConfigError, match="must be"):
        restart_weights([1.5], floor=0.1)
