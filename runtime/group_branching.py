"""Branches that teach: values of a finished group's turns before it is trained on, and continuations as episodes.

finished group -> branch at its turns, behind all rollouts -> V and Q as scores of the turns -> the buffer
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from turngate.envs.base import EnvFactory
from turngate.runtime.allocation import SequentialStop
from turngate.runtime.branch_budget import BranchLedger, BranchLimits, Estimand
from turngate.runtime.branching import (
    Branches,
    TurnBranches,
    branch,
    branch_point,
    check_branching,
    wanted_turns,
)
from turngate.runtime.continuation import side_by_side
from turngate.runtime.errors import ConfigError, check_kind
from turngate.runtime.learner import Learner
from turngate.runtime.runtime import Runtime
from turngate.runtime.seeds import derive_seed
from turngate.runtime.types import Group, Trajectory, Turn

__all__ = [
    "MC_Q",
    "MC_VALUE",
    "Branching",
    "GroupBrancher",
    "continuation_groups",
    "continuations_of",
    "with_branch_values",
]

MC_VALUE = "mc_value"
"""Score of a turn: V of the state *before* it, a mean over continuations. Other scores judge what a turn led to."""
MC_Q = "mc_q"
"""Score of a turn: Q of its action, likewise."""
_SCORES: dict[Estimand, str] = {"V": MC_VALUE, "Q": MC_Q}


@dataclass(frozen=True, slots=True, kw_only=True)
class Branching:
    """How the turns of finished groups are valued: `train(..., branching=Branching())`.

    Branches run in the runtime's slots behind every rollout; a group waits for its own and ages meanwhile. One that
    fails, or that the limits do not admit, costs a value and nothing else.
    """

    continuations: int = 8
    """Per turn and estimand."""
    estimands: Sequence[Estimand] = ("V",)
    """V of the state before a turn is what `GRPO(credit="vine")` reads. States that members share are valued once."""
    turns: Callable[[Trajectory], Iterable[int]] | None = None
    """Which turns, by index; all that the policy took when None. See `allocation.highest` and `turn_surprisal`."""
    stop: SequentialStop | None = None
    limits: BranchLimits | None = None
    """Caps on all branches of this process; a run that is resumed counts anew."""
    train_on: bool = False
    """Let the continuations train the policy beside the groups: samples of the policy from the state before a turn, of
    which only their own turns train, compared with each other alone."""

    def __post_init__(self) -> None:
        check_branching(self.estimands, self.continuations, self.stop)
        check_kind("limits", self.limits, BranchLimits, "Branching")
        turns: object = self.turns
        if turns is not None and not callable(turns):
            raise ConfigError(
                f"turns must be a function of a trajectory that names its turns, or None for all: got {turns!r:.80} "
                "(Branching)"
            )

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the scores that turns will have."""
        return tuple(_SCORES[kind] for kind in self.estimands)

    def check_learner(self, learner: Learner) -> None:
        """Require that the learner can learn from what it is given. Raises: ConfigError: it reads what is not there."""
        needed = tuple(getattr(learner, "needs_scores", ()))
        if self.train_on and needed:
            raise ConfigError(
                "train_on must go with a learner that reads no scores, which continuations have none of: got one that "
                f"reads {', '.join(needed)} (Branching); leave train_on out, or choose another credit"
            )


class GroupBrancher:
    """Values groups by branching from their turns."""

    # State: the ledger, and the tallies of estimates.
    ledger: BranchLedger
    _counted: int  # continuations that count in an estimate
    _truncated: int  # those of them that were cut short
    _failed: int  # continuations that say nothing
    _other_context: int  # continuations that saw other ids than their episode

    def __init__(self, config: Branching, runtime: Runtime, env: EnvFactory, *, seed: int) -> None:
        """Args: seed: root of all luck in the branches."""
        self.config, self._runtime, self._env, self._seed = config, runtime, env, seed
        self.ledger = BranchLedger(config.limits)
        self._counted = self._truncated = self._failed = self._other_context = 0

    def __repr__(self) -> str:
        return f"<GroupBrancher {self.config.continuations} continuations, {self.ledger!r}>"

    async def value(self, group: Group) -> tuple[Group, tuple[Group, ...]]:
        """Return the group with values on its turns and without snapshots, and its continuations if they are to train.

        Cancelled: so are the branches, and their slots and environments are given back.
        """
        found: dict[tuple[str, Estimand], dict[int, TurnBranches]] = {}
        wanted = {t.id: self._turns(t) for t in group.trajectories}
        first, holders = _shared_states(group, wanted)

        async def run(side: tuple[Trajectory, Estimand]) -> None:
            trajectory, kind = side
            made = await branch(
                self._runtime,
                self._env,
                trajectory,
                turns=first[trajectory.id] if kind == "V" else wanted[trajectory.id],
                continuations=self.config.continuations,
                estimands=[kind],
                stop=self.config.stop,
                ledger=self.ledger,
                seed=derive_seed(self._seed, "branching", trajectory.id),
            )
            found[trajectory.id, kind] = made.v if kind == "V" else made.q

        sides: list[tuple[Trajectory, Estimand]] = [
            (t, kind) for t in group.trajectories for kind in dict.fromkeys(self.config.estimands)
        ]
        await side_by_side(sides, run, at_once=max(len(sides), 1))
        own = [
            Branches(trajectory=t, q=found.get((t.id, "Q"), {}), v=found.get((t.id, "V"), {}))
            for t in group.trajectories
        ]
        self._count(own)
        v_of = {(one.trajectory.id, turn): of for one in own for turn, of in one.v.items()}

        def with_shared(one: Branches) -> Branches:
            held = holders[one.trajectory.id].items()
            return msgspec.structs.replace(one, v={turn: v_of[holder] for turn, holder in held if holder in v_of})

        valued = tuple(_without_snapshots(with_branch_values(with_shared(one))) for one in own)
        groups = tuple(made for one in own for made in continuation_groups(one, order=group.order))
        return msgspec.structs.replace(group, trajectories=valued), groups if self.config.train_on else ()

    def metrics(self) -> dict[str, float]:
        """Return what branches have cost since the process began, and how many say less than they should."""
        ledger = self.ledger
        return {
            "branch_rollouts": float(ledger.rollouts),
            "branch_model_tokens": float(ledger.model_tokens),
            "branch_env_steps": float(ledger.env_steps),
            "branch_refused": float(ledger.refused),
            "branch_failed": float(self._failed),
            "branch_other_context": float(self._other_context),
            "branch_truncated_fraction": self._truncated / max(self._counted, 1),
        }

    def _turns(self, trajectory: Trajectory) -> list[int]:
        if self.config.turns is not None:
            return wanted_turns(trajectory, self.config.turns(trajectory))
        return [turn.index for turn in trajectory.turns if turn.length]

    def _count(self, branches: Sequence[Branches]) -> None:
        for found in (found for one in branches for found in (*one.q.values(), *one.v.values())):
            self._counted += found.estimate.count
            self._truncated += found.estimate.truncated
            self._failed += found.failed
            self._other_context += found.other_context


def with_branch_values(branches: Branches) -> Trajectory:
    """Return the trajectory with V before each turn and Q of its action among the scores, where they were estimated."""

    def scored(turn: Turn) -> Turn:
        sides: tuple[tuple[str, dict[int, TurnBranches]], ...] = ((MC_VALUE, branches.v), (MC_Q, branches.q))
        found = {name: side[turn.index].estimate for name, side in sides if turn.index in side}
        scores = {name: estimate.mean for name, estimate in found.items() if estimate.count}
        return msgspec.structs.replace(turn, scores=turn.scores | scores) if scores else turn

    trajectory = branches.trajectory
    return msgspec.structs.replace(trajectory, turns=tuple(scored(turn) for turn in trajectory.turns))


def continuations_of(branches: Branches) -> list[Trajectory]:
    """Return the continuations that did not fail: episodes of their own, whose prefix is context."""
    found = (*branches.q.values(), *branches.v.values())
    return [one for turn in found for one in turn.trajectories if not one.end.is_failure]


def continuation_groups(branches: Branches, *, order: int = 0) -> list[Group]:
    """Return the continuations as groups to train on: one per state, after the recorded action (Q) or before it (V).

    They are never compared with episodes from their task's start. Continuations that failed, or came without ids or
    log-probs, are left out; so are groups of one, and those in which the policy said nothing.
    """
    groups: list[Group] = []
    for found in (*branches.q.values(), *branches.v.values()):
        members = tuple(one for one in found.trajectories if one.trainable and not one.end.is_failure)
        if len(members) > 1 and any(one.policy_tokens for one in members):
            name = f"{branches.trajectory.id}.{found.estimand}{found.turn}"
            groups.append(Group(id=name, task=branches.trajectory.task, order=order, trajectories=members))
    return groups


def _shared_states(
    group: Group, wanted: dict[str, list[int]]
) -> tuple[dict[str, list[int]], dict[str, dict[int, tuple[str, int]]]]:
    """Return the turns to value by trajectory, and for every turn whose V is its own: (trajectory id, turn).

    Members with one history, of the same ids, and one state of the environment have one value: their first turn, above
    all.
    """
    known: dict[object, tuple[str, int]] = {}
    first: dict[str, list[int]] = {}
    holders: dict[str, dict[int, tuple[str, int]]] = {}
    for trajectory in group.trajectories:
        first[trajectory.id], holders[trajectory.id] = [], {}
        for turn in wanted[trajectory.id]:
            point = branch_point(trajectory, turn)
            state = (point.snapshot, point.messages, point.chat)
            if state not in known:
                known[state] = trajectory.id, turn
                first[trajectory.id].append(turn)
            holders[trajectory.id][turn] = known[state]
    return first, holders


def _without_snapshots(trajectory: Trajectory) -> Trajectory:
    turns = tuple(msgspec.structs.replace(turn, snapshot=None) for turn in trajectory.turns)
    return msgspec.structs.replace(trajectory, turns=turns)
