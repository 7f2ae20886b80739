"""What a dialect may say."""

import pytest

from turngate.runtime.dialect import OPENAI, Dialect
from turngate.runtime.errors import ConfigError


def test_ids_are_asked_for_unless_the_mode_has_none():
    assert Dialect().asks_ids
    assert Dialect(token_mode="tokens").asks_ids
    assert not OPENAI.asks_ids
    assert not Dialect(token_mode="tokens", return_token_ids=False, token_id_strings=True).asks_ids


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_mode": "ids"}, r"token_mode must be one of tokens, server, text: got 'ids'"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs must come with logprobs"),
        ({"return_token_ids": False}, "needs ids of what was sampled"),
        ({"return_token_ids": False, "token_id_strings": True}, "'server' needs the prompt's ids"),
    ],
)
def test_dialects_that_cannot_work_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        Dialect(**fields)
