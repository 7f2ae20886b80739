"""Which turns were actions of the policy, what each was paid, and where its tokens lie."""

import math
from typing import Any

import msgspec
import pytest
import torch

from turngate.envs.base import End, Task
from turngate.learners.batch import lay_out
from turngate.learners.turns import action_turns, kept_trajectories, recorded_rewards, spread_turns, turn_tokens
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.errors import RecordError
from turngate.runtime.types import Segment, Trajectory, Turn


def played(*turns: tuple[int, float]) -> Trajectory:
    """Return an episode of (generated tokens, reward) per turn; turns without tokens were injected."""
    made: list[Turn] = []
    mask, turn_ids = [0], [-1]
    for index, (length, reward) in enumerate(turns):
        made.append(
            Turn(
                index=index, segment=0, start=len(mask), length=length, text="", rewards={"outcome": reward},
                injected=not length,
            )
        )  # fmt: skip
        mask += [1] * length + [0]
        turn_ids += [index] * length + [-1]
    n = len(mask)
    segment = Segment.of([1] * n, mask, [0.0] * n, [m - 1 for m in mask], turn_ids)
    return Trajectory(id="a", task=Task("t"), turns=tuple(made), segments=(segment,), end=End.success)


def turns_of(*turns: tuple[int, float]) -> tuple[tuple[int, ...], list[float], float]:
    trajectory = played(*turns)
    found = action_turns(trajectory, recorded_rewards(trajectory))
    return found.turns, found.rewards_T.tolist(), found.orphaned


def test_every_turn_with_tokens_is_an_action_and_keeps_its_reward() -> None:
    assert turns_of((2, 0.0), (1, 0.5), (3, 1.0)) == ((0, 1, 2), [0.0, 0.5, 1.0], 0.0)


def test_b3_6_an_episode_that_earned_nothing_has_all_its_turns() -> None:
    # RAGEN's core_algos.py looks for reward != 0: turns that earn nothing merge, and an episode of them crashes.
    assert turns_of((2, 0.0), (1, 0.0), (3, 0.0)) == ((0, 1, 2), [0.0, 0.0, 0.0], 0.0)


def test_b3_2_what_an_injected_turn_earned_goes_to_the_action_before_it() -> None:
    # radixark/miles#1827: a reward between two actions belongs to the one before, not to none and not to the next.
    assert turns_of((2, 0.25), (0, 0.5), (0, 1.0), (3, 2.0)) == ((0, 3), [1.75, 2.0], 0.0)


def test_b3_11_the_terminal_reward_reaches_the_last_action_when_something_else_ended_the_episode() -> None:
    # The outcome on the episode's last turn, which the policy did not take: slime's token_level_rewards[-1] loses it.
    assert turns_of((2, 0.0), (1, 0.0), (0, 1.0)) == ((0, 1), [0.0, 1.0], 0.0)


def test_what_was_paid_before_the_first_action_is_nobodys() -> None:
    assert turns_of((0, 0.5), (0, 0.25), (1, 1.0)) == ((2,), [1.0], 0.75)
    assert turns_of((0, 1.0)) == ((), [], 1.0)


def test_an_unknown_reward_stays_unknown_where_it_counts_and_only_there() -> None:
    trajectory = played((0, 0.0), (1, 0.0), (1, 1.0))
    found = action_turns(trajectory, [math.nan, 0.0, math.nan])
    assert found.orphaned == 0.0
    assert found.rewards_T.isnan().tolist() == [False, True]


def test_an_infinite_reward_is_refused_with_its_place() -> None:
    with pytest.raises(RecordError, match=r"reward must be finite: got -inf \(trajectory a, turn 1\)"):
        turns_of((1, 0.0), (0, -math.inf))


def test_every_recorded_turn_needs_a_reward() -> None:
    with pytest.raises(RecordError, match="expected 2, got 1"):
        action_turns(played((1, 0.0), (1, 0.0)), [0.0])


def test_kept_trajectories_keep_their_number(lab: Any, model: PolicyModel) -> None:
    batch = lab.sample_batch(model, [[0.0, 1.0], [0.5], [1.0, 0.0]])
    kept = list(kept_trajectories(batch, [[True, False], [True], [False, True]]))
    assert [(number, t.id) for number, t in kept] == [(0, "t0"), (2, "t2"), (4, "t4")]


def test_b3_7_positions_are_found_by_turn_ids_and_not_by_edges_of_the_mask(lab: Any) -> None:
    # VAGEN-derived code looks for 0 -> 1 edges: adjacent actions merge, since the second has none.
    mask, turn_ids = [0, 1, 1, 1, 0, 1], [-1, 0, 0, 1, -1, 2]
    turns = [Turn(index=i, segment=0, start=s, length=n, text="") for i, (s, n) in enumerate([(1, 2), (3, 1), (5, 1)])]
    segment = Segment.of([1] * 6, mask, [0.0] * 6, [m - 1 for m in mask], turn_ids)
    trajectory = Trajectory(id="a", task=Task("t"), turns=tuple(turns), segments=(segment,), end=End.success)
    tokens = lay_out(lab.make_batch([[trajectory]]), [[True]], vocabulary_size=24)
    assert {t: at.tolist() for t, at in turn_tokens(tokens)[0].items()} == {0: [1, 2], 1: [3], 2: [5]}


def test_turns_of_several_segments_are_one_trajectorys(lab: Any, model: PolicyModel) -> None:
    generator = torch.Generator().manual_seed(0)
    members = [lab.sample_trajectory(model, generator, name=n, drop_early_turns=True) for n in "ab"]
    tokens = lay_out(lab.make_batch([members]), [[True, True]], vocabulary_size=24)
    found = turn_tokens(tokens)
    assert list(found) == [0, 1]
    assert all(list(turns) == [0, 1, 2] for turns in found.values())
    everything = torch.cat([at for turns in found.values() for at in turns.values()])
    assert everything.sort().values.tolist() == tokens.mask_N.nonzero().squeeze(-1).tolist()
    for number, turns in found.items():
        for turn, at in turns.items():
            assert tokens.trajectory_ids_N[at].tolist() == [number] * len(at)
            assert tokens.turn_ids_N[at].tolist() == [turn] * len(at)


def test_nothing_masked_in_is_found_nowhere(lab: Any, model: PolicyModel) -> None:
    tokens = lay_out(lab.sample_batch(model, [[0.0]]), [[False]], vocabulary_size=24)
    assert turn_tokens(tokens) == {}
    assert len(spread_turns(tokens, {})) == 0


def test_each_token_gets_its_turns_value_and_context_gets_none(lab: Any) -> None:
    tokens = lay_out(lab.make_batch([[played((2, 0.0), (1, 1.0))]]), [[True]], vocabulary_size=24)
    assert spread_turns(tokens, {0: {0: 0.5, 1: -2.0}}).tolist() == [0, 0.5, 0.5, 0, -2.0]


def test_tokens_too_old_to_train_are_not_among_the_turns(lab: Any, model: PolicyModel) -> None:
    batch = lab.sample_batch(model, [[0.0]])
    old = msgspec.structs.replace(batch, policy_version=1, min_version=1)
    tokens = lay_out(old, [[True]], vocabulary_size=24)
    assert turn_tokens(tokens) == {}
    assert len(turn_tokens(tokens.masked(tokens.generated_N))[0]) == 2
