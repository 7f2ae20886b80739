"""What servers say when they refuse, in all the shapes they say it."""

import pytest

from turngate.runtime.error_bodies import error_message


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
