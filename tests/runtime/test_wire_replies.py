"""Replies that spell their ids out."""

import pytest

from turngate.runtime.errors import MalformedReply
from turngate.runtime.wire import decode_reply
from turngate.runtime.wire_replies import text_completion


def id_strings(tokens, ids=b"null"):
    logprobs = b'{"tokens": ' + tokens + b', "token_logprobs": [-0.5, -0.25]}'
    body = b'{"choices": [{"text": "ab", "token_ids": ' + ids + b', "logprobs": ' + logprobs + b"}]}"
    return text_completion(decode_reply(body, text=True), [1], 3, 3)


def test_ids_are_found_in_tokens_that_spell_them():
    completion = id_strings(b' [ "token_id:7", "token_id:123456" ]')
    assert (list(completion.token_ids), list(completion.versions)) == ([7, 123456], [3, 3])
    assert list(id_strings(b'["token_id:7", "token_id:8"]', b"[5, 6]").token_ids) == [5, 6]
    assert list(id_strings(b'["seven", "token_id:8"]').token_ids) == []
    assert list(id_strings(b"null").token_ids) == []


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (b'["token_id:7", "eight"]', "token ids must be integers"),
        (b'["token_id:7", "token_id:-8"]', "token ids must be integers"),
        (b'["token_id:7", "token_id:8.5"]', "token ids must be integers"),
        (b'["token_id:7", "token_id:4294967296"]', "token ids must be integers"),
        (b'["token_id:7", 8]', None),
        (b'["token_id:7"]', "logprobs must align"),
        (b'["token_id:7", "token_id:8,9"]', "logprobs must align"),
    ],
)
def test_id_strings_that_are_none_are_malformed(tokens, message):
    if message is None:
        assert list(id_strings(tokens).token_ids) == [7, 8]  # a number where a string should be is no other id
        return
    with pytest.raises(MalformedReply, match=message):
        id_strings(tokens)
