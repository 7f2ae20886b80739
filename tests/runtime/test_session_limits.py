"""Which limit a session has reached."""

from turngate.envs.base import End
from turngate.runtime.limits import Limits
from turngate.runtime.session_limits import fits_context, limit_reached, over_long
from turngate.runtime.types import Completion


def test_turns_are_counted_before_tokens_and_nothing_is_reached_below():
    limits = Limits(max_turns=2, max_policy_tokens=10)
    assert limit_reached(limits, requests=1, policy_tokens=9) is None
    assert limit_reached(limits, requests=1, policy_tokens=10) == (
        End.token_limit,
        "got 10 tokens (Limits.max_policy_tokens)",
    )
    assert limit_reached(limits, requests=2, policy_tokens=10) == (End.turn_limit, "got 2 turns (Limits.max_turns)")
    assert limit_reached(Limits(max_turns=2), requests=1, policy_tokens=10**9) is None


def test_a_reply_is_over_long_with_its_prompt_and_a_prompt_alone_may_still_fit():
    reply = Completion("x", [1, 2], [-1.0, -1.0], [0, 0], [7, 8, 9])
    assert over_long(Limits(max_context_tokens=5), reply) is None
    assert over_long(Limits(max_context_tokens=4), reply) == (
        End.context_overflow,
        "got a turn beyond 4 tokens (Limits.max_context_tokens)",
    )
    assert over_long(Limits(), reply) is None
    assert [fits_context(Limits(max_context_tokens=n), reply) for n in (2, 3)] == [False, True]
    assert fits_context(Limits(), reply)
