import json

import msgspec
import pytest

from turngate.runtime.openai_api.refusals import RequestError, decode_json, error_body, refusal_headers


class Inner(msgspec.Struct):
    size: int


class Ask(msgspec.Struct):
    inner: list[Inner]
    rate: float | None = None


DECODER = msgspec.json.Decoder(Ask)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        (b'{"inner": [{"size": 1}, {"size": "x"}]}', "inner[1].size", "Expected `int`, got `str`"),
        (b'{"inner": [{}]}', "inner[0].size", "missing required field"),
        (b'{"inner": [], "rate": NaN}', "rate", "must be finite"),
        (b'{"inner": [', None, "valid JSON"),
        (b"\xff", None, "valid JSON"),
        (b"[]", None, "the body must fit the schema"),
    ],
)
def test_the_offending_field_is_named_as_precisely_as_it_is_known(body, param, said):
    with pytest.raises(RequestError, match=said) as caught:
        decode_json(DECODER, body)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_body_nested_beyond_what_can_be_followed_is_a_bad_request():
    with pytest.raises(RequestError, match="nested less deeply"):
        decode_json(msgspec.json.Decoder(), b"[" * 100_000)


def test_an_error_is_spelled_as_openai_spells_it_and_says_when_to_come_again():
    error = RequestError("slow down", status=429, code="busy", retry_after_s=3)
    assert json.loads(error_body(error))["error"]["code"] == "busy"
    assert refusal_headers(error)["Retry-After"] == "3"
    assert refusal_headers(RequestError("who?", status=401))["WWW-Authenticate"] == "Bearer"
