"""The environment's state before an action, for value functions: they may ask from any task, at once, and too late."""

import asyncio

from turngate.envs.base import Snapshot
from turngate.runtime.deadline import Deadline, DeadlineExceeded
from turngate.runtime.episode_env import EpisodeEnv
from turngate.runtime.errors import EnvError
from turngate.runtime.foreign import ForeignCalls
from turngate.runtime.limits import Limits

__all__ = ["LiveSnapshot"]


class LiveSnapshot:
    """Takes one snapshot, the first time that it is called, and gives it to everybody who calls until it is closed.

    Environments are called by one at a time: nobody else may call this one meanwhile, and nobody through this object
    once it is closed. What value functions leave running, as a failed `asyncio.gather` does, gets an error then.
    """

    # Changed by __call__(): _task, which takes the snapshot. Changed by aclose(): _is_closed.
    __slots__ = ("_env", "_is_closed", "_limits", "_saved", "_task", "_where")

    def __init__(self, env: EpisodeEnv, limits: Limits, where: str, saved: Snapshot | None = None) -> None:
        """Take none yet. Args: where: names the decision. saved: the state, where somebody has taken it already."""
        self._env, self._limits, self._where, self._saved = env, limits, where, saved
        self._task: asyncio.Task[Snapshot] | None = None
        self._is_closed = False

    async def __call__(self) -> Snapshot:
        """Return the state. Cancelled: it is taken all the same, for others.

        Raises: EnvError: the environment raised or hung, or the decision has been made already.
        """
        if self._is_closed:
            raise EnvError(f"snapshot must be asked for while the decision is being made: it is made ({self._where})")
        if self._saved is not None:
            return self._saved
        task = self._task
        if task is None:
            task = self._task = asyncio.create_task(self._take(), name="turngate snapshot")
        await asyncio.wait({task})  # and not the task itself: who waits may be cancelled, and it goes on
        if task.cancelled():
            raise EnvError(f"snapshot must be there before the decision is made: it was not ({self._where})")
        return task.result()

    async def aclose(self) -> None:
        """Let nobody ask any more, and wait until the environment is left alone."""
        self._is_closed = True
        task = self._task
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # told to whoever asked, if anybody still listens

    async def _take(self) -> Snapshot:
        deadline, timeout_s = Deadline(), self._limits.tool_timeout_s
        calls = ForeignCalls(self._where, deadline, grace_s=self._limits.close_timeout_s)
        try:
            with deadline:
                deadline.set(asyncio.get_running_loop().time() + timeout_s, "env.snapshot")
                return await self._env.snapshot_by(calls)
        except DeadlineExceeded as error:
            if not deadline.expired:
                raise  # somebody else's
            raise EnvError(
                f"env.snapshot must finish within {timeout_s:g} s: it did not (Limits.tool_timeout_s, {self._where})"
            ) from error
