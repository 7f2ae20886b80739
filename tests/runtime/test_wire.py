"""The wire format's edges that no endpoint test meets."""

import pytest

from turngate.runtime.types import Message
from turngate.runtime.wire import error_message, wire_messages


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
    ],
)
def test_error_messages_of_every_common_shape_are_found(body, message):
    assert error_message(body) == message


def test_messages_without_tool_calls_are_sent_as_they_are():
    messages = [Message("user", "a"), Message("assistant", "b")]
    assert wire_messages(messages) is messages
