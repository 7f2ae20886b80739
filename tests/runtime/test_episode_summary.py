from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.envs.base import End
from turngate.runtime.episode_summary import EpisodeRow, Prices, pass_at_k, summarise_rows
from turngate.runtime.errors import ConfigError


def rows(task, *ends, error="boom"):
    return [
        EpisodeRow(f"{task}.{i}", task, end, float(end is End.success), 2, 10, error if end.is_failure else "", True)
        for i, end in enumerate(ends)
    ]


def test_pass_at_k_equals_the_share_of_draws_that_hold_a_success():
    ends = [True, False, False, True, False]
    for k in range(1, 6):
        draws = list(combinations(ends, k))
        assert pass_at_k(5, 2, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@given(st.integers(1, 12), st.data())
def test_pass_at_k_is_unbiased(n, data):
    k = data.draw(st.integers(1, n))
    p = data.draw(st.floats(0, 1))
    expected = sum(comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-9)


@pytest.mark.parametrize("wrong", [(3, 4, 1), (3, 1, 4), (3, 1, 0), (3, -1, 1)])
def test_pass_at_k_refuses_what_cannot_be(wrong):
    with pytest.raises(ValueError, match="pass@k"):
        pass_at_k(*wrong)


def test_failures_of_the_machinery_are_in_no_rate():
    found = summarise_rows(
        rows("a", End.success, End.failure) + rows("b", End.endpoint_error, End.success, End.turn_limit), samples=3
    )
    assert (found.episodes, found.scored, found.failed, found.successes, found.tasks) == (5, 4, 1, 2, 2)
    assert found.success == 0.5
    assert found.first_error == "boom"
    assert found.ends["success"].share == 0.5
    assert found.ends["endpoint_error"].share == 0.2  # of all
    assert found.ends["failure"].low < 0.25 < found.ends["failure"].high
    assert found.pass_at == {1: 0.5, 2: 1.0}  # no task has three scored episodes
    assert "1 failed by the machinery, first: boom" in str(found)


def test_nothing_scored_is_no_rate():
    found = summarise_rows(rows("a", End.env_error), samples=1)
    assert (found.success, found.pass_at, found.success_low, found.success_high) == (None, {}, 0.0, 1.0)
    assert str(found).startswith("success - ")


def test_tokens_cost_what_they_cost():
    found = summarise_rows(
        rows("a", End.success), samples=1, prompt_tokens=2_000_000, completion_tokens=500_000, prices=Prices(0.5, 2.0)
    )
    assert found.cost == pytest.approx(2.0)
    assert "cost 2.0000" in str(found)
    with pytest.raises(ConfigError, match="prices"):
        Prices(-1.0)
