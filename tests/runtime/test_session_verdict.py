"""How a session ends, and what goes before what."""

import asyncio

import pytest

from turngate.envs.base import End
from turngate.runtime.errors import ContextOverflow, EndpointError, EnvError, SessionLimit, ToolError
from turngate.runtime.session_verdict import SessionVerdict


def test_rewards_decide_where_nothing_else_does():
    assert SessionVerdict().on_return(0.1) == (End.success, "")
    assert SessionVerdict().on_return(0.0) == (End.failure, "")


def test_a_limit_goes_before_rewards_failures_and_errors_and_the_first_one_stays():
    verdict = SessionVerdict()
    verdict.stop(End.turn_limit, "8 turns")
    verdict.stop(End.token_limit, "9 tokens")
    verdict.fail(EndpointError("down"))
    assert verdict.on_return(1.0) == verdict.on_error(SessionLimit("8 turns")) == (End.turn_limit, "")
    assert repr(verdict) == "<SessionVerdict turn_limit EndpointError: down>"


def test_a_prompt_too_long_for_the_server_is_a_limit_told_in_words():
    verdict = SessionVerdict()
    verdict.fail(ContextOverflow("too long"))
    verdict.delivered()
    assert verdict.on_return(1.0) == (End.context_overflow, "too long")


def test_a_failure_goes_before_rewards_until_a_reply_comes():
    verdict = SessionVerdict()
    verdict.fail(EndpointError("down \ud800"))
    assert verdict.on_return(1.0) == (End.endpoint_error, "EndpointError: down \\ud800")
    assert verdict.on_error(ValueError("gave up"))[0] is End.endpoint_error
    verdict.delivered()
    assert verdict.on_return(1.0) == (End.success, "")


@pytest.mark.parametrize(
    ("error", "end", "why"),
    [
        (ValueError("oops"), End.env_error, "the agent must not raise: got ValueError: oops"),
        (EnvError("no such turn"), End.env_error, "no such turn"),
        (ToolError("broke"), End.tool_error, "broke"),
        (asyncio.CancelledError(), End.cancelled, "cancelled from outside"),
        (GeneratorExit(), End.cancelled, "cancelled from outside"),
    ],
)
def test_each_error_has_its_end(error, end, why):
    assert SessionVerdict().on_error(error) == (end, why)


def test_a_cancellation_is_one_even_after_a_limit():
    verdict = SessionVerdict()
    verdict.stop(End.turn_limit, "8 turns")
    assert verdict.on_error(asyncio.CancelledError())[0] is End.cancelled
