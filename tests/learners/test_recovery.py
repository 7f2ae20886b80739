"""Mistakes by a critic's values."""

import math
from typing import Any

import pytest

import turngate.runtime.recovery
from turngate.envs.base import End, Task
from turngate.learners import recovery
from turngate.learners.recovery import value_recovery_metrics, valued_episode
from turngate.runtime.errors import LearnerError
from turngate.runtime.types import RestartedFrom, Trajectory, Turn


def episode(end: End, injected: tuple[bool, ...], **fields: Any) -> Trajectory:
    last = len(injected) - 1
    turns = tuple(
        Turn(
            index=i,
            segment=0,
            start=0,
            length=0 if other else 2,
            text="",
            injected=other,
            rewards={"outcome": float(end is End.success), "shaping": 9.0} if i == last else {},
        )
        for i, other in enumerate(injected)
    )
    return Trajectory(id="e", task=Task("t"), end=end, turns=turns, **fields)


def test_an_episode_ends_in_its_gold_outcome() -> None:
    played = valued_episode(episode(End.success, (False, False)), [0.5, 0.25])
    assert (played.values, played.success) == ((0.5, 0.25, 1.0), True)


def test_a_drop_over_an_injected_turn_is_blamed_on_it() -> None:
    played = valued_episode(episode(End.failure, (False, True, False)), [0.5, None, 0.125])
    assert played.values == (0.5, 0.5, 0.125, 0.0)
    found = recovery.find_mistakes(played, tau=0.25)
    assert (found.mistakes, found.injected) == ((1,), (True,))
    first = valued_episode(episode(End.failure, (True, False)), [None, 0.5])
    assert first.values == (0.5, 0.5, 0.0)


def test_only_terminal_episodes_from_task_starts_count() -> None:
    origin = RestartedFrom("x", 1, 0, "mistake")
    batch = [
        episode(End.success, (False, False, False)),
        episode(End.failure, (False, False)),
        episode(End.turn_limit, (False, False)),
        episode(End.success, (False, False), restarted_from=origin),
        episode(End.failure, ()),
    ]
    metrics = value_recovery_metrics(batch, [[0.5, 0.25, 0.75], [0.5, 0.5], [0.5, 0.0], [0.5, 0.0], []], tau=0.25)
    assert metrics == {
        "value_mistake_rate": 2 / 5,
        "value_mistake_rate_self_inflicted": 2 / 5,
        "value_state_recovery_rate": 1 / 2,
        "value_recovery_latency": 1.0,
        "value_recovery_rate": 1 / 2,
        "value_clean_success": pytest.approx(math.nan, nan_ok=True),
    }


def test_values_that_do_not_belong_to_the_turns_are_refused() -> None:
    trajectory = episode(End.success, (False, False))
    with pytest.raises(LearnerError, match=r"values must be given per turn: expected 2, got 1 \(trajectory e\)"):
        valued_episode(trajectory, [0.5])
    with pytest.raises(LearnerError, match="a value must be known: got none of 2 turns"):
        valued_episode(trajectory, [None, None])
    with pytest.raises(LearnerError, match="expected 1 rows, got 0"):
        value_recovery_metrics([trajectory], [], tau=0.1)


def test_what_the_runtime_uses_is_at_hand_for_learners() -> None:
    for name in turngate.runtime.recovery.__all__:
        assert getattr(recovery, name) is getattr(turngate.runtime.recovery, name)
        assert name in recovery.__all__
