"""GAE: numbers by hand, the explicit sum and lambda-returns as references, and the ways ends and masks go wrong."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turngate.envs.base import End
from turngate.learners.advantages import masked_whiten
from turngate.learners.advantages.gae import (
    bootstrap_value,
    gae,
    gae_batch,
    gae_flat_tokens,
    gae_segments,
    length_adaptive_lambda,
)
from turngate.learners.ratios import ShapeError
from turngate.learners.voting import critic_handling
from turngate.runtime.errors import ConfigError, LearnerError

NUMBERS = st.integers(-16, 16).map(lambda n: n / 8)
FACTORS = st.sampled_from([0.0, 0.3, 0.9, 1.0])


def real(*values):
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def episodes(draw, min_size=1):
    """(rewards, values, bootstrap or None) of one trajectory."""
    steps = draw(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=min_size, max_size=6))
    rewards, values = zip(*steps, strict=True)
    return list(rewards), list(values), draw(st.none() | NUMBERS)


def residuals(rewards, values, bootstrap, gamma):
    following = [*values[1:], bootstrap or 0.0]
    return [r + gamma * n - v for r, v, n in zip(rewards, values, following, strict=True)]


# --- numbers and references


def test_advantages_by_hand() -> None:
    # Backwards: 1 - 0.5 = 0.5, then 0 + 0.5*0.5 - 0.25 + 0.5*0.5*0.5 = 0.125.
    estimate = gae(real(0.0, 1.0), real(0.25, 0.5), bootstrap=None, gamma=0.5, lam=0.5)
    assert estimate.advantages_T.tolist() == [0.125, 0.5]
    assert estimate.targets_T.tolist() == [0.375, 1.0]


@given(episodes(), FACTORS, FACTORS)
def test_p8_gae_is_the_explicit_sum_of_residuals(episode, gamma: float, lam: float) -> None:
    rewards, values, bootstrap = episode
    deltas = residuals(rewards, values, bootstrap, gamma)
    expected = [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]
    estimate = gae(real(*rewards), real(*values), bootstrap=bootstrap, gamma=gamma, lam=lam)
    torch.testing.assert_close(estimate.advantages_T, real(*expected))


@given(episodes(), FACTORS, FACTORS)
def test_p8_targets_are_lambda_returns(episode, gamma: float, lam: float) -> None:
    rewards, values, bootstrap = episode
    ahead, steps = [*values[1:], bootstrap or 0.0], len(rewards)

    def n_step_return(t: int, n: int) -> float:
        paid = sum(gamma**k * rewards[t + k] for k in range(n))
        return paid + gamma**n * ahead[t + n - 1]

    expected = []
    for t in range(steps):
        left = steps - t
        mixed = sum((1 - lam) * lam ** (n - 1) * n_step_return(t, n) for n in range(1, left))
        expected.append(mixed + lam ** (left - 1) * n_step_return(t, left))
    estimate = gae(real(*rewards), real(*values), bootstrap=bootstrap, gamma=gamma, lam=lam)
    torch.testing.assert_close(estimate.targets_T, real(*expected))
    torch.testing.assert_close(estimate.advantages_T, real(*expected) - real(*values))


@given(episodes(min_size=2), FACTORS, FACTORS, st.data())
def test_p9_a_cut_that_bootstraps_with_the_next_value_gives_that_steps_td_error(episode, gamma, lam, data) -> None:
    rewards, values, bootstrap = episode
    t = data.draw(st.integers(0, len(rewards) - 2))
    cut = gae(real(*rewards[: t + 1]), real(*values[: t + 1]), bootstrap=values[t + 1], gamma=gamma, lam=lam)
    whole = gae(real(*rewards), real(*values), bootstrap=bootstrap, gamma=gamma, lam=0.0)
    torch.testing.assert_close(cut.advantages_T[-1], whole.advantages_T[t])


@given(episodes(), FACTORS, FACTORS)
def test_p16_float32_agrees_with_float64_and_is_given_back(episode, gamma: float, lam: float) -> None:
    rewards, values, bootstrap = episode
    exact = gae(real(*rewards), real(*values), bootstrap=bootstrap, gamma=gamma, lam=lam)
    single = gae(real(*rewards).float(), real(*values).float(), bootstrap=bootstrap, gamma=gamma, lam=lam)
    for one, other in zip(single, exact, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-6)


def test_a_truncation_that_changes_nothing_has_no_advantage() -> None:
    assert gae(real(0.0), real(0.7), bootstrap=0.7).advantages_T.tolist() == [0.0]


def test_results_are_detached() -> None:
    values = torch.tensor([0.1, 0.2], requires_grad=True)
    estimate = gae(torch.zeros(2), values, bootstrap=None)
    flat = gae_flat_tokens(torch.tensor([True, False]), torch.zeros(2), values, bootstrap=None)
    assert not any(x.requires_grad for x in (*estimate, flat.advantages_T, flat.targets_T))


def test_no_steps_give_nothing() -> None:
    estimate = gae(torch.zeros(0), torch.zeros(0), bootstrap=0.5)
    assert estimate.advantages_T.shape == estimate.targets_T.shape == (0,)


# --- segments and batches


@given(episodes(), FACTORS, st.data())
def test_p3_where_a_trajectory_is_split_into_segments_changes_nothing(episode, lam: float, data) -> None:
    rewards, values, bootstrap = episode
    at = data.draw(st.integers(0, len(rewards)))
    parts = [[real(*x[:at]), real(*x[at:])] for x in (rewards, values)]
    split = gae_segments(*parts, bootstrap=bootstrap, lam=lam)
    assert torch.equal(
        split.advantages_T, gae(real(*rewards), real(*values), bootstrap=bootstrap, lam=lam).advantages_T
    )


def test_segments_must_pair_up() -> None:
    with pytest.raises(ShapeError, match="per segment"):
        gae_segments([real(1.0)], [real(1.0), real(2.0)], bootstrap=None)
    with pytest.raises(LearnerError, match="empty"):
        gae_segments([], [], bootstrap=None)


def test_every_trajectory_of_a_batch_is_estimated_on_its_own_by_its_own_end() -> None:
    rewards, values = [real(0.0, 1.0), real(0.0), real(0.5)], [real(0.5, 0.6), real(0.4), real(0.3)]
    ends = [End.success, End.turn_limit, End.env_error]
    first, second, third = gae_batch(rewards, values, ends, [0.9, 0.8, None])
    assert torch.equal(first.advantages_T, gae(rewards[0], values[0], bootstrap=None)[0])
    assert torch.equal(second.advantages_T, gae(rewards[1], values[1], bootstrap=0.8)[0])
    assert third is None


def test_a_batch_must_say_how_each_trajectory_ended() -> None:
    with pytest.raises(ShapeError, match="one length"):
        gae_batch([real(0.0)], [real(0.0)], [], [None])


# --- known mistakes


def flat(mask, rewards, values, **options):
    return gae_flat_tokens(torch.tensor(mask).bool(), real(*rewards), real(*values), **{"bootstrap": None, **options})


@given(episodes(), FACTORS, FACTORS, st.data())
def test_b3_1_observation_tokens_are_not_transitions(episode, gamma: float, lam: float, data) -> None:
    """However long observations are and whatever a critic says on them (verl#2337, radixark/miles#1827)."""
    rewards, values, bootstrap = episode
    gaps = data.draw(st.lists(st.integers(0, 3), min_size=len(rewards), max_size=len(rewards)))
    junk = data.draw(st.sampled_from([9.0, -1e6, math.nan, math.inf]))
    mask, paid, seen = [], [], []
    for gap, reward, value in zip(gaps, rewards, values, strict=True):
        mask += [0] * gap + [1]
        paid += [0.0] * gap + [reward]
        seen += [junk] * gap + [value]
    out = flat(mask, paid, seen, bootstrap=bootstrap, gamma=gamma, lam=lam)
    expected = gae(real(*rewards), real(*values), bootstrap=bootstrap, gamma=gamma, lam=lam)
    on_policy = torch.tensor(mask).bool()
    assert torch.equal(out.advantages_T[on_policy], expected.advantages_T)
    assert torch.equal(out.targets_T[on_policy], expected.targets_T)
    assert not out.advantages_T[~on_policy].any()
    assert not out.targets_T[~on_policy].any()


def test_b3_2_a_reward_on_an_observation_belongs_to_the_token_before_it() -> None:
    """Neither lost nor discounted on the way (radixark/miles#1827; verl's compute_gae_advantage_return drops it)."""
    moved = flat([1, 0, 0, 1], [0.0, 0.0, 2.0, 1.0], [0.1, 9.0, 9.0, 0.2], gamma=0.5)
    direct = flat([1, 0, 0, 1], [2.0, 0.0, 0.0, 1.0], [0.1, 9.0, 9.0, 0.2], gamma=0.5)
    assert torch.equal(moved.advantages_T, direct.advantages_T)
    assert moved.dropped_rewards == 0


def test_a_reward_before_the_first_policy_token_is_counted_and_left_out() -> None:
    out = flat([0, 0, 1], [0.5, 0.25, 1.0], [9.0, 9.0, 0.0])
    assert (out.dropped_rewards, out.dropped_total) == (2, 0.75)
    assert out.targets_T.tolist() == [0.0, 0.0, 1.0]


def test_no_policy_token_gives_zeros_and_drops_every_reward() -> None:
    out = flat([0, 0], [0.0, 1.0], [3.0, 4.0])
    assert out.advantages_T.tolist() == out.targets_T.tolist() == [0.0, 0.0]
    assert out.dropped_rewards == 1


@pytest.mark.parametrize("end", End)
def test_b3_3_what_an_end_means_comes_from_the_record(end: End) -> None:
    """Not from the padded width (areal-project/AReaL#1637); the rule is the one of `critic_handling`."""
    handling = critic_handling(end)
    if handling == "drop":
        with pytest.raises(LearnerError, match=end.value):
            bootstrap_value(end, 0.5)
    else:
        assert bootstrap_value(end, 0.5) == (None if handling == "reward" else 0.5)


@pytest.mark.parametrize("padding", [0, 1, 7])
def test_b3_3_padding_says_nothing_about_the_end(padding: int) -> None:
    mask, rewards, values = [1, 1] + [0] * padding, [0.0, 1.0] + [0.0] * padding, [0.5, 0.25] + [9.0] * padding
    terminated, truncated = flat(mask, rewards, values), flat(mask, rewards, values, bootstrap=0.75)
    assert terminated.targets_T[1].item() == 1.0
    assert truncated.targets_T[1].item() == 1.75


def test_b3_4_a_truncation_bootstraps_and_is_still_a_boundary() -> None:
    """Toni-SM/skrl#224 and #449, ray-project/ray#59958: not terminal, and nothing of the next trajectory gets in."""
    ends = [End.timeout, End.success]
    first, second = gae_batch([real(0.0), real(5.0)], [real(0.5), real(0.0)], ends, [0.75, None], lam=1.0)
    assert first.advantages_T.tolist() == [0.25]
    assert second.advantages_T.tolist() == [5.0]


def test_b3_4_a_truncation_without_a_value_is_refused() -> None:
    with pytest.raises(LearnerError, match="value of its last context"):
        bootstrap_value(End.token_limit, None)


def test_b3_5_the_bootstrap_is_the_value_after_the_last_action() -> None:
    """Not of the state before it (DexForce/EmbodiChain#612)."""
    estimate = gae(real(0.0, 0.0), real(0.25, 0.5), bootstrap=1.0, lam=0.0)
    assert estimate.advantages_T.tolist() == [0.25, 0.5]


def test_b3_8_a_value_after_a_terminal_end_is_not_read() -> None:
    """verl#50: whatever the critic says there, nothing follows."""
    out = [gae_batch([real(1.0)], [real(0.4)], [End.failure], [v])[0] for v in (0.0, 0.9, math.nan, None)]
    assert {e.targets_T.item() for e in out if e is not None} == {1.0}


def test_b3_9_the_advantage_is_the_return_minus_the_value_not_the_reward_minus_it() -> None:
    """natolambert/rlhf-book#216: a turn that earns nothing itself leads to the success at the end."""
    estimate = gae(real(0.0, 0.0, 1.0), real(0.5, 0.5, 0.5), bootstrap=None, lam=1.0)
    assert estimate.advantages_T.tolist() == [0.5, 0.5, 0.5]


def test_b3_10_whitening_advantages_leaves_the_targets_as_they_were() -> None:
    """pytorch/rl#1033: the target is the raw advantage plus the value, also when the policy gets a whitened one."""
    values = real(0.2, 0.1, 0.7)
    estimate = gae(real(0.0, 0.0, 1.0), values, bootstrap=None)
    raw, targets = estimate.advantages_T.clone(), estimate.targets_T.clone()
    whitened = masked_whiten(estimate.advantages_T, torch.ones(3).bool())
    assert torch.equal(estimate.targets_T, targets)
    torch.testing.assert_close(targets - values, raw)
    assert not torch.allclose(whitened + values, targets)


def test_b3_11_a_terminal_reward_behind_the_last_action_belongs_to_its_last_token() -> None:
    """slime writes it on the last response token, which may be an observation or padding."""
    behind = flat([1, 1, 0, 0], [0.0, 0.0, 0.0, 1.0], [0.5, 0.6, 9.0, 9.0], lam=0.5)
    on_it = flat([1, 1, 0, 0], [0.0, 1.0, 0.0, 0.0], [0.5, 0.6, 9.0, 9.0], lam=0.5)
    assert torch.equal(behind.advantages_T, on_it.advantages_T)
    assert behind.targets_T[1].item() == 1.0


# --- long inputs and bad ones


def test_ten_thousand_tokens_carry_the_outcome_to_the_first() -> None:
    count = 10_000
    rewards = torch.zeros(count)
    rewards[-1] = 1.0
    out = gae_flat_tokens(torch.ones(count).bool(), rewards, torch.zeros(count), bootstrap=None, lam=1.0)
    assert torch.equal(out.advantages_T, torch.ones(count))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_p17_rewards_values_and_bootstraps_must_be_finite(bad: float) -> None:
    with pytest.raises(LearnerError, match="rewards must be finite"):
        gae(real(bad), real(0.0), bootstrap=None)
    with pytest.raises(LearnerError, match="values must be finite"):
        gae(real(0.0), real(bad), bootstrap=None)
    with pytest.raises(LearnerError, match="bootstrap must be finite"):
        gae(real(0.0), real(0.0), bootstrap=bad)
    with pytest.raises(LearnerError, match="rewards must be finite"):
        flat([1, 0], [0.0, bad], [0.0, 0.0])  # a masked reward counts


def test_shapes_and_types_are_checked() -> None:
    with pytest.raises(ShapeError, match="one shape"):
        gae(torch.zeros(2), torch.zeros(3), bootstrap=None)
    with pytest.raises(ShapeError, match="one trajectory"):
        gae(torch.zeros(2, 2), torch.zeros(2, 2), bootstrap=None)
    with pytest.raises(ShapeError, match="one trajectory"):
        gae_flat_tokens(torch.ones(2, 2).bool(), torch.zeros(2, 2), torch.zeros(2, 2), bootstrap=None)
    with pytest.raises(LearnerError, match="floating point"):
        gae(torch.zeros(2), torch.zeros(2, dtype=torch.int64), bootstrap=None)


@pytest.mark.parametrize("wrong", [{"gamma": 1.01}, {"lam": -0.1}, {"lam": math.nan}])
def test_discounts_and_traces_lie_between_0_and_1(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        gae(real(0.0), real(0.0), bootstrap=None, **wrong)


def test_longer_responses_get_longer_traces() -> None:
    assert [length_adaptive_lambda(n, alpha=0.05) for n in (1, 20, 200)] == [0.0, 0.0, 0.9]
    with pytest.raises(ConfigError, match="alpha"):
        length_adaptive_lambda(10, alpha=0.0)
    with pytest.raises(ConfigError, match="tokens"):
        length_adaptive_lambda(0)
