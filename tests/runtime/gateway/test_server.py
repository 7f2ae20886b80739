"""The door: statuses, routes, roles, and what is recorded of what was delivered."""

import asyncio
import contextlib

import aiohttp
import msgspec
import pytest
from aiohttp import web

from tests.runtime.gateway.doors import ADMIN, CHAT, TOOLS, door_to, events
from turngate.envs.base import End
from turngate.runtime.errors import ConfigError
from turngate.runtime.gateway import Gateway, GatewayConfig
from turngate.runtime.limits import Limits
from turngate.runtime.runtime import Runtime
from turngate.runtime.testing import FakeEndpoint, render_ids
from turngate.runtime.testing.scripted_server import Said
from turngate.runtime.types import Message, Sampling

CHAT_PATH = "/v1/chat/completions"


async def test_a_delivered_reply_is_a_turn_with_the_servers_own_ids():
    async with door_to("hello") as door:
        session = door.session()
        status, told, _ = await door.post(CHAT_PATH, session.key)
        trajectory = session.seal(End.success)
    assert (status, told["choices"][0]["message"]["content"]) == (200, "hello")
    (segment,) = trajectory.segments
    prompt = render_ids([Message("user", "hi")])
    assert list(segment.ids()) == [*prompt, *b"hello", 260]
    assert trajectory.trainable
    assert (trajectory.turns[0].text, trajectory.turns[0].length) == ("hello", 6)
    assert trajectory.messages == (Message("user", "hi"), Message("assistant", "hello"))


async def test_tokens_of_agents_are_counted_as_those_of_environments():
    """Prices are of them; a stream without usage is counted by its ids."""
    prompt, sampled = len(render_ids([Message("user", "hi")])), len("hello") + 1
    async with door_to("hello") as door:
        session = door.session()
        for count, more in enumerate(({}, {"stream": True}), start=1):
            await door.post(CHAT_PATH, session.key, {**CHAT, **more})
            counted = door.endpoint.statistics()
            assert (counted.prompt_tokens, counted.completion_tokens) == (count * prompt, count * sampled)


async def test_extensions_stay_here_unless_they_are_asked_for():
    async with door_to() as door:
        session = door.session()
        _, bare, _ = await door.post(CHAT_PATH, session.key)
        _, full, _ = await door.post(CHAT_PATH, session.key, {**CHAT, "logprobs": True, "return_token_ids": True})
    assert "prompt_token_ids" not in bare
    assert bare["choices"][0]["logprobs"] is None
    assert not {"token_ids", "policy_versions"} & set(bare["choices"][0])
    assert full["choices"][0]["logprobs"]["content"][0]["logprob"] < 0
    assert full["choices"][0]["token_ids"][-1] == 260


async def test_fields_nobody_here_knows_reach_the_server():
    async with door_to() as door:
        shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
        await door.post(CHAT_PATH, door.session().key, {**CHAT, "response_format": shape, "vendor": {"a": [1]}})
        assert door.server.requests[0]["response_format"] == shape
        assert door.server.requests[0]["vendor"] == {"a": [1]}
        assert door.server.requests[0]["model"] == "base"


async def test_structured_output_is_recorded():
    """agent-lightning#308: empty triplets."""
    async with door_to('{"answer": 4}') as door:
        session = door.session()
        await door.post(CHAT_PATH, session.key, {**CHAT, "response_format": {"type": "json_object"}})
        assert session.seal().turns[0].text == '{"answer": 4}'


@pytest.mark.parametrize(
    ("asked", "by"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"response_format": {"type": "text"}, "tools": TOOLS, "tool_choice": "auto", "guided_json": None}, ""),
    ],
)
async def test_a_reply_of_which_only_some_tokens_could_pass_is_none_to_train_on(asked, by):
    async with door_to() as door:
        session = door.session()
        assert session.sampling is not None
        await door.post(CHAT_PATH, session.key, {**CHAT, **asked})
        assert all(door.server.requests[0][name] == value for name, value in asked.items())
        trajectory = session.seal()
    assert trajectory.policy_tokens == 6
    assert trajectory.trainable is (by == "")
    assert f"by {by}:" in trajectory.untrainable_because or by == ""


@pytest.mark.parametrize("where", ["bearer", "path", "header", "suffix", "model", "role header"])
async def test_sessions_and_roles_are_named_in_any_of_the_ways(where):
    async with door_to() as door:
        session = door.session()
        key, path, headers, body = session.key, CHAT_PATH, {}, CHAT
        role = ""
        if where == "path":
            key, path = "EMPTY", f"/s/{session.key}{CHAT_PATH}"
        elif where == "header":
            key, headers = "EMPTY", {"x-turngate-session": session.key}
        elif where == "suffix":
            key, role = f"{session.key}:critic", "critic"
        elif where == "model":
            body, role = {**CHAT, "model": "base@critic"}, "critic"
        elif where == "role header":
            headers, role = {"x-turngate-role": "critic"}, "critic"
        status, _, _ = await door.post(path, key, body, headers=headers)
        assert status == 200
        assert session.seal().turns[0].role == role


@pytest.mark.parametrize("given", ["a b", "x" * 65, "rôle"])
async def test_a_role_that_is_none_is_a_bad_request(given):
    async with door_to() as door:
        session = door.session()
        status, told, _ = await door.post(CHAT_PATH, session.key, {**CHAT, "model": f"base@{given}"})
        assert (status, told["error"]["param"]) == (400, "model")
        assert session.seal().turns == ()


@pytest.mark.parametrize("key", ["", "wrong", "k" * 5000, "é"])
async def test_wrong_keys_are_turned_away(key):
    async with door_to() as door:
        session = door.session()
        for path in (CHAT_PATH, "/v1/completions", "/v1/responses"):
            status, told, headers = await door.post(path, key, headers={"Authorization": f"Bearer {key}"})
            assert (status, told["error"]["code"]) == (401, "invalid_api_key")
            assert headers["WWW-Authenticate"] == "Bearer"
        assert (await door.get("/v1/models", key))[0] == 401
        assert door.server.requests == []
        assert session.seal().turns == ()


async def test_a_sealed_session_is_a_conflict_that_sdks_do_not_repeat():
    async with door_to() as door:
        session = door.session()
        await door.post(CHAT_PATH, session.key)
        session.seal()
        status, told, headers = await door.post(CHAT_PATH, session.key)
    assert (status, told["error"]["code"], headers["x-should-retry"]) == (409, "session_sealed", "false")
    assert len(session.trajectory.turns) == 1


async def test_a_session_at_its_limit_is_a_conflict_and_still_takes_rewards():
    async with door_to(table={"limits": Limits(max_turns=1)}) as door:
        session = door.session()
        await door.post(CHAT_PATH, session.key)
        status, told, _ = await door.post(CHAT_PATH, session.key)
        session.add_reward("outcome", 1.0)
    assert (status, told["error"]["code"]) == (409, "session_limit")
    assert session.seal().end is End.turn_limit


async def test_paths_and_methods_nobody_serves():
    async with door_to() as door:
        key = door.session().key
        assert (await door.post("/v1/embeddings", key))[0] == 404
        assert (await door.get(CHAT_PATH, key))[0] == 405
        assert (await door.get(f"/s/{key}{CHAT_PATH}", key))[0] == 405


async def test_models_are_those_of_the_server_behind():
    async with door_to() as door:
        key = door.session().key
        _, listed, _ = await door.get("/v1/models", key)
        assert [card["id"] for card in listed["data"]] == ["base"]
        assert (await door.get("/v1/models/base", key))[0] == 200
        assert (await door.get(f"/s/{key}/v1/models", ""))[0] == 200
        assert (await door.get("/v1/models/gpt-9", key))[0] == 404
        assert (await door.get("/v1/models", ADMIN))[0] == 200
        assert (await door.get("/health", ""))[0] == 200


async def test_bodies_are_json_and_bounded():
    async with door_to(max_body_bytes=1000) as door:
        session = door.session()
        status, _, _ = await door.post(CHAT_PATH, session.key, headers={"Content-Type": "text/plain"})
        assert status == 415
        status, told, _ = await door.post(CHAT_PATH, session.key, data=b'{"messages": "' + b"x" * 2000 + b'"}')
        assert (status, told["error"]["code"]) == (413, "body_too_large")
        status, _, _ = await door.post(CHAT_PATH, session.key, data=endless(50))
        assert status == 413
        assert (await door.post(CHAT_PATH, session.key))[0] == 200


async def endless(pieces):
    for _ in range(pieces):
        yield b" " * 1000


async def test_a_body_that_does_not_come_is_not_waited_for():
    async with door_to(body_timeout_s=0.05) as door:
        session = door.session()

        async def stall():
            yield b'{"mess'
            await asyncio.Event().wait()

        with contextlib.suppress(aiohttp.ClientError):  # it may still be writing when the connection is closed
            await door.post(CHAT_PATH, session.key, data=stall())
        assert door.gateway.statistics().requests == {f"{CHAT_PATH} 408": 1}


async def test_upstream_refusals_come_with_their_status_and_reason():
    async with door_to() as door:
        key = door.session().key
        for status, said in ((400, "temperature must be cold"), (404, "no such model"), (422, "what is vendor?")):
            door.server.failures = [error(status, said)]
            got, told, _ = await door.post(CHAT_PATH, key)
            assert (got, told["error"]["message"]) == (status, said)


async def test_a_prompt_too_long_for_the_server_is_named_so_and_ends_the_episode():
    async with door_to() as door:
        session = door.session()
        door.server.failures = [error(400, "maximum context length is 8 tokens")]
        status, told, _ = await door.post(CHAT_PATH, session.key)
        assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
        assert session.seal().end is End.context_overflow


async def test_a_busy_upstream_is_passed_on_with_its_wish():
    async with door_to() as door:
        door.server.failures = [error(429, "slow down", {"Retry-After": "7"})]
        status, told, headers = await door.post(CHAT_PATH, door.session().key)
    assert (status, headers["Retry-After"], told["error"]["message"]) == (429, "7", "slow down")


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (lambda: error(500, "boom"), 502),
        (lambda: error(401, "wrong key"), 502),
        (lambda: web.Response(body=b"<html>"), 502),
        (lambda: web.json_response({"choices": []}), 502),
    ],
)
async def test_upstream_failures_are_bad_gateways_and_the_server_is_to_blame(reply, status):
    async with door_to() as door:
        session = door.session()
        door.server.failures = [reply()]
        got, told, _ = await door.post(CHAT_PATH, session.key)
        assert (got, told["error"]["type"]) == (status, "server_error")
        assert session.seal().end is End.endpoint_error


async def test_a_slow_upstream_is_a_gateway_timeout():
    async with door_to(request_timeout_s=0.05) as door:
        door.server.before_answer = asyncio.Event().wait
        status, told, _ = await door.post(CHAT_PATH, door.session().key)
    assert (status, told["error"]["code"]) == (504, "upstream_timeout")


async def test_an_upstream_that_is_not_there_is_a_bad_gateway():
    async with door_to() as door:
        await door.server._runner.cleanup()
        assert (await door.post(CHAT_PATH, door.session().key))[0] == 502


async def test_too_many_open_requests_are_asked_to_wait():
    async with door_to(max_open=2, max_open_per_session=1) as door:
        gate = asyncio.Event()
        door.server.before_answer = gate.wait
        one, two = door.session(), door.session()
        first = asyncio.create_task(door.post(CHAT_PATH, one.key))
        await until(lambda: door.server.open == 1)
        status, _, headers = await door.post(CHAT_PATH, one.key, {**CHAT, "n": 2})
        assert (status, headers["Retry-After"]) == (429, "1")
        second = asyncio.create_task(door.post(CHAT_PATH, two.key))
        await until(lambda: door.server.open == 2)
        assert (await door.post(CHAT_PATH, door.session().key))[0] == 429
        gate.set()
        assert [(await task)[0] for task in (first, second)] == [200, 200]


async def test_weights_that_change_without_the_server_answering_are_waited_out():
    class Publisher:
        in_flight, is_switching = "restarts", True

    async with door_to() as door:
        door.endpoint.publisher = publisher = Publisher()
        key = door.session().key
        status, _, headers = await door.post(CHAT_PATH, key)
        assert (status, headers["Retry-After"]) == (503, "1")
        publisher.is_switching = False
        assert (await door.post(CHAT_PATH, key))[0] == 200


async def test_every_choice_is_a_turn_and_each_is_trained_once():
    async with door_to() as door:
        session = door.session()
        _, told, _ = await door.post(CHAT_PATH, session.key, {**CHAT, "n": 3})
        trajectory = session.seal()
    assert [choice["index"] for choice in told["choices"]] == [0, 1, 2]
    assert len(trajectory.turns) == 3
    assert trajectory.policy_tokens == sum(sum(segment.policy_mask) for segment in trajectory.segments) == 18


async def test_text_completions_are_turns_and_scoring_is_none():
    async with door_to(" there") as door:
        session = door.session()
        status, told, _ = await door.post("/v1/completions", session.key, {"prompt": "hi", "logprobs": 0})
        assert (status, told["choices"][0]["text"]) == (200, " there")
        assert "token_logprobs" in told["choices"][0]["logprobs"]
        await door.post("/v1/completions", session.key, {"prompt": [1, 2], "echo": True, "max_tokens": 0})
        trajectory = session.seal()
    assert len(trajectory.turns) == 1
    assert list(trajectory.segments[0].ids()) == [*b"hi there", 260]


async def test_the_policy_version_of_the_server_is_on_the_tokens():
    async with door_to(endpoint={"policy_version": 4}) as door:
        door.server.policy_version = 4
        session = door.session()
        await door.post(CHAT_PATH, session.key)
        assert session.seal().version_range() == (4, 4)


async def test_a_version_from_the_future_is_no_reply():
    async with door_to(endpoint={"policy_version": 1}) as door:
        door.server.policy_version = 9
        session = door.session()
        assert (await door.post(CHAT_PATH, session.key))[0] == 502
        assert session.seal().turns == ()


async def test_a_gateway_serves_any_endpoint_and_the_sessions_of_a_runtime():
    runtime = Runtime(FakeEndpoint(["fine"]), sampling=Sampling(max_tokens=64))
    async with Gateway(runtime) as gateway, aiohttp.ClientSession() as http:
        async with runtime.session() as session:
            headers = {"Authorization": f"Bearer {session.key}"}
            async with http.post(f"{gateway.url}/chat/completions", json=CHAT, headers=headers) as reply:
                assert (await reply.json())["choices"][0]["message"]["content"] == "fine"
            async with http.post(f"{gateway.url}/completions", json={"prompt": "x"}, headers=headers) as reply:
                assert reply.status == 404
    assert session.trajectory.trainable
    assert list(session.trajectory.segments[0].ids()) == [*render_ids([Message("user", "hi")]), *b"fine", 260]


async def test_what_a_gateway_holds_can_be_read():
    async with door_to() as door:
        session = door.session()
        await door.post(CHAT_PATH, session.key)
        assert "<Guests 1, 0 requests under way>" in repr(door.gateway)
        session.seal()
        statistics = door.gateway.statistics()
    assert (statistics.sessions, statistics.in_flight, statistics.requests) == (0, 0, {f"{CHAT_PATH} 200": 1})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_costs_one_request_and_nobody_waits_for_ever(monkeypatch, caplog, stream):
    def broken(*_):
        raise ZeroDivisionError

    async with door_to() as door:
        session = door.session()
        with monkeypatch.context() as patch:
            patch.setattr("turngate.runtime.gateway.reply.strip", broken)
            status, told, _ = await door.post(CHAT_PATH, session.key, {**CHAT, "stream": stream})
        assert (status, told["error"]["message"]) == (500, "the gateway has a bug; see its log")
        assert "ZeroDivisionError" in caplog.text
        assert (await door.post(CHAT_PATH, session.key))[0] == 200
        assert session.turns == 1


async def test_a_taken_port_is_a_config_error():
    async with door_to() as door:
        port = int(door.gateway.url.split(":")[2].split("/")[0])
        with pytest.raises(ConfigError, match="choose another host or port"):
            async with Gateway(FakeEndpoint([]), GatewayConfig(port=port)):
                pass


@pytest.mark.parametrize("bad", [{"max_open": 0}, {"body_timeout_s": 0}, {"admin_key": ""}, {"admin_key": "é"}])
def test_settings_that_cannot_work_are_refused(bad):
    with pytest.raises(ConfigError):
        GatewayConfig(**bad)


def error(status, message, headers=None):
    body = msgspec.json.encode({"error": {"message": message, "type": "t", "code": None}})
    return web.Response(status=status, body=body, headers={"Content-Type": "application/json", **(headers or {})})


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - another task's progress; the test's limit is the only clock
            await asyncio.sleep(0)


async def test_requests_under_way_count_towards_the_limit_of_turns():
    async with door_to(table={"limits": Limits(max_turns=2)}) as door:
        session = door.session()
        gate = asyncio.Event()
        door.server.before_answer = gate.wait
        tasks = [asyncio.create_task(door.post(CHAT_PATH, session.key, {**CHAT, "seed": n})) for n in range(2)]
        await until(lambda: door.server.open == 2)
        assert (await door.post(CHAT_PATH, session.key))[0] == 409
        gate.set()
        assert [(await task)[0] for task in tasks] == [200, 200]
        assert session.turns == 2


async def test_a_request_that_the_limit_forbids_still_tells_what_the_model_would_have_been_shown():
    async with door_to(table={"limits": Limits(max_turns=1)}) as door:
        session = door.session(last_contexts=True)
        await door.post(CHAT_PATH, session.key)
        longer = [*CHAT["messages"], {"role": "assistant", "content": "hello"}, {"role": "user", "content": "more"}]
        for _ in range(2):
            assert (await door.post(CHAT_PATH, session.key, {**CHAT, "messages": longer}))[0] == 409
        trajectory = session.seal()
        assert [request["max_tokens"] for request in door.server.requests] == [64, 1]
    shown = [Message("user", "hi"), Message("assistant", "hello"), Message("user", "more")]
    assert trajectory.last_context_is_whole
    assert list(memoryview(trajectory.last_context).cast("i")) == render_ids(shown)


async def test_a_reply_that_the_server_gave_up_is_asked_for_again_and_no_stream_ends_with_it():
    finishes = ["abort", "stop", "abort"]
    async with door_to(lambda _: Said("one two", finish_reason=finishes.pop(0))) as door:
        session = door.session()
        assert (await door.post(CHAT_PATH, session.key))[0] == 200
        _, text, _ = await door.post(CHAT_PATH, session.key, {**CHAT, "stream": True})
        assert events(text)[-1]["error"]["code"] == "upstream_failed"
        assert '"abort"' not in text
        assert (len(door.server.requests), session.turns) == (3, 1)


@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), ("/v1/completions", {"prompt": [1, 2]})])
async def test_a_reply_that_is_asked_for_again_is_asked_of_the_weights_whose_version_it_gets(path, body):
    finishes = ["abort", "stop"]

    def say(_):
        if len(finishes) == 2:
            door.endpoint.policy_version, door.endpoint.model = 1, "policy-1"
        return Said("one two", finish_reason=finishes.pop(0))

    async with door_to(say, endpoint={"model": "policy-0"}) as door:
        door.server.policy_version = 1
        session = door.session()
        assert (await door.post(path, session.key, body))[0] == 200
        assert [request["model"] for request in door.server.requests] == ["policy-0", "policy-1"]
        assert session.seal().turns[0].version_sent == 1
