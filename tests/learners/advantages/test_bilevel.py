"""Bi-level GAE: the identities between turns and tokens, on random episodes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turngate.learners.advantages.bilevel import gae_bilevel
from turngate.learners.advantages.gae import gae, gae_flat_tokens
from turngate.learners.ratios import ShapeError
from turngate.runtime.errors import ConfigError, LearnerError

NUMBERS = st.integers(-16, 16).map(lambda n: n / 8)
FACTORS = st.sampled_from([0.0, 0.3, 0.9, 1.0])
TRACES = st.fixed_dictionaries({"gamma_turn": FACTORS, "lam_turn": FACTORS})


def real(*values):
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def episodes(draw):
    """(rewards per turn, values per turn and token, rewards per turn and token, bootstrap)."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    rewards = real(*draw(st.lists(NUMBERS, min_size=len(lengths), max_size=len(lengths))))
    values, paid = (
        [real(*draw(st.lists(NUMBERS, min_size=length, max_size=length))) for length in lengths] for _ in range(2)
    )
    return rewards, values, paid, draw(st.none() | NUMBERS)


# --- P7: the identities


@given(episodes(), TRACES, FACTORS, FACTORS)
def test_p7_i1_the_last_tokens_q_is_the_turns_q(episode, traces, gamma_token: float, lam_token: float) -> None:
    rewards, values, _, bootstrap = episode
    out = gae_bilevel(rewards, values, bootstrap=bootstrap, gamma_token=gamma_token, lam_token=lam_token, **traces)
    last = torch.stack([t.advantages_T[-1] + v[-1] for t, v in zip(out.tokens, values, strict=True)])
    torch.testing.assert_close(last, out.turns.advantages_T + torch.stack([v[0] for v in values]))
    torch.testing.assert_close(torch.stack([t.targets_T[-1] for t in out.tokens]), out.turns.targets_T)


@given(episodes(), TRACES, st.booleans())
def test_p7_i2_without_a_token_trace_a_turns_token_advantages_sum_to_its_own(episode, traces, is_paid: bool) -> None:
    rewards, values, paid, bootstrap = episode
    token_rewards = paid if is_paid else None
    out = gae_bilevel(rewards, values, bootstrap=bootstrap, lam_token=0.0, token_rewards=token_rewards, **traces)
    torch.testing.assert_close(torch.stack([t.advantages_T.sum() for t in out.tokens]), out.turns.advantages_T)


@given(episodes(), TRACES, st.booleans())
def test_p7_i3_with_a_full_token_trace_the_first_tokens_advantage_is_the_turns(episode, traces, is_paid: bool) -> None:
    rewards, values, paid, bootstrap = episode
    out = gae_bilevel(rewards, values, bootstrap=bootstrap, token_rewards=paid if is_paid else None, **traces)
    torch.testing.assert_close(torch.stack([t.advantages_T[0] for t in out.tokens]), out.turns.advantages_T)


@given(episodes(), st.booleans())
def test_p7_i4_with_all_factors_one_it_is_flat_token_gae(episode, is_paid: bool) -> None:
    rewards, values, paid, bootstrap = episode
    token_rewards = paid if is_paid else [torch.zeros_like(v) for v in values]
    out = gae_bilevel(rewards, values, bootstrap=bootstrap, lam_turn=1.0, token_rewards=token_rewards)
    on_last = [r.clone() for r in token_rewards]
    for reward, rewards_L in zip(rewards, on_last, strict=True):
        rewards_L[-1] += reward
    everywhere = torch.ones(sum(len(v) for v in values)).bool()
    flat = gae_flat_tokens(everywhere, torch.cat(on_last), torch.cat(values), bootstrap=bootstrap, lam=1.0)
    torch.testing.assert_close(torch.cat([t.advantages_T for t in out.tokens]), flat.advantages_T)


@given(episodes(), TRACES)
def test_turn_advantages_are_gae_over_turns(episode, traces) -> None:
    rewards, values, _, bootstrap = episode
    out = gae_bilevel(rewards, values, bootstrap=bootstrap, **traces)
    first = torch.stack([v[0] for v in values])
    turns = gae(rewards, first, bootstrap=bootstrap, gamma=traces["gamma_turn"], lam=traces["lam_turn"])
    assert torch.equal(out.turns.advantages_T, turns.advantages_T)


# --- forms, token rewards, turn boundaries


def test_the_recursion_within_a_turn_by_hand() -> None:
    # Turn: return 1, V 0.5. Last token 1 - 0.25 = 0.75; first 0.25 - 0.5 + 0.5 * 0.75 = 0.125.
    out = gae_bilevel(real(1.0), [real(0.5, 0.25)], bootstrap=None, lam_token=0.5)
    assert out.tokens[0].advantages_T.tolist() == [0.125, 0.75]
    assert out.tokens[0].targets_T.tolist() == [0.625, 1.0]


def test_the_other_form_starts_with_the_turns_advantage() -> None:
    out = gae_bilevel(real(1.0), [real(0.5, 0.25)], bootstrap=None, lam_token=0.5, form="adv_init")
    assert out.tokens[0].advantages_T.tolist() == [0.0, 0.5]


def test_a_token_reward_is_seen_by_the_turn_and_paid_once() -> None:
    out = gae_bilevel(real(1.0), [real(0.0, 0.0)], bootstrap=None, token_rewards=[real(-0.25, -0.5)])
    assert out.turns.targets_T.tolist() == [0.25]
    assert out.tokens[0].advantages_T.tolist() == [0.25, 0.5]


def test_a_cut_inside_an_action_bootstraps_from_its_prefix() -> None:
    out = gae_bilevel(real(0.0), [real(0.5, 0.25)], bootstrap=0.75, lam_token=0.0)
    assert out.tokens[0].advantages_T.tolist() == [-0.25, 0.5]


def test_b3_6_turns_that_earn_nothing_are_turns() -> None:
    """RAGEN's core_algos.py looks for reward != 0: zero-reward turns merge, and an all-zero episode crashes."""
    values = [real(0.5, 0.25), real(0.0), real(0.75, 0.5)]
    out = gae_bilevel(real(0.0, 0.0, 0.0), values, bootstrap=None, lam_turn=0.0)
    assert out.turns.advantages_T.tolist() == [-0.5, 0.75, -0.75]
    assert [len(t.advantages_T) for t in out.tokens] == [2, 1, 2]


def test_single_token_actions_make_both_levels_equal() -> None:
    values = [real(0.5), real(0.25)]
    out = gae_bilevel(real(0.0, 1.0), values, bootstrap=None)
    assert torch.equal(torch.cat([t.advantages_T for t in out.tokens]), out.turns.advantages_T)


def test_results_have_the_dtype_of_the_values_and_no_graph() -> None:
    values = [torch.tensor([0.5, 0.25], requires_grad=True)]
    out = gae_bilevel(real(1.0), values, bootstrap=None)
    for tensor in (*out.turns, *out.tokens[0]):
        assert tensor.dtype == torch.float32
        assert not tensor.requires_grad


def test_an_episode_without_turns_gives_nothing() -> None:
    out = gae_bilevel(torch.zeros(0), [], bootstrap=None)
    assert out.turns.advantages_T.shape == (0,)
    assert out.tokens == []


# --- bad inputs


def test_a_turn_without_tokens_is_refused_with_what_to_do() -> None:
    with pytest.raises(ShapeError, match=r"turn 1.*injected"):
        gae_bilevel(real(0.0, 0.0), [real(0.5), real()], bootstrap=None)


def test_misaligned_inputs_are_refused() -> None:
    with pytest.raises(ShapeError, match="one per turn"):
        gae_bilevel(real(0.0, 0.0), [real(0.5)], bootstrap=None)
    with pytest.raises(ShapeError, match="per turn"):
        gae_bilevel(real(0.0), [real(0.5)], bootstrap=None, token_rewards=[])
    with pytest.raises(ShapeError, match="one shape"):
        gae_bilevel(real(0.0), [real(0.5)], bootstrap=None, token_rewards=[real(0.0, 0.0)])


def test_p17_what_is_not_finite_is_refused() -> None:
    with pytest.raises(LearnerError, match="finite"):
        gae_bilevel(real(0.0), [real(0.5, math.nan)], bootstrap=None)
    with pytest.raises(LearnerError, match="finite"):
        gae_bilevel(real(math.inf), [real(0.5)], bootstrap=None)
    with pytest.raises(LearnerError, match="finite"):
        gae_bilevel(real(0.0), [real(0.5)], bootstrap=None, token_rewards=[real(math.nan)])


@pytest.mark.parametrize("wrong", [{"form": "paper"}, {"gamma_token": 2.0}, {"lam_token": -1.0}, {"lam_turn": 1.5}])
def test_unknown_forms_and_factors_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong)).removesuffix("_turn")):
        gae_bilevel(real(0.0), [real(0.5)], bootstrap=None, **wrong)
