"""How a reply gets to the agent: in one piece or as it comes, and when it counts as delivered."""

import asyncio
from collections.abc import Awaitable

from aiohttp import web

from turngate.runtime.deadline import Deadline, DeadlineExceeded
from turngate.runtime.gateway.exchange import Exchange

__all__ = ["deliver"]


async def deliver(http: web.Request, exchange: Exchange, *, write_timeout_s: float) -> web.StreamResponse:
    """Write the reply of an exchange and record its turn once the last byte was written without an error.

    Cancelled, or the client gone: the exchange goes on without this connection. A stream that fails halfway ends with
    an error event, and nothing is recorded.

    Raises: RequestError: the request failed before any byte of its reply. ConnectionError: the client is gone, or has
        taken nothing for `write_timeout_s` and was disconnected.
    """
    if not exchange.is_streamed:
        await exchange.progress(0)
    if not exchange.is_streamed:
        return await _write_whole(http, exchange, write_timeout_s)
    reply = web.StreamResponse(headers=exchange.headers)
    seen = 0
    while True:
        await exchange.progress(seen)
        pieces = exchange.pieces[seen:]
        if not reply.prepared:
            if not pieces and exchange.problem is not None:
                raise exchange.problem
            await reply.prepare(http)
        seen += len(pieces)
        if pieces:
            await _taken(http, reply.write(b"".join(pieces)), write_timeout_s)
        elif exchange.is_done:
            break
    if exchange.problem is not None:
        await _taken(http, reply.write(exchange.failure_piece(exchange.problem)), write_timeout_s)
        await _taken(http, reply.write_eof(), write_timeout_s)
        return reply
    await _taken(http, reply.write_eof(), write_timeout_s)
    exchange.delivered()
    return reply


async def _write_whole(http: web.Request, exchange: Exchange, write_timeout_s: float) -> web.StreamResponse:
    if exchange.problem is not None:
        raise exchange.problem
    reply = web.Response(body=exchange.pieces[0], headers=exchange.headers)
    await reply.prepare(http)
    await _taken(http, reply.write_eof(), write_timeout_s)
    exchange.delivered()
    return reply


async def _taken(http: web.Request, write: Awaitable[None], timeout_s: float) -> None:
    """Wait until the client has taken enough of what was written. Raises ConnectionResetError: it does not."""
    try:
        with Deadline() as deadline:
            deadline.set(asyncio.get_running_loop().time() + timeout_s, "client")
            await write
    except DeadlineExceeded:
        if http.transport is not None:
            http.transport.abort()
        raise ConnectionResetError(f"the client must take its reply: it took nothing for {timeout_s:g} s") from None
