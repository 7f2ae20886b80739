"""Where an episode's own turns begin in its messages."""

from turngate.envs.base import End, Task
from turngate.runtime.opening import opening_messages
from turngate.runtime.types import Message, Trajectory, Turn

HEAD = (Message("system", "rules"), Message("user", "task"))
BEFORE = (Message("assistant", "old"), Message("user", "answer"))
OWN = (Message("assistant", "new"), Message("tool", "answer"), Message("user", "more"))


def episode(messages: tuple[Message, ...], turns: int) -> Trajectory:
    made = tuple(Turn(index=i, segment=0, start=0, length=1, text="") for i in range(turns))
    return Trajectory(id="t", task=Task("task"), turns=made, messages=messages, end=End.success)


def test_opening_ends_before_the_first_reply() -> None:
    assert opening_messages(episode(HEAD + OWN, 1)) == HEAD
    assert opening_messages(episode(HEAD + OWN * 3, 3)) == HEAD


def test_turns_before_a_restart_belong_to_the_opening() -> None:
    assert opening_messages(episode(HEAD + BEFORE + OWN, 1)) == HEAD + BEFORE


def test_episode_without_turns_or_their_messages_is_all_opening() -> None:
    assert opening_messages(episode(HEAD + BEFORE, 0)) == HEAD + BEFORE
    assert opening_messages(episode(HEAD, 2)) == HEAD
