"""SDKs repeat requests whose reply they did not get. However often they do, it is one turn. (AReaL#1498)"""

import asyncio
import contextlib

import aiohttp
import pytest
from openai import InternalServerError

from tests.runtime.gateway.doors import CHAT, HI, door_to, events
from tests.runtime.gateway.test_server import CHAT_PATH, error, until

RETRY = {"x-stainless-retry-count": "1"}


def counted():
    """Return a script that never says the same twice."""
    said = 0

    def say(_):
        nonlocal said
        said += 1
        return f"answer {said}"

    return say


async def abandon(door, key, body=CHAT):
    """Send a request and hang up before its reply."""
    arrived = len(door.server.requests)
    task = asyncio.create_task(door.post(CHAT_PATH, key, body))
    await until(lambda: len(door.server.requests) > arrived)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def detached(door):
    guest = next(iter(door.gateway._guests))
    await until(lambda: guest.exchanges.attached == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_that_comes_again_finds_its_reply_still_on_the_way(stream):
    body = {**CHAT, "stream": stream}
    async with door_to(counted()) as door:
        session = door.session()
        gate = asyncio.Event()
        door.server.before_answer = gate.wait
        await abandon(door, session.key, body)
        await detached(door)
        again = asyncio.create_task(door.post(CHAT_PATH, session.key, body))
        gate.set()
        assert "answer 1" in content_of((await again)[1])
        assert (len(door.server.requests), session.turns) == (1, 1)


async def test_an_agent_that_comes_after_the_server_was_done_gets_what_nobody_had():
    async with door_to(counted()) as door:
        session = door.session()
        gate = asyncio.Event()
        door.server.before_answer = gate.wait
        await abandon(door, session.key)
        gate.set()
        await until(lambda: door.gateway.statistics().in_flight == 0)
        assert session.turns == 0
        assert content_of((await door.post(CHAT_PATH, session.key))[1]) == "answer 1"
        assert (len(door.server.requests), session.turns) == (1, 1)


async def test_a_retry_of_a_delivered_reply_gets_it_again_and_is_no_turn():
    async with door_to(counted()) as door:
        session = door.session()
        first = await door.post(CHAT_PATH, session.key)
        again = await door.post(CHAT_PATH, session.key, headers=RETRY)
        assert first[1] == again[1]
        assert (len(door.server.requests), session.turns) == (1, 1)


async def test_a_retried_stream_is_replayed_from_its_beginning():
    body = {**CHAT, "stream": True}
    async with door_to(counted()) as door:
        session = door.session()
        first = await door.post(CHAT_PATH, session.key, body)
        again = await door.post(CHAT_PATH, session.key, body, headers=RETRY)
        assert events(first[1]) == events(again[1])
        assert session.turns == 1


async def test_equal_requests_that_are_no_retries_are_turns_of_their_own():
    async with door_to(counted()) as door:
        session = door.session()
        one_by_one = [content_of((await door.post(CHAT_PATH, session.key))[1]) for _ in range(2)]
        gate = asyncio.Event()
        door.server.before_answer = gate.wait
        twins = [asyncio.create_task(door.post(CHAT_PATH, session.key)) for _ in range(2)]
        await until(lambda: door.server.open == 2)
        gate.set()
        at_once = [content_of((await twin)[1]) for twin in twins]
        assert len({*one_by_one, *at_once}) == session.turns == 4


async def test_twins_that_both_hang_up_both_find_their_own():
    async with door_to(counted()) as door:
        session = door.session()
        gate = asyncio.Event()
        door.server.before_answer = gate.wait
        twins = [asyncio.create_task(door.post(CHAT_PATH, session.key)) for _ in range(2)]
        await until(lambda: door.server.open == 2)
        for twin in twins:
            twin.cancel()
        await asyncio.gather(*twins, return_exceptions=True)
        await detached(door)
        again = [asyncio.create_task(door.post(CHAT_PATH, session.key, headers=RETRY)) for _ in range(2)]
        await until(lambda: next(iter(door.gateway._guests)).exchanges.attached == 2)
        gate.set()
        assert {content_of((await one)[1]) for one in again} == {"answer 1", "answer 2"}
        assert (len(door.server.requests), session.turns) == (2, 2)


async def test_a_request_that_was_told_no_is_asked_anew():
    async with door_to(counted()) as door:
        session = door.session()
        await door.post(CHAT_PATH, session.key)
        door.server.failures = [error(500, "boom")]
        assert (await door.post(CHAT_PATH, session.key))[0] == 502
        told = (await door.post(CHAT_PATH, session.key, headers=RETRY))[1]
        assert content_of(told) == "answer 2"  # not the reply to the equal request before
        assert session.turns == 2


async def test_an_idempotency_key_is_one_turn_for_ever():
    headers = {"Idempotency-Key": "turn-7"}
    async with door_to(counted()) as door:
        session = door.session()
        replies = [(await door.post(CHAT_PATH, session.key, headers=headers))[1] for _ in range(3)]
        assert replies[0] == replies[1] == replies[2]
        status, told, _ = await door.post(CHAT_PATH, session.key, {**CHAT, "n": 2}, headers=headers)
        assert (status, told["error"]["param"]) == (400, "Idempotency-Key")
        assert (await door.post(CHAT_PATH, door.session().key, headers=headers))[1] != replies[0]
        assert session.turns == 1


async def test_the_sdk_is_one_turn_after_an_injected_failure():
    async with door_to(counted(), endpoint={"max_retries": 0}) as door:
        session = door.session()
        door.server.failures = [error(500, "boom"), error(503, "boom")]
        async with door.client(session.key, max_retries=2) as client:
            reply = await client.with_options(timeout=20).chat.completions.create(model="m", messages=HI)
        assert reply.choices[0].message.content == "answer 1"
        assert (len(door.server.requests), session.turns) == (3, 1)


async def test_the_sdk_is_one_turn_after_a_dropped_connection():
    async with door_to(counted()) as door:
        session = door.session()
        dropped = 0
        gate = asyncio.Event()
        door.server.before_answer = gate.wait

        async def drop():
            nonlocal dropped
            await until(lambda: door.server.open == 1)
            for connection in door.gateway._runner.server.connections:
                connection.transport.abort()
                dropped += 1
            gate.set()

        async with door.client(session.key, max_retries=2) as client:
            dropping = asyncio.create_task(drop())
            reply = await client.chat.completions.create(model="m", messages=HI)
            await dropping
        assert (reply.choices[0].message.content, dropped) == ("answer 1", 1)
        assert (len(door.server.requests), session.turns) == (1, 1)


async def test_the_sdk_is_one_turn_after_its_own_timeout():
    async with door_to(counted()) as door:
        session = door.session()
        gate = asyncio.Event()
        door.server.before_answer = gate.wait
        async with door.client(session.key, max_retries=2, timeout=0.2) as client:
            asking = asyncio.create_task(client.chat.completions.create(model="m", messages=HI))
            await until(lambda: door.gateway.statistics().in_flight == 1)
            await detached(door)
            gate.set()
            assert (await asking).choices[0].message.content == "answer 1"
        assert (len(door.server.requests), session.turns) == (1, 1)


async def test_a_failure_that_stays_is_told_after_the_sdks_retries():
    async with door_to(counted()) as door:
        session = door.session()
        door.server.failures = [error(500, "boom") for _ in range(2)]
        async with door.client(session.key, max_retries=1) as client:
            with pytest.raises(InternalServerError, match="boom"):
                await client.chat.completions.create(model="m", messages=HI)
        assert session.turns == 0


async def test_replies_are_kept_for_the_last_turns_only():
    async with door_to(counted(), kept_replies=2) as door:
        session = door.session()
        bodies = [{**CHAT, "seed": seed} for seed in range(4)]
        for body in bodies:
            await door.post(CHAT_PATH, session.key, body)
        guest = next(iter(door.gateway._guests))
        assert repr(guest.exchanges) == "<Exchanges 0 pending, 2 delivered>"
        for body in bodies:
            await abandoned_after_answer(door, session.key, {**body, "n": 2})
        assert len(guest.exchanges._pending) <= 3


async def abandoned_after_answer(door, key, body):
    door.server.before_answer = asyncio.Event().wait
    await abandon(door, key, body)
    await detached(door)


def content_of(told):
    if isinstance(told, str):
        return "".join(c["choices"][0]["delta"].get("content", "") for c in events(told)[:-1])
    return told["choices"][0]["message"]["content"]


async def test_a_connection_that_is_gone_before_the_reply_is_written_delivers_nothing():
    async with door_to(counted()) as door:
        session = door.session()
        gate = asyncio.Event()
        door.server.before_answer = gate.wait
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
            headers = {"Authorization": f"Bearer {session.key}"}
            task = asyncio.create_task(http.post(f"{door.gateway.url}/chat/completions", json=CHAT, headers=headers))
            await until(lambda: door.server.open == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        gate.set()
        await until(lambda: door.gateway.statistics().in_flight == 0)
        assert session.seal().turns == ()


async def test_what_failed_while_nobody_waited_is_asked_anew():
    async with door_to(counted()) as door:
        session = door.session()
        gate = asyncio.Event()
        door.server.before_answer = gate.wait
        door.server.failures = [error(500, "boom")]
        await abandon(door, session.key)
        gate.set()
        await until(lambda: door.gateway.statistics().in_flight == 0)
        assert content_of((await door.post(CHAT_PATH, session.key, headers=RETRY))[1]) == "answer 1"
        assert (len(door.server.requests), session.turns) == (2, 1)


async def test_a_refusal_stands_for_one_new_request_only():
    async with door_to(counted()) as door:
        session = door.session()
        door.server.failures = [error(500, "boom")]
        assert (await door.post(CHAT_PATH, session.key))[0] == 502
        first = await door.post(CHAT_PATH, session.key)  # by an agent that asks again by itself
        assert (await door.post(CHAT_PATH, session.key, headers=RETRY))[1] == first[1]
        assert session.turns == 1


async def test_a_name_that_is_empty_is_none():
    async with door_to(counted()) as door:
        session = door.session()
        for number in (1, 2):
            reply = await door.post(CHAT_PATH, session.key, headers={"Idempotency-Key": ""})
            assert content_of(reply[1]) == f"answer {number}"
        assert session.turns == 2
