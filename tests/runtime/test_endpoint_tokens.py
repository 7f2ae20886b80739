"""The hot client where chats are rendered on our side: what goes over the wire, and what comes of it."""

import msgspec
import pytest

from turngate.envs.base import End, Task
from turngate.envs.testing import EchoEnv
from turngate.runtime.dialect import Dialect
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.engine_renderer import EngineRenderer
from turngate.runtime.errors import ConfigError, MalformedReply
from turngate.runtime.rollout import run_rollout
from turngate.runtime.testing import FakeRenderer, FakeTransport, render_ids
from turngate.runtime.transport import Reply
from turngate.runtime.types import Message, Sampling

ASK = [Message("system", "be brief"), Message("user", "hi")]
SAMPLING = Sampling(max_tokens=8)


def sampled(ids, **more):
    choice = {"text": "x", "finish_reason": "stop", "logprobs": {"token_logprobs": [-0.5] * len(ids)}, **more}
    return Reply(200, {}, msgspec.json.encode({"choices": [choice]}))


def spelled(ids):
    reply = msgspec.json.decode(sampled(ids).body)
    reply["choices"][0]["logprobs"]["tokens"] = [f"token_id:{i}" for i in ids]
    return Reply(200, {}, msgspec.json.encode(reply))


@pytest.mark.parametrize("strings", [True, False], ids=["id strings", "ids"])
async def test_token_mode_sends_ids_and_asks_for_the_sampled_ones_alone_where_it_can(strings):
    ids = [*b"yes", 260]
    transport = FakeTransport(spelled(ids) if strings else sampled(ids, token_ids=ids))
    dialect = Dialect(token_mode="tokens", token_id_strings=strings)
    endpoint = Endpoint("http://x/v1", model="m", dialect=dialect, renderer=FakeRenderer(), transport=transport)
    conversation = endpoint.conversation()
    first = await conversation.complete(ASK, SAMPLING, seed=5)
    second = await conversation.complete([*ASK, Message("assistant", "yes"), *ASK], SAMPLING)
    path, request = transport.requests[0]
    assert (path, request["prompt"], request["seed"], request["stop_token_ids"]) == (
        "/completions",
        render_ids(ASK),
        5,
        [260],
    )
    asked = ("return_token_ids" in request, "return_tokens_as_token_ids" in request)
    assert asked == (not strings, strings)
    assert "messages" not in request
    assert (first.text, list(first.token_ids), list(first.logprobs)) == ("yes", ids, [-0.5] * 4)
    assert transport.requests[1][1]["prompt"] == [*render_ids(ASK), *ids, *render_ids(ASK)]
    assert list(second.prompt_token_ids) == transport.requests[1][1]["prompt"]
    assert endpoint.conversation() is not conversation


async def test_a_completion_without_a_conversation_is_rendered_whole():
    renderer, ids = FakeRenderer(), [*b"yes", 260]
    transport = FakeTransport(sampled(ids, token_ids=ids))
    dialect = Dialect(token_mode="tokens", stop_token_ids=False)
    endpoint = Endpoint("http://x/v1", model="m", dialect=dialect, renderer=renderer, transport=transport)
    for count in (1, 2):
        assert (await endpoint.complete(ASK, SAMPLING)).text == "yes"
        assert renderer.whole == count
    assert "stop_token_ids" not in transport.requests[0][1]


def test_a_renderer_and_the_mode_that_uses_it_come_together():
    with pytest.raises(ConfigError, match="must come together: got renderer none with token_mode='tokens'"):
        Endpoint("http://x/v1", model="m", dialect=Dialect(token_mode="tokens"))
    with pytest.raises(ConfigError, match=r"must come together: got renderer <.*> with token_mode='server'"):
        Endpoint("http://x/v1", model="m", renderer=FakeRenderer())
    endpoint = Endpoint("http://x/v1", model="m")
    assert endpoint.conversation() is endpoint


@pytest.mark.parametrize("where", ["choice", "reply"])
@pytest.mark.parametrize(
    "prompt", [[1], [1, *render_ids(ASK)], [*render_ids(ASK)[1:], 7]], ids=["cut", "more", "other"]
)
async def test_a_server_that_has_seen_another_prompt_than_it_was_sent_is_not_believed(where, prompt):
    reply = msgspec.json.decode(sampled([*b"yes", 260], token_ids=[*b"yes", 260]).body)
    told = reply["choices"][0] if where == "choice" else reply
    transport = FakeTransport(lambda path, request: Reply(200, {}, msgspec.json.encode(reply)))
    dialect = Dialect(token_mode="tokens")
    endpoint = Endpoint("http://x/v1", model="m", dialect=dialect, renderer=FakeRenderer(), transport=transport)
    told["prompt_token_ids"] = render_ids(ASK)
    assert (await endpoint.complete(ASK, SAMPLING)).text == "yes"
    told["prompt_token_ids"] = prompt
    with pytest.raises(MalformedReply, match="prompt_token_ids must be those that were sent"):
        await endpoint.complete(ASK, SAMPLING)


async def test_ids_of_another_vocabulary_are_the_servers_fault():
    transport = FakeTransport(sampled([10**6], token_ids=[10**6]))
    renderer = EngineRenderer(Tokenizer.train(["hi"], 266))
    endpoint = Endpoint(
        "http://x/v1", model="m", dialect=Dialect(token_mode="tokens"), renderer=renderer, transport=transport
    )
    with pytest.raises(MalformedReply, match=r"sampled ids must be of the renderer's vocabulary: .* got 1000000"):
        await endpoint.complete(ASK, SAMPLING)
    trajectory = await run_rollout(EchoEnv, Task("t", "hi"), endpoint)
    assert trajectory.end is End.endpoint_error
