"""Step groups and shared edges: who is compared with whom."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turngate.learners.advantages import masked_whiten, reward_to_go
from turngate.learners.advantages.group import GROUP_PRESETS, GroupScheme, group_advantages
from turngate.learners.advantages.steps import (
    StepAdvantages,
    add_step_advantages,
    edge_advantages,
    edge_keys,
    step_group_advantages,
    step_returns,
)
from turngate.learners.ratios import ShapeError
from turngate.runtime.errors import LearnerError

NUMBERS = st.integers(-16, 16).map(lambda n: n / 8)
Z_SCORE = GroupScheme("mean", "std_sample", eps=0.0)


def real(*values):
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def groups(draw):
    """(rewards, keys) of a few trajectories over a handful of states."""
    members = draw(st.lists(st.lists(st.tuples(NUMBERS, st.sampled_from("abc")), max_size=5), min_size=1, max_size=5))
    rewards = [real(*(reward for reward, _ in steps)) for steps in members]
    return rewards, [[key for _, key in steps] for steps in members]


def test_returns_are_discounted_from_each_step_on() -> None:
    assert step_returns(real(1.0, 0.0, 4.0), gamma=0.5).tolist() == [2.0, 2.0, 4.0]


def test_steps_from_one_state_are_compared_across_trajectories_and_visits() -> None:
    # At "a" stand returns 1, 0 and, visited again, 0; "b" was passed once.
    out = step_group_advantages([real(0.0, 1.0), real(0.0, 0.0)], [["a", "b"], ["a", "a"]], gamma=1.0)
    torch.testing.assert_close(out.advantages, [real(2 / 3, 0.0), real(-1 / 3, -1 / 3)])


def test_bucket_sizes_show_how_much_there_was_to_compare() -> None:
    out = step_group_advantages([real(0.0, 1.0), real(0.0, 0.0)], [["a", "b"], ["a", "a"]])
    assert out.bucket_sizes == {1: 1, 3: 1}
    shown = {"step_buckets": 2, "step_bucket_size_mean": 2, "step_singleton_fraction": 0.25}
    histogram = {"1": 1, "2": 0, "3": 1, "4": 0, "5": 0, "6": 0, "7": 0, "8_plus": 0}
    assert out.metrics() == shown | {f"step_buckets_of_{size}": count for size, count in histogram.items()}


def test_one_bin_of_the_histogram_holds_all_large_buckets() -> None:
    metrics = StepAdvantages([], {7: 2, 8: 3, 100: 4}).metrics()
    assert metrics["step_buckets_of_7"] == 2
    assert metrics["step_buckets_of_8_plus"] == 7


def test_keys_with_a_clock_leave_nothing_to_compare_and_the_metrics_say_so() -> None:
    out = step_group_advantages([real(0.0, 1.0), real(0.0, 0.0)], [["a@1", "b@2"], ["a@3", "a@4"]])
    assert out.metrics()["step_singleton_fraction"] == 1.0
    assert not torch.cat(out.advantages).any()


@given(groups(), st.sampled_from(["none", "std_sample"]))
def test_p6_step_advantages_sum_to_zero_in_every_bucket(group, scale: str) -> None:
    rewards, keys = group
    out = step_group_advantages(rewards, keys, scheme=GroupScheme("mean", scale))
    placed = [
        pair for steps, names in zip(out.advantages, keys, strict=True) for pair in zip(names, steps, strict=True)
    ]
    for state in "abc":
        assert sum(float(a) for key, a in placed if key == state) == pytest.approx(0.0, abs=1e-9)


@given(groups(), st.sampled_from([0.5, 2.0, 8.0]))
def test_p5_step_advantages_with_a_scale_do_not_see_that_of_the_rewards(group, factor: float) -> None:
    rewards, keys = group
    out = step_group_advantages(rewards, keys, scheme=Z_SCORE)
    scaled = step_group_advantages([r * factor for r in rewards], keys, scheme=Z_SCORE)
    torch.testing.assert_close(out.advantages, scaled.advantages)


@given(groups(), st.randoms(use_true_random=False))
def test_p1_the_order_of_trajectories_does_not_matter(group, random) -> None:
    rewards, keys = group
    order = list(range(len(keys)))
    random.shuffle(order)
    out = step_group_advantages(rewards, keys).advantages
    shuffled = step_group_advantages([rewards[i] for i in order], [keys[i] for i in order]).advantages
    torch.testing.assert_close([out[i] for i in order], shuffled)


def test_members_that_do_not_count_do_not_vote() -> None:
    rewards, keys = [real(1.0), real(0.0), real(100.0), real(math.nan)], [["a"]] * 4
    out = step_group_advantages(rewards, keys, torch.tensor([True, True, False, True]))
    assert [a.item() for a in out.advantages] == [0.5, -0.5, 0.0, 0.0]
    assert out.bucket_sizes == {2: 1}


def test_b1_10_a_trajectory_is_never_normalised_by_itself() -> None:
    """alibaba/ROLL#397: with gamma 1 an outcome is the same return at every step, and its z-score over them is 0."""
    won, lost = reward_to_go(real(0.0, 0.0, 1.0), torch.ones(3).bool(), gamma=1.0), real(0.0, 0.0, 0.0)
    assert not masked_whiten(won, torch.ones(3).bool()).any()
    over_the_batch = masked_whiten(torch.stack([won, lost]), torch.ones(2, 3).bool())
    assert (over_the_batch[0] > 0.5).all()
    # Buckets hold the steps of the whole group, so repeats of a state inside one trajectory keep their credit too.
    out = step_group_advantages([real(0.0, 0.0, 1.0), lost], [["a", "a", "a"]] * 2, gamma=1.0)
    assert out.advantages[0].tolist() == [0.5, 0.5, 0.5]


def test_the_episode_votes_once_and_its_advantage_is_added() -> None:
    rewards, keys = [real(0.0, 1.0), real(0.0)], [["a", "b"], ["a"]]
    steps = step_group_advantages(rewards, keys, gamma=0.5)
    episode = group_advantages(real(1.0, 0.0), scheme=GROUP_PRESETS["dr_grpo"]).advantages_G
    total = add_step_advantages(episode, steps.advantages, omega=2.0)
    torch.testing.assert_close(total, [real(0.5 + 2 * 0.25, 0.5), real(-0.5 - 2 * 0.25)])


def test_shared_edges_get_the_mean_advantage_of_those_who_took_them() -> None:
    keys = [
        edge_keys(["home", "list", "end"], ["search", "buy"]),
        edge_keys(["home", "list", "end"], ["search", "quit"]),
        edge_keys(["home", "end"], ["quit"]),
    ]
    out = edge_advantages(real(1.0, -0.5, -0.5), keys)
    assert [a.tolist() for a in out.advantages] == [[0.25, 1.0], [0.25, -0.5], [-0.5]]
    assert out.bucket_sizes == {1: 3, 2: 1}


def test_an_edge_is_another_one_when_it_led_elsewhere() -> None:
    keys = [edge_keys(["home", "list"], ["search"]), edge_keys(["home", "error"], ["search"])]
    assert [a.item() for a in edge_advantages(real(1.0, -1.0), keys).advantages] == [1.0, -1.0]


def test_edges_of_members_that_do_not_count_are_left_out() -> None:
    out = edge_advantages(real(1.0, 0.0), [["edge"], ["edge"]], torch.tensor([True, False]))
    assert [a.item() for a in out.advantages] == [1.0, 0.0]


@given(groups())
def test_p16_float32_agrees_with_float64_and_is_given_back(group) -> None:
    rewards, keys = group
    exact = step_group_advantages(rewards, keys).advantages
    single = step_group_advantages([r.float() for r in rewards], keys).advantages
    assert all(a.dtype == torch.float32 for a in single)
    torch.testing.assert_close([a.double() for a in single], exact, rtol=2e-5, atol=2e-6)


def test_empty_groups_and_trajectories_give_nothing() -> None:
    assert step_group_advantages([], []).metrics()["step_buckets"] == 0
    assert [len(a) for a in step_group_advantages([real(), real(1.0)], [[], ["a"]]).advantages] == [0, 1]


def test_bad_inputs_are_refused() -> None:
    with pytest.raises(LearnerError, match="trajectory 1"):
        step_group_advantages([real(0.0), real(math.inf)], [["a"], ["a"]])
    with pytest.raises(ShapeError, match="reward and a key"):
        step_group_advantages([real(0.0, 0.0)], [["a"]])
    with pytest.raises(ShapeError, match="valid"):
        step_group_advantages([real(0.0)], [["a"]], torch.ones(2).bool())
    with pytest.raises(ShapeError, match="one per trajectory"):
        add_step_advantages(real(1.0), [])
    with pytest.raises(ShapeError, match="one per trajectory"):
        edge_advantages(real(1.0), [["a"], ["b"]])
    with pytest.raises(LearnerError, match="finite"):
        edge_advantages(real(math.nan), [["a"]])
    with pytest.raises(ShapeError, match="one more"):
        edge_keys(["home"], ["search"])
