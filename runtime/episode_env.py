"""An episode's environment, and how long each wait of the episode may take."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar, cast

from turngate.envs.base import Action, End, Env, EnvFactory, Observation, Snapshot, SnapshotEnv, Step, Task
from turngate.runtime.answers import check_snapshot, check_start
from turngate.runtime.closing import close_env
from turngate.runtime.deadline import Deadline
from turngate.runtime.errors import ConfigError, EnvError
from turngate.runtime.foreign import ForeignCalls
from turngate.runtime.limits import Limits

__all__ = ["TIMEOUTS", "EpisodeEnv", "Waits"]

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUTS = {
    "rollout": (End.timeout, "rollout_timeout_s"),
    "context": (End.tool_error, "turn_timeout_s"),
    "injection": (End.tool_error, "turn_timeout_s"),
    "completion": (End.endpoint_error, "turn_timeout_s"),
    "turn.step": (End.env_error, "turn_timeout_s"),
    "turn.snapshot": (End.env_error, "turn_timeout_s"),
    "env.reset": (End.env_error, "tool_timeout_s"),
    "env.restore": (End.env_error, "tool_timeout_s"),
    "env.step": (End.env_error, "tool_timeout_s"),
    "env.snapshot": (End.env_error, "tool_timeout_s"),
}
"""What running into each deadline means: a hanging server or environment is a failure, a slow episode is cut short."""


class Waits:
    """Sets one episode's deadline before each wait: that of the turn or of the rollout, whichever is nearer."""

    # Changed as the episode goes on: all but the deadline and the limits.
    __slots__ = ("_limit_s", "_limit_what", "_limits", "_rollout_end_s", "deadline")

    def __init__(self, limits: Limits) -> None:
        self.deadline = Deadline()
        self._limits = limits
        self._rollout_end_s = self._limit_s = float("inf")
        self._limit_what = "rollout"

    def begin_rollout(self) -> None:
        """Let the rollout's time begin now."""
        self._rollout_end_s = self._limit_s = asyncio.get_running_loop().time() + self._limits.rollout_timeout_s

    def begin_turn(self) -> None:
        """Let a turn's time begin now."""
        turn_end_s = asyncio.get_running_loop().time() + self._limits.turn_timeout_s
        if turn_end_s < self._rollout_end_s:
            self._limit_s, self._limit_what = turn_end_s, "turn"
        else:
            self._limit_s, self._limit_what = self._rollout_end_s, "rollout"

    def wait_for(self, what: str) -> None:
        """Set the deadline for a wait that the turn's time bounds; the turn's names what it waits for."""
        self.deadline.set(self._limit_s, what if self._limit_what == "turn" else self._limit_what)

    def wait_for_env(self, what: str) -> None:
        """Set the deadline for a call into the environment."""
        tool_end_s = asyncio.get_running_loop().time() + self._limits.tool_timeout_s
        if tool_end_s < self._limit_s:
            self.deadline.set(tool_end_s, f"env.{what}")
        else:
            self.wait_for(f"turn.{what}")


class EpisodeEnv:
    """Makes one environment, calls it within deadlines, and closes it; whatever it raises becomes an EnvError."""

    # Changed here: _env, made by make() and closed by aclose().
    __slots__ = ("_calls", "_env", "_waits")

    def __init__(self, calls: ForeignCalls, waits: Waits) -> None:
        self._calls, self._waits = calls, waits
        self._env: Env | None = None

    async def make(self, factory: EnvFactory, *, needs_snapshots: bool) -> None:
        """Make the environment. Raises: ConfigError: it has no snapshots, which are needed."""

        async def make_env() -> None:
            self._env = factory()

        await self._calls.run("the environment factory", EnvError, make_env)
        if needs_snapshots and not isinstance(self._env, SnapshotEnv):
            raise ConfigError(
                f"keep_snapshots and restarts need snapshot() and restore(): {type(self._env).__name__} has not both; "
                "turn them off or give the environment snapshots"
            )

    @property
    def has_snapshots(self) -> bool:
        """Whether the environment can be saved and restored."""
        return isinstance(self._env, SnapshotEnv)

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode."""
        observation = await self._call("reset", cast(Env, self._env).reset, task, seed)
        check_start(observation)
        return observation

    async def step(self, action: Action) -> Step:
        """Execute an action; what it returns is not checked here."""
        return await self._call("step", cast(Env, self._env).step, action)

    async def snapshot(self) -> Snapshot:
        """Return the state as it is now."""
        self._waits.wait_for_env("snapshot")
        return await self.snapshot_by(self._calls)

    async def snapshot_by(self, calls: ForeignCalls) -> Snapshot:
        """Return the state as it is now, to a task with calls and a deadline of its own."""
        snapshot = await calls.run("env.snapshot", EnvError, cast(SnapshotEnv, self._env).snapshot)
        check_snapshot(snapshot)
        return snapshot

    async def restore(self, snapshot: Snapshot, seed: int) -> None:
        """Return to a state, with luck from `seed`."""
        await self._call("restore", cast(SnapshotEnv, self._env).restore, snapshot, seed)

    async def aclose(self, *, timeout_s: float, owner: str) -> None:
        """Close the environment, if there is one; see `close_env`."""
        env, self._env = self._env, None
        if env is not None:
            await close_env(env, timeout_s=timeout_s, owner=owner)

    async def _call(self, what: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        self._waits.wait_for_env(what)
        return await self._calls.run(f"env.{what}", EnvError, call, *args, **kwargs)
