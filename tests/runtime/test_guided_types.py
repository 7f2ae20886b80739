"""Settings and records of guidance."""

import msgspec
import numpy
import pytest

from turngate.runtime.errors import ConfigError
from turngate.runtime.types import TokenGuidance


def test_settings_of_any_kind_of_number_are_sent_as_plain_ones():
    given = TokenGuidance(beta=numpy.float32(2.5), top_k=numpy.int64(3))
    assert given == TokenGuidance(beta=2.5, top_k=3)
    assert msgspec.json.decode(msgspec.json.encode(given)) == {"beta": 2.5, "top_k": 3, "tail": "base"}


@pytest.mark.parametrize("settings", [{"beta": "x"}, {"beta": None}, {"beta": 1.0, "top_k": 2.0}])
def test_what_is_no_number_is_refused_when_it_is_given(settings):
    with pytest.raises(ConfigError, match="beta must be a number, top_k a whole one"):
        TokenGuidance(**settings)
