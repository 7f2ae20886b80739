"""A reply counts as delivered when its last byte was written, and not before."""

import asyncio
import contextlib
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web

from tests.runtime.gateway.doors import CHAT, door_to
from tests.runtime.gateway.test_retries import content_of, counted
from tests.runtime.gateway.test_server import CHAT_PATH, until


class BrokenResponse(web.Response):
    async def write_eof(self, data=b""):
        raise ConnectionResetError("Cannot write to closing transport")


class BrokenStream(web.StreamResponse):
    async def write_eof(self, data=b""):
        raise ConnectionResetError("Cannot write to closing transport")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_that_cannot_be_written_to_its_end_is_no_turn_until_it_is(monkeypatch, stream):
    body = {**CHAT, "stream": stream}
    async with door_to(counted()) as door:
        session = door.session()
        with monkeypatch.context() as patch, contextlib.suppress(aiohttp.ClientError):
            broken = SimpleNamespace(Response=BrokenResponse, StreamResponse=BrokenStream)
            patch.setattr("turngate.runtime.gateway.delivery.web", broken)
            await door.post(CHAT_PATH, session.key, body)
        assert (len(door.server.requests), session.turns) == (1, 0)
        assert content_of((await door.post(CHAT_PATH, session.key, body))[1]) == "answer 1"
        assert (len(door.server.requests), session.turns) == (1, 1)


class StalledResponse(web.Response):
    async def write_eof(self, data=b""):
        await asyncio.Event().wait()


class StalledStream(web.StreamResponse):
    async def write(self, data):
        await asyncio.Event().wait()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_takes_nothing_is_disconnected_and_has_no_turn(monkeypatch, caplog, stream):
    async with door_to(write_timeout_s=0.05) as door:
        session = door.session()
        stalled = SimpleNamespace(Response=StalledResponse, StreamResponse=StalledStream)
        monkeypatch.setattr("turngate.runtime.gateway.delivery.web", stalled)
        with pytest.raises(aiohttp.ClientError):
            await door.post(CHAT_PATH, session.key, {**CHAT, "stream": stream})
        await until(lambda: not door.gateway._runner.server.connections)
        assert session.turns == 0
        assert door.gateway.statistics().requests == {"/v1/chat/completions 499": 1}
    assert not caplog.records  # thousands of agents die, and none of them is an error of the gateway's


async def test_a_reply_delivered_twice_is_one_turn():
    async with door_to(counted()) as door:
        session = door.session()
        gate = asyncio.Event()
        door.server.before_answer = gate.wait
        first = asyncio.create_task(door.post(CHAT_PATH, session.key))
        await until(lambda: door.server.open == 1)
        second = asyncio.create_task(door.post(CHAT_PATH, session.key, headers={"x-stainless-retry-count": "1"}))
        await until(lambda: next(iter(door.gateway._guests)).exchanges.attached == 2)
        gate.set()
        assert (await first)[1] == (await second)[1]
        assert (len(door.server.requests), session.turns) == (1, 1)
