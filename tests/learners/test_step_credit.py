"""Steps against the steps of siblings, read off real records: by hand, with injected turns, failures and old tokens."""

from collections.abc import Hashable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from turngate.envs.base import End, Task
from turngate.learners.advantages.group import GroupScheme
from turngate.learners.batch import lay_out
from turngate.learners.policy_learner import Scored
from turngate.learners.step_credit import StepGroups, observation_keys, step_group_credit, turn_index_credit
from turngate.learners.turns import recorded_rewards
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.types import Segment, Trajectory, Turn


def walked(name: str, *turns: tuple[str, float], end: End = End.success, injected: Sequence[int] = ()) -> Trajectory:
    """Return an episode of (what was observed, reward) per turn; turn i says i + 1 tokens, none when injected."""
    made: list[Turn] = []
    mask, turn_ids = [0], [-1]
    for index, (observation, reward) in enumerate(turns):
        length = 0 if index in injected else index + 1
        made.append(
            Turn(
                index=index, segment=0, start=len(mask), length=length, text="", observation=observation,
                rewards={"outcome": reward}, injected=index in injected,
            )
        )  # fmt: skip
        mask += [1] * length + [0]
        turn_ids += [index] * length + [-1]
    n = len(mask)
    segment = Segment.of([1] * n, mask, [0.0] * n, [m - 1 for m in mask], turn_ids)
    return Trajectory(id=name, task=Task("t"), turns=tuple(made), segments=(segment,), end=end)


def scored(lab: Any, groups: Sequence[Sequence[Trajectory]], keep: Sequence[Sequence[bool]] | None = None) -> Scored:
    batch = lab.make_batch(groups)
    keep = keep or [[True] * len(group) for group in groups]
    tokens = lay_out(batch, keep, vocabulary_size=24)
    zeros_N = torch.zeros(len(tokens.mask_N))
    return Scored(batch, keep, tokens, zeros_N, zeros_N, None)


def by_turn(found: Scored, credit_N: Tensor) -> dict[tuple[str, int], float]:
    """Return the credit of each turn; its tokens share it and context has none."""
    tokens = found.tokens
    assert not credit_N[~tokens.mask_N].any()
    values: dict[tuple[str, int], set[float]] = {}
    for at in tokens.mask_N.nonzero().squeeze(-1).tolist():
        name = tokens.trajectory_names[int(tokens.trajectory_ids_N[at])]
        values.setdefault((name, int(tokens.turn_ids_N[at])), set()).add(round(float(credit_N[at]), 6))
    assert all(len(v) == 1 for v in values.values())
    return {key: v.pop() for key, v in values.items()}


def test_steps_from_one_situation_are_compared_by_their_discounted_returns(lab: Any) -> None:
    # gamma 0.5. From the start: returns 0.5 and 0, mean 0.25. From "shelf": 1 and 0 (b's end), mean 0.5.
    a = walked("a", ("shelf", 0.0), ("done", 1.0))
    b = walked("b", ("shelf", 0.0), ("gone", 0.0))
    found = scored(lab, [[a, b]])
    credit_N, metrics = step_group_credit(found, StepGroups(omega=2.0, gamma=0.5), observation_keys, recorded_rewards)
    expected = {("a", 0): 0.5, ("b", 0): -0.5, ("a", 1): 1.0, ("b", 1): -1.0}
    assert by_turn(found, credit_N) == pytest.approx(expected)
    shown = {"step_buckets": 2.0, "step_buckets_of_2": 2.0, "step_bucket_size_mean": 2.0}
    assert {name: value for name, value in metrics.items() if value} == shown


def test_a_situation_that_comes_again_counts_again_and_one_seen_once_gives_nothing(lab: Any) -> None:
    # a is at "shelf" twice, b never. Returns at gamma 1: a 1, 1, 1 and b 0. Start: 1, 0. Shelf: 1, 1. Lift: alone.
    a = walked("a", ("shelf", 0.0), ("shelf", 0.0), ("done", 1.0))
    b = walked("b", ("lift", 0.0), ("gone", 0.0))
    found = scored(lab, [[a, b]])
    credit_N, metrics = step_group_credit(found, StepGroups(gamma=1.0), observation_keys, recorded_rewards)
    expected = {("a", 0): 0.5, ("b", 0): -0.5, ("a", 1): 0.0, ("a", 2): 0.0, ("b", 1): 0.0}
    assert by_turn(found, credit_N) == pytest.approx(expected)
    assert metrics["step_singleton_fraction"] == pytest.approx(1 / 5)


def test_groups_never_meet(lab: Any) -> None:
    groups = [[walked(f"{g}{i}", ("x", 0.0), ("y", float(g))) for i in range(2)] for g in range(2)]
    found = scored(lab, groups)
    credit_N, metrics = step_group_credit(found, StepGroups(), observation_keys, recorded_rewards)
    assert not credit_N.any()
    assert metrics["step_buckets"] == 4.0  # the buckets of all groups together


def test_an_injected_turn_is_no_step_and_what_it_earned_belongs_to_the_one_before(lab: Any) -> None:
    # a: turn 1 is injected and earns 1, so turn 0 is paid 1; turn 2 starts from what the injected turn brought up.
    a = walked("a", ("x", 0.0), ("shelf", 1.0), ("done", 0.0), injected=[1])
    b = walked("b", ("shelf", 0.0), ("done", 0.5))
    found = scored(lab, [[a, b]])
    credit_N, _ = step_group_credit(found, StepGroups(gamma=1.0), observation_keys, recorded_rewards)
    # Start: returns 1 and 0.5. "shelf", before a's turn 2 and b's turn 1: returns 0 and 0.5.
    expected = {("a", 0): 0.25, ("b", 0): -0.25, ("a", 2): -0.25, ("b", 1): 0.25}
    assert by_turn(found, credit_N) == pytest.approx(expected)


def test_members_that_do_not_count_are_no_baseline(lab: Any) -> None:
    a, b = walked("a", ("x", 0.0), ("y", 1.0)), walked("b", ("x", 0.0), ("y", 0.0))
    wrecked = walked("c", ("x", 0.0), ("y", 100.0), end=End.env_error)
    found = scored(lab, [[a, b, wrecked]], [[True, True, False]])
    for credit_N in (
        step_group_credit(found, StepGroups(gamma=1.0), observation_keys, recorded_rewards)[0],
        turn_index_credit(found, recorded_rewards),
    ):
        assert by_turn(found, credit_N)["a", 0] in (0.5, 1.0)  # mean over two, or over the one sibling
        assert all(name != "c" for name, _ in by_turn(found, credit_N))


def test_a_member_without_a_turn_harms_no_one(lab: Any) -> None:
    a, b = walked("a", ("x", 1.0)), walked("b", ("x", 0.0))
    nothing = walked("c", end=End.cancelled)
    assert observation_keys(nothing) == []
    found = scored(lab, [[a, nothing, b]], [[True, False, True]])
    credit_N, _ = step_group_credit(found, StepGroups(), observation_keys, recorded_rewards)
    assert by_turn(found, credit_N) == pytest.approx({("a", 0): 0.5, ("b", 0): -0.5})


def test_a_lone_member_gets_nothing(lab: Any) -> None:
    found = scored(lab, [[walked("a", ("x", 0.0), ("y", 1.0))]])
    assert not step_group_credit(found, StepGroups(), observation_keys, recorded_rewards)[0].any()
    assert not turn_index_credit(found, recorded_rewards).any()


def test_turn_baselines_are_the_siblings_means_at_the_same_turn(lab: Any) -> None:
    # To go: a 1.5, 1; b 0.5, 0; c 0 (one turn). Turn 0: leave one out. Turn 1: a and b alone.
    a, b, c = walked("a", ("x", 0.5), ("y", 1.0)), walked("b", ("x", 0.5), ("y", 0.0)), walked("c", ("x", 0.0))
    found = scored(lab, [[a, b, c]])
    credit = by_turn(found, turn_index_credit(found, recorded_rewards))
    assert credit["a", 0] == pytest.approx(1.5 - (0.5 + 0.0) / 2)
    assert credit["b", 0] == pytest.approx(0.5 - (1.5 + 0.0) / 2)
    assert credit["c", 0] == pytest.approx(0.0 - (1.5 + 0.5) / 2)
    # A sibling whose episode is over has nothing to go: its 0 is part of the mean.
    assert credit["a", 1] == pytest.approx(1.0 - (0.0 + 0.0) / 2)
    assert credit["b", 1] == pytest.approx(0.0 - (1.0 + 0.0) / 2)


def test_tokens_too_old_to_train_get_none_but_their_turns_still_are_a_baseline(lab: Any) -> None:
    a, b = walked("a", ("x", 1.0)), walked("b", ("x", 0.0))
    segment = b.segments[0]
    young = Segment.of(segment.ids(), segment.policy_mask, segment.logprob_values(), [-1, 5, -1], segment.turn_values())
    b = msgspec.structs.replace(b, segments=(young,))
    batch = msgspec.structs.replace(lab.make_batch([[a, b]]), policy_version=5, min_version=5)
    tokens = lay_out(batch, [[True, True]], vocabulary_size=24)
    zeros_N = torch.zeros(len(tokens.mask_N))
    found = Scored(batch, [[True, True]], tokens, zeros_N, zeros_N, None)
    credit_N, _ = step_group_credit(found, StepGroups(), observation_keys, recorded_rewards)
    assert by_turn(found, credit_N) == pytest.approx({("b", 0): -0.5})


def test_what_names_situations_can_be_chosen_and_must_name_all(lab: Any) -> None:
    a, b = walked("a", ("x", 0.0), ("y", 1.0)), walked("b", ("z", 0.0), ("y", 0.0))
    found = scored(lab, [[a, b]])

    def apart(trajectory: Trajectory) -> Sequence[Hashable]:
        return [(trajectory.id, turn.index) for turn in trajectory.turns]

    credit_N, metrics = step_group_credit(found, StepGroups(), apart, recorded_rewards)
    assert not credit_N.any()
    assert metrics["step_singleton_fraction"] == 1.0
    with pytest.raises(LearnerError, match=r"expected 2 keys, got 1 \(trajectory a\)"):
        step_group_credit(found, StepGroups(), lambda _: ["x"], recorded_rewards)
    with pytest.raises(LearnerError, match=r"hashable keys: unhashable type: 'list' \(trajectory a, turn 0\)"):
        step_group_credit(found, StepGroups(), lambda t: [("x", []) for _ in t.turns], recorded_rewards)


def test_the_scheme_of_the_steps_can_be_chosen(lab: Any) -> None:
    a, b = walked("a", ("x", 3.0)), walked("b", ("x", 1.0))
    found = scored(lab, [[a, b]])
    groups = StepGroups(scheme=GroupScheme("loo", "none"))
    credit_N, _ = step_group_credit(found, groups, observation_keys, recorded_rewards)
    assert by_turn(found, credit_N) == pytest.approx({("a", 0): 2.0, ("b", 0): -2.0})


@pytest.mark.parametrize(("options", "why"), [({"gamma": 1.5}, "gamma must be"), ({"omega": -1.0}, "omega must be")])
def test_configs_that_make_no_sense_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        StepGroups(**options)
