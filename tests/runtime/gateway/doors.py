"""A gateway in front of a scripted server, and what tests ask of both."""

from contextlib import asynccontextmanager
from random import Random
from typing import Any

import aiohttp
import msgspec
from openai import AsyncOpenAI

from turngate.envs.base import Task, ToolCall
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.gateway import Gateway, GatewayConfig
from turngate.runtime.session_table import SessionTable
from turngate.runtime.testing.scripted_server import Said, ScriptedServer
from turngate.runtime.types import Sampling

HI: list[Any] = [{"role": "user", "content": "hi"}]
CHAT = {"model": "m", "messages": HI}
LOOK = ToolCall("call_1", "look", '{"at": "it"}')
ADMIN = "the-admin-key"


class Door:
    """Everything between an agent and the model."""

    def __init__(self, server, endpoint, gateway, http):
        self.server, self.endpoint, self.gateway, self.http = server, endpoint, gateway, http

    def session(self, **options):
        return self.gateway.sessions.create(Task("t", "do it"), **options)

    @asynccontextmanager
    async def client(self, key, **options):
        async with AsyncOpenAI(base_url=self.gateway.url, api_key=key, **options) as client:
            yield client

    async def post(self, path, key, body=CHAT, *, data=None, headers=None):
        """Return (status, decoded body, headers)."""
        sent = data if data is not None else msgspec.json.encode(body)
        given = {"Content-Type": "application/json", "Authorization": f"Bearer {key}", **(headers or {})}
        url = self.gateway.url.removesuffix("/v1") + path
        async with self.http.post(url, data=sent, headers=given) as reply:
            return reply.status, _decoded(await reply.read()), reply.headers

    async def get(self, path, key):
        url = self.gateway.url.removesuffix("/v1") + path
        async with self.http.get(url, headers={"Authorization": f"Bearer {key}"}) as reply:
            return reply.status, _decoded(await reply.read()), reply.headers


def _decoded(body):
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode()


@asynccontextmanager
async def door_to(say="hello", *, endpoint=None, table=None, guidance=None, **config):
    """Open a gateway in front of a server that says so."""
    table = {"sampling": Sampling(max_tokens=64), **(table or {})}
    async with ScriptedServer(say) as server:
        options = {"model": "base", "max_retries": 0, "random": Random(0), **(endpoint or {})}
        async with Endpoint(server.url, **options) as upstream:
            sessions = SessionTable(upstream, **table)
            settings = GatewayConfig(**{"admin_key": ADMIN, **config})
            async with Gateway(sessions, settings, guidance=guidance) as gateway, aiohttp.ClientSession() as http:
                yield Door(server, upstream, gateway, http)


def events(text):
    """Return the decoded data of a stream's events, the last one as it is."""
    found = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [one if one == "[DONE]" else msgspec.json.decode(one) for one in found]


def two_tool_agent(request):
    """Say what a model with two tools says: look, then take, then the answer."""
    answered = sum(message["role"] == "tool" for message in request["messages"])
    if answered == 0:
        return Said("let me see", (LOOK,))
    if answered == 1:
        return Said("", (ToolCall("call_2", "take", '{"count": 2}'),))
    return Said("it is 4")


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": name,
            "parameters": {"type": "object", "properties": {arg: {"type": kind}}, "required": [arg]},
        },
    }
    for name, arg, kind in (("look", "at", "string"), ("take", "count", "integer"))
]
