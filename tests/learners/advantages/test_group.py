"""Group statistics: presets, who votes, and the ways they go wrong."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turngate.learners.advantages.group import (
    GROUP_PRESETS,
    GroupScheme,
    batch_reward_std,
    group_advantages,
    sample_advantages,
)
from turngate.runtime.errors import ConfigError, LearnerError

GRPO, DR_GRPO, RLOO = (GROUP_PRESETS[name] for name in ("grpo", "dr_grpo", "rloo"))
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)

rewards_lists = st.lists(st.integers(-20, 20).map(lambda n: n / 4), min_size=2, max_size=8)


def test_dr_grpo_subtracts_the_mean() -> None:
    assert group_advantages(REWARDS, scheme=DR_GRPO).advantages_G.tolist() == [0.5, -0.5, -0.5, 0.5]


def test_grpo_divides_by_the_sample_standard_deviation() -> None:
    std = math.sqrt(4 * 0.25 / 3) + 1e-6
    assert group_advantages(REWARDS, scheme=GRPO).advantages_G[0].item() == pytest.approx(0.5 / std)


def test_no_baseline_passes_the_rewards_on() -> None:
    assert group_advantages(REWARDS, scheme=GroupScheme("none", "none")).advantages_G.tolist() == [1.0, 0.0, 0.0, 1.0]


@given(rewards_lists)
def test_leave_one_out_is_dr_grpo_times_n_over_n_minus_1(rewards: list[float]) -> None:
    rewards_G, n = torch.tensor(rewards, dtype=torch.float64), len(rewards)
    loo = group_advantages(rewards_G, scheme=RLOO).advantages_G
    torch.testing.assert_close(loo, group_advantages(rewards_G, scheme=DR_GRPO).advantages_G * n / (n - 1))


@given(rewards_lists, st.floats(0.1, 50), st.floats(-50, 50))
def test_p5_grpo_does_not_see_scale_and_offset_of_rewards(rewards: list[float], scale: float, offset: float) -> None:
    rewards_G, scheme = torch.tensor(rewards, dtype=torch.float64), GroupScheme("mean", "std_sample", eps=0.0)
    moved = group_advantages(rewards_G * scale + offset, scheme=scheme).advantages_G
    torch.testing.assert_close(moved, group_advantages(rewards_G, scheme=scheme).advantages_G, rtol=1e-6, atol=1e-6)


@given(rewards_lists, st.sampled_from(["grpo", "dr_grpo", "rloo"]), st.data())
def test_p6_valid_advantages_sum_to_zero(rewards: list[float], preset: str, data: st.DataObject) -> None:
    flags = st.lists(st.booleans(), min_size=len(rewards), max_size=len(rewards))
    valid_G = torch.tensor(data.draw(flags))
    result = group_advantages(torch.tensor(rewards, dtype=torch.float64), valid_G, scheme=GROUP_PRESETS[preset])
    assert result.advantages_G.sum().item() == pytest.approx(0.0, abs=1e-9)
    assert (result.advantages_G[~valid_G] == 0).all()


@given(rewards_lists)
def test_p16_float32_agrees_with_float64(rewards: list[float]) -> None:
    exact = group_advantages(torch.tensor(rewards, dtype=torch.float64), scheme=GRPO).advantages_G
    single = group_advantages(torch.tensor(rewards, dtype=torch.float32), scheme=GRPO).advantages_G
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=2e-5, atol=2e-6)


def test_b1_1_groups_are_normalised_on_their_own() -> None:
    # Whatever another group earned, this one's siblings are compared with each other only.
    easy, hard = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0.0, 0.0, 1.0])
    pooled = group_advantages(torch.cat([easy, hard]), scheme=GRPO).advantages_G[:3]
    assert not torch.allclose(group_advantages(easy, scheme=GRPO).advantages_G, pooled)


def test_b1_2_a_trajectory_votes_once_however_many_samples_it_has() -> None:
    once = sample_advantages([0, 1], torch.tensor([1.0, 0.0]), scheme=GRPO)
    often = sample_advantages([0, 0, 0, 0, 1], torch.tensor([1.0, 0.0]), scheme=GRPO)
    assert often.tolist() == [once[0].item()] * 4 + [once[1].item()]


def test_b1_3_a_lone_member_has_no_advantage_whatever_its_reward() -> None:
    result = group_advantages(torch.tensor([7.0]), scheme=GRPO)
    assert result.advantages_G.tolist() == [0.0]
    assert result.is_degenerate


def test_a_lone_member_keeps_its_reward_on_request() -> None:
    result = group_advantages(torch.tensor([7.0]), scheme=GroupScheme("mean", "none", singleton="raw"))
    assert result.advantages_G.tolist() == [7.0]


def test_b1_4_an_unscorable_member_does_not_move_the_baseline() -> None:
    with_nan = group_advantages(torch.tensor([1.0, math.nan, 0.0]), scheme=DR_GRPO)
    assert with_nan.advantages_G.tolist() == [0.5, 0.0, -0.5]
    assert with_nan.keep_G.tolist() == [True, False, True]


def test_b1_5_a_member_that_does_not_train_does_not_vote() -> None:
    valid_G = torch.tensor([True, True, False])
    assert group_advantages(torch.tensor([1.0, 0.0, 100.0]), valid_G, scheme=DR_GRPO).advantages_G.tolist()[:2] == [
        0.5,
        -0.5,
    ]


def test_b1_6_one_outlier_among_equals_stays_finite_under_leave_one_out() -> None:
    rewards_G = torch.tensor([0.0] + [0.95] * 7, dtype=torch.float64)
    advantages_G = group_advantages(rewards_G, scheme=GroupScheme("loo", "std_sample")).advantages_G
    assert advantages_G.abs().max() < 3  # the peers' spread is zero: dividing by it would give about 1e6


@pytest.mark.parametrize("rewards", [[0.7, 0.7, 0.7], [0.1 + 0.2, 0.3, 0.3], [1e9, 1e9 + 1e-7, 1e9], [-5.0, -5.0]])
def test_b1_7_equal_up_to_rounding_is_exactly_zero_even_without_eps(rewards: list[float]) -> None:
    scheme = GroupScheme("mean", "std_sample", eps=0.0)
    result = group_advantages(torch.tensor(rewards, dtype=torch.float64), scheme=scheme)
    assert result.advantages_G.tolist() == [0.0] * len(rewards)
    assert result.is_degenerate


def test_small_but_real_differences_are_no_rounding() -> None:
    assert not group_advantages(torch.tensor([1e-3, 2e-3]), scheme=GRPO).is_degenerate


def test_no_valid_member_gives_nothing() -> None:
    result = group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([False, False]), scheme=GRPO)
    assert result.n_valid == 0
    assert not result.keep_G.any()


def test_batch_scale_uses_one_deviation_for_all_groups() -> None:
    rewards = [torch.tensor([1.0, 0.0]), torch.tensor([5.0, 5.0, math.nan])]
    std = batch_reward_std(rewards, [torch.ones(2).bool(), torch.ones(3).bool()])
    assert std == pytest.approx(torch.tensor([1.0, 0.0, 5.0, 5.0]).std().item())
    result = group_advantages(rewards[0], scheme=GROUP_PRESETS["batch_std"], batch_std=std)
    assert result.advantages_G[0].item() == pytest.approx(0.5 / (std + 1e-6))


def test_an_infinite_reward_is_refused() -> None:
    with pytest.raises(LearnerError, match="finite"):
        group_advantages(torch.tensor([1.0, math.inf]), scheme=GRPO)


@pytest.mark.parametrize("wrong", [{"baseline": "median"}, {"scale": "mad"}, {"singleton": "drop"}, {"eps": -1.0}])
def test_unknown_schemes_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        GroupScheme(**wrong)
