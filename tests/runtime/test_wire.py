"""The wire format's edges that no endpoint test meets."""

import pytest

from turngate.runtime.errors import MalformedReply
from turngate.runtime.types import Message
from turngate.runtime.wire import decode_reply, error_message, wire_messages

DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too hot", "type": "x", "code": "hot"}}', "too hot | hot"),
        (b'{"error": {"message": "too hot", "code": 400}}', "too hot | 400"),
        (b'{"error": "plain"}', "plain"),
        (b'{"object": "error", "message": "flat"}', "flat"),
        (b'{"detail": [{"loc": ["body", "n"], "msg": "bad"}]}', "[{'loc': ['body', 'n'], 'msg': 'bad'}]"),
        (b"<html>Bad Gateway</html>", "<html>Bad Gateway</html>"),
        (b"[1, 2]", "[1, 2]"),
        (b"", ""),
        (b'{"error": ' + b"[" * 100_000, '{"error": ' + "[" * 190),
        (b'{"error": ' + b"9" * 5_000 + b"}", '{"error": ' + "9" * 190),
        (b'{"error": "\\ud800"}', '{"error": "\\ud800"}'),
    ],
)
def test_error_messages_of_every_common_shape_are_found(body, message):
    assert error_message(body) == message


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
