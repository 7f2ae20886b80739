"""The guided policy as a model: reranked replies for agents that know nothing of it."""

import asyncio
import itertools

import aiohttp
import msgspec
import pytest

from tests.runtime.gateway.doors import CHAT, HI, TOOLS, door_to, events
from tests.runtime.gateway.test_server import until
from turngate.envs.base import Action, ToolCall
from turngate.runtime.critic_q import CriticQ
from turngate.runtime.dialect import OPENAI, Dialect
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.gateway import Gateway
from turngate.runtime.guidance import Guidance
from turngate.runtime.limits import Limits
from turngate.runtime.runtime import Runtime
from turngate.runtime.session_table import SessionTable
from turngate.runtime.testing import FakeEndpoint, FakeTransport
from turngate.runtime.testing.endpoints import fake_reply
from turngate.runtime.testing.renderers import FakeRenderer
from turngate.runtime.testing.scripted_server import Said
from turngate.runtime.transport import Reply

GUIDED = {**CHAT, "model": "base@guided"}


async def by_length(point, candidates):
    return [float(len(one.text) + sum(len(call.arguments) for call in one.tool_calls)) for one in candidates]


def guidance(q=by_length, **settings):
    return Guidance(q, **{"beta": 50.0, "draws": 4, **settings})


def cycle(*said):
    waiting = itertools.cycle(said)
    return lambda request: next(waiting)


def door(say, q=by_length, **options):
    return door_to(say, **{**options, "guidance": guidance(q, **options.get("guidance", {}))})


async def test_the_guided_model_gives_the_best_draw_and_the_record_says_how():
    async with door(cycle("a", "abcd", "ab", "abc")) as d:
        session = d.session(seed=3)
        status, told, _ = await d.post("/v1/chat/completions", session.key, GUIDED)
        trajectory = session.seal()
        seeds = [request["seed"] for request in d.server.requests]
    assert status == 200
    assert told["choices"][0]["message"]["content"] == "abcd"
    assert "token_ids" not in told["choices"][0]
    (turn,) = trajectory.turns
    assert sorted(c.text for c in turn.decision.candidates) == ["a", "ab", "abc", "abcd"]
    assert turn.decision.candidates[turn.decision.chosen].text == turn.text == "abcd"
    assert len(set(seeds)) == 4
    assert {request["model"] for request in d.server.requests} == {"base"}
    assert trajectory.segments[0].policy_mask.count(1) == 5
    assert trajectory.trainable


async def test_the_base_model_is_the_base_still():
    async with door(cycle("a", "abcd")) as d:
        session = d.session()
        _, told, _ = await d.post("/v1/chat/completions", session.key)
        assert session.seal().turns[0].decision is None
    assert told["choices"][0]["message"]["content"] == "a"
    assert len(d.server.requests) == 1


@pytest.mark.parametrize("header", ["beta=0", "off"])
@pytest.mark.parametrize("stream", [False, True])
async def test_beta_zero_is_the_base_bit_for_bit(header, stream):
    found = []
    for body, headers in (({**CHAT, "model": "base"}, {}), (GUIDED, {"x-turngate-guidance": header})):
        async with door("hello there") as d:
            session = d.session(seed=5)
            reply = await d.post(
                "/v1/chat/completions", session.key, {**body, "stream": stream, "n": 2}, headers=headers
            )
            trajectory = session.seal()
            found.append((reply[:2], d.server.requests, trajectory.segments, [t.text for t in trajectory.turns]))
    assert found[0] == found[1]


async def test_a_header_sets_beta_and_draws_for_one_request():
    async with door(cycle("a", "ab")) as d:
        session = d.session()
        headers = {"x-turngate-guidance": "beta=2, draws=3, floor=0.1, max_kl=5"}
        status, _, _ = await d.post("/v1/chat/completions", session.key, headers=headers)
        decision = session.seal().turns[0].decision
    assert status == 200
    assert (decision.beta, len(decision.candidates), decision.floor) == (2.0, 3, 0.1)


@pytest.mark.parametrize(
    ("header", "param"),
    [
        ("beta=-1", "x-turngate-guidance.beta"),
        ("beta=nan", "x-turngate-guidance.beta"),
        ("beta=inf", "x-turngate-guidance.beta"),
        ("beta=101", "x-turngate-guidance.beta"),
        ("beta=5, beta=6", "x-turngate-guidance.beta"),
        ("draws=0", "x-turngate-guidance.draws"),
        ("draws=33", "x-turngate-guidance.draws"),
        ("draws=00000000010000", "x-turngate-guidance.draws"),
        (f"draws=1{'0' * 5000}", "x-turngate-guidance.draws"),
        ("beta=1_0", "x-turngate-guidance.beta"),
        ("beta=\u0665", "x-turngate-guidance.beta"),
        ("draws=2.5", "x-turngate-guidance.draws"),
        ("floor=2", "x-turngate-guidance.floor"),
        ("max_kl=x", "x-turngate-guidance.max_kl"),
        ("temperature=1", "x-turngate-guidance.temperature"),
        ("on", "x-turngate-guidance.on"),
        ("off, beta=1", "x-turngate-guidance.off"),
        ("tokens, beta=5", "x-turngate-guidance"),
    ],
)
async def test_settings_that_cannot_be_are_refused_by_name(header, param):
    async with door("x") as d:
        status, told, _ = await d.post("/v1/chat/completions", d.session().key, headers={"x-turngate-guidance": header})
        assert (status, told["error"]["param"]) == (400, param)
        assert not d.server.requests


async def test_a_gateway_without_guidance_says_so():
    async with door_to("x") as d:
        for body, headers in ((GUIDED, {}), (CHAT, {"x-turngate-guidance": "beta=1"})):
            status, told, _ = await d.post("/v1/chat/completions", d.session().key, body, headers=headers)
            assert (status, told["error"]["code"]) == (400, "guidance_unavailable")
        _, models, _ = await d.get("/v1/models", d.session().key)
        assert [card["id"] for card in models["data"]] == ["base"]


async def test_the_guided_model_is_listed_and_guided_is_no_role():
    async with door("x") as d:
        session = d.session()
        _, models, _ = await d.get("/v1/models", session.key)
        assert [card["id"] for card in models["data"]] == ["base", "base@guided"]
        status, card, _ = await d.get("/v1/models/base@guided", session.key)
        assert (status, card["id"]) == (200, "base@guided")
        await d.post("/v1/chat/completions", session.key, {**CHAT, "model": "base@planner@guided"})
        status, told, _ = await d.post("/v1/chat/completions", session.key, headers={"x-turngate-role": "guided"})
        assert (status, told["error"]["param"]) == (400, "x-turngate-role")
        for name in ("base@guided@planner", "base@guided@guided"):
            status, told, _ = await d.post("/v1/chat/completions", session.key, {**CHAT, "model": name})
            assert (status, told["error"]["param"]) == (400, "model")
        (turn,) = session.seal().turns
    assert turn.role == "planner"
    assert turn.decision is not None


CALLS = [Said("", (ToolCall(f"c{i}", "look", '{"at": "' + "x" * i + '"}'),)) for i in range(4)]


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_are_reranked_whole_or_streamed(stream):
    async with door(cycle(*CALLS)) as d:
        session = d.session()
        body = {**GUIDED, "tools": TOOLS, "stream": stream, "tool_choice": "auto", "parallel_tool_calls": False}
        if stream:
            body["stream_options"] = {"include_usage": True}
        status, told, _ = await d.post("/v1/chat/completions", session.key, body)
        (turn,) = session.seal().turns
        sent = d.server.requests
    assert status == 200
    assert turn.tool_calls[0].arguments == '{"at": "xxx"}'
    assert all(request["parallel_tool_calls"] is False and "stream" not in request for request in sent)
    if not stream:
        assert told["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"at": "xxx"}'
        return
    *chunks, usage, done = events(told)
    assert done == "[DONE]"
    assert usage["usage"]["completion_tokens"] == turn.length
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[1]["tool_calls"] == [
        {"index": 0, "id": "c3", "type": "function", "function": {"name": "look", "arguments": '{"at": "xxx"}'}}
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "tool_calls"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


async def test_the_official_client_reads_guided_replies_and_streams():
    async with door(cycle("a", "abcd", "ab", "abc")) as d:
        session = d.session()
        async with d.client(session.key) as client:
            reply = await client.chat.completions.create(model="base@guided", messages=HI, stop=["!"])
            stream = await client.chat.completions.create(model="base@guided", messages=HI, stream=True)
            words = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            answer = await client.responses.create(model="base@guided", input="hi")
            text = await client.completions.create(model="base@guided", prompt="hi", max_tokens=8)
        turns = session.seal().turns
    assert [reply.choices[0].message.content, words, answer.output_text, text.choices[0].text] == ["abcd"] * 4
    assert [len(turn.decision.candidates) for turn in turns] == [4] * 4


async def test_every_choice_is_a_decision_of_its_own():
    async with door(cycle("a", "abcd", "ab", "abc")) as d:
        session = d.session()
        status, told, _ = await d.post("/v1/chat/completions", session.key, {**GUIDED, "n": 3})
        prompts = {"model": "base@guided", "prompt": ["x", "y"], "n": 2, "max_tokens": 8}
        _, texts, _ = await d.post("/v1/completions", session.key, prompts)
        turns = session.seal().turns
        asked = [request["prompt"] for request in d.server.requests if "prompt" in request]
    assert not any("n" in request for request in d.server.requests)
    assert status == 200
    assert [choice["index"] for choice in told["choices"]] == [0, 1, 2]
    assert len(texts["choices"]) == 4
    assert sorted(asked) == ["x"] * 8 + ["y"] * 8
    assert all(turn.decision is not None for turn in turns)
    assert len(turns) == 7


async def test_scoring_a_text_has_nothing_to_choose():
    async with door("x") as d:
        body = {"model": "base@guided", "prompt": [1, 2], "echo": True, "max_tokens": 0, "logprobs": 1}
        status, told, _ = await d.post("/v1/completions", d.session().key, body)
    assert (status, told["error"]["param"]) == (400, "echo")


async def test_where_values_fail_the_base_answers_and_the_record_is_flagged():
    async def hangs(point, candidates):
        await asyncio.sleep(60)

    async with door(cycle("a", "abcd"), hangs, guidance={"timeout_s": 0.05}) as d:
        session = d.session()
        status, told, _ = await d.post("/v1/chat/completions", session.key, GUIDED)
        decision = session.seal().turns[0].decision
    assert (status, told["choices"][0]["message"]["content"]) == (200, decision.candidates[0].text)
    assert decision.fallback == "timeout"


async def test_text_servers_take_value_functions_that_read_text_and_no_others():
    options = {"endpoint": {"dialect": OPENAI}}
    async with door(cycle("a", "abc"), **options) as d:
        session = d.session()
        status, told, _ = await d.post("/v1/chat/completions", session.key, GUIDED)
        assert (status, told["choices"][0]["message"]["content"]) == (200, "abc")
        assert session.seal().turns[0].decision.fallback == ""
    async with CriticQ("http://127.0.0.1:9") as critic, door("x", critic, **options) as d:
        status, told, _ = await d.post("/v1/chat/completions", d.session().key, GUIDED)
        assert (status, told["error"]["code"]) == (400, "guidance_unavailable")
        assert "token ids" in told["error"]["message"]


async def test_listed_actions_are_refused_where_the_server_renders():
    async with door("x", guidance={"candidates": lambda point: [Action("a")]}) as d:
        status, told, _ = await d.post("/v1/chat/completions", d.session().key, GUIDED)
    assert (status, told["error"]["code"]) == (400, "guidance_unavailable")


async def test_a_client_that_leaves_ends_the_draws():
    started = asyncio.Event()

    async def wait():
        started.set()
        await asyncio.sleep(60)

    async with door("x") as d:
        d.server.before_answer = wait
        session = d.session()
        task = asyncio.ensure_future(d.post("/v1/chat/completions", session.key, GUIDED))
        await started.wait()
        session.seal()
        status, _, _ = await task
        assert status == 409
        await until(lambda: not d.server.open)
        assert d.server.cancelled == 4


async def test_sessions_of_a_guided_runtime_are_guided_whatever_the_model_is_called():
    texts = itertools.cycle(["a", "abc"])
    runtime = Runtime(FakeEndpoint(lambda _: next(texts)), guidance=guidance(draws=2))
    async with runtime.session() as session:
        reply = await session.openai.chat.completions.create(model="any", messages=HI)
    await runtime.aclose()
    assert reply.choices[0].message.content == "abc"
    assert session.trajectory.turns[0].decision is not None


@pytest.mark.parametrize("stream", [False, True])
async def test_where_chats_are_rendered_here_the_chosen_draw_alone_is_gone_on_from(stream):
    texts = itertools.cycle(["a", "abcd", "ab", "abc"])

    def serve(path, body):
        ids = [*next(texts).encode(), 260]
        choice = {
            "text": "",
            "finish_reason": "stop",
            "token_ids": ids,
            "logprobs": {"token_logprobs": [-0.5] * len(ids)},
        }
        return Reply(200, {}, msgspec.json.encode({"choices": [choice]}))

    upstream = Endpoint(
        "http://x/v1",
        model="base",
        dialect=Dialect(token_mode="tokens"),
        renderer=FakeRenderer(),
        transport=FakeTransport(serve),
    )
    async with Gateway(SessionTable(upstream), guidance=guidance()) as gateway, aiohttp.ClientSession() as http:
        session = gateway.sessions.create()
        chat = list(HI)
        for _ in range(2):
            body = {"model": "base@guided", "messages": chat, "stream": stream}
            headers = {"Authorization": f"Bearer {session.key}"}
            async with http.post(f"{gateway.url}/chat/completions", json=body, headers=headers) as reply:
                assert reply.status == 200
                text = await reply.text()
            if stream:
                said = "".join(e["choices"][0]["delta"].get("content", "") for e in events(text)[:-1])
            else:
                said = msgspec.json.decode(text)["choices"][0]["message"]["content"]
            assert said == "abcd"
            chat += [{"role": "assistant", "content": said}, {"role": "user", "content": "go"}]
        trajectory = session.seal()
    assert len(trajectory.segments) == 1
    assert [turn.text for turn in trajectory.turns] == ["abcd", "abcd"]


async def test_two_requests_with_different_settings_are_two():
    async with door(cycle("a", "abcd")) as d:
        session = d.session()
        await d.post("/v1/chat/completions", session.key, headers={"x-turngate-guidance": "draws=2"})
        again = {"x-stainless-retry-count": "1", "x-turngate-guidance": "draws=3"}
        await d.post("/v1/chat/completions", session.key, headers=again)
        turns = session.seal().turns
    assert [len(turn.decision.candidates) for turn in turns] == [2, 3]


@pytest.mark.parametrize(("table", "is_sent"), [({}, False), ({"sampling": None}, True)])
async def test_guidance_of_tokens_that_an_agent_asks_the_server_for_itself_is_no_policys(table, is_sent):
    async with door("x", table=table) as d:
        session = d.session()
        await d.post("/v1/chat/completions", session.key, {**CHAT, "guidance": {"beta": 5.0}})
        trajectory = session.seal()
    assert ("guidance" in d.server.requests[0]) == is_sent
    assert trajectory.trainable != is_sent


async def raw_header(d, key, *values):
    """Send a chat with these very headers; return (status, decoded body)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(d.gateway.url.split(":")[2].split("/")[0]))
    body = msgspec.json.encode(CHAT)
    head = [
        b"POST /v1/chat/completions HTTP/1.1",
        b"Host: x",
        b"Connection: close",
        b"Content-Type: application/json",
        b"Authorization: Bearer %b" % key.encode(),
        b"Content-Length: %d" % len(body),
        *(b"x-turngate-guidance: %b" % value for value in values),
    ]
    writer.write(b"\r\n".join(head) + b"\r\n\r\n" + body)
    told = await reader.read()
    writer.close()
    await writer.wait_closed()
    return int(told.split()[1]), msgspec.json.decode(told.partition(b"\r\n\r\n")[2])


async def test_a_header_that_comes_twice_is_read_as_one_and_bytes_that_are_no_text_are_refused_in_words():
    async with door(cycle("a", "ab")) as d:
        session = d.session()
        assert (await raw_header(d, session.key, b"beta=5", b"draws=2"))[0] == 200
        assert len(d.server.requests) == 2
        for values in ((b"beta=5", b"beta=6"), (b"off", b"beta=5"), (b"\xff\xfe=3",), (b"\xed\xa0\x80",)):
            status, told = await raw_header(d, session.key, *values)
            assert status == 400
            assert told["error"]["param"].startswith("x-turngate-guidance")
        assert len(d.server.requests) == 2


async def test_a_schedule_that_gives_no_beta_is_told_to_the_agent():
    async with door("x", guidance={"beta": lambda version: {}[version]}) as d:
        status, told, _ = await d.post("/v1/chat/completions", d.session().key, GUIDED)
    assert (status, told["error"]["code"]) == (400, "guidance_unavailable")
    assert "from its schedule at policy version 0" in told["error"]["message"]


async def test_draws_count_among_the_requests_that_are_open():
    gate = asyncio.Event()
    async with door(cycle("a", "ab"), max_open=10, max_open_per_session=6) as d:
        d.server.before_answer = gate.wait
        session, other = d.session(), d.session()
        for body in ({**GUIDED, "n": 2}, {"model": "base@guided", "prompt": ["x", "y"], "max_tokens": 8}):
            path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
            status, told, _ = await d.post(path, session.key, body)  # 8 draws at once: never
            assert (status, told["error"]["param"]) == (400, "n")
        first = asyncio.ensure_future(d.post("/v1/chat/completions", session.key, GUIDED))
        await until(lambda: d.server.open == 4)
        assert d.gateway.statistics().in_flight == 4
        again = {**GUIDED, "seed": 1}
        assert (await d.post("/v1/chat/completions", session.key, again))[0] == 429
        second = asyncio.ensure_future(d.post("/v1/chat/completions", other.key, GUIDED))
        await until(lambda: d.server.open == 8)
        status, _, headers = await d.post("/v1/chat/completions", d.session().key, GUIDED)
        assert (status, headers["Retry-After"]) == (429, "1")
        assert len(d.server.requests) == 8
        gate.set()
        assert [(await task)[0] for task in (first, second)] == [200, 200]
        assert d.gateway.statistics().in_flight == 0


async def test_an_agent_whose_seed_the_server_may_know_gets_different_draws_all_the_same():
    async with door(cycle("a", "ab"), endpoint={"dialect": Dialect(seed=False)}) as d:
        await d.post("/v1/chat/completions", d.session().key, {**GUIDED, "seed": 7})
        seeds = [request["seed"] for request in d.server.requests]
        await d.post("/v1/chat/completions", d.session().key, GUIDED)
        assert not any("seed" in request for request in d.server.requests[4:])
    assert seeds[0] == 7
    assert len(set(seeds)) == 4


async def test_usage_counts_every_prompt_once():
    async with door(cycle("a", "ab")) as d:
        prompts = {"model": "base", "prompt": ["x", "a longer one"], "n": 2, "max_tokens": 8}
        session = d.session()
        _, alone, _ = await d.post("/v1/completions", session.key, {**prompts, "prompt": "x"})
        _, other, _ = await d.post("/v1/completions", session.key, {**prompts, "prompt": "a longer one"})
        _, both, _ = await d.post("/v1/completions", session.key, {**prompts, "model": "base@guided"})
    expected = [told["usage"]["prompt_tokens"] for told in (alone, other)]
    assert both["usage"]["prompt_tokens"] == sum(expected)


async def test_a_reply_with_fields_that_cannot_be_read_is_malformed_and_no_bug():
    async def serve(path, body, *, timeout_s):
        reply = msgspec.json.encode(fake_reply(msgspec.json.decode(body), "hi"))
        return Reply(200, {}, b'{"x": 1e999, ' + reply[1:])

    transport = FakeTransport()
    transport.post = serve
    upstream = Endpoint("http://x/v1", model="base", transport=transport)
    async with Gateway(SessionTable(upstream), guidance=guidance()) as gateway, aiohttp.ClientSession() as http:
        session = gateway.sessions.create()
        headers = {"Authorization": f"Bearer {session.key}"}
        async with http.post(f"{gateway.url}/chat/completions", json=GUIDED, headers=headers) as reply:
            assert reply.status == 502
            assert "must answer with a whole completion" in await reply.text()


async def test_agents_of_this_process_ask_as_much_at_once_as_without_guidance():
    runtime = Runtime(FakeEndpoint(lambda _: "x"), limits=Limits(max_turns=99), guidance=guidance(draws=16))
    async with runtime.session() as session:
        client = session.openai.with_options(max_retries=0)
        asks = (client.chat.completions.create(model="any", messages=HI, seed=seed) for seed in range(40))
        replies = await asyncio.gather(*asks)  # 640 draws, and 256 requests are the limit for strangers
    await runtime.aclose()
    assert len(replies) == 40
