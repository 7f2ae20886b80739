"""Cancellations that nobody asked for: what runs inside a task may raise one, or cancel the very task it runs in.

In a task group such a task ends the whole group without a word, as if the group had been cancelled.
"""

import asyncio
import math
from collections.abc import Generator
from contextlib import contextmanager

import anyio

__all__ = ["strays_end_here"]


@contextmanager
def strays_end_here() -> Generator[None]:
    """Let the body be left by a cancellation, in a task of an anyio group, only when the group or a scope is cancelled.

    Any other is forgotten, and what follows the block goes on.
    """
    try:
        yield
    except asyncio.CancelledError:
        if anyio.current_effective_deadline() == -math.inf:
            raise  # a scope around us wants it
        task = asyncio.current_task()
        while task is not None and task.cancelling():
            task.uncancel()
