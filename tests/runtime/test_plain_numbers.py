"""Settings as plain numbers."""

from collections.abc import Callable

import msgspec
import numpy
import pytest

from turngate.runtime.errors import ConfigError
from turngate.runtime.limits import Limits
from turngate.runtime.types import Sampling, TokenGuidance


@pytest.mark.parametrize(
    ("made", "plain"),
    [
        (
            lambda: Sampling(
                temperature=numpy.float64(0.5),
                top_p=numpy.float32(0.25),
                top_k=numpy.int64(3),
                max_tokens=numpy.int32(9),
            ),
            Sampling(temperature=0.5, top_p=0.25, top_k=3, max_tokens=9),
        ),
        (
            lambda: Limits(
                max_turns=numpy.int64(3), max_policy_tokens=numpy.int64(70), turn_timeout_s=numpy.float64(2)
            ),
            Limits(max_turns=3, max_policy_tokens=70, turn_timeout_s=2.0),
        ),
        (lambda: TokenGuidance(beta=numpy.float32(2.5), top_k=numpy.int64(3)), TokenGuidance(beta=2.5, top_k=3)),
        (lambda: msgspec.structs.replace(Sampling(), temperature=numpy.float64(2)), Sampling(temperature=2.0)),
    ],
)
def test_numbers_of_any_kind_are_written_as_plain_ones(made: Callable[[], msgspec.Struct], plain: msgspec.Struct):
    assert msgspec.json.encode(made()) == msgspec.json.encode(plain)


@pytest.mark.parametrize(
    ("settings", "given", "expected"),
    [
        (Sampling, {"temperature": "1"}, r"temperature must be a number: got '1' \(Sampling\)"),
        (Sampling, {"top_p": None}, r"top_p must be a number: got None \(Sampling\)"),
        (Sampling, {"max_tokens": 64.0}, r"max_tokens must be a whole number: got 64.0 \(Sampling\)"),
        (Limits, {"max_turns": 2.5}, r"max_turns must be a whole number: got 2.5 \(Limits\)"),
        (Limits, {"turn_timeout_s": "9"}, r"turn_timeout_s must be a number: got '9' \(Limits\)"),
        (TokenGuidance, {"beta": "x"}, r"beta must be a number: got 'x' \(TokenGuidance\)"),
        (TokenGuidance, {"beta": 1.0, "top_k": 2.0}, r"top_k must be a whole number: got 2.0 \(TokenGuidance\)"),
    ],
)
def test_what_is_no_number_is_refused_when_it_is_given(settings, given, expected):
    with pytest.raises(ConfigError, match=expected):
        settings(**given)
