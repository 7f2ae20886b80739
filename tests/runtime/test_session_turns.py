"""Turns of a session while their answers and rewards still come in."""

import pytest

from turngate.envs.base import ToolCall
from turngate.runtime.errors import EnvError
from turngate.runtime.session_recorder import Placed
from turngate.runtime.session_turns import SessionTurns
from turngate.runtime.types import Completion


def turns_with(*texts):
    turns = SessionTurns()
    for at, text in enumerate(texts):
        turns.add(Completion(text), Placed(0, at, 1, at - 1), role="r", model_s=1.0, now_s=10.0 * at)
    return turns


def test_a_turn_has_what_the_reply_had_and_where_it_stands():
    turns = SessionTurns()
    call = ToolCall("c", "add", "{}")
    reply = Completion("x", stop_reason="tool_calls", tool_calls=(call,), version_sent=3, version_received=4)
    turns.add(reply, Placed(2, 5, 7, -1), role="solver", model_s=1.5, now_s=0.0)
    (turn,) = turns.all()
    assert (turn.index, turn.segment, turn.start, turn.length, turn.role) == (0, 2, 5, 7, "solver")
    assert (turn.text, turn.tool_calls, turn.stop_reason) == ("x", (call,), "tool_calls")
    assert (turn.version_sent, turn.version_received, turn.model_s, turn.env_s) == (3, 4, 1.5, 0.0)


def test_the_first_answer_to_a_turn_is_the_one_that_stays():
    turns = turns_with("a", "b")
    finished = turns.answer(0, "no", asked_s=4.0)
    assert finished is not None
    assert (finished.observation, finished.env_s) == ("no", 4.0)
    assert turns.answer(0, "yes", asked_s=9.0) is None
    assert turns.all()[0] is finished
    assert [turn.index for turn in turns.unfinished()] == [1]


def test_an_answer_keeps_the_rewards_before_it_and_takes_those_after_it():
    turns = turns_with("a", "b")
    turns.add_reward("x", 1.0, 0, "test")
    turns.answer(0, "no", asked_s=0.0)
    turns.add_reward("x", 1.0, 0, "test")
    assert turns.all()[0].rewards == {"x": 2.0}
    assert turns.reward() == 2.0


def test_early_rewards_wait_for_the_first_turn_alone():
    turns = SessionTurns()
    turns.add_reward("x", 1.0, -1, "test")
    assert turns.early_rewards == {"x": 1.0}
    with pytest.raises(EnvError, match=r"turn must be one .*: expected -1 before the first, got 0"):
        turns.add_reward("x", 1.0, 0, "test")
    for text in "ab":
        turns.add(Completion(text), Placed(0, 0, 0, -1), role="", model_s=0.0, now_s=0.0)
    assert [turn.rewards for turn in turns.all()] == [{"x": 1.0}, {}]
    assert (len(turns), turns.early_rewards) == (2, {})
