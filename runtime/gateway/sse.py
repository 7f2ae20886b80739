"""Server-sent events: read from a server as they come, and written to an agent."""

from collections.abc import AsyncGenerator, AsyncIterator

from turngate.runtime.errors import MalformedReply

__all__ = ["DONE", "SSE_HEADERS", "event_data", "event_piece", "named_piece"]

SSE_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
DONE = b"[DONE]"
"""Data of the last event of a stream."""
_MAX_EVENT_BYTES = 16 * 1024 * 1024
"""Of one event: what comes without an end must not fill our memory."""


async def event_data(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """Yield the data of each event; comments and all fields but `data` are skipped, whatever ends the lines.

    Raises: MalformedReply: an event has no end in sight. What `pieces` raises goes through.
    """
    rest: list[bytes] = []  # of a line whose end is still to come, in pieces: joined once
    data: list[bytes] = []
    waiting = kept = 0  # bytes in each
    async for piece in pieces:
        rest.append(piece)
        waiting += len(piece)
        if b"\n" in piece:
            *lines, last = b"".join(rest).split(b"\n")
            rest, waiting = [last], len(last)
            for line in lines:
                if line.startswith(b"data:"):
                    data.append(line[5:].strip())
                    kept += len(line)
                elif data and line in (b"", b"\r"):
                    yield b"\n".join(data)
                    data.clear()
                    kept = 0
        if waiting + kept > _MAX_EVENT_BYTES:
            raise MalformedReply(f"events of a stream must have at most {_MAX_EVENT_BYTES} bytes: got more")
    last = b"".join(rest)
    if last.startswith(b"data:"):  # a server that ends without the last empty line
        data.append(last[5:].strip())
    if data:
        yield b"\n".join(data)


def event_piece(data: bytes) -> bytes:
    """Return an event as it is written."""
    return b"data: %b\n\n" % data


def named_piece(name: str, data: bytes) -> bytes:
    """Return an event with a name as it is written."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
