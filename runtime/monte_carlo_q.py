"""Values of actions by trying them: for each candidate, act, play on a few times, and take the mean return."""

import itertools
import math
from collections.abc import Sequence

from turngate.envs.base import Action, EnvFactory, Snapshot
from turngate.runtime.branch_budget import BranchLedger
from turngate.runtime.continuation import Bootstrap, Player, side_by_side
from turngate.runtime.errors import ConfigError, GuidanceError
from turngate.runtime.guidance import DecisionPoint, QValues
from turngate.runtime.guided_types import action_key
from turngate.runtime.recorded_chat import chat_with
from turngate.runtime.restarts import RestartPoint
from turngate.runtime.runtime import Runtime
from turngate.runtime.seeds import derive_seed
from turngate.runtime.selection import soft_q
from turngate.runtime.slots import Slots
from turngate.runtime.types import Completion, RestartedFrom

__all__ = ["MonteCarloQ"]


class MonteCarloQ:
    """Estimates Q by branching from the live environment's snapshot. The dearest value function, and the reference.

        Guidance(MonteCarloQ(runtime, ShoppingEnv, continuations=4), beta=20.0, draws=4, timeout_s=300)

    Equal candidates share their continuations. Branches have slots of their own: the decision that waits for them holds
    one of the runtime's.
    """

    name = "monte_carlo"
    needs_snapshots = True

    # Changed by calls: the ledger, the player's slots, and the counts of continuations.

    def __init__(
        self,
        runtime: Runtime,
        env: EnvFactory,
        *,
        continuations: int = 4,
        soft_beta: float | None = None,
        ledger: BranchLedger | None = None,
        bootstrap: Bootstrap | None = None,
        max_concurrent: int = 64,
    ) -> None:
        """Hold the parts.

        Args: soft_beta: take (1 / beta) log mean exp(beta R) in place of the mean, which is the KL-optimal Q where the
            environment has no luck of its own.
            ledger: when it refuses, the decision has no values, and the base acts.
            bootstrap: values the state in which a continuation was cut short; without it that counts what it was paid,
            and `truncated_fraction` says how many did.
        Raises: ConfigError: a setting cannot work.
        """
        if continuations < 1:
            raise ConfigError(f"continuations must be 1 or more: got {continuations} (MonteCarloQ)")
        if soft_beta is not None and not 0 < soft_beta < math.inf:
            raise ConfigError(f"soft_beta must be finite and above 0: got {soft_beta} (MonteCarloQ)")
        self._continuations, self._soft_beta = continuations, soft_beta
        self._player = Player(runtime, env, ledger=ledger, slots=Slots(max_concurrent), bootstrap=bootstrap)
        self.ledger = self._player.ledger
        self._counted = self._truncated = 0

    def __repr__(self) -> str:
        return (
            f"<MonteCarloQ {self._continuations} continuations, {self.truncated_fraction:.0%} cut short, "
            f"{self.ledger!r}>"
        )

    @property
    def truncated_fraction(self) -> float:
        """Share of continuations, of all decisions, that a limit cut short; counted as failures they bias values."""
        return self._truncated / self._counted if self._counted else 0.0

    async def __call__(self, point: DecisionPoint, candidates: Sequence[Completion], /) -> QValues:
        """Return the mean return of each candidate. Cancelled: so are all branches.

        Raises: GuidanceError: there is no environment to branch from, the ledger is spent, or no continuation of a
        candidate came to an end.
        """
        if point.snapshot is None or point.task is None:
            raise GuidanceError("Monte Carlo values need an environment with snapshots: there is none at this decision")
        snapshot = await point.snapshot()
        size = len(snapshot.data)
        if not self.ledger.hold(size):
            raise GuidanceError(f"the ledger must have room for a decision's snapshot: {size} bytes are over its cap")
        try:
            return await self._value(point, snapshot, candidates)
        finally:
            self.ledger.release(size)

    async def _value(self, point: DecisionPoint, snapshot: Snapshot, candidates: Sequence[Completion]) -> QValues:
        actions = [Action(candidate.text, candidate.tool_calls) for candidate in candidates]
        keys = [action_key(action) for action in actions]
        tried = [keys.index(key) for key in dict.fromkeys(keys)]  # equal ones once, as the first was written
        starts = [_start(point, snapshot, candidates[at]) for at in tried]
        returns: list[list[float]] = [[] for _ in tried]

        async def one(play: tuple[int, int]) -> None:
            number, index = play
            seed = derive_seed(point.seed, "monte carlo", number, index)
            trajectory = await self._player.play(starts[number], actions[tried[number]], seed=seed)
            if trajectory is not None and not trajectory.end.is_failure:
                self._counted += 1
                self._truncated += trajectory.end.is_truncation
                returns[number].append(await self._player.worth(trajectory))

        plays = itertools.product(range(len(tried)), range(self._continuations))
        await side_by_side(plays, one, at_once=self._player.slots.total)
        if empty := [actions[at].text for at, found in zip(tried, returns, strict=True) if not found]:
            spent = self.ledger.exhausted()
            raise GuidanceError(
                f"every candidate must have a continuation that came to an end: none has {empty[0]!r:.80}"
                + (f"; the ledger's cap on {spent} is met" if spent else "")
            )
        values = {keys[at]: self._mean(found) for at, found in zip(tried, returns, strict=True)}
        return QValues([values[key] for key in keys], point.policy_version)

    def _mean(self, returns: Sequence[float]) -> float:
        if self._soft_beta is not None:
            return soft_q(returns, self._soft_beta)
        return sum(returns) / len(returns)


def _start(point: DecisionPoint, snapshot: Snapshot, candidate: Completion) -> RestartPoint:
    """Return the state of the episode, to take a candidate in: its tokens count, as if it had been chosen."""
    assert point.task is not None
    reached = RestartedFrom(
        f"{point.task.id}.{point.seed:x}",
        point.turn,
        point.policy_version,
        "branch",
        policy_tokens=point.policy_tokens + len(candidate.token_ids),
    )
    # What was shown, not the history: a context function that hides messages goes on from the same ids here, too.
    chat = chat_with(point.messages, candidate)
    return RestartPoint(point.task, snapshot, tuple(point.history), reached, chat)
