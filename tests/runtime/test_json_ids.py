"""Prompts as JSON text: only the new part is parsed, and never wrongly."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.runtime.errors import MalformedReply
from turngate.runtime.json_ids import JsonIds, ids_text, parse_ids

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(IDS, st.sampled_from([(",", ":"), (", ", ": ")]))
def test_ids_read_like_a_sequence_whatever_the_spacing(ids, separators):
    wrapped = JsonIds(json.dumps(ids, separators=separators).encode())
    assert (list(wrapped), len(wrapped), bool(wrapped)) == (ids, len(ids), bool(ids))
    if ids:
        assert (wrapped[0], list(wrapped[1:])) == (ids[0], ids[1:])


@given(IDS, IDS)
def test_what_follows_a_known_prefix_is_parsed_alone(known, new):
    if known:
        rest = JsonIds(json.dumps(known + new).encode()).text_after(ids_text(known))
        assert list(parse_ids(rest)) == new


def test_the_start_of_a_longer_number_is_no_prefix():
    assert JsonIds(b"[1,23]").text_after(b"1,2") is None
    assert JsonIds(b"[1,2]").text_after(b"1,3") is None
    assert JsonIds(b"[1,2]").text_after(b"1,2,3") is None


@pytest.mark.parametrize("text", [b"null", b'"[1]"', b"{}", b""])
def test_what_is_no_array_is_refused(text):
    with pytest.raises(MalformedReply, match="must be an array"):
        JsonIds(text)


@pytest.mark.parametrize("text", [b"[" * 100_000 + b"]" * 100_000, b"[-1]", b"[2147483648]", b'["\xff"]', b"[1"])
def test_ids_that_are_none_are_refused_when_somebody_looks(text):
    with pytest.raises(MalformedReply, match="token ids must be integers"):
        JsonIds(text).ids()


def test_a_length_that_is_known_is_not_counted():
    assert len(JsonIds(b"[1,2,3]", 3)) == 3
    assert len(JsonIds(b"[1, 2, 3]")) == 3
    assert len(JsonIds(b"[]")) == 0
