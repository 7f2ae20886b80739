"""The fakes behave as a good server does."""

import asyncio

import pytest

from turngate.envs.base import Action, ToolCall
from turngate.runtime.endpoint import ChatEndpoint, Endpoint
from turngate.runtime.testing import FakeEndpoint, FakeTransport, render_ids, run_virtual
from turngate.runtime.types import Completion, Message, Sampling

ASK = [Message("user", "hi")]


def complete(endpoint, sampling=Sampling(), **options):  # noqa: B008 - frozen
    return run_virtual(endpoint.complete(ASK, sampling, **options))


def test_fake_and_real_endpoint_are_chat_endpoints():
    endpoints: list[ChatEndpoint] = [FakeEndpoint(["a"]), Endpoint("http://x", model="m", transport=FakeTransport())]
    assert [endpoint.policy_version for endpoint in endpoints] == [0, 0]


def test_what_was_sampled_is_rendered_as_the_same_ids():
    completion = complete(FakeEndpoint(["yes"]))
    then = render_ids([*ASK, Message("assistant", "yes"), Message("user", "more")])
    assert then[: len(completion.prompt_token_ids) + len(completion.token_ids)] == [
        *completion.prompt_token_ids,
        *completion.token_ids,
    ]


def test_a_scripted_action_calls_its_tools_and_renders_as_the_same_ids():
    calls = (ToolCall("a", "look", '{"at": "it"}'),)
    completion = complete(FakeEndpoint([Action("let me see", calls)]))
    then = render_ids([*ASK, Message("assistant", "let me see", calls), Message("tool", "seen")])
    ids = [*completion.prompt_token_ids, *completion.token_ids]
    assert then[: len(ids)] == ids
    assert (completion.text, completion.tool_calls, completion.stop_reason) == ("let me see", calls, "tool_calls")
    cut = complete(FakeEndpoint([Action("", calls)]), Sampling(max_tokens=3))
    assert (cut.text, cut.tool_calls, cut.stop_reason) == ("loo", (), "length")


def test_the_script_may_be_a_function_of_the_messages_even_asynchronous():
    async def shout(messages):
        await asyncio.sleep(2)
        return messages[-1].content.upper()

    assert complete(FakeEndpoint(shout)).text == "HI"
    assert complete(FakeEndpoint(lambda messages: Completion("as is"))) == Completion("as is")


def test_the_script_may_fail_and_may_end():
    with pytest.raises(ValueError, match="boom"):
        complete(FakeEndpoint([ValueError("boom")]))
    with pytest.raises(AssertionError, match="more calls than answers"):
        complete(FakeEndpoint([]))


def test_calls_are_kept_with_the_messages_of_their_time():
    endpoint, live = FakeEndpoint(["a", "b"]), list(ASK)

    async def main():
        await endpoint.complete(live, Sampling(), seed=1)
        live.append(Message("assistant", "a"))
        await endpoint.complete(live, Sampling(), seed=2)

    run_virtual(main())
    assert [(len(call.messages), call.seed) for call in endpoint.calls] == [(1, 1), (2, 2)]


def test_max_tokens_cuts_as_a_server_would():
    completion = complete(FakeEndpoint(["hello"]), Sampling(max_tokens=3))
    assert (completion.text, list(completion.token_ids), completion.stop_reason) == ("hel", [*b"hel"], "length")
