"""Cancellations that nobody asked for: what runs inside a task may raise one, or cancel the very task it runs in.

In a task group such a task ends the whole group without a word, as if the group had been cancelled.
"""

import asyncio
import math
from collections.abc import Awaitable, Generator
from contextlib import contextmanager

import anyio

from turngate.envs.base import End, Task
from turngate.runtime.types import Trajectory

__all__ = ["played_apart", "strays_end_here"]

_STRAY_CANCELLATION = "the episode must end by itself: it was cancelled by something that runs inside it"


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


async def played_apart(rollout: Awaitable[Trajectory], *, trajectory_id: str, task: Task, seed: int) -> Trajectory:
    """Await a rollout in a task of an anyio group; one that a stray cancellation ended failed, and the others go on."""
    played = Trajectory(id=trajectory_id, task=task, seed=seed, end=End.env_error, error=_STRAY_CANCELLATION)
    with strays_end_here():
        played = await rollout
    return played
