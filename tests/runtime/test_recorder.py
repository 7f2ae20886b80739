"""Token truth: every way of giving a prompt leads to the same segments, with each generated token exactly once."""

import json

from hypothesis import given
from hypothesis import strategies as st

from turngate.runtime import open_segment as open_segment_module
from turngate.runtime.json_ids import JsonIds, parse_ids
from turngate.runtime.recorder import Recorder
from turngate.runtime.types import NO_TURN, NO_VERSION, Completion

IDS = st.lists(st.integers(0, 300), min_size=1, max_size=6)


def completion(prompt, ids, *, version=0, as_json=False):
    given_prompt = JsonIds(json.dumps(prompt, separators=(",", ":")).encode()) if as_json else prompt
    return Completion("text" if ids else "", ids, [-i / 512 for i in ids], [version] * len(ids), given_prompt)


def record(turns, as_json):
    recorder = Recorder()
    places = [recorder.add(completion(*turn, version=n, as_json=as_json), n) for n, turn in enumerate(turns)]
    return places, recorder.segments()


@st.composite
def episodes(draw):
    """(prompt, ids) per turn; a prompt extends what came before, or does not."""
    turns: list[tuple[list[int], list[int]]] = []
    so_far: list[int] = []
    for _ in range(draw(st.integers(1, 6))):
        how = draw(st.sampled_from(["extend", "extend", "same", "other", "shorter"]))
        if how == "extend":
            prompt = so_far + draw(IDS)
        elif how == "same" and so_far:
            prompt = list(so_far)
        elif how == "shorter" and len(so_far) > 1:
            prompt = so_far[: len(so_far) // 2]
        else:
            prompt = draw(IDS)
        ids = draw(st.lists(st.integers(0, 300), max_size=5))
        turns.append((prompt, ids))
        so_far = prompt + ids
    return turns


@given(episodes(), st.booleans())
def test_every_turn_stands_behind_the_context_it_was_sampled_from(turns, as_json):
    places, segments = record(turns, as_json)
    for turn, ((prompt, ids), (index, start, length)) in enumerate(zip(turns, places, strict=True)):
        segment = segments[index]
        assert list(segment.ids())[:start] == prompt
        place = slice(start, start + length)
        assert list(segment.ids())[place] == ids
        assert list(segment.policy_mask[place]) == [1] * len(ids)
        assert list(segment.version_values())[place] == [turn] * len(ids)
        assert list(segment.turn_values())[place] == [turn] * len(ids)
        assert list(segment.logprob_values())[place] == [-i / 512 for i in ids]
    assert sum(sum(segment.policy_mask) for segment in segments) == sum(len(ids) for _, ids in turns)
    for segment in segments:
        for mask, logprob, version, turn in zip(
            segment.policy_mask,
            segment.logprob_values(),
            segment.version_values(),
            segment.turn_values(),
            strict=True,
        ):
            assert mask or (logprob, version, turn) == (0.0, NO_VERSION, NO_TURN)


@given(episodes())
def test_prompts_as_json_text_and_as_integers_give_equal_segments(turns):
    assert record(turns, as_json=True) == record(turns, as_json=False)


def test_prompts_that_change_their_form_on_the_way_are_compared_exactly():
    recorder = Recorder()
    recorder.add(completion([1, 2], [3], as_json=True), 0)
    recorder.add(completion([1, 2, 3, 4], [5]), 1)
    recorder.add(completion([1, 2, 3, 4, 5, 6], [7], as_json=True), 2)
    recorder.add(completion([1, 2, 3, 4, 5, 6, 7, 8], []), 3)
    recorder.add(completion([1, 2, 3, 4, 5, 6, 7, 8, 9], [10], as_json=True), 4)
    (segment,) = recorder.segments()
    assert list(segment.ids()) == list(range(1, 11))


def test_text_known_before_a_prompt_of_integers_is_not_trusted_after_it():
    recorder = Recorder()
    recorder.add(completion([1, 2], [3], as_json=True), 0)
    recorder.add(completion([1, 2, 3, 4], []), 1)
    recorder.add(completion([1, 2, 3, 4, 5], [6], as_json=True), 2)
    (segment,) = recorder.segments()
    assert list(segment.ids()) == [1, 2, 3, 4, 5, 6]


def test_a_turn_without_tokens_is_no_reason_not_to_train():
    recorder = Recorder()
    assert recorder.add(Completion("", [], [], [], [1, 2]), 0) == (0, 2, 0)
    assert recorder.untrainable_because == ""
    assert recorder.last_context() == recorder.segments()[0].token_ids


def test_what_is_missing_is_named_once_and_later_turns_are_still_recorded():
    recorder = Recorder()
    assert recorder.add(completion([1], [2]), 0) == (0, 1, 1)
    assert recorder.add(Completion("x", [3], [], [0], [1, 2, 9]), 1) == (0, 2, 0)
    assert recorder.add(Completion("x"), 2) == (0, 2, 0)
    assert recorder.add(completion([1, 2, 9, 3], [4]), 3) == (0, 4, 1)
    assert recorder.untrainable_because == "the server gave no log-probs (turn 1)"
    assert repr(recorder) == "<Recorder 1 segments, 2 policy tokens>"


def test_each_turn_parses_its_new_part_only(monkeypatch):
    parsed = []

    def parse_and_measure(text):
        parsed.append(len(text))
        return parse_ids(text)

    monkeypatch.setattr(open_segment_module, "parse_ids", parse_and_measure)
    recorder, prompt = Recorder(), [100] * 10
    for turn in range(60):
        recorder.add(completion(prompt, [200] * 5, as_json=True), turn)
        prompt = [*prompt, *[200] * 5, *[100] * 10]
    assert set(parsed) == {len("[" + ",".join(["100"] * 10) + "]")}
    assert len(recorder.segments()) == 1
