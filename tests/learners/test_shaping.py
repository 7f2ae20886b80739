"""Potentials, penalties, process scores. Numbers worked by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from turngate.learners.shaping import (
    min_form,
    potential_shaping,
    progress_form,
    soft_overlong,
    turn_penalties,
)
from turngate.runtime.errors import ConfigError, LearnerError

scores = st.lists(st.floats(-2, 2), min_size=1, max_size=8)
gammas = st.floats(0, 1)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- potentials


def test_shaping_is_the_discounted_difference_of_potentials() -> None:
    shaping = potential_shaping(f64(0.5, 0.75), gamma=0.5, terminated=False, start=0.25)
    assert shaping.tolist() == [0.0, -0.125]


def test_b7_1_the_potential_of_a_terminal_state_is_zero_whatever_was_given() -> None:
    """HumanCompatibleAI/imitation#323, rlevo#646: a terminal potential is a bonus for the way the episode ended."""
    given_, unknown = f64(0.5, 0.9), f64(0.5, math.nan)
    shaped = potential_shaping(given_, gamma=1.0, terminated=True)
    assert shaped.tolist() == [0.5, -0.5]
    assert potential_shaping(unknown, gamma=1.0, terminated=True).tolist() == [0.5, -0.5]
    assert potential_shaping(given_, gamma=1.0, terminated=False).tolist() == [0.5, pytest.approx(0.4)]


@given(scores, gammas, st.floats(-2, 2), st.booleans())
def test_shaping_telescopes_to_the_potentials_at_both_ends(
    potentials: list[float], gamma: float, start: float, terminated: bool
) -> None:
    shaping = potential_shaping(f64(*potentials), gamma=gamma, terminated=terminated, start=start)
    total = sum(gamma**t * float(f) for t, f in enumerate(shaping))
    last = 0.0 if terminated else potentials[-1]
    assert total == pytest.approx(gamma ** len(potentials) * last - start, abs=1e-9)


@given(st.lists(st.tuples(st.floats(-2, 2), st.booleans()), min_size=1, max_size=7), gammas, st.booleans())
def test_turns_that_the_policy_did_not_take_cost_no_discount(
    turns: list[tuple[float, bool]], gamma: float, terminated: bool
) -> None:
    """An injected turn is part of the transition before it, for which credit has one step, hence one discount."""
    own = [True, *(is_own for _, is_own in turns[1:])]
    potentials = [potential for potential, _ in turns]
    shaping = potential_shaping(
        f64(*potentials), gamma=gamma, terminated=terminated, start=0.5, is_own_T=torch.tensor(own)
    )
    step, total = -1, 0.0
    for f, is_own in zip(shaping.tolist(), own, strict=True):
        step += is_own
        total += gamma**step * f
    last = 0.0 if terminated else potentials[-1]
    assert total == pytest.approx(gamma ** sum(own) * last - 0.5, abs=1e-9)


def test_b7_2_staying_where_the_potential_is_high_pays_nothing() -> None:
    """johnsutor/so101-nexus#123: paid as it stands, a potential makes waiting near the goal better than reaching it."""
    direct = potential_shaping(f64(0.9, 1.0), gamma=1.0, terminated=True)
    dwelling = potential_shaping(f64(0.9, 0.9, 0.9, 0.9, 1.0), gamma=1.0, terminated=True)
    assert float(direct.sum()) == pytest.approx(float(dwelling.sum()))
    assert dwelling[1:4].tolist() == [0.0, 0.0, 0.0]


def test_progress_is_shaping_by_the_score() -> None:
    assert progress_form(f64(0.25, 0.75), terminated=False, start=0.5).tolist() == [-0.25, 0.5]


def test_an_unknown_potential_is_nan_at_the_two_turns_it_touches() -> None:
    shaping = potential_shaping(f64(0.5, math.nan, 0.5, 0.5), gamma=1.0, terminated=True)
    assert shaping.isnan().tolist() == [False, True, True, False]


def test_an_episode_without_turns_has_no_shaping() -> None:
    assert potential_shaping(torch.zeros(0), gamma=1.0, terminated=True).tolist() == []


@pytest.mark.parametrize("bad", [torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64), torch.tensor([math.inf])])
def test_potentials_that_are_none_are_refused(bad: Tensor) -> None:
    with pytest.raises(LearnerError, match="potentials must"):
        potential_shaping(bad, gamma=1.0, terminated=True)


def test_a_discount_above_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="gamma must be from 0 to 1"):
        potential_shaping(f64(0.0), gamma=1.1, terminated=True)


# --- process scores


def test_min_form_weighs_by_softmin() -> None:
    expected = [w * r for w, r in zip([0.2689414213699951, 0.7310585786300049], [1.0, 0.0], strict=True)]
    assert min_form(f64(1.0, 0.0), temperature=1.0).tolist() == pytest.approx(expected)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_min_form_adds_up_to_at_least_the_smallest_and_nears_it_when_cold(values: list[float]) -> None:
    total = float(min_form(f64(*values), temperature=1e-3).sum())
    assert min(values) - 1e-9 <= total <= min(values) + 1e-2


def test_more_turns_as_good_as_the_worst_do_not_pay_in_min_form() -> None:
    short, long = min_form(f64(0.5, 0.9)), min_form(f64(0.5, *[0.9] * 20))
    assert float(long.sum()) == pytest.approx(float(short.sum()), abs=0.2)
    assert float(f64(0.5, *[0.9] * 20).sum() - f64(0.5, 0.9).sum()) > 10


def test_min_form_of_a_missing_score_is_unknown_everywhere() -> None:
    assert min_form(f64(0.5, math.nan)).isnan().all()
    assert min_form(torch.zeros(0)).tolist() == []


def test_min_form_needs_a_positive_temperature() -> None:
    with pytest.raises(ConfigError, match="temperature must be positive"):
        min_form(f64(0.5), temperature=0.0)


# --- penalties


def test_overlong_falls_linearly_and_stops_at_minus_one() -> None:
    lengths = torch.tensor([0, 80, 85, 100, 10_000])
    assert soft_overlong(lengths, max_length=100, cache_length=20).tolist() == [0.0, 0.0, -0.25, -1.0, -1.0]


def test_overlong_without_a_slope_is_a_step() -> None:
    assert soft_overlong(torch.tensor([100, 101]), max_length=100, cache_length=0).tolist() == [0.0, -1.0]


def test_overlong_slope_wider_than_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="cache_length must be from 0 to max_length 10"):
        soft_overlong(torch.tensor([1]), max_length=10, cache_length=11)


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def test_penalties_are_kept_apart_by_reason() -> None:
    paid = turn_penalties(flags(0, 1, 0), flags(0, 0, 1), turn_cost=0.125, invalid_penalty=0.5, repeat_penalty=0.25)
    assert paid.turn_T.tolist() == [-0.125, -0.125, -0.125]
    assert paid.invalid_T.tolist() == [0.0, -0.5, 0.0]
    assert paid.repeat_T.tolist() == [0.0, 0.0, -0.25]
    assert paid.total_T.tolist() == [-0.125, -0.625, -0.375]


def test_turn_that_reaches_the_cap_pays_what_is_left_in_proportion() -> None:
    paid = turn_penalties(flags(1, 1, 1), flags(0, 0, 0), turn_cost=0.25, invalid_penalty=0.75, cap=1.5)
    assert paid.total_T.tolist() == [-1.0, -0.5, 0.0]
    assert paid.turn_T.tolist() == [-0.25, -0.125, 0.0]
    assert paid.invalid_T.tolist() == [-0.75, -0.375, 0.0]


def test_turns_of_others_cost_nothing_and_leave_the_cap_alone() -> None:
    paid = turn_penalties(flags(1, 1), flags(0, 0), invalid_penalty=0.5, cap=0.5, is_own_T=flags(0, 1))
    assert paid.total_T.tolist() == [0.0, -0.5]


costs = st.floats(0, 1)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12), costs, costs, costs, costs)
def test_penalties_never_exceed_the_cap_and_add_up(
    pairs: list[tuple[bool, bool]], turn_cost: float, invalid: float, repeat: float, cap: float
) -> None:
    columns = [flags(*(pair[i] for pair in pairs)) for i in range(2)]
    paid = turn_penalties(*columns, turn_cost=turn_cost, invalid_penalty=invalid, repeat_penalty=repeat, cap=cap)
    due = sum(turn_cost + invalid * a + repeat * b for a, b in pairs)
    assert float(-paid.total_T.sum()) == pytest.approx(min(due, cap), abs=1e-9)
    assert torch.allclose(paid.turn_T + paid.invalid_T + paid.repeat_T, paid.total_T, atol=1e-12)
    assert (paid.total_T <= 0).all()
