"""Monte Carlo values: restore the environment as it was before a turn, and play on from there a few times.

    trajectory -> snapshot before turn t -> fresh luck -> (the recorded action again) -> the policy -> return

Q re-executes the recorded action in every branch, so that the environment's own luck is averaged over; V lets the
policy choose afresh. Branches run in the runtime's slots behind all other rollouts, within a ledger's caps, and harm
nothing when they fail.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence

import anyio
import msgspec

from turngate.envs.base import Action, EnvFactory, Snapshot, Task
from turngate.runtime.allocation import SequentialStop
from turngate.runtime.branch_budget import BranchLedger, Estimand
from turngate.runtime.errors import ConfigError
from turngate.runtime.injection import Injection
from turngate.runtime.monte_carlo import Estimate, estimate, newcombe_interval, vine_advantages
from turngate.runtime.restarts import RestartPoint
from turngate.runtime.runtime import Runtime
from turngate.runtime.seeds import derive_seed
from turngate.runtime.slots import Slots
from turngate.runtime.types import Message, RestartedFrom, Trajectory, Turn
from turngate.runtime.unwrap import single_errors

__all__ = [
    "Bootstrap",
    "Branches",
    "TurnBranches",
    "branch",
    "branch_point",
    "play_on",
    "return_of",
    "turn_surprisal",
]

BRANCH_PRIORITY = 1 << 40
"""Behind every rollout: slots go to the lowest number, and groups count from 0."""
Bootstrap = Callable[[Trajectory], Awaitable[float]]
"""Value of the state that a continuation was left in when a limit cut it short."""


class TurnBranches(msgspec.Struct, frozen=True, kw_only=True):
    """The continuations from one turn."""

    turn: int
    estimand: Estimand
    estimate: Estimate
    """Over the continuations that came to an end, and the truncated ones as they were counted."""
    trajectories: tuple[Trajectory, ...]
    """All that were played, failed ones included."""
    failed: int = 0
    """Continuations that the machinery failed; they say nothing."""
    refused: int = 0
    """Continuations that the ledger did not admit."""


class Branches(msgspec.Struct, frozen=True, kw_only=True):
    """What branching an episode found, by turn."""

    trajectory: Trajectory
    q: dict[int, TurnBranches]
    v: dict[int, TurnBranches]

    def advantage(self, turn: int) -> tuple[float, tuple[float, float]]:
        """Return (Q - V, its 95 % Newcombe interval) of a turn.

        Raises: KeyError: Q or V of the turn was not estimated. ValueError: returns are not 0 or 1; no interval.
        """
        q, v = self.q[turn].estimate, self.v[turn].estimate
        if q.successes is None or v.successes is None:
            raise ValueError(f"returns must be 0 or 1 for an interval: got others at turn {turn}; use the estimates")
        return q.mean - v.mean, newcombe_interval(q.successes, q.count, v.successes, v.count)

    def vine_advantages(self, *, gamma: float = 1.0, last_value: float = 0.0) -> list[float]:
        """Return r_t + gamma V(h_t+1) - V(h_t) of every turn; V of every turn must have been estimated.

        Args: last_value: of the state after the last turn, when a limit cut the episode short; 0 after a terminal end.
        Source: Kazemnejad et al. 2024, VinePPO (arXiv 2410.01679).
        """
        values = [self.v[turn.index].estimate.mean for turn in self.trajectory.turns]
        rewards = [turn.reward for turn in self.trajectory.turns]
        if rewards:
            rewards[-1] += gamma * last_value
        return vine_advantages(values, rewards, gamma=gamma)


async def branch(
    runtime: Runtime,
    env: EnvFactory,
    trajectory: Trajectory,
    *,
    turns: Iterable[int] | None = None,
    continuations: int = 8,
    estimands: Sequence[Estimand] = ("Q",),
    gamma: float = 1.0,
    stop: SequentialStop | None = None,
    bootstrap: Bootstrap | None = None,
    ledger: BranchLedger | None = None,
    slots: Slots | None = None,
    seed: int = 0,
) -> Branches:
    """Estimate Q or V, or both, of an episode's turns by playing on from each, and return what was found.

    The episode must have been recorded with snapshots (`keep_snapshots=True`); of turns without one nothing is
    estimated. Cancelled: so are all branches, and their slots and environments are given back.

    Args: turns: indices of turns; all by default. continuations: per turn and estimand, each with luck of its own.
        estimands: Q of the recorded action, V of the state before it.
        gamma: discount per turn. stop: ends the sampling of a turn early, after `stop.at_least`.
        bootstrap: values the state in which a continuation was cut short; without it that counts what it was paid, and
            `Estimate.truncated` says how many did. What it raises ends all branches.
        ledger: counts, and caps, what branches spend. slots: in which they run, by default the runtime's.
        seed: root of all luck in the branches.
    Raises: ConfigError: a turn does not exist, or has no snapshot. TimeoutError: the bootstrap is too late.
    """
    ledger = ledger if ledger is not None else BranchLedger()
    wanted = [turn.index for turn in trajectory.turns] if turns is None else list(turns)
    points = {turn: branch_point(trajectory, turn) for turn in wanted}
    player = _Player(runtime, env, ledger, slots or runtime.slots, gamma, bootstrap)
    found: dict[tuple[Estimand, int], TurnBranches] = {}

    async def run_one(turn: int, estimand: Estimand) -> None:
        point = points[turn]
        taken = trajectory.turns[_position(trajectory, turn)]
        action = Action(taken.text, taken.tool_calls) if estimand == "Q" else None
        root = derive_seed(seed, "branch", trajectory.id, turn, estimand)
        found[estimand, turn] = await player.run(point, action, turn, estimand, root, continuations, stop)

    with single_errors():
        async with anyio.create_task_group() as tg:
            for turn in wanted:
                for estimand in estimands:
                    tg.start_soon(run_one, turn, estimand)
    by_turn = {kind: {t: b for (k, t), b in sorted(found.items()) if k == kind} for kind in ("Q", "V")}
    return Branches(trajectory=trajectory, q=by_turn["Q"], v=by_turn["V"])


class _Player:
    """Plays continuations within a ledger and in slots."""

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

    async def run(
        self,
        point: RestartPoint,
        action: Action | None,
        turn: int,
        estimand: Estimand,
        root: int,
        count: int,
        stop: SequentialStop | None,
    ) -> TurnBranches:
        """Play up to `count` continuations from one point."""
        size = len(point.snapshot.data)
        if not self._ledger.hold(size):
            return _summary(turn, estimand, [], [], refused=count)
        played: list[Trajectory] = []
        returns: list[float] = []
        refused = 0
        try:
            while len(played) < count:
                wave = count - len(played)
                if stop is not None:
                    if played and stop.is_enough(estimate(returns)):
                        break
                    wave = min(wave, stop.at_least - len(played) if len(played) < stop.at_least else 1)
                new = await self._wave(point, action, root, range(len(played), len(played) + wave))
                refused += wave - len(new)
                played += [one for one, _ in new]
                returns += [value for _, value in new if value is not None]
                if len(new) < wave:
                    break  # the ledger is spent
        finally:
            self._ledger.release(size)
        return _summary(turn, estimand, played, returns, refused=refused)

    async def _wave(
        self, point: RestartPoint, action: Action | None, root: int, indices: Sequence[int]
    ) -> list[tuple[Trajectory, float | None]]:
        """Play some continuations side by side; those that the ledger refuses are missing."""
        done: dict[int, tuple[Trajectory, float | None]] = {}

        async def one(index: int) -> None:
            async with self._slots.hold(priority=BRANCH_PRIORITY):
                if not self._ledger.admit():
                    return
                trajectory = await play_on(
                    self._runtime, self._env, point, action, seed=derive_seed(root, "continuation", index)
                )
                spend(self._ledger, trajectory)
                value = None
                if not trajectory.end.is_failure:
                    timeout_s = self._runtime.limits.turn_timeout_s
                    value = await worth_of(
                        trajectory, timeout_s=timeout_s, gamma=self._gamma, bootstrap=self._bootstrap
                    )
                done[index] = trajectory, value

        async with anyio.create_task_group() as tg:
            for index in indices:
                tg.start_soon(one, index)
        return [done[index] for index in sorted(done)]


async def play_on(
    runtime: Runtime,
    env: EnvFactory,
    point: RestartPoint,
    action: Action | None,
    *,
    seed: int,
    keep_snapshots: bool = False,
) -> Trajectory:
    """Play one continuation from a point: `action` first when there is one, then the base policy. Takes no slot.

    What came before counts towards `max_turns` and `max_policy_tokens`; `action` is a turn, and no tokens.
    """
    injection = None
    if action is not None:
        taken = action

        async def act(shown: Sequence[Message], seed: int) -> Action:
            return taken

        injection = Injection(1.0, act, max_per_episode=1)
    return await runtime.rollout(
        env,
        point.task,
        seed=seed,
        env_seed=derive_seed(seed, "branch env"),
        group_id=f"branch.{point.restarted_from.origin}.{point.restarted_from.turn}",
        trajectory_id=f"branch.{point.restarted_from.origin}.{point.restarted_from.turn}.{seed:x}",
        start=point,
        injection=injection,
        guidance=None,
        score=False,
        keep_snapshots=keep_snapshots,
    )


def branch_point(trajectory: Trajectory, turn: int) -> RestartPoint:
    """Return the state before a turn of an episode, with its history. Raises: ConfigError: there is none."""
    position = _position(trajectory, turn)
    taken = trajectory.turns[position]
    if taken.snapshot is None:
        raise ConfigError(
            f"branching needs a snapshot before every turn: got none (trajectory {trajectory.id}, turn {turn}); record "
            "it with keep_snapshots=True"
        )
    starts = [index for index, message in enumerate(trajectory.messages) if message.role == "assistant"]
    before = starts[len(starts) - len(trajectory.turns) + position]
    versions = [t.version_sent for t in trajectory.turns[: position + 1]]
    origin = RestartedFrom(trajectory.id, turn, min(versions), "branch")
    spent = sum(t.length for t in trajectory.turns[:position])
    return RestartPoint(trajectory.task, taken.snapshot, trajectory.messages[:before], origin, spent)


def here(
    task: Task,
    snapshot: Snapshot,
    history: Sequence[Message],
    *,
    origin: str,
    turn: int,
    policy_version: int,
    policy_tokens: int = 0,
) -> RestartPoint:
    """Return the state that a live episode is in, to play on from."""
    reached = RestartedFrom(origin, turn, policy_version, "branch")
    return RestartPoint(task, snapshot, tuple(history), reached, policy_tokens)


def return_of(trajectory: Trajectory, *, gamma: float = 1.0) -> float:
    """Return what a continuation was paid, discounted per turn."""
    value = 0.0
    for turn in reversed(trajectory.turns):
        value = turn.reward + gamma * value
    return value


async def worth_of(
    trajectory: Trajectory, *, timeout_s: float, gamma: float = 1.0, bootstrap: Bootstrap | None = None
) -> float:
    """Return what a continuation was paid; when a limit cut it short, with what `bootstrap` says of the rest.

    Raises: TimeoutError: that takes longer than `timeout_s`. What it raises itself goes on.
    """
    value = return_of(trajectory, gamma=gamma)
    if trajectory.end.is_truncation and bootstrap is not None:
        with anyio.fail_after(timeout_s):
            value += gamma ** len(trajectory.turns) * await bootstrap(trajectory)
    return value


def spend(ledger: BranchLedger, trajectory: Trajectory) -> None:
    """Count what a continuation has used."""
    asked = [turn for turn in trajectory.turns if not turn.injected]
    ledger.spend(model_turns=len(asked), model_tokens=trajectory.policy_tokens, env_steps=len(trajectory.turns))


def turn_surprisal(trajectory: Trajectory) -> list[float]:
    """Return the mean -log mu of each turn's tokens: a gate for branching where the policy hesitates, NaN without any.

    In expectation it is the policy's entropy, which servers do not tell.
    """
    return [_surprisal(trajectory, turn) for turn in trajectory.turns]


def _surprisal(trajectory: Trajectory, turn: Turn) -> float:
    if not turn.length:
        return float("nan")
    values = trajectory.segments[turn.segment].logprob_values()[turn.start : turn.start + turn.length]
    return -sum(values) / turn.length


def _position(trajectory: Trajectory, turn: int) -> int:
    for position, taken in enumerate(trajectory.turns):
        if taken.index == turn:
            return position
    known = [taken.index for taken in trajectory.turns]
    raise ConfigError(f"turns must be among the episode's: got {turn}, of {known} (trajectory {trajectory.id})")


def _summary(
    turn: int, estimand: Estimand, played: Sequence[Trajectory], returns: Sequence[float], *, refused: int
) -> TurnBranches:
    truncated = sum(one.end.is_truncation for one in played)
    return TurnBranches(
        turn=turn,
        estimand=estimand,
        estimate=estimate(returns, truncated=truncated),
        trajectories=tuple(played),
        failed=sum(one.end.is_failure for one in played),
        refused=refused,
    )
