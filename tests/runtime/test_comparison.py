import math

import pytest

from turngate.runtime.comparison import RunCurve, equal_steps, training_seconds
from turngate.runtime.errors import ConfigError

CURVE = RunCurve([10.0, 20.0, 10.0], [0.0, 0.5, 1.0])


def test_success_is_the_running_mean_at_the_last_update_that_had_ended() -> None:
    assert CURVE.steps == [10, 30, 40]
    assert CURVE.smooth(2) == [0.0, 0.25, 0.75]
    assert CURVE.smooth(5) == [0.0, 0.25, 0.5]
    assert [CURVE.success_at(steps, updates=2) for steps in (10, 29, 30, 100)] == [0.0, 0.0, 0.25, 0.75]
    assert math.isnan(CURVE.success_at(9, updates=2))


def test_the_area_weighs_updates_by_their_environment_steps() -> None:
    assert CURVE.area(40) == (20 * 0.5 + 10 * 1.0) / 40
    assert CURVE.area(20) == 10 * 0.5 / 20
    assert CURVE.area(5) == 0.0


def test_updates_without_an_episode_from_a_task_start_are_left_out() -> None:
    curve = RunCurve.of([{"env_steps": 10, "success": 0.5}, {"env_steps": 30, "success": None}])
    assert curve.smooth(1)[0] == 0.5
    assert math.isnan(curve.smooth(1)[1])
    assert curve.smooth(2) == [0.5, 0.5]
    assert curve.area(40) == 0.5


def test_runs_are_comparable_up_to_the_end_of_the_shortest() -> None:
    assert equal_steps([CURVE, RunCurve([35.0], [1.0])]) == 35


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ConfigError, match="got none"):
        equal_steps([])
    with pytest.raises(ConfigError, match="at most those of the run: 40, got 41"):
        CURVE.area(41)
    with pytest.raises(ConfigError, match="got 1 and 0"):
        RunCurve([1.0], [])
    with pytest.raises(ConfigError, match="at least one update"):
        RunCurve([], [])


def test_the_seconds_of_a_resumed_run_are_those_of_all_its_processes() -> None:
    assert training_seconds([{"seconds": seconds} for seconds in (2.0, 3.5, 1.0, 2.5)]) == 3.5 + 2.5
    assert training_seconds([]) == 0.0
