"""Values of finished prefixes over HTTP."""

import asyncio
import logging
import socket

import msgspec
import pytest
import torch
from aiohttp import web

from tests.runtime.test_wire_guidance import TOKENIZER, Talk, models
from turngate.envs.base import Task
from turngate.envs.fakes import EchoEnv
from turngate.runtime import Limits, Runtime, Sampling
from turngate.runtime.critic_q import CriticQ
from turngate.runtime.dialect import OPENAI
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.engine import Engine
from turngate.runtime.engine.incremental import Incremental, Span
from turngate.runtime.errors import ConfigError, EndpointError, GuidanceError, MalformedReply
from turngate.runtime.guidance import DecisionPoint, Guidance
from turngate.runtime.json_ids import JsonIds
from turngate.runtime.testing import FakeTransport, run_virtual
from turngate.runtime.testing.endpoints import fake_reply
from turngate.runtime.transport import Reply
from turngate.runtime.types import Completion

POINT = DecisionPoint(messages=[])
CANDIDATES = [
    Completion("a", [7, 8], [-1.0, -1.0], [0, 0], [1, 2, 3]),
    Completion("b", [9], [-1.0], [0], JsonIds(b"[1,2]")),
]


def pooled(*data, **fields):
    body = {"data": [{"index": index, "object": "pooling", "data": one} for index, one in enumerate(data)], **fields}
    return Reply(200, {}, msgspec.json.encode(body))


def asking(*replies):
    transport = FakeTransport(*replies)
    return CriticQ("http://critic", transport=transport, max_retries=0), transport


async def test_each_candidate_is_asked_about_as_the_ids_that_were_seen_and_sampled():
    critic, transport = asking(pooled([0.25], [0.75], value_version=4))
    found = await critic(POINT, CANDIDATES)
    assert transport.requests == [("/pooling", {"input": [[1, 2, 3, 7, 8], [1, 2, 9]]})]
    assert (found.values, found.version) == ([0.25, 0.75], 4)


@pytest.mark.parametrize("shape", [lambda value: [value], lambda value: value])
async def test_values_per_token_are_read_at_the_last_token(shape):
    critic, _ = asking(pooled([shape(x / 10) for x in range(5)], [shape(x / 10) for x in range(3)]))
    assert (await critic(POINT, CANDIDATES)).values == [0.4, 0.2]


async def test_values_belong_to_the_inputs_that_their_index_names():
    critic, _ = asking(Reply(200, {}, b'{"data": [{"index": 1, "data": [0.9]}, {"index": 0, "data": [0.1]}]}'))
    assert (await critic(POINT, CANDIDATES)).values == [0.1, 0.9]


async def test_a_name_and_password_in_the_url_are_used_and_never_shown():
    url = "http://user:hunter2@127.0.0.1:9/"
    async with CriticQ(url, max_retries=0) as critic:
        assert "hunter2" not in repr(critic)
        with pytest.raises(EndpointError) as raised:
            await critic(POINT, CANDIDATES)
    assert "hunter2" not in str(raised.value)
    with pytest.raises(ConfigError, match="api_key must not come with a name and password"):
        CriticQ(url, api_key="k")


def test_one_critic_serves_one_event_loop_after_another():
    async def ask(critic):
        return (await critic(POINT, CANDIDATES)).values

    async def both():
        server = await asyncio.start_server(answer_once, "127.0.0.1", port)
        async with server:
            return await ask(critic)

    async def answer_once(reader, writer):
        await reader.readuntil(b"]]}")
        body = pooled([0.1], [0.2]).body
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    critic = CriticQ(f"http://127.0.0.1:{port}", max_retries=0)
    assert [asyncio.run(both()), asyncio.run(both())] == [[0.1, 0.2]] * 2


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (pooled([0.1]), MalformedReply, "one value per input: expected indices 0 to 1"),
        (pooled([], [0.1]), MalformedReply, "must hold one value, or one per token: expected 1 or 5, got 0"),
        (pooled([0.1] * 4096, [0.1]), MalformedReply, "got 4096"),
        (pooled([[0.1, 0.2]], [0.1]), MalformedReply, "must be scalars"),
        (pooled([0.1], [0.1], [0.2]), MalformedReply, r"got \[0, 1, 2\]"),
        (Reply(200, {}, b'{"data": [' + b",".join([b'{"index": 0, "data": [1]}'] * 2) + b"]}"), MalformedReply, "got"),
        (pooled([0.1], [0.2], value_version=10**30), MalformedReply, "value_version"),
        (Reply(200, {}, b"<html>"), MalformedReply, "must hold pooled values"),
        (Reply(404, {}, b"no"), EndpointError, "404"),
        (ConnectionError("gone"), EndpointError, "gone"),
    ],
)
async def test_servers_that_do_not_score_are_errors(reply, error, message):
    critic, _ = asking(reply)
    with pytest.raises(error, match=message):
        await critic(POINT, CANDIDATES)


async def test_candidates_without_ids_cannot_be_scored():
    critic, _ = asking(pooled([0.1]))
    with pytest.raises(GuidanceError, match="must have token ids to be scored"):
        await critic(POINT, [Completion("text only")])


async def test_b6_6_on_a_real_engine_q_is_the_value_of_the_recorded_prefix(tmp_path):
    policy, critic = models()
    critic.save(tmp_path)
    async with Engine.start(policy, TOKENIZER, critic=tmp_path, mode="thread") as engine, CriticQ.of(engine) as q:
        guidance = Guidance(q, beta=8.0, draws=4)
        runtime = Runtime(
            engine.endpoint, sampling=Sampling(max_tokens=5), limits=Limits(max_turns=3), guidance=guidance
        )
        trajectory = await runtime.rollout(Talk, Task("t"))
        plain = await runtime.rollout(Talk, Task("t"), guidance=None)
        zero = await runtime.rollout(Talk, Task("t"), guidance=Guidance(q, beta=0.0))
    assert guidance.statistics().guided == 3
    values = Incremental(critic, 1)
    for turn in trajectory.turns:
        decision = turn.decision
        segment = trajectory.segments[turn.segment]
        prefix = segment.ids().tolist()[: turn.start + turn.length]
        with torch.inference_mode():
            hidden = values.prefill_hidden([Span(0, 0, 0, prefix)])
            expected = float(values.value_outputs(hidden).double().sigmoid()[0])
        chosen = decision.candidates[decision.chosen]
        assert chosen.q == pytest.approx(expected, abs=1e-5)
        assert memoryview(chosen.token_ids).cast("i").tolist() == prefix[turn.start :]
        # The behaviour log-probs of a reranked action are those of drawing it.
        assert list(memoryview(chosen.logprobs).cast("f")) == pytest.approx(
            list(segment.logprob_values()[turn.start : turn.start + turn.length])
        )
    assert [t.text for t in zero.turns] == [t.text for t in plain.turns]
    assert zero.segments == plain.segments


async def test_a_critic_that_never_answers_leaves_the_base_and_is_told_about(caplog):
    critic, _ = asking(ConnectionError("gone"))
    guidance = Guidance(critic, beta=1.0, draws=2)

    async def draw(seed):
        return CANDIDATES[0]

    with caplog.at_level(logging.WARNING, "turngate.guidance"):
        for _ in range(20):
            assert (await guidance.choose(draw, POINT)).decision.fallback.startswith("error")
    assert [record.getMessage()[:44] for record in caplog.records] == ["no decision of the first 16 was guided, the "]


async def test_where_a_server_gives_no_ids_the_base_draws_once_and_that_is_told_once(caplog):
    chats = FakeTransport(lambda path, request: Reply(200, {}, msgspec.json.encode(fake_reply(request, "a"))))
    critic, transport = asking(pooled([0.1], [0.1]))
    async with Endpoint("http://x/v1", model="m", dialect=OPENAI, transport=chats) as endpoint:
        guidance = Guidance(critic, beta=1.0, draws=8)
        runtime = Runtime(endpoint, limits=Limits(max_turns=3), guidance=guidance)
        with caplog.at_level(logging.WARNING, "turngate.guidance"):
            trajectory = await runtime.rollout(lambda: EchoEnv(3), Task("t"))
    assert [turn.decision.fallback[:12] for turn in trajectory.turns] == ["no token ids"] * 3
    assert (len(chats.requests), len(transport.requests)) == (3, 0)
    assert len(caplog.records) == 1


async def test_the_key_and_the_model_are_sent_and_a_busy_server_is_asked_again():
    seen, answers = [], [503, 200]

    async def pooling(request):
        body = await request.json()
        seen.append((request.headers.get("Authorization"), body.get("model"), len(body["input"])))
        data = [{"index": 0, "data": [0.5]}, {"index": 1, "data": [0.25]}]
        return web.json_response({"data": data}, status=answers.pop(0) if len(answers) > 1 else answers[0])

    app = web.Application()
    app.router.add_post("/pooling", pooling)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    try:
        async with CriticQ(url, api_key="sesame", model="prm", max_retries=1) as critic:
            assert (await critic(POINT, CANDIDATES)).values == [0.5, 0.25]

        class Served:
            pass

        Served.url = url
        async with CriticQ.of(Served, api_key="other") as critic:
            await critic(POINT, CANDIDATES)
    finally:
        await runner.cleanup()
    assert seen == [("Bearer sesame", "prm", 2)] * 2 + [("Bearer other", None, 2)]


def test_a_critic_is_waited_for_no_longer_than_it_was_given_and_closed_with_its_block():
    async def play():
        transport = FakeTransport(pooled([0.1], [0.2]), latency_s=60.0)
        async with CriticQ("http://critic", transport=transport, timeout_s=2.5, max_retries=0) as critic:
            began = asyncio.get_running_loop().time()
            with pytest.raises(EndpointError):
                await critic(POINT, CANDIDATES)
            seconds = asyncio.get_running_loop().time() - began
        return seconds, transport.closed

    assert run_virtual(play()) == (2.5, True)


async def test_a_candidate_whose_prompt_has_no_ids_cannot_be_scored_either():
    critic, transport = asking(pooled([0.1]))
    with pytest.raises(GuidanceError, match=r"candidates must have token ids to be scored: got none \(candidate 1\)"):
        await critic(POINT, [CANDIDATES[0], Completion("b", [9], [-1.0], [0])])
    assert transport.requests == []


async def test_a_server_that_repeats_the_key_does_not_make_it_known():
    transport = FakeTransport(Reply(401, {}, b'{"error": {"message": "no such key: sesame"}}'))
    async with CriticQ("http://critic", api_key="sesame", transport=transport, max_retries=0) as critic:
        with pytest.raises(EndpointError, match="no such key") as raised:
            await critic(POINT, CANDIDATES)
    assert "sesame" not in str(raised.value)
