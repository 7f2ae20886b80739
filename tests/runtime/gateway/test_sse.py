import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.runtime.errors import MalformedReply
from turngate.runtime.gateway import sse
from turngate.runtime.gateway.sse import event_data, event_piece, named_piece

STREAM = b': ping\r\n\r\ndata: {"a": "\xc3\xa9"}\r\n\r\nevent: x\ndata:one\ndata: two\nid: 7\n\ndata: [DONE]\n\n'


async def read(pieces):
    async def come():
        for piece in pieces:
            yield piece

    return [data async for data in event_data(come())]


@given(st.lists(st.integers(0, len(STREAM)), max_size=6))
async def test_events_are_the_same_wherever_the_network_cuts_them(cuts):
    bounds = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[a:b] for a, b in pairwise(bounds)]
    assert await read(pieces) == [b'{"a": "\xc3\xa9"}', b"one\ntwo", b"[DONE]"]


async def test_a_last_event_without_its_empty_line_counts():
    assert await read([b"data: 1\n\nda", b"ta: 2"]) == [b"1", b"2"]
    assert await read([b"data: 1\n\ndata: 2\n"]) == [b"1", b"2"]


async def test_what_is_written_reads_back():
    assert await read([event_piece(b"x") + named_piece("name", b"y")]) == [b"x", b"y"]


async def test_an_event_without_an_end_is_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(sse, "_MAX_EVENT_BYTES", 100)
    with pytest.raises(MalformedReply, match="at most 100 bytes"):
        await read([b"data: " + b"x" * 60, b"y" * 60])
    with pytest.raises(MalformedReply, match="at most 100 bytes"):
        await read([b"data: x\n"] * 20)
    assert len(await read([b"data: x\n\n"] * 20)) == 20


async def test_a_long_line_in_small_pieces_costs_its_length_and_not_the_square_of_it():
    line = b"data: " + b"x" * 8_000_000
    began_s = time.process_time()
    assert await read([line[at : at + 1000] for at in range(0, len(line), 1000)]) == [line[6:]]
    assert time.process_time() - began_s < 2  # the square would take half a minute
