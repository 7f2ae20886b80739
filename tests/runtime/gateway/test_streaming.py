"""Streams: chunks go through as they come, and add up to the turn that is recorded once all of them were delivered."""

import asyncio

import pytest
from aiohttp import web

from tests.runtime.gateway.doors import CHAT, LOOK, TOOLS, door_to, events
from tests.runtime.gateway.test_server import CHAT_PATH, error, until
from turngate.runtime.testing import render_ids
from turngate.runtime.testing.scripted_server import Said
from turngate.runtime.types import Message

STREAM = {**CHAT, "stream": True}


async def test_chunks_go_to_the_agent_as_they_come_from_the_server():
    async with door_to("one two three") as door:
        session = door.session()
        pieces: list[str] = []
        gate = asyncio.Semaphore(0)
        door.server.between_chunks = gate.acquire
        headers = {"Authorization": f"Bearer {session.key}"}
        async with door.http.post(f"{door.gateway.url}/chat/completions", json=STREAM, headers=headers) as reply:
            assert reply.headers["Content-Type"].startswith("text/event-stream")
            for word in ("one ", "two ", "three"):
                while word not in "".join(pieces):
                    pieces.append((await reply.content.readany()).decode())
                assert session.turns == 0
                gate.release()
            pieces.append((await reply.read()).decode())
        told = events("".join(pieces))
        trajectory = session.seal()
    assert told[-1] == "[DONE]"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in told[:-1]) == "one two three"
    assert trajectory.turns[0].text == "one two three"
    assert trajectory.trainable
    (segment,) = trajectory.segments
    assert list(segment.ids()) == [*render_ids([Message("user", "hi")]), *b"one two three", 260]


async def test_ids_logprobs_and_versions_of_the_chunks_are_recorded_and_not_shown():
    """agent-lightning#262: no token ids when streaming."""
    async with door_to("one two", endpoint={"policy_version": 2}) as door:
        door.server.policy_version = 2
        whole, streamed = door.session(), door.session()
        await door.post(CHAT_PATH, whole.key)
        _, text, _ = await door.post(CHAT_PATH, streamed.key, STREAM)
        assert whole.seal().segments == streamed.seal().segments
    assert not any(word in text for word in ("token_ids", "policy_version", '"logprobs":{'))


async def test_what_the_agent_asks_for_is_in_its_chunks():
    body = {**STREAM, "logprobs": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    async with door_to("one two") as door:
        _, text, _ = await door.post(CHAT_PATH, door.session().key, body)
    *chunks, usage, done = events(text)
    ids = [i for c in chunks for i in c["choices"][0].get("token_ids", [])]
    assert (bytes(ids[:-1]), done) == (b"one two", "[DONE]")
    assert sum(len((c["choices"][0].get("logprobs") or {}).get("content", [])) for c in chunks) == len(ids)
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], len(ids))


async def test_streamed_tool_calls_are_put_together_for_the_record():
    said = Said("let me see", (LOOK, LOOK))
    async with door_to(lambda _: said) as door:
        session = door.session()
        _, text, _ = await door.post(CHAT_PATH, session.key, {**STREAM, "tools": TOOLS})
        (turn,) = session.seal().turns
    assert turn.tool_calls == (LOOK, LOOK)
    assert (turn.text, turn.stop_reason) == ("let me see", "tool_calls")
    deltas = [c["choices"][0]["delta"].get("tool_calls") for c in events(text)[:-1]]
    assert [d[0]["index"] for d in deltas if d] == [0, 0, 0, 1, 1, 1]


async def test_streamed_choices_are_turns_of_their_own():
    async with door_to("one two") as door:
        session = door.session()
        await door.post(CHAT_PATH, session.key, {**STREAM, "n": 3})
        assert [turn.text for turn in session.seal().turns] == ["one two"] * 3


async def test_text_completions_stream_too():
    async with door_to("one two") as door:
        session = door.session()
        _, text, _ = await door.post("/v1/completions", session.key, {"prompt": "hi", "stream": True})
        trajectory = session.seal()
    assert "".join(c["choices"][0]["text"] for c in events(text)[:-1]) == "one two"
    assert list(trajectory.segments[0].ids()) == [*b"hi", *b"one two", 260]


async def test_an_error_before_the_first_chunk_has_its_status():
    async with door_to() as door:
        door.server.failures = [error(400, "no")]
        status, told, _ = await door.post(CHAT_PATH, door.session().key, STREAM)
    assert (status, told["error"]["message"]) == (400, "no")


async def test_an_error_halfway_is_an_event_of_the_stream_and_no_turn():
    async with door_to("one two three") as door:
        session = door.session()
        door.server.breaks_after = 2
        status, text, _ = await door.post(CHAT_PATH, session.key, STREAM)
        assert status == 200
        assert events(text)[-1]["error"]["code"] == "upstream_failed"
        assert (session.turns, "[DONE]" in text) == (0, False)
        assert (await door.post(CHAT_PATH, session.key, STREAM))[0] == 200
        assert session.turns == 1


@pytest.mark.parametrize(
    "body",
    [b"", b"data: {}\n\n", b"data: nonsense\n\n", b'data: {"choices": [{"index": -3}]}\n\n', b"data: [DONE]\n\n"],
)
async def test_a_stream_that_is_none_is_a_bad_gateway_or_an_error_event(body):
    async with door_to() as door:
        session = door.session()
        door.server.failures = [web.Response(body=body)]
        status, told, _ = await door.post(CHAT_PATH, session.key, STREAM)
        problem = told["error"] if status != 200 else events(told)[-1]["error"]
        assert problem["code"] == "upstream_failed"
        assert session.turns == 0


async def test_an_agent_that_leaves_a_stream_has_no_turn_and_the_server_is_let_go_with_the_session():
    async with door_to("one two three") as door:
        session = door.session()
        never = asyncio.Event()
        door.server.between_chunks = never.wait
        headers = {"Authorization": f"Bearer {session.key}"}
        async with door.http.post(f"{door.gateway.url}/chat/completions", json=STREAM, headers=headers) as reply:
            await reply.content.readany()
            reply.close()
        assert door.server.open == 1  # somebody may come again for it
        session.seal()
        await until(lambda: door.server.open == 0)
        assert (door.server.cancelled, door.gateway.statistics().in_flight) == (1, 0)
    assert session.trajectory.turns == ()


async def test_a_session_that_ends_tells_whoever_waits():
    async with door_to() as door:
        session = door.session()
        door.server.before_answer = asyncio.Event().wait
        waiting = asyncio.create_task(door.post(CHAT_PATH, session.key))
        await until(lambda: door.server.open == 1)
        session.seal()
        status, told, _ = await waiting
    assert (status, told["error"]["code"]) == (409, "session_sealed")


async def test_a_gateway_that_closes_tells_whoever_waits_and_leaves_the_session_open():
    async with door_to() as door:
        session = door.session()
        door.server.before_answer = asyncio.Event().wait
        waiting = asyncio.create_task(door.post(CHAT_PATH, session.key))
        await until(lambda: door.server.open == 1)
        await door.gateway.aclose()
        status, told, _ = await waiting
    assert (status, told["error"]["code"]) == (503, "gateway_closed")
    assert session.state == "open"


async def test_what_comes_while_a_gateway_closes_is_not_left_behind():
    async with door_to() as door:
        session = door.session()
        door.server.before_answer = asyncio.Event().wait
        late: list[asyncio.Task[object]] = []

        async def slow_to_end() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                late.append(asyncio.create_task(door.post(CHAT_PATH, session.key)))
                await until(lambda: late[0].done() or door.server.open == 1)

        door.gateway._guests.tasks.add(asyncio.create_task(slow_to_end()))
        await asyncio.sleep(0)
        await door.gateway.aclose()
        assert [task for task in door.gateway._guests.tasks if not task.done()] == []
        await asyncio.gather(*late, return_exceptions=True)
