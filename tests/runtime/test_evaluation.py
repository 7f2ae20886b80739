import math

import pytest

from turngate.envs.base import End, Task
from turngate.runtime.evaluation import summarise_episodes
from turngate.runtime.types import Trajectory, Turn


def _episode(end: End, reward: float, turns: int = 1) -> Trajectory:
    last = turns - 1
    made = tuple(
        Turn(index=i, segment=0, start=0, length=4, text="", rewards={"outcome": reward if i == last else 0.0})
        for i in range(turns)
    )
    return Trajectory(id="a", task=Task("t"), end=end, turns=made, error="no disk" if end.is_failure else "")


def test_success_counts_truncations_and_leaves_out_failures_of_the_machinery() -> None:
    evaluation = summarise_episodes(
        [_episode(End.success, 1.0, 3)] * 6
        + [_episode(End.failure, 0.0), _episode(End.turn_limit, 0.0)]
        + [_episode(End.env_error, 0.0)] * 4
    )
    assert (evaluation.successes, evaluation.scored, evaluation.failed) == (6, 8, 4)
    assert evaluation.success == 0.75
    assert evaluation.interval == pytest.approx((0.409, 0.929), abs=5e-4)
    assert evaluation.mean_turns == pytest.approx(20 / 8)
    assert evaluation.mean_policy_tokens == pytest.approx(80 / 8)
    assert evaluation.ends == {"success": 6, "failure": 1, "turn_limit": 1, "env_error": 4}
    assert str(evaluation) == "0.750 [0.409, 0.929] (n = 8, 4 failed by the machinery, first: no disk)"


def test_nothing_scored_is_not_a_success_rate() -> None:
    assert math.isnan(summarise_episodes([_episode(End.env_error, 0.0)]).success)


def test_against_a_dead_server_the_evaluation_says_what_failed_first() -> None:
    evaluation = summarise_episodes([_episode(End.endpoint_error, 0.0)] * 3)
    assert str(evaluation) == "nan [0.000, 1.000] (n = 0, 3 failed by the machinery, first: no disk)"
