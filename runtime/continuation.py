"""One continuation: restore the environment as it was, play on with fresh luck, and say what that paid.

    point, (an action) -> slot -> ledger -> restore -> (the action) -> the policy -> trajectory -> worth

Everything that branches plays its continuations here: Q and V of recorded turns, outcomes, values of live decisions.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeAlias, TypeVar

import anyio

from turngate.envs.base import Action, EnvFactory
from turngate.runtime.agent import check_agent_run
from turngate.runtime.branch_budget import BranchLedger
from turngate.runtime.deadline import Deadline
from turngate.runtime.errors import ConfigError, ToolError, check_kind
from turngate.runtime.foreign import ForeignCalls
from turngate.runtime.injection import Injection
from turngate.runtime.restarts import RestartPoint
from turngate.runtime.rollout import run_rollout
from turngate.runtime.runtime import Runtime
from turngate.runtime.seeds import derive_seed
from turngate.runtime.slots import Slots
from turngate.runtime.strays import strays_end_here
from turngate.runtime.types import Message, Trajectory
from turngate.runtime.unwrap import single_errors

__all__ = ["Bootstrap", "Player", "play_on", "return_of", "side_by_side", "spend"]

T = TypeVar("T")
Bootstrap: TypeAlias = Callable[[Trajectory], Awaitable[float]]
"""Value of the state that a continuation was left in when a limit cut it short."""
BRANCH_PRIORITY = 1 << 40
"""Behind every rollout: slots go to the lowest number, and groups count from 0."""


class Player:
    """Plays continuations in slots, within a ledger. Cancelled: what a continuation has used by then is counted."""

    def __init__(
        self,
        runtime: Runtime,
        env: EnvFactory,
        *,
        ledger: BranchLedger | None = None,
        slots: Slots | None = None,
        gamma: float = 1.0,
        bootstrap: Bootstrap | None = None,
    ) -> None:
        """Hold the parts; arguments are as of `branch`. Raises: ConfigError: one is of another kind."""
        _check_runtime(runtime)
        check_agent_run(env, branching=True)
        check_kind("ledger", ledger, BranchLedger)
        check_kind("slots", slots, Slots)
        self._runtime, self._env, self._bootstrap, self.gamma = runtime, env, bootstrap, gamma
        self.ledger, self.slots = ledger or BranchLedger(), slots or runtime.slots

    async def play(
        self, point: RestartPoint, action: Action | None, *, seed: int, keep_snapshots: bool = False
    ) -> Trajectory | None:
        """Play one continuation in a slot; None when the ledger does not admit it."""
        async with self.slots.hold(priority=BRANCH_PRIORITY):
            if not self.ledger.admit():
                return None
            trajectory = await play_on(
                self._runtime,
                self._env,
                point,
                action,
                seed=seed,
                keep_snapshots=keep_snapshots,
                on_cancelled=lambda partial: spend(self.ledger, partial),
            )
            spend(self.ledger, trajectory)
        return trajectory

    async def worth(self, trajectory: Trajectory) -> float:
        """Return what a continuation was paid; when a limit cut it short, with what the bootstrap says of the rest.

        Raises: TimeoutError: the bootstrap is too late. ToolError: it raised, or returned no finite number.
        """
        value = return_of(trajectory, gamma=self.gamma)
        if self._bootstrap is None or not trajectory.end.is_truncation:
            return value
        limits, deadline = self._runtime.limits, Deadline()
        calls = ForeignCalls(f"continuation {trajectory.id}", deadline, grace_s=limits.close_timeout_s)
        with deadline:
            deadline.set(asyncio.get_running_loop().time() + limits.turn_timeout_s, "bootstrap")
            rest = await calls.run("the bootstrap", ToolError, self._bootstrap, trajectory)
        return value + self.gamma ** len(trajectory.turns) * _finite(rest)


async def play_on(
    runtime: Runtime,
    env: EnvFactory,
    point: RestartPoint,
    action: Action | None,
    *,
    seed: int,
    keep_snapshots: bool = False,
    on_cancelled: Callable[[Trajectory], None] | None = None,
) -> Trajectory:
    """Play one continuation from a point: `action` first when there is one, then the base policy. Takes no slot.

    What came before counts towards `max_turns` and `max_policy_tokens`. `action` is a turn; its tokens count where the
    point counts them, as `branch_point(..., with_action=True)` does. Cancelled: `on_cancelled` gets what there is.
    """
    _check_runtime(runtime)
    check_agent_run(env, restarts=point)
    injection = None
    if action is not None:
        taken = action

        async def act(shown: Sequence[Message], seed: int) -> Action:
            return taken

        injection = Injection(1.0, act, max_per_episode=1)
    name = f"branch.{point.restarted_from.origin}.{point.restarted_from.turn}"
    return await run_rollout(
        env,
        point.task,
        runtime.endpoint,
        limits=runtime.limits,
        sampling=runtime.sampling,
        context=runtime.context,
        seed=seed,
        env_seed=derive_seed(seed, "branch env"),
        group_id=name,
        trajectory_id=f"{name}.{seed:x}",
        events=runtime.events,
        keep_snapshots=keep_snapshots,
        start=point,
        injection=injection,
        on_cancelled=on_cancelled,
    )


def return_of(trajectory: Trajectory, *, gamma: float = 1.0) -> float:
    """Return what a continuation was paid, discounted per turn."""
    value = 0.0
    for turn in reversed(trajectory.turns):
        value = turn.reward + gamma * value
    return value


def spend(ledger: BranchLedger, trajectory: Trajectory) -> None:
    """Count what a continuation has used."""
    asked = [turn for turn in trajectory.turns if not turn.injected]
    ledger.spend(model_turns=len(asked), model_tokens=trajectory.policy_tokens, env_steps=len(trajectory.turns))


async def side_by_side(items: Iterable[T], run: Callable[[T], Awaitable[None]], *, at_once: int) -> None:
    """Run something for every item, at most `at_once` of them at a time. Cancelled: so are all.

    A cancellation that comes from inside, which nobody asked for, costs its item and no other.
    Raises: the first error of any, after which the others are cancelled.
    """
    room = anyio.Semaphore(at_once)

    async def one(item: T) -> None:
        try:
            with strays_end_here():
                await run(item)
        finally:
            room.release()

    with single_errors():
        async with anyio.create_task_group() as tg:
            for item in items:
                await room.acquire()  # as many tasks as can do something: a million would fill the memory
                tg.start_soon(one, item)


def _check_runtime(runtime: object) -> None:
    if not isinstance(runtime, Runtime):
        raise ConfigError(
            f"runtime must be a Runtime to play branches on: got {runtime!r:.80}; an endpoint goes into "
            "Runtime(endpoint)"
        )


def _finite(value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]  # NumPy's scalars and tensors of one number, too
    except (TypeError, ValueError) as error:
        raise ToolError(f"the bootstrap must return a number: got {value!r:.80}") from error
    if not math.isfinite(number):
        raise ToolError(f"the bootstrap must return a finite number: got {number}")
    return number
