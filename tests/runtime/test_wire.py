"""The wire format's edges that no endpoint test meets."""

import pytest

from turngate.runtime.errors import MalformedReply
from turngate.runtime.types import Message
from turngate.runtime.wire import decode_reply, wire_messages

DEEP = b"[" * 100_000 + b"]" * 100_000


def test_messages_without_tool_calls_are_sent_as_they_are():
    messages = [Message("user", "a"), Message("assistant", "b")]
    assert wire_messages(messages) is messages


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize(
    "body",
    [b'{"choices": [], "x": ' + DEEP + b"}", b'{"choices": [], "prompt_token_ids": ' + DEEP + b"}", b'{"\xff": 1}'],
    ids=["field nobody reads", "prompt", "no UTF-8"],
)
def test_replies_that_cannot_be_decoded_are_malformed(body, text):
    with pytest.raises(MalformedReply, match="reply must be a completion object"):
        decode_reply(body, text=text)
