"""Credit finer than an episode without a critic: steps against the steps of siblings, read off the records."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turngate.learners.advantages.group import GroupScheme
from turngate.learners.advantages.steps import StepAdvantages, step_group_advantages
from turngate.learners.advantages.turn_index import turn_index_advantages
from turngate.learners.credit import Scored
from turngate.learners.turns import ActionTurns, RewardsOf, action_turns, spread_turns
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.types import Trajectory

__all__ = ["AnchorKeys", "StepGroups", "observation_keys", "step_group_credit", "turn_index_credit"]

AnchorKeys = Callable[[Trajectory], Sequence[Hashable]]
"""Names the situation before each recorded turn of a trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """Steps against the steps that the group took in the same situation, beside the episode's own advantage.

    Source: GiGPO, Feng et al. 2025 (2505.10978).
    """

    omega: float = 1.0
    """Weight of the step's advantage beside the episode's."""
    gamma: float = 0.95
    """Discount per turn of the return that steps are compared by."""
    scheme: GroupScheme = GroupScheme("mean", "none")  # noqa: RUF009 - frozen
    """How the steps of one situation are compared."""

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise ConfigError(f"gamma must be from 0 to 1: got {self.gamma} (StepGroups)")
        if not self.omega >= 0:
            raise ConfigError(f"omega must be 0 or more: got {self.omega} (StepGroups)")


def observation_keys(trajectory: Trajectory) -> Sequence[Hashable]:
    """Name the situation before each turn by what the environment said last.

    Good where that says where one is; clocks, counters or random ids in it make every situation one of its own, which
    the metric `step_singleton_fraction` shows.
    """
    # An episode may end before its first turn: the slice is for that.
    return [trajectory.first_observation, *(turn.observation for turn in trajectory.turns)][: len(trajectory.turns)]


def step_group_credit(
    scored: Scored, groups: StepGroups, anchor: AnchorKeys, rewards: RewardsOf
) -> tuple[Tensor, dict[str, float]]:
    """Return omega * A_step of every token, float32 (N,), and how many steps shared a situation."""
    values: dict[int, dict[int, float]] = {}
    found: list[StepAdvantages] = []
    for numbers, members, actions, valid_G in _groups(scored, rewards):
        keys = [_keys(anchor, trajectory, action) for trajectory, action in zip(members, actions, strict=True)]
        paid = [action.rewards_T for action in actions]
        made = step_group_advantages(paid, keys, valid_G, gamma=groups.gamma, scheme=groups.scheme)
        found.append(made)
        _note(values, numbers, actions, made.advantages)
    sizes: dict[int, int] = {}
    for made in found:
        for size, count in made.bucket_sizes.items():
            sizes[size] = sizes.get(size, 0) + count
    metrics = StepAdvantages([], sizes).metrics()
    return groups.omega * spread_turns(scored.tokens, values), metrics


def turn_index_credit(scored: Scored, rewards: RewardsOf) -> Tensor:
    """Return each token's return-to-go minus the siblings' mean at the same turn, float32 (N,)."""
    values: dict[int, dict[int, float]] = {}
    for numbers, _, actions, valid_G in _groups(scored, rewards):
        _note(values, numbers, actions, turn_index_advantages([a.rewards_T for a in actions], valid_G))
    return spread_turns(scored.tokens, values)


_Group = tuple[Sequence[int], Sequence[Trajectory], list[ActionTurns], Tensor]


def _groups(scored: Scored, rewards: RewardsOf) -> list[_Group]:
    """Return per group: numbers as in `trajectory_ids_N`, members, their actions, and which of them count."""
    made: list[_Group] = []
    start = 0
    for group, kept in zip(scored.batch.groups, scored.keep, strict=True):
        members = group.trajectories
        numbers = range(start, start + len(members))
        start += len(members)
        actions = [action_turns(t, rewards(t)) for t in members]
        made.append((numbers, members, actions, torch.tensor(list(kept), dtype=torch.bool)))
    return made


def _keys(anchor: AnchorKeys, trajectory: Trajectory, action: ActionTurns) -> list[Hashable]:
    keys = anchor(trajectory)
    if len(keys) != len(trajectory.turns):
        raise LearnerError(
            f"anchor must name the situation before each turn: expected {len(trajectory.turns)} keys, got {len(keys)} "
            f"(trajectory {trajectory.id})"
        )
    for turn, key in zip(trajectory.turns, keys, strict=True):
        try:
            hash(key)
        except TypeError as error:
            raise LearnerError(
                f"anchor must name situations by hashable keys: {error} (trajectory {trajectory.id}, turn "
                f"{turn.index}); use strings, numbers or tuples"
            ) from error
    named = {turn.index: key for turn, key in zip(trajectory.turns, keys, strict=True)}
    return [named[turn] for turn in action.turns]


def _note(
    values: dict[int, dict[int, float]],
    numbers: Sequence[int],
    actions: Sequence[ActionTurns],
    advantages: Sequence[Tensor],
) -> None:
    for number, action, advantages_T in zip(numbers, actions, advantages, strict=True):
        values[number] = dict(zip(action.turns, advantages_T.tolist(), strict=True))
