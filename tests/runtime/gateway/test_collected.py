"""Chunks add up to what the same reply in one piece would have said."""

import msgspec

from turngate.runtime.gateway.collected import Arrival, CollectedText

ARRIVAL = Arrival(3, 3, None)


def chunk(text, ids, **more):
    logprobs = {"token_logprobs": [-0.5] * len(ids), "tokens": [f"token_id:{i}" for i in ids]}
    return msgspec.json.encode({"choices": [{"index": 0, "text": text, "logprobs": logprobs, **more}]})


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
