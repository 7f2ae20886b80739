"""Agents that bring their own loop, run like environments: one coroutine is one episode."""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeAlias

import msgspec

from turngate.envs.base import End, EnvFactory, Task
from turngate.runtime.deadline import Deadline, DeadlineExceeded
from turngate.runtime.errors import ConfigError, EnvError, ToolError
from turngate.runtime.foreign import ForeignCalls
from turngate.runtime.guidance import Guidance
from turngate.runtime.limits import Limits
from turngate.runtime.session import Session
from turngate.runtime.session_table import SessionTable
from turngate.runtime.types import Sampling, Trajectory

__all__ = ["Agent", "AgentFunction", "AgentOrEnv", "Outcome", "Verdict", "check_agent_run", "run_agent"]


class Outcome(msgspec.Struct, frozen=True):
    """What an agent returns to name the end of its episode itself."""

    reward: float | Mapping[str, float]
    """The component `outcome`, or all components by name; added to the newest turn."""
    end: End
    """A terminal end, or a truncation when the agent itself cuts the episode short."""


Verdict: TypeAlias = float | Mapping[str, float] | Outcome | None
"""A reward, rewards by name, a reward with an end, or nothing when the rewards were given otherwise."""
AgentFunction: TypeAlias = Callable[[Session, Task], Awaitable[Verdict]]


class Agent:
    """Wraps `async def agent(session, task) -> reward`, to be given wherever an environment factory is.

        runtime.rollout(Agent(solve), task)
        train(runtime, Agent(solve), tasks, learner=...)

    The episode is a success when its rewards come to more than 0 (those named `outcome`, if there are any), otherwise a
    failure; return an `Outcome` to say it otherwise. An exception ends it with `env_error`.
    """

    __slots__ = ("fn", "max_turns", "name")

    def __init__(self, fn: AgentFunction, *, name: str = "", max_turns: int | None = None) -> None:
        """Args: fn: called once per episode, for many episodes at once. max_turns: instead of `Limits.max_turns`."""
        if not callable(fn):
            raise ConfigError(f"agent must be a coroutine function of (session, task): got {fn!r:.80}")
        if max_turns is not None and max_turns < 1:
            raise ConfigError(f"max_turns must be 1 or more: got {max_turns} (Agent)")
        self.fn, self.max_turns = fn, max_turns
        self.name = name or getattr(fn, "__qualname__", type(fn).__qualname__)

    def __repr__(self) -> str:
        return f"<Agent {self.name}>"

    def limits(self, limits: Limits) -> Limits:
        """Return the limits of its episodes."""
        return limits if self.max_turns is None else msgspec.structs.replace(limits, max_turns=self.max_turns)


AgentOrEnv: TypeAlias = EnvFactory | Agent
"""What an episode is played with."""


def check_agent_run(
    env: AgentOrEnv,
    *,
    restarts: object = None,
    injection: object = None,
    branching: object = None,
    keep_snapshots: bool = False,
) -> None:
    """Refuse what needs a look inside the loop, which an agent keeps to itself, and what cannot be played at all.

    Raises: ConfigError.
    """
    if not isinstance(env, Agent):
        _check_factory(env)
        return
    given = {"restarts": restarts, "injection": injection, "branching": branching}
    wanted = {name: value is not None for name, value in given.items()} | {"keep_snapshots": keep_snapshots}
    if found := [name for name, is_wanted in wanted.items() if is_wanted]:
        raise ConfigError(
            f"{' and '.join(found)} must go with an environment: got {env!r}, which runs its own loop and can neither "
            "be saved nor be acted for; leave it out, or write the task as an Env"
        )


def _check_factory(env: object) -> None:
    if not callable(env):
        raise ConfigError(
            f"environment must be a class, or anything callable that makes one per episode: got {env!r:.80}; pass the "
            "class, or functools.partial(...) of it"
        )
    if inspect.iscoroutinefunction(env):
        raise ConfigError(f"agent must be wrapped: got the coroutine function {env!r:.80}; pass Agent(...) of it")


async def run_agent(
    agent: Agent,
    task: Task,
    sessions: SessionTable,
    *,
    limits: Limits,
    sampling: Sampling,
    seed: int = 0,
    env_seed: int | None = None,
    group_id: str = "",
    member: int = 0,
    trajectory_id: str = "",
    last_contexts: bool = False,
    guidance: Guidance | None = None,
) -> Trajectory:
    """Play one episode of `task` and return it, however it ended. Args: as of `run_rollout`.

    What goes wrong in the agent or at the endpoint is on the trajectory; only bugs of ours raise. Cancelled: so is the
    agent, the session is sealed with `End.cancelled`, and CancelledError goes on.
    """
    limits = agent.limits(limits)
    session = sessions.create(
        task,
        id=trajectory_id or f"{task.id}.{seed}",
        seed=seed,
        env_seed=env_seed,
        group_id=group_id,
        member=member,
        limits=limits,
        sampling=sampling,
        timeout_s=math.inf,  # it ends with this coroutine
        last_contexts=last_contexts,
        guidance=guidance,
    )
    deadline = Deadline()
    calls = ForeignCalls(f"trajectory {session.id}", deadline, grace_s=limits.close_timeout_s)
    try:
        with deadline:
            deadline.set(asyncio.get_running_loop().time() + limits.rollout_timeout_s, "rollout")
            verdict = await calls.run("the agent", EnvError, agent.fn, session, task)
            _settle(session, verdict)
    except DeadlineExceeded:
        if not deadline.expired:
            raise  # somebody else's
        session.seal(End.timeout, _too_slow(session))
    except (EnvError, ToolError) as error:
        session.seal_after(error)
    except BaseException as error:
        session.seal_after(error)
        raise
    if session.bug is not None:
        raise session.bug  # of ours, not of the agent it passed through
    return session.trajectory


def _settle(session: Session, verdict: Verdict) -> None:
    """Add what the agent returned, and seal. Raises EnvError: it is no verdict."""
    if session.state == "sealed":
        return  # by the agent itself, which had its reasons
    end: End | None = None
    rewards: object = verdict
    if isinstance(verdict, Outcome):
        rewards, end = verdict.reward, verdict.end
        if not isinstance(end, End) or end.is_failure:
            raise EnvError(f"the agent's Outcome.end must be terminal or a truncation: got {end!r:.80}; raise to fail")
    for name, value in _components(rewards):
        session.add_reward(name, value)
    session.seal(end)


def _components(rewards: object) -> Iterable[tuple[Any, Any]]:
    """Return the named rewards in what an agent returned; they are checked when they are added."""
    if rewards is None:
        return ()
    return rewards.items() if isinstance(rewards, Mapping) else [("outcome", rewards)]


def _too_slow(session: Session) -> str:
    limit_s = session.limits.rollout_timeout_s
    return f"agent must end within {limit_s:g} s: it did not (session {session.id}); see Limits.rollout_timeout_s"
