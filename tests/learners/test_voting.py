"""Who votes and who trains."""

import math

import pytest
import torch

from turngate.envs.base import End, Task
from turngate.learners.advantages.group import GROUP_PRESETS, GroupScheme
from turngate.learners.voting import assess, critic_handling, group_handling
from turngate.runtime.errors import RecordError
from turngate.runtime.types import Batch, Group, Trajectory, Turn

TASK, DR_GRPO = Task("t"), GROUP_PRESETS["dr_grpo"]


def member(reward: float, end: End = End.success) -> Trajectory:
    turn = Turn(index=0, segment=0, start=1, length=1, text="", rewards={"outcome": reward})
    return Trajectory(id=f"r{reward}", task=TASK, turns=(turn,), end=end)


def batch(*groups: list[Trajectory]) -> Batch:
    made = [Group(id=str(i), task=TASK, order=i, trajectories=tuple(g)) for i, g in enumerate(groups)]
    return Batch(groups=tuple(made), policy_version=0)


def test_terminal_ends_vote_truncations_and_failures_do_not() -> None:
    assert [group_handling(end) for end in (End.success, End.failure, End.budget)] == ["vote"] * 3
    assert {group_handling(end) for end in End if not end.is_terminal} == {"exclude"}


def test_critics_bootstrap_truncations_and_drop_failures() -> None:
    assert critic_handling(End.failure) == "reward"
    assert critic_handling(End.turn_limit) == "bootstrap"
    assert critic_handling(End.env_error) == "drop"


def test_truncated_and_failed_members_neither_vote_nor_train() -> None:
    members = [member(1.0), member(0.0), member(0.0, End.turn_limit), member(0.0, End.env_error)]
    votes = assess(batch(members), DR_GRPO)
    assert votes.advantages_I.tolist() == [0.5, -0.5, 0.0, 0.0]
    assert votes.keep == [[True, True, False, False]]
    assert votes.metrics["excluded_truncated"] == 1
    assert votes.metrics["excluded_failed"] == 1


def test_truncations_can_be_scored_as_they_are() -> None:
    members = [member(1.0), member(1.0), member(0.0, End.turn_limit)]
    votes = assess(batch(members), DR_GRPO, score_truncations=True)
    assert votes.keep == [[True, True, True]]
    assert votes.advantages_I[2].item() == pytest.approx(-2 / 3)


def test_b1_8_what_unrelated_failures_left_of_a_group_is_dropped_and_counted() -> None:
    members = [member(1.0), member(0.0)] + [member(0.0, End.env_error)] * 4
    votes = assess(batch(members), DR_GRPO, min_group_fraction=0.5)
    assert votes.keep == [[False] * 6]
    assert votes.metrics["incomplete_groups"] == 1
    assert assess(batch(members), DR_GRPO, min_group_fraction=0.3).keep[0][:2] == [True, True]


def test_one_survivor_is_no_group() -> None:
    votes = assess(batch([member(1.0), member(0.0, End.timeout)]), DR_GRPO)
    assert votes.keep == [[False, False]]


def test_b1_1_groups_do_not_share_a_baseline() -> None:
    votes = assess(batch([member(1.0), member(0.0)], [member(10.0), member(8.0)]), DR_GRPO)
    assert votes.advantages_I.tolist() == [0.5, -0.5, 1.0, -1.0]


def test_b1_4_an_unscorable_member_is_excluded_and_counted() -> None:
    votes = assess(batch([member(1.0), member(math.nan), member(0.0)]), DR_GRPO)
    assert votes.advantages_I.tolist() == [0.5, 0.0, -0.5]
    assert votes.metrics["excluded_unscorable"] == 1


def test_an_infinite_reward_names_its_trajectory() -> None:
    with pytest.raises(RecordError, match=r"finite: got inf \(trajectory rinf\)"):
        assess(batch([member(math.inf), member(0.0)]), DR_GRPO)


def test_degenerate_groups_are_told_from_the_others() -> None:
    votes = assess(batch([member(1.0), member(1.0)], [member(1.0), member(0.0)]), DR_GRPO)
    assert votes.is_degenerate_Q.tolist() == [True, False]
    assert votes.metrics["degenerate_fraction"] == 0.5


def test_groups_in_which_nobody_votes_teach_nothing_either() -> None:
    cut_short = [member(0.0, End.turn_limit), member(1.0, End.turn_limit)]
    votes = assess(batch(cut_short, [member(1.0), member(0.0)], [member(1.0), member(0.0, End.timeout)]), DR_GRPO)
    assert votes.metrics["degenerate_fraction"] == pytest.approx(2 / 3)
    assert assess(batch(cut_short), DR_GRPO).metrics["degenerate_fraction"] == 1.0


def test_b1_11_penalties_move_baseline_and_advantage_together() -> None:
    votes = assess(batch([member(1.0), member(0.0)]), DR_GRPO, penalties_I=torch.tensor([0.5, 0.0]))
    assert votes.advantages_I.tolist() == [0.25, -0.25]
    assert votes.metrics["group_reward_mean"] == 0.5  # what the environment gave


@pytest.mark.parametrize("preset", GROUP_PRESETS)
def test_b1_13_penalties_make_no_signal_out_of_a_degenerate_group(preset: str) -> None:
    penalties_I = torch.tensor([1e-4, 2e-4, 3e-4, 4e-4, 0.0, 0.0])
    equal, unequal = [member(1.0)] * 4, [member(1.0), member(0.0)]
    votes = assess(batch(equal, unequal), GROUP_PRESETS[preset], penalties_I=penalties_I)
    assert votes.advantages_I.tolist()[:4] == [0.0] * 4
    assert votes.advantages_I[4] > 0.4 > -0.4 > votes.advantages_I[5]
    assert votes.is_degenerate_Q.tolist() == [True, False]
    assert votes.metrics["degenerate_fraction"] == 0.5


def test_a_lone_member_that_keeps_its_reward_pays_its_penalty() -> None:
    votes = assess(batch([member(1.0)]), GroupScheme(singleton="raw"), penalties_I=torch.tensor([0.25]))
    assert votes.advantages_I.tolist() == [0.75]


def test_batch_deviation_spans_the_groups() -> None:
    votes = assess(batch([member(1.0), member(0.0)], [member(4.0), member(5.0)]), GROUP_PRESETS["batch_std"])
    std = torch.tensor([1.0, 0.0, 4.0, 5.0]).std().item()
    assert votes.advantages_I[0].item() == pytest.approx(0.5 / (std + 1e-6))


def test_an_empty_batch_has_no_votes() -> None:
    assert assess(batch(), DR_GRPO).advantages_I.tolist() == []
