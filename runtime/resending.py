"""Generations that a server gave up half-way, sent again: what `in_flight == "restarts"` asks of clients."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from turngate.runtime.errors import GenerationAborted

__all__ = ["resend_aborted"]

_RESENDS = 8
"""Weight updates that one request may meet before it is given up: with more, updates outrun generation."""

T = TypeVar("T")


async def resend_aborted(send: Callable[[float], Awaitable[T]], timeout_s: float) -> T:
    """Return the first reply of `send`, which is given the seconds left, that the server did not abort.

    At once: a server that aborts while its weights change holds new requests back by itself.
    Raises: GenerationAborted: it aborted that many times, or until the time was over.
    """
    now = asyncio.get_running_loop().time
    deadline = now() + timeout_s
    resends = 0
    while True:
        try:
            return await send(deadline - now())
        except GenerationAborted:
            if resends == _RESENDS or now() >= deadline:
                raise
            resends += 1
