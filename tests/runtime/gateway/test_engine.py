"""The gateway in front of the embedded engine: recorded ids are the engine's, log-probs those of the training pass."""

import asyncio

import aiohttp
import pytest
import torch
from openai import AsyncOpenAI

from tests.runtime.gateway.doors import TOOLS
from turngate.runtime.dialect import Dialect
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.engine.config import EngineConfig
from turngate.runtime.engine.model import ModelConfig, PolicyModel
from turngate.runtime.engine.packing import pack
from turngate.runtime.engine.server import EngineServer
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.engine_renderer import EngineRenderer
from turngate.runtime.gateway import Gateway
from turngate.runtime.session_table import SessionTable
from turngate.runtime.types import Sampling


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["buy the red one", 'search["backpack"] under $80'])


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tokenizer.save(path / "tokenizer.json")
    return path


@pytest.fixture
def model(tokenizer):
    """Of few weights, and one that says something: fresh models only repeat their last token."""
    config = ModelConfig(
        vocab_size=len(tokenizer), width=16, layers=1, heads=2, head_dim=8, mlp_width=32, max_context=2048
    )
    made = PolicyModel(config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(0.5 * torch.randn(weight.shape, generator=generator))
    return made


async def play(gateway, session, number):
    """Play four turns in one of the ways there are, whatever the model says."""
    is_streamed, is_response, has_tools = number % 2, number % 3 == 0, number % 4 < 2
    async with AsyncOpenAI(base_url=gateway.url, api_key=session.key) as client:
        messages = [{"role": "user", "content": f"buy the red one {number}"}]
        for turn in range(4):
            if is_response:
                reply = await client.responses.create(model="any", input=messages, max_output_tokens=8)
                said = [{"role": "assistant", "content": reply.output_text}]
            else:
                tools = {"tools": TOOLS} if has_tools else {}
                said = [await ask_chat(client, messages, is_streamed, tools)]
            messages += [*said, {"role": "user", "content": f"under $8{turn}"}]


async def ask_chat(client, messages, is_streamed, tools):
    if not is_streamed:
        reply = await client.chat.completions.create(model="any", messages=messages, max_tokens=8, **tools)
        return reply.choices[0].message.model_dump(exclude_none=True)
    stream = await client.chat.completions.create(model="any", messages=messages, max_tokens=8, stream=True)
    return {"role": "assistant", "content": "".join([chunk.choices[0].delta.content or "" async for chunk in stream])}


@pytest.mark.parametrize("mode", ["server", "tokens"])
async def test_interleaved_episodes_in_every_way_are_exact(model, folder, tokenizer, mode):
    renderer = EngineRenderer(folder) if mode == "tokens" else None
    reference = PolicyModel(model.config, seed=0)
    reference.load_state_dict(model.state_dict())
    async with EngineServer(model, tokenizer, EngineConfig(policy_version=3)) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        dialect = Dialect(token_mode=mode)
        async with Endpoint(url, model="policy", dialect=dialect, renderer=renderer, policy_version=3) as endpoint:
            async with Gateway(SessionTable(endpoint, sampling=Sampling())) as gateway:
                sessions = [gateway.sessions.create(seed=number) for number in range(8)]
                await asyncio.gather(*(play(gateway, session, n) for n, session in enumerate(sessions)))
                trajectories = [session.seal() for session in sessions]
        assert server._thread.open == 0
    for trajectory in trajectories:
        assert trajectory.trainable, trajectory.untrainable_because
        assert (len(trajectory.turns), trajectory.version_range()) == (4, (3, 3))
        for segment in trajectory.segments:
            ids = list(segment.ids())
            with torch.no_grad():
                own = [0.0, *reference.score(pack([ids])).logprobs_M.tolist()]
            sampled = [(own[s], segment.logprob_values()[s]) for s in range(len(ids)) if segment.policy_mask[s]]
            assert [ours for _, ours in sampled] == pytest.approx([theirs for theirs, _ in sampled], abs=1e-4)
    shapes = {(len(trajectory.segments), trajectory.drifts) for trajectory in trajectories}
    # What such a model says is not what its text reads as: a server that renders drifts each turn, kept ids never do.
    assert shapes == ({(1, 0)} if mode == "tokens" else {(4, 3)})


async def test_a_closed_agent_frees_the_engines_slots_with_its_session(model, tokenizer):
    async with EngineServer(model, tokenizer, EngineConfig()) as server:
        async with Endpoint(f"http://127.0.0.1:{server.port}/v1", model="policy") as endpoint:
            async with Gateway(SessionTable(endpoint)) as gateway, aiohttp.ClientSession() as http:
                session = gateway.sessions.create()
                body = {"messages": [{"role": "user", "content": "red"}], "stream": True, "n": 4, "max_tokens": 1900}
                headers = {"Authorization": f"Bearer {session.key}"}
                async with http.post(f"{gateway.url}/chat/completions", json=body, headers=headers) as reply:
                    await reply.content.readany()
                    reply.close()
                session.seal()
                async with asyncio.timeout(20):
                    while (await server.statistics())["running"]:  # noqa: ASYNC110 - the condition asks the server
                        await asyncio.sleep(0)
