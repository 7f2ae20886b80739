"""VinePPO's credit from the values on turns, and who is left out."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from turngate.envs.base import End
from turngate.learners.batch import lay_out
from turngate.learners.credit import Scored
from turngate.learners.grpo import GRPO
from turngate.learners.reward_scheme import RewardScheme
from turngate.learners.turns import recorded_rewards, turn_tokens
from turngate.learners.vine import valued_members, vine_credit
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.errors import ConfigError
from turngate.runtime.group_branching import MC_VALUE, Branching
from turngate.runtime.learner import check_learner
from turngate.runtime.types import Batch, Sampling, Trajectory


def valued(trajectory: Trajectory, *values: float) -> Trajectory:
    """Return the trajectory with V before each turn; NaN leaves it out."""
    turns = [
        turn if math.isnan(v) else msgspec.structs.replace(turn, scores={MC_VALUE: v})
        for turn, v in zip(trajectory.turns, values, strict=True)
    ]
    return msgspec.structs.replace(trajectory, turns=tuple(turns))


def with_members(batch: Batch, *members: Trajectory) -> Batch:
    return msgspec.structs.replace(batch, groups=(msgspec.structs.replace(batch.groups[0], trajectories=members),))


@pytest.fixture
def batch(lab: Any, model: PolicyModel) -> Batch:
    """A group of two successes: without anything to tell them apart by their returns."""
    made = lab.sample_batch(model, [[1.0, 1.0]])
    one, two = made.groups[0].trajectories  # two turns, and three
    return with_members(made, valued(one, 0.5, 0.25), valued(two, 0.5, 0.75, 0.5))


def advantages(batch: Batch) -> dict[int, list[float]]:
    keep, _ = valued_members(batch, score_truncations=False)
    tokens = lay_out(batch, keep, vocabulary_size=24)
    zeros_N = torch.zeros(len(tokens.mask_N))
    credit_N = vine_credit(Scored(batch, keep, tokens, zeros_N, zeros_N, None), recorded_rewards)
    assert (credit_N[~tokens.mask_N] == 0).all()
    found: dict[int, list[float]] = {}
    for number, turns in turn_tokens(tokens).items():
        for at in turns.values():
            assert len(credit_N[at].unique()) == 1  # one for all tokens of a turn
        found[number] = [float(credit_N[at[0]]) for at in turns.values()]
    return found


def test_each_turn_is_credited_with_the_value_it_moved(batch: Batch) -> None:
    assert advantages(batch) == {0: [-0.25, 0.75], 1: [0.25, -0.25, 0.5]}


def test_a_turn_of_something_else_is_part_of_the_transition(lab: Any, batch: Batch) -> None:
    one = batch.groups[0].trajectories[1]
    # The second turn's tokens become context: it was injected.
    middle = msgspec.structs.replace(one.turns[1], length=0, injected=True, rewards={"bonus": 0.125}, scores={})
    segment = one.segments[0]
    mask = bytes(0 if turn == 1 else m for m, turn in zip(segment.policy_mask, segment.turn_values(), strict=True))
    made = msgspec.structs.replace(
        one,
        turns=(one.turns[0], middle, one.turns[2]),
        segments=(msgspec.structs.replace(segment, policy_mask=mask),),
    )
    assert advantages(with_members(batch, made)) == {0: [0.125 + 0.5 - 0.5, 0.5]}


@pytest.mark.parametrize("change", ["missing", "nan reward", "cut", "failed"])
def test_episodes_without_all_their_values_are_left_out_and_counted(batch: Batch, change: str) -> None:
    one, two = batch.groups[0].trajectories
    unvalued = msgspec.structs.replace(two.turns[0], scores={})
    other = {
        "missing": lambda: msgspec.structs.replace(two, turns=(unvalued, *two.turns[1:])),
        "nan reward": lambda: msgspec.structs.replace(
            two, turns=(*two.turns[:-1], msgspec.structs.replace(two.turns[-1], rewards={"outcome": math.nan}))
        ),
        "cut": lambda: msgspec.structs.replace(two, end=End.turn_limit),
        "failed": lambda: msgspec.structs.replace(two, end=End.env_error),
    }[change]()  # fmt: skip
    keep, metrics = valued_members(with_members(batch, one, other), score_truncations=False)
    assert keep == [[True, False]]
    assert metrics == {"excluded_unvalued": float(change in ("missing", "nan reward"))}
    assert valued_members(with_members(batch, one, other), score_truncations=True)[0] == [[True, change == "cut"]]


def test_a_group_without_a_difference_teaches_all_the_same(folder: Path, batch: Batch) -> None:
    flat, vine = (GRPO(folder, credit=credit) for credit in ("trajectory", "vine"))
    for learner in (flat, vine):
        learner.load(None)
    assert flat.update(batch).metrics["grad_norm"] == 0
    metrics = vine.update(batch).metrics
    assert metrics["grad_norm"] > 0
    assert metrics["excluded_unvalued"] == 0
    assert metrics["advantage_turn_0"] == pytest.approx(0.0)
    assert metrics["advantage_turn_1"] == pytest.approx(0.25)


def test_it_starts_only_with_something_that_gives_values(folder: Path) -> None:
    learner = GRPO(folder, credit="vine")
    with pytest.raises(ConfigError, match=r"expected mc_value, got none; .*train\(branching="):
        check_learner(learner, Sampling(), 0)
    with pytest.raises(ConfigError, match="expected mc_value, got mc_q"):
        check_learner(learner, Sampling(), 0, Branching(estimands=("Q",)).scores)
    check_learner(learner, Sampling(), 0, Branching().scores)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rewards": RewardScheme(turn_cost=0.1)}, "environment's own"),
        ({"preset": "grpo"}, "a value from branches"),
        ({"kl_coef": 0.1}, "part of the loss"),
    ],
)
def test_what_it_would_leave_unread_is_refused(folder: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        GRPO(folder, credit="vine", **options)


def test_an_episode_in_which_the_policy_said_nothing_teaches_nothing(batch: Batch) -> None:
    one, two = batch.groups[0].trajectories
    silent = tuple(msgspec.structs.replace(turn, length=0, injected=True, scores={}) for turn in two.turns)
    masked = tuple(msgspec.structs.replace(s, policy_mask=bytes(len(s.policy_mask))) for s in two.segments)
    injected = msgspec.structs.replace(two, turns=silent, segments=masked)
    keep, _ = valued_members(with_members(batch, one, injected), score_truncations=False)
    assert keep == [[True, False]]
