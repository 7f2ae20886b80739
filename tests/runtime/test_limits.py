import pytest

from turngate.runtime.errors import ConfigError
from turngate.runtime.limits import Limits


@pytest.mark.parametrize("field", ["max_turns", "max_policy_tokens", "request_timeout_s", "turn_timeout_s"])
def test_limits_must_be_positive(field):
    with pytest.raises(ConfigError, match=f"{field} must be positive: got 0"):
        Limits(**{field: 0})
