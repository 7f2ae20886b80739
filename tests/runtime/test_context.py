"""Context functions: what the model sees, at what cost, and that the history stays whole."""

import asyncio
import inspect

import pytest

from turngate.runtime.context import History, full, last_turns, summarise, token_budget
from turngate.runtime.errors import ConfigError
from turngate.runtime.testing import run_virtual
from turngate.runtime.types import Message

SYSTEM, TASK = Message("system", "s"), Message("user", "task")


def history_of(turns):
    history = History([SYSTEM, TASK])
    for turn in range(turns):
        history.append_turn(Message("assistant", f"a{turn}"), [Message("user", f"o{turn}")])
    return history


def texts(messages):
    return [message.content for message in messages]


def test_history_knows_its_head_and_turns():
    history = history_of(3)
    assert (history.turns, len(history)) == (3, 8)
    assert texts(history.head) == ["s", "task"]
    assert texts(history.turn_messages(1)) == ["a1", "o1", "a2", "o2"]
    assert texts(history.turn_messages(1, 2)) == ["a1", "o1"]


def test_a_history_is_read_back_from_its_messages_also_before_any_turn():
    for turns in range(3):
        again = History.of(history_of(turns).messages)
        assert (again.turns, texts(again.head), texts(again.messages)) == (
            turns, ["s", "task"], texts(history_of(turns).messages),
        )  # fmt: skip


def test_a_turn_has_as_many_messages_as_the_environment_answers():
    history = History([TASK])
    history.append_turn(
        Message("assistant", "a0"), [Message("tool", "r0"), Message("tool", "r1"), Message("user", "o")]
    )
    history.append_turn(Message("assistant", "a1"), [])
    assert texts(history.turn_messages(0, 1)) == ["a0", "r0", "r1", "o"]
    assert texts(last_turns(1)(history)) == ["task", "a1"]


def test_full_shows_everything_without_copying():
    history = history_of(2)
    assert full()(history) is history.messages
    assert texts(history.messages) == ["s", "task", "a0", "o0", "a1", "o1"]


@pytest.mark.parametrize(
    ("turns", "shown"),
    [
        (0, ["s", "task"]),
        (2, ["s", "task", "a0", "o0", "a1", "o1"]),
        (4, ["s", "task", "a2", "o2", "a3", "o3"]),
    ],
)
def test_last_turns_keeps_the_head_and_the_newest(turns, shown):
    assert texts(last_turns(2)(history_of(turns))) == shown


def count(message):
    return 10 if message.role == "user" and message.content != "task" else 1


def test_token_budget_drops_the_oldest_turns_until_it_fits():
    context = token_budget(25, count)  # the head is 2, a turn 11
    assert texts(context(history_of(2))) == ["s", "task", "a0", "o0", "a1", "o1"]
    assert texts(context(history_of(3))) == ["s", "task", "a1", "o1", "a2", "o2"]


def test_token_budget_always_keeps_head_and_newest_turn():
    assert texts(token_budget(1, count)(history_of(3))) == ["s", "task", "a2", "o2"]


def test_token_budget_with_cut_to_cuts_seldom_and_deep():
    context = token_budget(50, count, cut_to=24)
    history = history_of(0)
    first_shown = []
    for turn in range(9):
        history.append_turn(Message("assistant", f"a{turn}"), [Message("user", f"o{turn}")])
        first_shown.append(texts(context(history))[2])
    assert first_shown == ["a0", "a0", "a0", "a0", "a3", "a3", "a3", "a6", "a6"]


def test_token_budget_counts_each_message_once():
    counted: list[str] = []

    def count_once(message):
        counted.append(message.content)
        return 1

    context = token_budget(1000, count_once)
    history = history_of(0)
    for turn in range(5):
        history.append_turn(Message("assistant", f"a{turn}"), [Message("user", f"o{turn}")])
        context(history)
    assert sorted(counted) == sorted(texts(history.messages))


def test_one_context_object_serves_many_histories():
    context = token_budget(25, count)
    long, short = history_of(4), history_of(1)
    assert texts(context(long))[2] == "a2"
    assert texts(context(short))[2] == "a0"
    assert texts(context(long))[2] == "a2"


def fold(summary, messages):
    return f"{summary}[{'+'.join(texts(messages))}]"


async def fold_later(summary, messages):
    await asyncio.sleep(1)
    return fold(summary, messages)


async def shown_by(context, history):
    messages = context(history)
    return texts(await messages if inspect.isawaitable(messages) else messages)


@pytest.mark.parametrize("summariser", [fold, fold_later])
def test_summarise_folds_old_turns_and_keeps_the_newest_word_for_word(summariser):
    context = summarise(summariser, after_turns=2, keep_turns=1)

    async def main():
        history, shown = history_of(0), []
        for turn in range(4):
            history.append_turn(Message("assistant", f"a{turn}"), [Message("user", f"o{turn}")])
            shown.append(await shown_by(context, history))
        return shown

    note = "Summary of the earlier turns:\n"
    assert run_virtual(main()) == [
        ["s", "task", "a0", "o0"],
        ["s", "task", "a0", "o0", "a1", "o1"],
        ["s", "task", f"{note}[a0+o0+a1+o1]", "a2", "o2"],
        ["s", "task", f"{note}[a0+o0+a1+o1]", "a2", "o2", "a3", "o3"],
    ]


def test_a_summary_that_fails_folds_nothing_away():
    attempts = []

    def fail_once(summary, messages):
        attempts.append(texts(messages))
        if len(attempts) == 1:
            raise OSError("no model")
        return "ok"

    context, history = summarise(fail_once, after_turns=1), history_of(2)

    async def main():
        with pytest.raises(OSError, match="no model"):
            await shown_by(context, history)
        return await shown_by(context, history)

    assert run_virtual(main())[2:] == ["Summary of the earlier turns:\nok", "a1", "o1"]
    assert attempts == [["a0", "o0"], ["a0", "o0"]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: last_turns(0),
        lambda: token_budget(0, count),
        lambda: token_budget(10, count, cut_to=11),
        lambda: summarise(fold, after_turns=1, keep_turns=2),
        lambda: summarise(fold, after_turns=1, keep_turns=0),
    ],
)
def test_settings_that_cannot_work_are_refused(make):
    with pytest.raises(ConfigError):
        make()
