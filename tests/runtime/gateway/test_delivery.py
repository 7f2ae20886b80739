"""A reply counts as delivered when its last byte was written, and not before."""

import contextlib
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web

from tests.runtime.gateway.doors import CHAT, door_to
from tests.runtime.gateway.test_retries import content_of, counted
from tests.runtime.gateway.test_server import CHAT_PATH


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
