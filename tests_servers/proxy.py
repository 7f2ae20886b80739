"""A proxy that keeps what went through it, and that loses requests and replies on purpose."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import aiohttp
import msgspec
from aiohttp import web

from tests_servers.tap import Exchange

__all__ = ["Fault", "Proxy"]

Fault: TypeAlias = Literal["", "500", "500 after", "drop", "drop under way", "drop after"]
"""What becomes of a request: passed on; answered with a 500, before or after it was passed on; its connection closed,
before it was passed on, while it is being answered, or when the whole reply was there."""
_TIMEOUT_S = 120.0


class _Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Proxy:
    """Listens on a free loopback port while its `async with` block runs, and passes requests on to `target`."""

    url: str

    def __init__(self, target: str) -> None:
        """Args: target: the root of an OpenAI API, ending in /v1."""
        self._target = target
        self.faults: deque[Fault] = deque()
        """Of the requests to come; when they are used up, all pass."""
        self.exchanges: list[Exchange] = []
        """Posts that were answered with status 200, streamed replies as one."""
        self.arrived = asyncio.Condition()
        """Told of every request."""
        self.requests = 0
        self.when_under_way: Callable[[], Awaitable[object]] | None = None
        """Waits until a request that was passed on is being answered."""

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_TIMEOUT_S), auto_decompress=False)
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/v1/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
        await self._http.close()

    async def wait_for_request(self, number: int) -> None:
        """Wait until `number` requests have arrived."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: self.requests >= number)

    async def _serve(self, http: web.Request) -> web.StreamResponse:
        body = await http.read()
        async with self.arrived:
            self.requests += 1
            self.arrived.notify_all()
        fault = self.faults.popleft() if self.faults and http.method == "POST" else ""
        if fault in ("500", "drop"):
            return _fail(http, fault)
        if fault == "drop under way":
            assert self.when_under_way is not None
            passed = asyncio.create_task(self._pass_on(http, body))
            await self.when_under_way()
            passed.cancel()
            await asyncio.wait([passed])
            return _fail(http, fault)
        reply = await self._pass_on(http, body)
        return _fail(http, fault) if fault else await self._answer(http, reply)

    async def _pass_on(self, http: web.Request, body: bytes) -> _Reply:
        headers = {name: value for name, value in http.headers.items() if name.lower() not in _HOP}
        url = self._target + http.path_qs.removeprefix("/v1")
        async with self._http.request(http.method, url, data=body or None, headers=headers) as reply:
            told = _Reply(reply.status, dict(reply.headers), await reply.read())
        if http.method == "POST" and reply.status == 200:
            self.exchanges.append(Exchange(http.path.removeprefix("/v1"), msgspec.json.decode(body), _decoded(told)))
        return told

    async def _answer(self, http: web.Request, reply: _Reply) -> web.StreamResponse:
        headers = {name: value for name, value in reply.headers.items() if name.lower() not in _HOP}
        if "text/event-stream" not in reply.headers.get("Content-Type", ""):
            return web.Response(body=reply.body, status=reply.status, headers=headers)
        answer = web.StreamResponse(status=reply.status, headers=headers)
        await answer.prepare(http)
        for event in reply.body.split(b"\n\n"):
            if event:
                await answer.write(event + b"\n\n")
        await answer.write_eof()
        return answer


_HOP = ("host", "content-length", "transfer-encoding", "connection", "keep-alive", "accept-encoding", "date", "server")


def _fail(http: web.Request, fault: Fault) -> web.StreamResponse:
    if fault.startswith("drop") and http.transport is not None:
        http.transport.abort()
    return web.json_response({"error": {"message": "a fault on purpose", "type": "server_error"}}, status=500)


def _decoded(reply: _Reply) -> dict[str, Any]:
    """Return a reply as one, whether it was streamed or not."""
    if "text/event-stream" not in reply.headers.get("Content-Type", ""):
        return msgspec.json.decode(reply.body)
    ids: list[int] = []
    logprobs: list[dict[str, Any]] = []
    prompt: list[int] = []
    for line in reply.body.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        chunk = msgspec.json.decode(line.removeprefix(b"data: "))
        prompt = chunk.get("prompt_token_ids") or prompt
        for choice in chunk.get("choices", ()):
            ids += choice.get("token_ids") or ()
            logprobs += (choice.get("logprobs") or {}).get("content") or ()
    return {"prompt_token_ids": prompt, "choices": [{"token_ids": ids, "logprobs": {"content": logprobs}}]}
