"""Draws of the base; and beta 0, which is the base bit for bit, wherever chats are rendered and however one asks."""

import itertools
from typing import Any

import msgspec
import pytest

from turngate.envs.base import Task
from turngate.envs.fakes import EchoEnv
from turngate.runtime import Agent, Limits, Runtime, Sampling
from turngate.runtime.context import last_turns
from turngate.runtime.dialect import OPENAI, Dialect
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.guidance import Guidance
from turngate.runtime.testing import FakeRenderer, FakeTransport, run_virtual
from turngate.runtime.testing.endpoints import fake_reply
from turngate.runtime.testing.scripted_server import ScriptedServer
from turngate.runtime.transport import Reply
from turngate.runtime.types import Trajectory

TASK = Task("t", "say something")
MODES = {
    "server": {},
    "text": {"dialect": OPENAI},
    "tokens": {"dialect": Dialect(token_mode="tokens"), "renderer": FakeRenderer()},
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


async def never_asked(point, candidates):
    raise AssertionError("beta 0 has nothing to ask")


def guidances():
    return [
        None,
        Guidance(never_asked, beta=0.0, draws=8),
        Guidance(never_asked, beta=lambda version: 0.0, draws=8, floor=0.5, max_kl=1.0),
    ]


def answers():
    """Return a server that says something else each time, in either API."""
    numbers = itertools.count()

    def serve(path, request):
        text = f"answer {next(numbers)}"
        if path == "/chat/completions":
            return Reply(200, {}, msgspec.json.encode(fake_reply(request, text)))
        ids = [*text.encode(), 260]
        logprobs = {"token_logprobs": [-0.25] * len(ids)}
        choice = {"text": "", "finish_reason": "stop", "token_ids": ids, "logprobs": logprobs}
        return Reply(200, {}, msgspec.json.encode({"choices": [choice]}))

    return FakeTransport(serve)


def told(trajectory):
    """Return the record as it is written, without its clock."""
    turns = tuple(msgspec.structs.replace(turn, model_s=0.0, env_s=0.0) for turn in trajectory.turns)
    written = msgspec.json.encode(msgspec.structs.replace(trajectory, turns=turns, started_s=0.0, ended_s=0.0))
    assert msgspec.json.decode(written, type=Trajectory).turns == turns
    return written


@pytest.mark.parametrize("mode", MODES)
def test_an_episode_at_beta_zero_asks_and_records_what_the_base_does(mode):
    def play(guidance):
        transport = answers()
        endpoint = Endpoint("http://x/v1", model="m", transport=transport, **MODES[mode])
        runtime = Runtime(endpoint, limits=Limits(max_turns=4), context=last_turns(1), guidance=guidance)
        trajectory = run_virtual(runtime.rollout(lambda: EchoEnv(9), TASK, seed=5, last_contexts=True))
        assert len(trajectory.turns) == 4
        return transport.requests, told(trajectory)

    base, *others = map(play, guidances())
    assert others == [base] * 2


@pytest.mark.parametrize("mode", MODES)
async def test_an_agent_at_beta_zero_asks_and_gets_what_the_base_says(mode):
    async def agent(session, task):
        said: list[Any] = []
        chat = [{"role": "user", "content": "hi"}]
        for options in ({}, {"tools": TOOLS}, {"stream": True}, {"n": 2}):
            reply = await session.openai.chat.completions.create(model="m", messages=chat, seed=len(said), **options)
            if "stream" in options:
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in reply])
            else:
                text = reply.choices[-1].message.content
            said.append(text)
            chat += [{"role": "assistant", "content": text}, {"role": "user", "content": "go"}]
        said.append((await session.chat(chat)).text)
        assert len(set(said)) == 5
        return 1.0

    async def play(guidance):
        numbers = itertools.count()
        async with ScriptedServer(lambda request: f"answer {next(numbers)}") as server:
            async with Endpoint(server.url, model="m", max_retries=0, **MODES[mode]) as endpoint:
                runtime = Runtime(endpoint, sampling=Sampling(max_tokens=64), guidance=guidance)
                trajectory = await runtime.rollout(Agent(agent), TASK, seed=5)
                await runtime.aclose()
        assert trajectory.error == ""
        return server.requests, told(trajectory)

    base, *others = [await play(guidance) for guidance in guidances()]
    assert others == [base] * 2
