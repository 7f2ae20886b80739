"""Token truth for agents with loops of their own: branches, forks, n > 1, histories rewritten at will."""

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from turngate.envs.base import ToolCall
from turngate.runtime.json_ids import JsonIds
from turngate.runtime.session_recorder import SessionRecorder
from turngate.runtime.types import NO_TURN, Completion, Message

ASK = Message("user", "what now?")


def completion(prompt, ids, *, text="said", version=0, as_json=False):
    given_prompt = JsonIds(json.dumps(prompt, separators=(",", ":")).encode()) if as_json else prompt
    return Completion(text, ids, [-i / 512 for i in ids], [version] * len(ids), given_prompt)


def chat(*texts):
    """Messages of a chat: what the user and the model said, in turns, the user first."""
    return tuple(Message("assistant" if at % 2 else "user", text) for at, text in enumerate(texts))


@st.composite
def sessions(draw):
    """(prompt, ids) per reply: prompts go on from any earlier reply, part of one, or nothing."""
    replies: list[tuple[list[int], list[int]]] = []
    ids = st.lists(st.integers(0, 3), max_size=4)  # few ids, so that segments start alike
    for _ in range(draw(st.integers(1, 8))):
        how = draw(st.sampled_from(["extend", "extend", "again", "part", "other"]))
        base = [i for part in draw(st.sampled_from(replies)) for i in part] if replies else []
        if how == "again" and replies:
            prompt = list(draw(st.sampled_from(replies))[0])
        elif how == "part" and base:
            prompt = base[: draw(st.integers(1, len(base)))]
        elif how == "extend" and base:
            prompt = base + draw(ids)
        else:
            prompt = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
        replies.append((prompt, draw(ids)))
    return replies


def record(replies, form="ids"):
    recorder = SessionRecorder()
    placed = []
    for turn, reply in enumerate(replies):
        as_json = form == "json" or (form == "mixed" and turn % 2 == 0)
        placed.append(recorder.place(completion(*reply, version=turn, text="", as_json=as_json), turn, (ASK,)))
    return placed, recorder


@given(sessions(), st.sampled_from(["ids", "json", "mixed"]))
def test_each_generated_token_is_trained_once_behind_the_exact_prompt_it_was_sampled_from(replies, form):
    placed, recorder = record(replies, form)
    segments = recorder.segments()
    for turn, ((prompt, ids), place) in enumerate(zip(replies, placed, strict=True)):
        segment = segments[place.segment]
        here = slice(place.start, place.start + place.length)
        assert list(segment.ids())[: place.start] == prompt
        assert list(segment.ids())[here] == ids
        assert list(segment.turn_values())[here] == [turn] * len(ids)
        assert list(segment.version_values())[here] == [turn] * len(ids)
        assert list(segment.logprob_values())[here] == [-i / 512 for i in ids]
    assert sum(sum(segment.policy_mask) for segment in segments) == sum(len(ids) for _, ids in replies)


@given(sessions(), st.sampled_from(["ids", "json", "mixed"]))
def test_a_reply_extends_the_longest_segment_that_starts_its_prompt(replies, form):
    recorder = SessionRecorder()
    for turn, (prompt, ids) in enumerate(replies):
        before = [list(segment.ids()) for segment in recorder.segments()]
        as_json = form == "json" or (form == "mixed" and turn % 2 == 0)
        place = recorder.place(completion(prompt, ids, text="", as_json=as_json), turn, (ASK,))
        fitting = [known for known in before if prompt[: len(known)] == known]
        if fitting:
            assert len(before[place.segment]) == max(len(known) for known in fitting)
            assert before[place.segment] in fitting
        else:
            assert place.segment == len(before)


@given(sessions())
def test_prompts_as_json_text_and_as_integers_give_equal_records(replies):
    assert record(replies, "json")[1].segments() == record(replies, "ids")[1].segments()


def test_sub_chats_that_take_turns_each_grow_a_segment_of_their_own():
    recorder = SessionRecorder()
    recorder.place(completion([1, 2], [3]), 0, chat("a"))
    recorder.place(completion([7, 8], [9]), 1, chat("b"))
    main = recorder.place(completion([1, 2, 3, 4], [5]), 2, chat("a", "said", "more"))
    sub = recorder.place(completion([7, 8, 9, 4], [6]), 3, chat("b", "said", "more"))
    assert (main.segment, main.answers, sub.segment, sub.answers) == (0, 0, 1, 1)
    assert [list(segment.ids()) for segment in recorder.segments()] == [[1, 2, 3, 4, 5], [7, 8, 9, 4, 6]]
    assert recorder.drifts == 0


def test_any_choice_of_a_reply_can_be_gone_on_with():
    recorder = SessionRecorder()
    for turn, ids in enumerate([[3], [4], [5]]):
        recorder.place(completion([1, 2], ids, text=str(ids[0])), turn, chat("a"))
    place = recorder.place(completion([1, 2, 4, 9], [6]), 3, chat("a", "4", "more"))
    assert (place.segment, place.start, place.answers) == (1, 4, 1)
    assert [sum(segment.policy_mask) for segment in recorder.segments()] == [1, 2, 1]
    assert recorder.drifts == 0


def test_of_segments_that_are_the_same_each_agent_goes_on_with_its_own():
    recorder = SessionRecorder()
    for turn, role in enumerate(["solver", "adviser", "judge"]):
        recorder.place(completion([1, 2], [3]), turn, chat("a"), role)
    for turn, role in [(3, "adviser"), (4, "solver"), (5, "judge")]:
        place = recorder.place(completion([1, 2, 3, 4], [5]), turn, chat("a", "said", "more"), role)
        assert place.segment == place.answers == {"solver": 0, "adviser": 1, "judge": 2}[role]


def test_a_chat_that_is_tokenised_otherwise_the_second_time_is_a_drift_that_still_answers_its_turn():
    recorder = SessionRecorder()
    recorder.place(completion([1, 2], [3]), 0, chat("a"))
    place = recorder.place(completion([1, 2, 33, 4], [5]), 1, chat("a", "said", "more"))
    assert (place.segment, place.answers, recorder.drifts) == (1, 0, 1)
    again = recorder.place(completion([1, 2, 33, 4, 5, 6], [7]), 2, chat("a", "said", "more", "said", "end"))
    assert (again.segment, again.answers, recorder.drifts) == (1, 1, 1)


def test_an_sdk_that_writes_the_arguments_of_calls_anew_drifts_and_still_answers_its_turns():
    recorder = SessionRecorder()
    said = [msgspec.structs.replace(completion([1], [2]), text="", tool_calls=(ToolCall("c0", "find", '{"a":1}'),))]
    said.append(msgspec.structs.replace(said[0], prompt_token_ids=[1, 5, 3], token_ids=[4]))
    anew = Message("assistant", "", (ToolCall("c0", "find", '{"a": 1}'),))
    recorder.place(said[0], 0, (ASK,))
    place = recorder.place(said[1], 1, (ASK, anew, Message("tool", "x", (), "c0")))
    assert (place.segment, place.answers, recorder.drifts) == (1, 0, 1)
    history = (ASK, anew, Message("tool", "x", (), "c0"), anew, Message("tool", "y", (), "c0"))
    place = recorder.place(completion([1, 5, 3, 6, 7], [8]), 2, history)
    assert (place.segment, place.answers, recorder.drifts) == (2, 1, 2)


def test_forks_and_rewritten_histories_are_no_drifts():
    recorder = SessionRecorder()
    recorder.place(completion([1, 2], [3]), 0, chat("a"))
    recorder.place(completion([1, 2, 3, 4], [5]), 1, chat("a", "said", "left"))
    fork = recorder.place(completion([1, 2, 3, 6], [7]), 2, chat("a", "said", "right"))
    short = recorder.place(completion([8], [9]), 3, chat("in short"))
    assert (fork.segment, fork.answers, short.answers, recorder.drifts) == (1, NO_TURN, NO_TURN, 0)


def test_an_agent_that_puts_other_words_in_the_models_mouth_makes_no_drift():
    recorder = SessionRecorder()
    recorder.place(completion([1, 2], [3]), 0, chat("a"))
    place = recorder.place(completion([1, 2, 33, 4], [5]), 1, chat("a", "in other words", "more"))
    assert (place.segment, place.answers, recorder.drifts) == (1, NO_TURN, 0)


def test_without_ids_chats_are_told_apart_by_their_words():
    recorder = SessionRecorder()
    recorder.place(Completion("said"), 0, chat("a"))
    recorder.place(Completion("said"), 1, chat("b"))
    place = recorder.place(Completion("end"), 2, chat("a", "said", "more"))
    assert place == (0, 0, 0, 0)
    assert recorder.messages() == chat("a", "said", "more", "end")
    assert recorder.untrainable_because == "the server gave no prompt token ids (turn 0)"
    assert recorder.segments() == ()


def test_the_newest_chat_is_the_one_to_show_and_to_go_on_from():
    recorder = SessionRecorder()
    assert (recorder.messages(), recorder.last_context()) == ((), b"")
    recorder.place(completion([1, 2], [3]), 0, chat("a"))
    recorder.place(completion([7], [8]), 1, chat("b"))
    recorder.place(completion([1, 2, 3], [4]), 2, chat("a", "said", "more"))
    assert recorder.messages() == chat("a", "said", "more", "said")
    assert recorder.last_context() == recorder.segments()[0].token_ids


def test_a_prompt_in_another_form_than_its_segment_is_compared_exactly():
    recorder = SessionRecorder()
    recorder.place(completion([1, 2], [3], as_json=True), 0, chat("a"))
    recorder.place(completion([1, 2, 3, 4], [5]), 1, chat("a"))
    recorder.place(completion([1, 2, 3, 4, 5, 6], [7], as_json=True), 2, chat("a"))
    (segment,) = recorder.segments()
    assert list(segment.ids()) == list(range(1, 8))
