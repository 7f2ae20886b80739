"""How a reply gets to the agent: in one piece or as it comes, and when it counts as delivered."""

from aiohttp import web

from turngate.runtime.gateway.exchange import Exchange

__all__ = ["deliver"]


async def deliver(http: web.Request, exchange: Exchange) -> web.StreamResponse:
    """Write the reply of an exchange and record its turn once the last byte was written without an error.

    Cancelled, or the client gone: the exchange goes on without this connection. A stream that fails halfway ends with
    an error event, and nothing is recorded.

    Raises: RequestError: the request failed before any byte of its reply.
    """
    if not exchange.is_streamed:
        await exchange.progress(0)
    if not exchange.is_streamed:
        return await _write_whole(http, exchange)
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
            await reply.write(b"".join(pieces))
        elif exchange.is_done:
            break
    if exchange.problem is not None:
        await reply.write(exchange.failure_piece(exchange.problem))
        await reply.write_eof()
        return reply
    await reply.write_eof()
    exchange.delivered()
    return reply


async def _write_whole(http: web.Request, exchange: Exchange) -> web.StreamResponse:
    if exchange.problem is not None:
        raise exchange.problem
    reply = web.Response(body=exchange.pieces[0], headers=exchange.headers)
    await reply.prepare(http)
    await reply.write_eof()
    exchange.delivered()
    return reply
