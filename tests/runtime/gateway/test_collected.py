"""Chunks add up to what the same reply in one piece would have said."""

import msgspec
import pytest

from turngate.runtime.errors import MalformedReply
from turngate.runtime.gateway.collected import Arrival, CollectedText

ARRIVAL = Arrival(3, 3, None)


def chunk(text, ids, **more):
    logprobs = {"token_logprobs": [-0.5] * len(ids), "tokens": [f"token_id:{i}" for i in ids]}
    return msgspec.json.encode({"choices": [{"index": 0, "text": text, "logprobs": logprobs} | more]})


def test_ids_that_come_spelled_out_are_those_of_their_chunk_and_of_the_whole():
    collected = CollectedText(1)
    told = [collected.add(chunk("a", [1])), collected.add(chunk("bc", [2, 3], finish_reason="stop"))]
    assert [one.choices[0].token_ids for one in told] == [[1], [2, 3]]
    (completion,) = collected.completions(ARRIVAL)
    assert (completion.text, completion.token_ids) == ("abc", [1, 2, 3])
    assert (completion.logprobs, completion.versions) == ([-0.5] * 3, [3] * 3)


def test_ids_are_not_counted_twice_where_both_kinds_come():
    collected = CollectedText(1)
    collected.add(chunk("a", [1], token_ids=[1]))
    collected.add(chunk("b", [2], token_ids=[2], finish_reason="stop"))
    assert collected.completions(ARRIVAL)[0].token_ids == [1, 2]


def test_tokens_after_the_end_of_a_choice_are_no_part_of_it():
    collected = CollectedText(1)
    collected.add(chunk("a", [1], finish_reason="stop"))
    collected.add(b'{"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}')
    with pytest.raises(MalformedReply, match="must end once: got tokens after 'stop'"):
        collected.add(chunk("a", [1], finish_reason="stop"))


def test_a_stream_is_of_one_prompt():
    collected = CollectedText(1)
    for _ in range(2):
        collected.add(chunk("a", [1], prompt_token_ids=[5, 6]))
    with pytest.raises(MalformedReply, match="must be of one prompt"):
        collected.add(chunk("b", [2], prompt_token_ids=[5, 7]))


def test_choices_that_nobody_asked_for_are_refused():
    collected = CollectedText(1)
    for index in (0, 1):
        collected.add(chunk("a", [1], index=index, finish_reason="stop"))
    with pytest.raises(MalformedReply, match="must finish all its choices: expected 1, got 2 of 2"):
        collected.completions(ARRIVAL)
