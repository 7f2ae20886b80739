"""A real HTTP server that misbehaves on demand."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeAlias

import msgspec

from turngate.runtime.testing.endpoints import fake_reply

__all__ = ["Behaviour", "HostileServer", "answer", "broken", "hang", "raw", "reset", "status"]

Behaviour: TypeAlias = "Callable[[Any, asyncio.StreamWriter], Awaitable[bool]]"
"""Answers one decoded request on a connection; returns True when the connection lives on."""


def answer(text: str = "ok", edit: Callable[[dict[str, Any]], Any] | None = None, *, close: bool = False) -> Behaviour:
    """Answer well, after `edit` has changed the reply in place; `close` drops the connection without announcing it."""

    async def behave(request: Any, writer: asyncio.StreamWriter) -> bool:
        reply = fake_reply(request, text)
        if edit is not None:
            edit(reply)
        _send(writer, 200, msgspec.json.encode(reply))
        await writer.drain()
        return not close

    return behave


def raw(body: bytes, code: int = 200) -> Behaviour:
    """Answer these very bytes."""

    async def behave(request: Any, writer: asyncio.StreamWriter) -> bool:
        _send(writer, code, body)
        await writer.drain()
        return True

    return behave


def status(code: int, message: str = "no", **headers: str) -> Behaviour:
    """Answer an OpenAI-style error; header names are written with underscores."""

    async def behave(request: Any, writer: asyncio.StreamWriter) -> bool:
        body = msgspec.json.encode({"error": {"message": message, "type": "test", "code": None}})
        _send(writer, code, body, "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items()))
        await writer.drain()
        return True

    return behave


def reset() -> Behaviour:
    """Reset the connection before the first byte of a reply."""

    async def behave(request: Any, writer: asyncio.StreamWriter) -> bool:
        _reset(writer)
        return False

    return behave


def broken() -> Behaviour:
    """Reset the connection in the middle of a reply."""

    async def behave(request: Any, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        _reset(writer)
        return False

    return behave


def hang() -> Behaviour:
    """Accept the request and never answer."""

    async def behave(request: Any, writer: asyncio.StreamWriter) -> bool:
        await asyncio.Event().wait()
        return False

    return behave


class HostileServer:
    """Listens on a free loopback port and behaves as told, one behaviour per request, the last one for all others.

    async with HostileServer(status(500), reset(), answer("fine")) as server: ...
    """

    def __init__(self, *behaviours: Behaviour, port: int = 0) -> None:
        """Give the behaviours in the order of the requests; a server without any answers well. Port 0 is a free one."""
        self._behaviours = list(behaviours) or [answer()]
        self.requests: list[Any] = []
        """Decoded body of every request."""
        self.connections = 0
        """Connections accepted so far."""
        self.url = ""
        self._port = port
        self._received = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._live: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<HostileServer {self.url}, {len(self.requests)} requests on {self.connections} connections>"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._live:
            task.cancel()
        await asyncio.gather(*self._live, return_exceptions=True)
        await self._server.wait_closed()

    async def received(self) -> None:
        """Wait for the next request to arrive in whole."""
        self._received.clear()
        await self._received.wait()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._live.add(task)
        task.add_done_callback(self._live.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            alive = True
            while alive:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
                request = msgspec.json.decode(await reader.readexactly(length))
                self.requests.append(request)
                self._received.set()
                behave = self._behaviours.pop(0) if len(self._behaviours) > 1 else self._behaviours[0]
                alive = await behave(request, writer)


def _send(writer: asyncio.StreamWriter, code: int, body: bytes, headers: str = "") -> None:
    head = f"HTTP/1.1 {code} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    writer.write(head.encode() + body)


def _reset(writer: asyncio.StreamWriter) -> None:
    # Linger 0 makes close() send RST instead of FIN.
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
