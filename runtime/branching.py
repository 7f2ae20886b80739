"""Monte Carlo values: restore the environment as it was before a turn, and play on from there a few times.

    trajectory -> snapshot before turn t -> fresh luck -> (the recorded action again) -> the policy -> return

Q re-executes the recorded action in every branch, so that the environment's own luck is averaged over; V lets the
policy choose afresh. Branches run in the runtime's slots behind all other rollouts, within a ledger's caps, and harm
nothing when they fail. `continuation` plays them one by one.
"""

from collections.abc import Iterable, Sequence

import msgspec

from turngate.envs.base import Action, EnvFactory
from turngate.runtime.allocation import SequentialStop
from turngate.runtime.branch_budget import BranchLedger, Estimand
from turngate.runtime.context import FullHistory
from turngate.runtime.continuation import Bootstrap, Player, play_on, return_of, side_by_side, spend
from turngate.runtime.errors import ConfigError, check_kind
from turngate.runtime.monte_carlo import Estimate, estimate, newcombe_interval, vine_advantages
from turngate.runtime.recorded_chat import chat_before, has_other_context, own_starts
from turngate.runtime.restarts import RestartPoint
from turngate.runtime.runtime import Runtime
from turngate.runtime.seeds import derive_seed
from turngate.runtime.slots import Slots
from turngate.runtime.types import RestartedFrom, Trajectory, Turn

__all__ = [
    "Bootstrap",
    "Branches",
    "TurnBranches",
    "branch",
    "branch_point",
    "play_on",
    "return_of",
    "spend",
    "turn_surprisal",
]


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
    other_context: int = 0
    """Continuations that saw the episode's history written with other token ids than the episode did; they are counted
    like the others."""

    def __repr__(self) -> str:
        e, lost = self.estimate, self.failed + self.refused
        told = f", {lost} failed or refused" if lost else ""
        return f"<{self.estimand} of turn {self.turn}: {e.mean:.3f} ± {e.standard_error:.3f} over {e.count}{told}>"


class Branches(msgspec.Struct, frozen=True, kw_only=True):
    """What branching an episode found, by turn."""

    trajectory: Trajectory
    q: dict[int, TurnBranches]
    v: dict[int, TurnBranches]

    def __repr__(self) -> str:
        return f"<Branches of {self.trajectory.id}: Q of {len(self.q)} turns, V of {len(self.v)}>"

    def advantage(self, turn: int) -> tuple[float, tuple[float, float]]:
        """Return (Q - V, its 95 % Newcombe interval) of a turn.

        Raises: KeyError: Q or V of the turn was not estimated. ValueError: returns are not 0 or 1; no interval.
        """
        q, v = _estimate(self.q, "Q", turn), _estimate(self.v, "V", turn)
        if q.successes is None or v.successes is None:
            raise ValueError(f"returns must be 0 or 1 for an interval: got others at turn {turn}; use the estimates")
        return q.mean - v.mean, newcombe_interval(q.successes, q.count, v.successes, v.count)

    def vine_advantages(self, *, gamma: float = 1.0, last_value: float = 0.0) -> list[float]:
        """Return r_t + gamma V(h_t+1) - V(h_t) of every turn; V of every turn must have been estimated.

        Args: last_value: of the state after the last turn, when a limit cut the episode short; 0 after a terminal end.
        Raises: KeyError: V of a turn was not estimated.
        Source: Kazemnejad et al. 2024, VinePPO (arXiv 2410.01679).
        """
        values = [_estimate(self.v, "V", turn.index).mean for turn in self.trajectory.turns]
        rewards = [turn.reward for turn in self.trajectory.turns]
        if rewards:
            rewards[-1] += gamma * last_value
        return vine_advantages(values, rewards, gamma=gamma)


def _estimate(side: dict[int, TurnBranches], kind: Estimand, turn: int) -> Estimate:
    if turn not in side:
        raise KeyError(
            f"{kind} must have been estimated: turn {turn} is not among {list(side)}; branch with its turn, and "
            f"estimands=['Q', 'V'] for both"
        )
    return side[turn].estimate


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

    The episode must have been recorded with snapshots (`keep_snapshots=True`). Cancelled: so are all branches, and
    their slots and environments are given back; the ledger keeps what they have used.

    Args: turns: indices of turns, each counts once; all by default.
        continuations: per turn and estimand, each with luck of its own.
        estimands: Q of the recorded action, V of the state before it.
        gamma: discount per turn. stop: ends the sampling of a turn early, after `stop.at_least`.
        bootstrap: values the state in which a continuation was cut short; without it that counts what it was paid, and
            `Estimate.truncated` says how many did. One that fails ends all branches.
        ledger: counts, and caps, what branches spend. slots: in which they run, by default the runtime's.
        seed: root of all luck in the branches.
    Raises: ConfigError: a turn does not exist, or has no snapshot; nothing is to be estimated; an argument is of
        another kind. TimeoutError: the bootstrap is later than `Limits.turn_timeout_s`. ToolError: it raised, or
        returned no finite number.
    """
    check_branching(estimands, continuations, stop)
    player = Player(runtime, env, ledger=ledger, slots=slots, gamma=gamma, bootstrap=bootstrap)
    wanted = wanted_turns(trajectory, turns)
    sides: list[tuple[int, Estimand]] = [(turn, kind) for turn in wanted for kind in dict.fromkeys(estimands)]
    points = {(turn, kind): branch_point(trajectory, turn, with_action=kind == "Q") for turn, kind in sides}
    found: dict[Estimand, dict[int, TurnBranches]] = {"Q": {}, "V": {}}

    async def run_one(side: tuple[int, Estimand]) -> None:
        turn, kind = side
        sampled = _Sampled(player, points[side], recorded_action(trajectory, turn) if kind == "Q" else None)
        await sampled.run(derive_seed(seed, "branch", trajectory.id, turn, kind), continuations, stop)
        is_whole = kind == "V" or (trajectory.token_mode == "tokens" and type(runtime.context) is FullHistory)
        found[kind][turn] = sampled.summary(trajectory, turn, kind, compares=is_whole)

    await side_by_side(sides, run_one, at_once=max(len(sides), 1))
    by_turn = {kind: dict(sorted(side.items())) for kind, side in found.items()}
    return Branches(trajectory=trajectory, q=by_turn["Q"], v=by_turn["V"])


class _Sampled:
    """The continuations from one point. Mutable state: all of it, as they come in."""

    def __init__(self, player: Player, point: RestartPoint, action: Action | None) -> None:
        self._player, self._point, self._action = player, point, action
        self._played: list[Trajectory] = []
        self._returns: list[float] = []
        self._tried = self._refused = 0

    async def run(self, root: int, count: int, stop: SequentialStop | None) -> None:
        """Play up to `count` continuations, until `stop` has had enough or the ledger is spent."""
        ledger, size = self._player.ledger, len(self._point.snapshot.data)
        if not ledger.hold(size):
            self._tried = self._refused = count
            return
        try:
            while self._tried < count and not self._refused:
                wave = count - self._tried
                if stop is not None:
                    if self._played and stop.is_enough(estimate(self._returns)):
                        break
                    wave = min(wave, stop.at_least - self._tried if self._tried < stop.at_least else 1)
                await self._wave(root, range(self._tried, self._tried + wave))
        finally:
            ledger.release(size)

    async def _wave(self, root: int, indices: Sequence[int]) -> None:
        """Play some continuations side by side."""
        done: dict[int, tuple[Trajectory, float | None]] = {}

        async def one(index: int) -> None:
            seed = derive_seed(root, "continuation", index)
            trajectory = await self._player.play(self._point, self._action, seed=seed)
            if trajectory is None:
                self._refused += 1
                return
            done[index] = trajectory, None
            if not trajectory.end.is_failure:
                done[index] = trajectory, await self._player.worth(trajectory)

        await side_by_side(indices, one, at_once=self._player.slots.total)
        self._tried += len(indices)
        for _, (trajectory, value) in sorted(done.items()):
            self._played.append(trajectory)
            if value is not None:
                self._returns.append(value)

    def summary(self, trajectory: Trajectory, turn: int, estimand: Estimand, *, compares: bool) -> TurnBranches:
        """Return what there is. Args: compares: the start of each can be held against the episode's."""
        position, played = _position(trajectory, turn), self._played
        is_q = estimand == "Q"
        return TurnBranches(
            turn=turn,
            estimand=estimand,
            estimate=estimate(self._returns, truncated=sum(one.end.is_truncation for one in played)),
            trajectories=tuple(played),
            failed=self._tried - self._refused - len(self._returns),
            refused=self._refused,
            other_context=sum(has_other_context(trajectory, position, one, with_action=is_q) for one in played)
            if compares
            else 0,
        )


def check_branching(estimands: Sequence[str], continuations: int, stop: SequentialStop | None) -> None:
    """Refuse what cannot be estimated. Raises: ConfigError."""
    check_kind("stop", stop, SequentialStop)
    if continuations < 1:
        raise ConfigError(f"continuations must be 1 or more: got {continuations}")
    if not estimands or any(kind not in ("Q", "V") for kind in estimands):
        raise ConfigError(f"estimands must be Q, V or both: got {estimands!r}")


def wanted_turns(trajectory: Trajectory, turns: Iterable[int] | None) -> list[int]:
    """Return the indices of turns to branch at, each once; all by default. Raises: ConfigError: they are none."""
    given: object = turns
    if given is not None and not isinstance(given, Iterable):
        raise ConfigError(
            f"turns must be indices of turns, or None for all: got {given!r:.80} (trajectory {trajectory.id})"
        )
    return [turn.index for turn in trajectory.turns] if turns is None else list(dict.fromkeys(turns))


def branch_point(trajectory: Trajectory, turn: int, *, with_action: bool = False) -> RestartPoint:
    """Return the state before a turn of an episode, with its history. Raises: ConfigError: there is none.

    Args: with_action: the turn's own action will be executed there first: its tokens count, and are known.
    """
    position = _position(trajectory, turn)
    taken, starts = trajectory.turns[position], own_starts(trajectory)
    if taken.snapshot is None:
        raise ConfigError(
            f"branching needs a snapshot before every turn: got none (trajectory {trajectory.id}, turn {turn}); record "
            "it with keep_snapshots=True"
        )
    if len(starts) != len(trajectory.turns):
        raise ConfigError(
            f"branching needs the episode's messages: expected {len(trajectory.turns)} of the assistant, got "
            f"{len(starts)} (trajectory {trajectory.id})"
        )
    said = position + 1 if with_action else position
    before = trajectory.restarted_from.policy_tokens if trajectory.restarted_from is not None else 0
    origin = RestartedFrom(
        trajectory.id,
        turn,
        min(t.version_sent for t in trajectory.turns[: position + 1]),
        "branch",
        policy_tokens=before + sum(t.length for t in trajectory.turns[:said]),
    )
    history = trajectory.messages[: starts[position]]
    return RestartPoint(trajectory.task, taken.snapshot, history, origin, chat_before(trajectory, said))


def recorded_action(trajectory: Trajectory, turn: int) -> Action:
    """Return what was done in a turn. Raises: ConfigError: there is no such turn."""
    taken = trajectory.turns[_position(trajectory, turn)]
    return Action(taken.text, taken.tool_calls)


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
