"""Invalid and repeated actions, told from what the agent saw and did."""

from hypothesis import given
from hypothesis import strategies as st

from turngate.envs.base import Action, ToolCall
from turngate.envs.detectors import ObservedAction, action_key, invalid_actions, repeated_actions, repeated_pairs


def steps(*pairs: tuple[str | None, str]) -> list[ObservedAction]:
    return [ObservedAction(observation, Action(text)) for observation, text in pairs]


def call(arguments: str, *, id: str = "1", name: str = "search") -> Action:
    return Action("let me look", (ToolCall(id, name, arguments),))


def test_same_action_after_the_same_observation_is_a_repeat() -> None:
    assert repeated_actions(steps((None, "look"), ("a", "look"), ("a", "look"), ("a", "take"))) == [
        False,
        False,
        True,
        False,
    ]


def test_the_start_of_an_episode_is_no_empty_observation() -> None:
    assert repeated_actions(steps((None, "look"), ("", "look"))) == [False, False]


def test_spaces_around_an_action_do_not_make_it_new() -> None:
    assert repeated_actions(steps(("a", "look"), ("a", " look\n"))) == [False, True]


def test_tool_calls_are_compared_by_value_and_without_their_ids() -> None:
    assert action_key(call('{"q": "lamp", "page": 1}')) == action_key(call('{"page":1,"q":"lamp"}', id="2"))
    assert action_key(call('{"q": "lamp"}')) != action_key(call('{"q": "desk"}'))
    assert action_key(call("{}")) != action_key(call("{}", name="open"))


def test_arguments_that_are_no_json_are_compared_as_text() -> None:
    assert action_key(call("{broken ")) == action_key(call(" {broken"))
    assert action_key(call("[" * 100_000)) == action_key(call("[" * 100_000))


def test_talk_beside_a_tool_call_is_no_part_of_the_action() -> None:
    assert action_key(Action("first", call("{}").tool_calls)) == action_key(Action("again", call("{}").tool_calls))


def test_invalid_is_what_the_environment_said() -> None:
    said = [ObservedAction("", Action("x"), valid=False), ObservedAction("a", Action("x"))]
    assert invalid_actions(said) == [True, False]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))))
def test_as_many_pairs_are_new_as_there_are_different_ones(pairs: list[tuple[int, int]]) -> None:
    flags = repeated_pairs(pairs)
    assert len(flags) == len(pairs)
    assert flags.count(False) == len(set(pairs))
