"""Token-in/token-out against the engine: the ids of the server's own rendering, and none of its drift."""

import functools
import json

import pytest

from turngate.envs.base import Action, End, Observation, Step, Task, ToolResult, ToolSpec
from turngate.runtime.context import full, last_turns, summarise
from turngate.runtime.dialect import Dialect
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.engine.config import EngineConfig
from turngate.runtime.engine.server import EngineServer
from turngate.runtime.engine_renderer import EngineRenderer
from turngate.runtime.limits import Limits
from turngate.runtime.rollout import run_rollout
from turngate.runtime.types import Sampling

TASK = Task("t", "buy the red one")
TURNS = 4


class ShopEnv:
    """Answers a few turns; the actions it has seen are its state."""

    def __init__(self, tools=()):
        self.tools, self.actions = tools, []

    async def reset(self, task: Task, seed: int) -> Observation:
        return Observation("the red", system="buy", tools=self.tools)

    async def step(self, action: Action) -> Step:
        self.actions.append(action)
        results = tuple(ToolResult(call.id, "under $80") for call in action.tool_calls)
        answer = Observation("" if results else f"one {len(self.actions)}", results)
        return Step(answer, end=End.success if len(self.actions) == TURNS else None, state={"said": action.text})

    async def aclose(self) -> None:
        pass


def endpoint_at(server, mode):
    url = f"http://127.0.0.1:{server.port}/v1"
    renderer = EngineRenderer(server.fake.tokenizer if hasattr(server, "fake") else server.tokenizer)
    if mode == "server":
        return Endpoint(url, model="policy")
    dialect = Dialect(token_mode="tokens", token_id_strings=mode == "strings")
    return Endpoint(url, model="policy", dialect=dialect, renderer=renderer)


async def both(server, env, ours, *, context, max_tokens=8, **options):
    """Play one episode rendered by the server and one rendered here; return the trajectories."""
    played = []
    for mode in ("server", ours):
        async with endpoint_at(server, mode) as endpoint:
            sampling = Sampling(max_tokens=max_tokens, **options)
            trajectory = await run_rollout(env, TASK, endpoint, context=context, sampling=sampling, seed=3)
        assert trajectory.end is End.success, trajectory.error
        assert trajectory.token_mode == ("server" if mode == "server" else "tokens")
        assert trajectory.untrainable_because == ""
        played.append(trajectory)
    return played


CONTEXTS = [full(), last_turns(1), last_turns(2), summarise(lambda text, _: text + "the", after_turns=2, keep_turns=1)]
CALLING = (ToolSpec("buy", "the red", {"type": "object"}),)


@pytest.mark.parametrize("context", CONTEXTS, ids=repr)
@pytest.mark.parametrize("max_tokens", [8, 1], ids=["whole", "cut"])
@pytest.mark.parametrize("tools", [(), CALLING], ids=["text", "tools"])
@pytest.mark.parametrize("mode", ["tokens", "strings"])
async def test_both_modes_record_the_same_ids(start_server, tokenizer, monkeypatch, context, max_tokens, tools, mode):
    async with start_server(policy_version=2) as server:
        if tools:
            call = [tokenizer.special("<|call|>"), *tokenizer.encode("buy {}")]
            server.fake.script = [*tokenizer.encode("red"), *call, tokenizer.end]
        monkeypatch.setattr(server._completions, "_max_context", 512)
        env = functools.partial(ShopEnv, tools)
        ours, theirs = await both(server, env, mode, context=context, max_tokens=max_tokens)
    assert ours.segments == theirs.segments
    assert ours.drifts == theirs.drifts == 0
    assert len(ours.segments) == 1 or context is not CONTEXTS[0]
    for one, other in zip(ours.turns, theirs.turns, strict=True):
        assert (one.segment, one.start, one.length) == (other.segment, other.start, other.length)
        assert (one.text, one.observation, one.stop_reason) == (other.text, other.observation, other.stop_reason)
        assert [(c.name, c.arguments) for c in one.tool_calls] == [(c.name, c.arguments) for c in other.tool_calls]
        assert bool(one.tool_calls) == (bool(tools) and max_tokens == 8)


async def test_what_a_model_says_in_its_own_tokens_drifts_on_the_server_and_not_here(make_policy, tokenizer):
    policy = make_policy(len(tokenizer), max_context=1024)
    async with EngineServer(policy, tokenizer, EngineConfig(seed=0)) as server:
        server.tokenizer = tokenizer
        limits = Limits(max_turns=TURNS)
        async with endpoint_at(server, "tokens") as endpoint, endpoint_at(server, "server") as plain:
            sampling = Sampling(max_tokens=24)
            ours = await run_rollout(ShopEnv, TASK, endpoint, sampling=sampling, limits=limits, seed=1)
            theirs = await run_rollout(ShopEnv, TASK, plain, sampling=sampling, limits=limits, seed=1)
            (segment,) = ours.segments
            scores = await endpoint.score(list(segment.ids()))
    assert (ours.drifts, ours.error) == (0, "")
    assert theirs.drifts > 0
    assert len(theirs.segments) == 1 + theirs.drifts
    # The first turn saw the same prompt and had the same luck.
    length = ours.turns[0].start + ours.turns[0].length
    assert segment.ids()[:length] == theirs.segments[0].ids()[:length]
    # What the record says was sampled from its own prefix was sampled from it.
    for at, mask in enumerate(segment.policy_mask):
        if mask:
            assert scores[at] == pytest.approx(segment.logprob_values()[at], abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_log_probs_can_be_named_by_id(http, start_server, tokenizer, stream):
    asked = {"return_tokens_as_token_ids": True, "stream": stream}
    messages = [{"role": "user", "content": "red"}]
    async with start_server() as server:
        root = f"http://127.0.0.1:{server.port}/v1"
        names = [f"token_id:{i}" for i in server.fake.script]
        body = {"messages": messages, "logprobs": True, **asked}
        async with http.post(f"{root}/chat/completions", json=body) as reply:
            chat = await read(reply, stream)
        async with http.post(f"{root}/completions", json={"prompt": "red", "logprobs": 0, **asked}) as reply:
            text = await read(reply, stream)
    found = [entry["token"] for choice in chat if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert found == names
    assert [name for choice in text if choice["logprobs"] for name in choice["logprobs"]["tokens"]] == names
    offsets = [offset for choice in text if choice["logprobs"] for offset in choice["logprobs"]["text_offset"]]
    assert offsets == sorted(offsets)


async def read(reply, stream):
    """Return all choices of a reply, or of its chunks."""
    body = await reply.text()
    lines = body.split("\n\n") if stream else [f"data: {body}"]
    replies = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [choice for one in replies for choice in one["choices"]]
