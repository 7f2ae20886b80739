"""Q of an action over several of its outcomes, and how much of its variance is the environment's luck.

    state before the action -> (the action, fresh luck) x outcomes -> state after it -> (the policy) x continuations

`branch` executes the action anew in every continuation, which needs no further thought. Several continuations of one
outcome are cheaper where executing an action is dear, and they tell the luck of the outcome from all luck after it.
"""

from collections.abc import Iterable

import anyio
import msgspec

from turngate.envs.base import Action, EnvFactory
from turngate.runtime.branch_budget import BranchLedger
from turngate.runtime.branching import BRANCH_PRIORITY, Bootstrap, branch_point, play_on, spend, worth_of
from turngate.runtime.closing import close_env
from turngate.runtime.errors import ConfigError
from turngate.runtime.monte_carlo import OutcomeSplit, split_by_outcome
from turngate.runtime.restarts import RestartPoint
from turngate.runtime.runtime import Runtime
from turngate.runtime.seeds import derive_seed
from turngate.runtime.slots import Slots
from turngate.runtime.types import Trajectory
from turngate.runtime.unwrap import single_errors

__all__ = ["OutcomeBranches", "branch_outcomes"]


class OutcomeBranches(msgspec.Struct, frozen=True, kw_only=True):
    """What was played from one turn."""

    turn: int
    split: OutcomeSplit
    trajectories: tuple[tuple[Trajectory, ...], ...]
    """By outcome: the first of each executed the action, the others go on from the state that it led to."""
    failed: int
    """Continuations that the machinery failed; they say nothing."""
    truncated: int
    """Continuations that were cut short, and count what they were paid unless a bootstrap valued the rest."""
    refused: int
    """Continuations that the ledger did not admit."""


async def branch_outcomes(
    runtime: Runtime,
    env: EnvFactory,
    trajectory: Trajectory,
    *,
    turns: Iterable[int] | None = None,
    outcomes: int = 4,
    continuations: int = 2,
    gamma: float = 1.0,
    bootstrap: Bootstrap | None = None,
    ledger: BranchLedger | None = None,
    slots: Slots | None = None,
    seed: int = 0,
) -> dict[int, OutcomeBranches]:
    """Estimate Q of an episode's turns from `outcomes` executions of each action, `continuations` of each outcome.

    Where an outcome ended the episode there is nothing to continue. Cancelled: so are all branches, and their slots
    and environments are given back. Arguments are as of `branch`.
    Raises: ConfigError: a number is not positive; a turn does not exist or has no snapshot; one outcome is to be
        shared by several continuations of an environment that does not declare `deterministic_step`.
    """
    if outcomes < 1 or continuations < 1:
        raise ConfigError(f"outcomes and continuations must be 1 or more: got {outcomes} and {continuations}")
    wanted = [turn.index for turn in trajectory.turns] if turns is None else list(turns)
    points = {turn: branch_point(trajectory, turn) for turn in wanted}
    if outcomes == 1 and continuations > 1 and not await _is_deterministic(env, runtime):
        raise ConfigError(
            "one outcome may be shared only where steps have no luck: the environment does not declare "
            "deterministic_step = True; ask for outcomes=2 or more"
        )
    ledger = ledger if ledger is not None else BranchLedger()
    player = _OutcomePlayer(runtime, env, ledger, slots or runtime.slots, gamma, bootstrap)
    actions = {turn.index: Action(turn.text, turn.tool_calls) for turn in trajectory.turns}
    found: dict[int, OutcomeBranches] = {}

    async def run_one(turn: int) -> None:
        root = derive_seed(seed, "outcomes", trajectory.id, turn)
        played = [_Outcome() for _ in range(outcomes)]
        async with anyio.create_task_group() as tg:
            for index, outcome in enumerate(played):
                tg.start_soon(
                    player.run, outcome, points[turn], actions[turn], derive_seed(root, "outcome", index), continuations
                )
        found[turn] = _summary(turn, played)

    with single_errors():
        async with anyio.create_task_group() as tg:
            for turn in wanted:
                tg.start_soon(run_one, turn)
    return dict(sorted(found.items()))


class _Outcome:
    """One execution of the action. Mutable state: all of it."""

    def __init__(self) -> None:
        self.trajectories: dict[int, Trajectory] = {}  # by continuation
        self.returns: list[float] = []
        self.is_final = False  # the action ended the episode
        self.refused = 0


class _OutcomePlayer:
    """Plays outcomes and their continuations within a ledger and in slots."""

    def __init__(
        self,
        runtime: Runtime,
        env: EnvFactory,
        ledger: BranchLedger,
        slots: Slots,
        gamma: float,
        bootstrap: Bootstrap | None,
    ) -> None:
        self._runtime, self._env, self._ledger, self._slots = runtime, env, ledger, slots
        self._gamma, self._bootstrap = gamma, bootstrap

    async def run(self, outcome: _Outcome, point: RestartPoint, action: Action, root: int, count: int) -> None:
        """Execute the action and play on `count` times from where that led to."""
        first = await self._play(outcome, 0, point, action, root)
        if first is None or first.end.is_failure:
            outcome.refused += count - 1 if first is None else 0
            return
        await self._count(outcome, first, 0.0, 1.0)
        if len(first.turns) == 1:
            outcome.is_final = first.end.is_terminal
            return
        after = branch_point(first, first.turns[1].index)
        after = msgspec.structs.replace(after, policy_tokens=point.policy_tokens + after.policy_tokens)
        size = len(after.snapshot.data)
        if not self._ledger.hold(size):
            outcome.refused += count - 1
            return

        async def go_on(index: int) -> None:
            played = await self._play(outcome, index, after, None, derive_seed(root, "continuation", index))
            if played is not None and not played.end.is_failure:
                await self._count(outcome, played, first.turns[0].reward, self._gamma)

        try:
            async with anyio.create_task_group() as tg:
                for index in range(1, count):
                    tg.start_soon(go_on, index)
        finally:
            self._ledger.release(size)

    async def _play(
        self, outcome: _Outcome, index: int, point: RestartPoint, action: Action | None, seed: int
    ) -> Trajectory | None:
        """Play one continuation in a slot; None when the ledger refuses it."""
        async with self._slots.hold(priority=BRANCH_PRIORITY):
            if not self._ledger.admit():
                outcome.refused += 1
                return None
            is_first = action is not None
            played = await play_on(self._runtime, self._env, point, action, seed=seed, keep_snapshots=is_first)
            spend(self._ledger, played)
        outcome.trajectories[index] = played
        return played

    async def _count(self, outcome: _Outcome, played: Trajectory, paid: float, discount: float) -> None:
        """Add the return of the action: what it was `paid`, and `discount` times what came after."""
        timeout_s = self._runtime.limits.turn_timeout_s
        value = await worth_of(played, timeout_s=timeout_s, gamma=self._gamma, bootstrap=self._bootstrap)
        outcome.returns.append(paid + discount * value)


def _summary(turn: int, played: list[_Outcome]) -> OutcomeBranches:
    trajectories = tuple(tuple(one for _, one in sorted(outcome.trajectories.items())) for outcome in played)
    every = [one for some in trajectories for one in some]
    return OutcomeBranches(
        turn=turn,
        split=split_by_outcome([o.returns for o in played], is_final_O=[o.is_final for o in played]),
        trajectories=trajectories,
        failed=sum(one.end.is_failure for one in every),
        truncated=sum(one.end.is_truncation for one in every),
        refused=sum(outcome.refused for outcome in played),
    )


async def _is_deterministic(env: EnvFactory, runtime: Runtime) -> bool:
    made = env()  # what a factory makes can only be asked once it is made
    try:
        return getattr(made, "deterministic_step", False) is True
    finally:
        await close_env(made, timeout_s=runtime.limits.close_timeout_s, owner="branch_outcomes")
