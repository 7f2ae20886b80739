"""vLLM on CPU with a tiny model: the probe, and records whose ids and log-probs are those that were sampled."""

from collections.abc import Iterator

import pytest

from tests_servers.checks import TEMPERATURE, assert_whole, play, verdicts
from tests_servers.launch import Options, Server, running
from tests_servers.reference import Reference
from tests_servers.tap import Tap, recorded, replied
from turngate.envs.base import ToolCall, ToolSpec
from turngate.runtime import Dialect, Endpoint, Message, Sampling
from turngate.runtime.capabilities import check_trainable
from turngate.runtime.connect import connect
from turngate.runtime.huggingface_renderer import HuggingFaceRenderer
from turngate.runtime.probe import probe

FLOAT32_NATS = 1e-4
"""Two implementations of one model in float32; 5e-6 was measured."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("vllm", "digits", Options(lora=True)) as server:
        yield server


@pytest.fixture(scope="module")
def reference(server: Server) -> Reference:
    return Reference(server.folder)


async def test_probe_finds_what_training_needs(server: Server) -> None:
    capabilities = await probe(server.url)

    found = verdicts(capabilities)
    missing = {name for name, verdict in found.items() if verdict == "no"}
    unknown = {name for name, verdict in found.items() if verdict == "unknown"}
    assert missing == {"versions"}, capabilities.table()
    # Answers of one digit are too short to stop within, the same under every seed, and never a tool call.
    assert unknown <= {"stop", "stop_ids", "seeds", "tool_calls"}, capabilities.table()
    for use in ("evaluate", "record", "train", "guide", "publish"):
        assert capabilities.problems(use, has_renderer=False) == [], use


async def test_connect_lets_the_server_render_without_a_renderer(server: Server, reference: Reference) -> None:
    async with await connect(server.url) as endpoint:
        assert endpoint.dialect.token_mode == "server"
        check_trainable(endpoint, Sampling(temperature=TEMPERATURE, top_p=0.9))
    tap = Tap(server.url)
    async with Endpoint(server.url, model=server.model, dialect=endpoint.dialect, transport=tap) as endpoint:
        trajectories = await play(endpoint)

    assert_whole(trajectories)
    assert recorded(trajectories) == replied(tap.exchanges)
    assert reference.errors(trajectories, temperature=TEMPERATURE).largest < FLOAT32_NATS


async def test_connect_renders_itself_with_a_renderer(server: Server, reference: Reference) -> None:
    renderer = HuggingFaceRenderer(server.folder)
    async with await connect(server.url, renderer=renderer) as endpoint:
        assert endpoint.dialect.token_mode == "tokens"
        dialect: Dialect = endpoint.dialect
    tap = Tap(server.url)
    async with Endpoint(server.url, model=server.model, dialect=dialect, renderer=renderer, transport=tap) as endpoint:
        trajectories = await play(endpoint)

    assert_whole(trajectories)
    assert {exchange.path for exchange in tap.exchanges} == {"/completions"}
    assert recorded(trajectories) == replied(tap.exchanges)
    assert [len(t.segments) for t in trajectories] == [1] * len(trajectories)
    assert reference.errors(trajectories, temperature=TEMPERATURE).largest < FLOAT32_NATS


async def test_both_sides_render_the_same_ids(server: Server) -> None:
    by_server, by_us = Tap(server.url), Tap(server.url)
    renderer, dialect = HuggingFaceRenderer(server.folder), Dialect(token_mode="tokens")
    async with Endpoint(server.url, model=server.model, transport=by_server) as endpoint:
        theirs = await play(endpoint, temperature=0.0)
    async with Endpoint(
        server.url, model=server.model, dialect=dialect, renderer=renderer, transport=by_us
    ) as endpoint:
        ours = await play(endpoint, temperature=0.0)

    assert [t.segments[0].token_ids for t in ours] == [t.segments[0].token_ids for t in theirs]


async def test_both_sides_render_tools_calls_and_results_to_the_same_ids(server: Server) -> None:
    numbers = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"description": "ä"}}, "required": ["a"]}
    tools = (ToolSpec("add", "Adds two numbers.", numbers), ToolSpec("stop", "", {"type": "object", "properties": {}}))
    calls = (ToolCall("call_0_0", "add", '{"a":1,"b":-5}'), ToolCall("call_0_1", "add", '{"a": 2}'))
    results = [Message("tool", "日本", (), "call_0_0"), Message("tool", "two", (), "call_0_1")]
    asked = [Message("user", "hi"), Message("assistant", "Let me see.", calls), *results]
    chats = [
        asked[:1],
        asked,
        [Message("system", "be good"), *asked, Message("assistant", "3"), Message("user", "so?")],
    ]
    renderer = HuggingFaceRenderer(server.folder)
    async with Endpoint(server.url, model=server.model) as endpoint:
        for chat in chats:
            completion = await endpoint.complete(chat, Sampling(max_tokens=1), tools=tools)
            assert list(completion.prompt_token_ids) == renderer.render(chat, tools)
