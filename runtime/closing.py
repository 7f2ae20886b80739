"""Closing an environment: exactly once, to the end, whatever happens to the task that owned it."""

import asyncio
import logging

import anyio

from turngate.envs.base import Env
from turngate.runtime.leaving import LeavableCalls

__all__ = ["close_env"]

_log = logging.getLogger("turngate.rollout")


async def close_env(env: Env, *, timeout_s: float, owner: str) -> None:
    """Await `env.aclose()` once, shielded from cancellation but not for longer than `timeout_s`.

    A close that raises or hangs is logged; it changes nothing about the episode. Cancelled: the close runs on, and
    CancelledError is raised once it is done.
    """
    loop = asyncio.get_running_loop()
    # A task of its own, because a plain asyncio cancellation pierces every shield of the task it hits.
    closing = loop.create_task(_aclose(env, owner, timeout_s), name=f"aclose of {owner}")
    deadline_s = loop.time() + timeout_s
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):  # or anyio would repeat the cancellation at every wait
        while not closing.done() and (left_s := deadline_s - loop.time()) > 0:
            try:
                await asyncio.wait({closing}, timeout=left_s)
            except asyncio.CancelledError as error:
                cancelled = error
    if not closing.done():
        closing.cancel()
        _log.error("%s: env.aclose() did not finish within %g s and was cancelled", owner, timeout_s)
    if cancelled is not None:
        raise cancelled


async def _aclose(env: Env, owner: str, grace_s: float) -> None:
    try:
        await LeavableCalls(owner, grace_s=grace_s).run("env.aclose", env.aclose)
    except Exception:
        # A recorded boundary: what the episode showed stays true when its cleanup fails.
        _log.exception("%s: env.aclose() raised", owner)
