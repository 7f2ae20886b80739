"""The guided policy as a service on a real engine with a critic, and value servers that misbehave."""

import asyncio
import math
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from openai import AsyncOpenAI

from tests.runtime.gateway.doors import HI, door_to
from tests.runtime.test_wire_guidance import TOKENIZER, models
from turngate.envs.base import Action
from turngate.runtime.critic_q import CriticQ
from turngate.runtime.dialect import Dialect
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.engine import Engine
from turngate.runtime.engine_renderer import EngineRenderer
from turngate.runtime.gateway import Gateway
from turngate.runtime.guidance import Guidance
from turngate.runtime.limits import Limits
from turngate.runtime.runtime import Runtime
from turngate.runtime.session_table import SessionTable
from turngate.runtime.types import Sampling

PINNED = Sampling(max_tokens=5)
LIMITS = Limits(max_turns=10_000)


@asynccontextmanager
async def engine_endpoint(tmp_path, mode):
    policy, critic = models()
    critic.save(tmp_path / "critic")
    async with Engine.start(policy, TOKENIZER, critic=tmp_path / "critic", value_version=4, mode="thread") as engine:
        if mode == "server":
            yield engine, engine.endpoint
            return
        dialect, renderer = Dialect(token_mode="tokens", guidance=True), EngineRenderer(TOKENIZER)
        async with Endpoint(f"{engine.url}/v1", model="policy", dialect=dialect, renderer=renderer) as endpoint:
            yield engine, endpoint


@pytest.mark.parametrize("mode", ["server", "tokens"])
async def test_an_agent_gets_guided_replies_by_the_models_name_and_guided_tokens_by_a_header(tmp_path, mode):
    async with engine_endpoint(tmp_path, mode) as (engine, endpoint), CriticQ.of(engine) as q:
        table = SessionTable(endpoint, sampling=PINNED)
        service = Guidance(q, beta=8.0, draws=4)
        async with Gateway(table, guidance=service) as gateway:
            session = table.create(seed=3)
            async with AsyncOpenAI(base_url=gateway.url, api_key=session.key, max_retries=0) as client:
                guided = await client.chat.completions.create(model="policy@guided", messages=HI)
                said = {"role": "assistant", "content": guided.choices[0].message.content}
                chat: Any = [*HI, said, {"role": "user", "content": "go"}]
                stream = await client.chat.completions.create(model="policy@guided", messages=chat, stream=True)
                words = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                header = {"x-turngate-guidance": "tokens, beta=4, top_k=6"}
                await client.chat.completions.create(model="policy", messages=HI, extra_headers=header)
            trajectory = session.seal()
        scores = [await engine.endpoint.score(list(segment.ids())) for segment in trajectory.segments]
    first, second, tokens = trajectory.turns
    assert trajectory.trainable
    assert (first.text, second.text) == (said["content"], words)
    for turn in (first, second):
        assert turn.decision.fallback == ""
        assert turn.decision.value_version == 4
        segment = trajectory.segments[turn.segment]
        recorded = list(segment.logprob_values()[turn.start : turn.start + turn.length])
        # Of drawing it: the policy's own, as the engine scores the recorded ids.
        assert recorded == pytest.approx(scores[turn.segment][turn.start : turn.start + turn.length], abs=1e-4)
        assert len({len(c.logprobs) == len(c.token_ids) > 0 for c in turn.decision.candidates}) == 1
    assert tokens.decision is None
    assert (tokens.guided_tokens.beta, tokens.guided_tokens.top_k) == (4.0, 6)
    assert service.statistics().guided == 2


async def test_listed_actions_are_scored_as_the_engine_would_sample_them(tmp_path):
    async def q(point, candidates):
        return [float(len(one.text)) for one in candidates]

    guidance = Guidance(q, beta=1.0, candidates=lambda point: [Action(text) for text in ("a", "bc", "def")])
    async with engine_endpoint(tmp_path, "tokens") as (engine, endpoint):
        async with Runtime(endpoint, sampling=PINNED, guidance=guidance).session() as session:
            for _ in range(2):
                await session.chat(HI)
        trajectory = session.trajectory
        whole = [await engine.endpoint.score(list(segment.ids())) for segment in trajectory.segments]
    for turn in trajectory.turns:
        decision = turn.decision
        assert decision.fallback == ""
        sums = [one.logprob for one in decision.candidates]
        top = max(lp + q for lp, q in zip(sums, (1, 2, 3), strict=True))
        weights = [math.exp(lp + q - top) for lp, q in zip(sums, (1, 2, 3), strict=True)]
        assert [c.weight for c in decision.candidates] == pytest.approx([w / sum(weights) for w in weights])
        recorded = trajectory.segments[turn.segment].logprob_values()[turn.start : turn.start + turn.length]
        assert list(recorded) == pytest.approx(whole[turn.segment][turn.start : turn.start + turn.length], abs=1e-4)
        chosen = decision.candidates[decision.chosen]
        assert math.fsum(recorded) + decision.log_selection == pytest.approx(math.log(chosen.weight), abs=1e-5)


@asynccontextmanager
async def value_server(answer):
    app = web.Application()
    app.router.add_post("/pooling", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def hang(http):
    await asyncio.sleep(60)


async def slow_trickle(http):
    reply = web.StreamResponse(headers={"Content-Type": "application/json"})
    await reply.prepare(http)
    for _ in range(100):
        await reply.write(b" ")
        await asyncio.sleep(0.05)
    return reply


def says(body, status=200):
    async def answer(http):
        return web.Response(body=body, status=status, content_type="application/json")

    return answer


ONE = b'{"index": %d, "data": [%s]}'


def pooled(*values):
    return b'{"data": [' + b",".join(ONE % (i, v) for i, v in enumerate(values)) + b"]}"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (hang, "timeout"),
        (slow_trickle, "timeout"),
        (says(b"no", 500), "error"),
        (says(b"no", 429), "timeout"),
        (says(b"<html>"), "error"),
        (says(pooled(b"NaN", b"1")), "error"),
        (says(pooled(b"null", b"1")), "error"),
        (says(pooled(b"1e999", b"1")), "error"),
        (says(pooled(b"1")), "error"),
        (says(pooled(b"1", b"1", b"1")), "error"),
        (says(b"[" * 100_000), "error"),
    ],
)
async def test_a_value_server_that_misbehaves_costs_the_guidance_and_nothing_else(answer, reason):
    async with value_server(answer) as url, CriticQ(url, max_retries=1 if reason == "error" else 6) as critic:
        async with door_to("hello", guidance=Guidance(critic, beta=1.0, draws=2, timeout_s=0.5)) as d:
            session = d.session()
            status, told, _ = await d.post("/v1/chat/completions", session.key, {"model": "b@guided", "messages": HI})
            decision = session.seal().turns[0].decision
    assert (status, told["choices"][0]["message"]["content"]) == (200, "hello")
    assert decision.reason in (reason, "timeout")
    assert decision.log_selection == 0.0


async def test_hundreds_of_guided_requests_at_once_through_one_gateway():
    async def q(point, candidates):
        return [float(one.text == "b") for one in candidates]

    count = iter(range(1 << 30))
    guidance = Guidance(q, beta=500.0, draws=2, timeout_s=60)
    options = {"table": {"limits": LIMITS}, "guidance": guidance, "max_open_per_session": 2000}
    async with door_to(lambda request: "ab"[next(count) % 2], **options) as d:
        session = d.session()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as d.http:
            bodies = [
                {"model": "b@guided", "messages": [{"role": "user", "content": str(number)}]} for number in range(200)
            ]
            found = await asyncio.gather(*(d.post("/v1/chat/completions", session.key, body) for body in bodies))
        turns = session.seal().turns
    assert {status for status, _, _ in found} == {200}
    assert len(turns) == 200
    assert all(turn.decision.fallback == "" for turn in turns)
    assert all(turn.text == "b" or "b" not in [c.text for c in turn.decision.candidates] for turn in turns)
