"""Q of an action over several of its outcomes, and how much of its variance is the environment's luck.

    state before the action -> (the action, fresh luck) x outcomes -> state after it -> (the policy) x continuations

`branch` executes the action anew in every continuation, which needs no further thought. Several continuations of one
outcome are cheaper where executing an action is dear, and they tell the luck of the outcome from all luck after it.
"""

from collections.abc import Iterable

import msgspec

from turngate.envs.base import Action, EnvFactory
from turngate.runtime.branch_budget import BranchLedger
from turngate.runtime.branching import branch_point, recorded_action, wanted_turns
from turngate.runtime.closing import close_env
from turngate.runtime.continuation import Bootstrap, Player, side_by_side
from turngate.runtime.errors import ConfigError
from turngate.runtime.monte_carlo import OutcomeSplit, split_by_outcome
from turngate.runtime.restarts import RestartPoint
from turngate.runtime.runtime import Runtime
from turngate.runtime.seeds import derive_seed
from turngate.runtime.slots import Slots
from turngate.runtime.types import Trajectory

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
    player = Player(runtime, env, ledger=ledger, slots=slots, gamma=gamma, bootstrap=bootstrap)
    wanted = wanted_turns(trajectory, turns)
    points = {turn: branch_point(trajectory, turn, with_action=True) for turn in wanted}
    if outcomes == 1 and continuations > 1 and not await _is_deterministic(env, runtime):
        raise ConfigError(
            "one outcome may be shared only where steps have no luck: the environment does not declare "
            "deterministic_step = True; ask for outcomes=2 or more"
        )
    found: dict[int, OutcomeBranches] = {}

    async def run_one(turn: int) -> None:
        root = derive_seed(seed, "outcomes", trajectory.id, turn)
        played = [_Outcome(player) for _ in range(outcomes)]
        action = recorded_action(trajectory, turn)

        async def run(index: int) -> None:
            await played[index].run(points[turn], action, derive_seed(root, "outcome", index), continuations)

        await side_by_side(range(outcomes), run, at_once=player.slots.total)
        found[turn] = _summary(turn, played)

    await side_by_side(wanted, run_one, at_once=max(len(wanted), 1))
    return dict(sorted(found.items()))


class _Outcome:
    """One execution of the action, and what follows it. Mutable state: all of it but the player."""

    def __init__(self, player: Player) -> None:
        self._player = player
        self.trajectories: dict[int, Trajectory] = {}  # by continuation
        self.returns: list[float] = []
        self.is_final = False  # the action ended the episode
        self.refused = 0

    async def run(self, point: RestartPoint, action: Action, root: int, count: int) -> None:
        """Execute the action and play on `count` times from where that led to."""
        first = await self._play(0, point, action, root)
        if first is None or first.end.is_failure:
            self.refused += count - 1 if first is None else 0
            return
        self.returns.append(await self._player.worth(first))
        if len(first.turns) == 1:
            self.is_final = first.end.is_terminal
            return
        after, paid = branch_point(first, first.turns[1].index), first.turns[0].reward
        after = msgspec.structs.replace(after, chat=point.chat)  # up to the action: nothing was sampled since
        ledger, size = self._player.ledger, len(after.snapshot.data)
        if not ledger.hold(size):
            self.refused += count - 1
            return

        async def go_on(index: int) -> None:
            played = await self._play(index, after, None, derive_seed(root, "continuation", index))
            if played is not None and not played.end.is_failure:
                self.returns.append(paid + self._player.gamma * await self._player.worth(played))

        try:
            await side_by_side(range(1, count), go_on, at_once=self._player.slots.total)
        finally:
            ledger.release(size)

    async def _play(self, index: int, point: RestartPoint, action: Action | None, seed: int) -> Trajectory | None:
        """Play one continuation; None when the ledger refuses it."""
        played = await self._player.play(point, action, seed=seed, keep_snapshots=action is not None)
        if played is None:
            self.refused += 1
            return None
        self.trajectories[index] = played = _with_outcome_alone(played)
        return played


def _with_outcome_alone(played: Trajectory) -> Trajectory:
    """Return the trajectory with the state that the action led to, and none of those after it, which nobody counts."""
    turns = (turn if n == 1 else msgspec.structs.replace(turn, snapshot=None) for n, turn in enumerate(played.turns))
    return msgspec.structs.replace(played, turns=tuple(turns))


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
