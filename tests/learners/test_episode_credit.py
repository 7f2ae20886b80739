"""Credit within one episode: by hand on three turns, and the identities between its two levels."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from turngate.learners.episode_credit import (
    CreditLevel,
    EpisodeCredit,
    GAEConfig,
    compute_episode_credit,
    observed_returns,
)
from turngate.runtime.errors import ConfigError, LearnerError

# Turns of 2, 1 and 3 tokens. V before each token:
VALUES = [torch.tensor(v, dtype=torch.float64) for v in ([0.5, 0.6], [0.4], [0.8, 0.7, 0.9])]
REWARDS = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
FINE = {"gamma": 0.5, "lam": 0.5}


def credit(
    config: GAEConfig,
    *,
    rewards: Tensor = REWARDS,
    values: Sequence[Tensor] = VALUES,
    bootstrap: float | None = None,
    penalties: Sequence[Tensor] | None = None,
) -> EpisodeCredit:
    return compute_episode_credit(rewards, values, bootstrap=bootstrap, config=config, token_rewards=penalties)


def flat(parts: Sequence[Tensor]) -> list[float]:
    return torch.cat(list(parts)).tolist()


def test_turn_advantages_equal_a_calculation_by_hand() -> None:
    # delta_2 = 1 - 0.8 = 0.2                      A_2 = 0.2
    # delta_1 = 0.25 + 0.5 * 0.8 - 0.4 = 0.25      A_1 = 0.25 + 0.25 * 0.2 = 0.3
    # delta_0 = 0 + 0.5 * 0.4 - 0.5 = -0.3         A_0 = -0.3 + 0.25 * 0.3 = -0.225
    found = credit(GAEConfig(**FINE))
    assert found.turn_advantages_T.tolist() == pytest.approx([-0.225, 0.3, 0.2])
    assert flat(found.advantages) == pytest.approx([-0.225] * 2 + [0.3] + [0.2] * 3)
    assert found.action_targets_T.tolist() == pytest.approx([0.275, 0.7, 1.0])
    assert flat(found.targets) == pytest.approx([0.275] * 2 + [0.7] + [1.0] * 3)


def test_a_truncated_episode_goes_on_from_its_bootstrap() -> None:
    # Only delta_2 changes: 1 + 0.5 * 0.6 - 0.8 = 0.5; A_1 = 0.25 + 0.25 * 0.5 = 0.375; A_0 = -0.3 + 0.25 * 0.375.
    found = credit(GAEConfig(**FINE), bootstrap=0.6)
    assert found.turn_advantages_T.tolist() == pytest.approx([-0.20625, 0.375, 0.5])


def test_a_bootstrap_of_zero_is_a_value_and_ends_alike() -> None:
    terminal, zero = credit(GAEConfig(**FINE)), credit(GAEConfig(**FINE), bootstrap=0.0)
    assert terminal.turn_advantages_T.tolist() == zero.turn_advantages_T.tolist()


def test_a_truncation_that_changes_nothing_gives_nothing() -> None:
    values = [torch.full((n,), 0.4) for n in (2, 1, 3)]
    for level in ("turn", "token", "bilevel"):
        found = credit(GAEConfig(level=level), rewards=torch.zeros(3), values=values, bootstrap=float(values[0][0]))
        assert flat(found.advantages) == pytest.approx([0.0] * 6, abs=1e-7)


def test_token_advantages_equal_a_calculation_by_hand() -> None:
    # Six steps; actions are paid at their last tokens (1, 2 and 5); gamma 0.5, lambda 0.5.
    # A_5 = 1 - 0.9 = 0.1;  A_4 = 0.5 * 0.9 - 0.7 + 0.25 * 0.1 = -0.225;  A_3 = 0.35 - 0.8 + 0.25 * -0.225 = -0.50625
    # A_2 = 0.25 + 0.5 * 0.8 - 0.4 + 0.25 * -0.50625 = 0.1234375
    # A_1 = 0.5 * 0.4 - 0.6 + 0.25 * 0.1234375 = -0.369140625;  A_0 = 0.3 - 0.5 + 0.25 * A_1 = -0.29228515625
    found = credit(GAEConfig(level="token", **FINE))
    expected = [-0.29228515625, -0.369140625, 0.1234375, -0.50625, -0.225, 0.1]
    assert flat(found.advantages) == pytest.approx(expected)
    assert found.turn_advantages_T.tolist() == pytest.approx([expected[1], expected[2], expected[5]])
    targets = [a + v for a, v in zip(expected, flat(VALUES), strict=True)]
    assert flat(found.targets) == pytest.approx(targets)
    assert found.action_targets_T.tolist() == pytest.approx([targets[1], targets[2], targets[5]])


def test_bilevel_advantages_equal_a_calculation_by_hand() -> None:
    # Targets of the turns as above: 0.275, 0.7, 1. Within a turn gamma and lambda 1: A_j = target - V_j.
    found = credit(GAEConfig(level="bilevel", **FINE))
    assert flat(found.advantages) == pytest.approx([0.275 - 0.5, 0.275 - 0.6, 0.7 - 0.4, 1 - 0.8, 1 - 0.7, 1 - 0.9])
    assert flat(found.targets) == pytest.approx([0.275] * 2 + [0.7] + [1.0] * 3)
    assert found.turn_advantages_T.tolist() == pytest.approx([-0.225, 0.3, 0.2])


def test_a_short_trace_within_an_action_bootstraps_on_its_prefixes() -> None:
    # lam_token 0: A_j = V_{j+1} - V_j, the last one target - V. They add up to the turn's (I2).
    found = credit(GAEConfig(level="bilevel", lam_token=0.0, **FINE))
    assert flat(found.advantages) == pytest.approx([0.1, 0.275 - 0.6, 0.3, -0.1, 0.2, 0.1])
    sums = [float(a.sum()) for a in found.advantages]
    assert sums == pytest.approx([-0.225, 0.3, 0.2])


@pytest.mark.parametrize(("level", "length"), [("turn", 3), ("bilevel", 3), ("token", 6)])
def test_adaptive_traces_count_the_steps_of_the_level(level: CreditLevel, length: int) -> None:
    adaptive = credit(GAEConfig(level=level, lam=0.1, length_adaptive=0.5))
    expected = credit(GAEConfig(level=level, lam=1 - 1 / (0.5 * length)))
    assert flat(adaptive.advantages) == pytest.approx(flat(expected.advantages))
    assert adaptive.turn_advantages_T.tolist() == pytest.approx(expected.turn_advantages_T.tolist())


@pytest.mark.parametrize("level", ["turn", "bilevel", "token"])
def test_adaptive_traces_leave_the_critics_targets_at_lambda_1(level: CreditLevel) -> None:
    # VAPO decouples the two: shorter traces for the policy must not teach the critic its own bootstraps.
    adaptive = credit(GAEConfig(level=level, length_adaptive=0.5))
    untraced = credit(GAEConfig(level=level, lam=1.0))
    assert flat(adaptive.targets) == pytest.approx(flat(untraced.targets))
    assert adaptive.action_targets_T.tolist() == pytest.approx(untraced.action_targets_T.tolist())
    assert flat(adaptive.advantages) != pytest.approx(flat(untraced.advantages))


def test_a_single_token_action_is_a_turn_and_a_token() -> None:
    values = [torch.tensor([0.3], dtype=torch.float64), torch.tensor([0.6], dtype=torch.float64)]
    made = [
        credit(GAEConfig(level=level), rewards=REWARDS[1:], values=values) for level in ("turn", "token", "bilevel")
    ]
    for other in made[1:]:
        assert flat(other.advantages) == pytest.approx(flat(made[0].advantages))


# --- penalties per token


PENALTIES = [torch.tensor(p, dtype=torch.float64) for p in ([-0.1, -0.2], [-0.05], [0.0, -0.3, 0.1])]


def test_a_turn_pays_the_penalties_of_all_its_tokens() -> None:
    summed = REWARDS + torch.stack([p.sum() for p in PENALTIES])
    for bootstrap in (None, 0.6):
        found = credit(GAEConfig(**FINE), penalties=PENALTIES, bootstrap=bootstrap)
        expected = credit(GAEConfig(**FINE), rewards=summed, bootstrap=bootstrap)
        assert found.turn_advantages_T.tolist() == pytest.approx(expected.turn_advantages_T.tolist())


def test_tokens_pay_their_own_penalties() -> None:
    # At gamma 1 and lambda 1 the advantage is what was paid from the token on, minus its value.
    paid = torch.cat(PENALTIES).clone()
    paid[[1, 2, 5]] += REWARDS
    to_go = paid.flip(0).cumsum(0).flip(0)
    expected = (to_go - torch.cat(VALUES)).tolist()
    for level in ("token", "bilevel"):
        found = credit(GAEConfig(level=level, lam=1.0), penalties=PENALTIES)
        assert flat(found.advantages) == pytest.approx(expected)


def test_without_penalties_nothing_changes() -> None:
    none = [torch.zeros_like(v) for v in VALUES]
    for level in ("turn", "token", "bilevel"):
        config = GAEConfig(level=level, **FINE)
        assert flat(credit(config, penalties=none).advantages) == flat(credit(config).advantages)


# --- identities


@st.composite
def episodes(draw: st.DrawFn) -> tuple[Tensor, list[Tensor], float | None]:
    numbers = st.floats(-2, 2, width=32)
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    values = [torch.tensor([draw(numbers) for _ in range(n)], dtype=torch.float64) for n in lengths]
    rewards = torch.tensor([draw(numbers) for _ in lengths], dtype=torch.float64)
    return rewards, values, draw(st.none() | numbers)


FACTORS = st.floats(0, 1)


@given(episodes(), FACTORS, FACTORS, FACTORS, FACTORS)
def test_p7_i1_the_last_token_of_an_action_is_worth_what_the_action_was(
    episode: Any, gamma: float, lam: float, gamma_token: float, lam_token: float
) -> None:
    rewards, values, bootstrap = episode
    config = GAEConfig(level="bilevel", gamma=gamma, lam=lam, gamma_token=gamma_token, lam_token=lam_token)
    found = credit(config, rewards=rewards, values=values, bootstrap=bootstrap)
    last_targets = torch.stack([y[-1] for y in found.targets])
    first_values = torch.stack([v[0] for v in values])
    assert torch.allclose(last_targets, found.turn_advantages_T + first_values, atol=1e-9)
    assert torch.allclose(last_targets, found.action_targets_T, atol=1e-9)


@given(episodes(), FACTORS, FACTORS)
def test_p7_i2_without_a_token_trace_advantages_of_tokens_add_up_to_the_turns(
    episode: Any, gamma: float, lam: float
) -> None:
    rewards, values, bootstrap = episode
    config = GAEConfig(level="bilevel", gamma=gamma, lam=lam, lam_token=0.0)
    found = credit(config, rewards=rewards, values=values, bootstrap=bootstrap)
    assert torch.allclose(torch.stack([a.sum() for a in found.advantages]), found.turn_advantages_T, atol=1e-9)


@given(episodes(), FACTORS, FACTORS)
def test_p7_i3_with_a_full_token_trace_the_first_token_has_the_turns_advantage(
    episode: Any, gamma: float, lam: float
) -> None:
    rewards, values, bootstrap = episode
    config = GAEConfig(level="bilevel", gamma=gamma, lam=lam)
    found = credit(config, rewards=rewards, values=values, bootstrap=bootstrap)
    assert torch.allclose(torch.stack([a[0] for a in found.advantages]), found.turn_advantages_T, atol=1e-9)


@given(episodes())
def test_p7_i4_with_all_factors_1_two_levels_are_flat_tokens_and_return_minus_value(episode: Any) -> None:
    rewards, values, bootstrap = episode
    both, tokens = (
        credit(GAEConfig(level=level, lam=1.0), rewards=rewards, values=values, bootstrap=bootstrap)
        for level in ("bilevel", "token")
    )
    assert flat(both.advantages) == pytest.approx(flat(tokens.advantages), abs=1e-9)
    to_go = rewards.flip(0).cumsum(0).flip(0) + (bootstrap or 0.0)
    expected = torch.cat([g - v for g, v in zip(to_go, values, strict=True)])
    assert flat(both.advantages) == pytest.approx(expected.tolist(), abs=1e-9)


@given(episodes(), st.sampled_from(["turn", "token", "bilevel"]))
def test_targets_are_advantages_plus_values(episode: Any, level: CreditLevel) -> None:
    rewards, values, bootstrap = episode
    found = credit(GAEConfig(level=level, **FINE), rewards=rewards, values=values, bootstrap=bootstrap)
    if level == "turn":
        of_turns = [(a[0], y[0], v[0]) for a, y, v in zip(found.advantages, found.targets, values, strict=True)]
        assert all(float(a + v) == pytest.approx(float(y), abs=1e-9) for a, y, v in of_turns)
    else:
        assert flat(found.targets) == pytest.approx((torch.cat(list(found.advantages)) + torch.cat(values)).tolist())


# --- the rest


@pytest.mark.parametrize("level", ["turn", "token", "bilevel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_are_detached_and_in_the_dtype_of_the_values(level: CreditLevel, dtype: torch.dtype) -> None:
    values = [v.to(dtype).requires_grad_() for v in VALUES]
    found = credit(GAEConfig(level=level), values=values)
    for tensor in (*found.advantages, *found.targets, found.turn_advantages_T, found.action_targets_T):
        assert tensor.dtype == dtype
        assert not tensor.requires_grad
    assert [len(a) for a in found.advantages] == [len(y) for y in found.targets] == [2, 1, 3]


@pytest.mark.parametrize("level", ["turn", "token", "bilevel"])
@pytest.mark.parametrize("bad", ["reward", "value", "bootstrap", "penalty"])
def test_numbers_that_are_not_finite_are_refused(level: CreditLevel, bad: str) -> None:
    nan = torch.tensor([math.nan], dtype=torch.float64)
    # At level turn only V at the start of turns counts, but a critic that says NaN is broken wherever it says it.
    rewards = torch.cat([nan, REWARDS[1:]]) if bad == "reward" else REWARDS
    values = [VALUES[0], nan, VALUES[2]] if bad == "value" else VALUES
    penalties = [PENALTIES[0], nan, PENALTIES[2]] if bad == "penalty" else None
    with pytest.raises(LearnerError, match="must be finite"):
        credit(
            GAEConfig(level=level), rewards=rewards, values=values, penalties=penalties,
            bootstrap=math.inf if bad == "bootstrap" else None,
        )  # fmt: skip


def test_observed_returns_discount_like_the_targets() -> None:
    lengths = [2, 1, 3]
    turns = observed_returns(REWARDS, lengths, GAEConfig(gamma=0.5))
    assert turns.tolist() == pytest.approx([0.5 * (0.25 + 0.5), 0.25 + 0.5, 1.0])
    # Per token: from token 0 the 0.25 is 2 tokens away and the 1 is 5; from token 2 they are 0 and 3; from 3 it is 2.
    tokens = observed_returns(REWARDS, lengths, GAEConfig(level="token", gamma=0.5))
    assert tokens.tolist() == pytest.approx([0.25 / 4 + 1 / 32, 0.25 + 1 / 8, 1 / 4])
    for level in ("turn", "token", "bilevel"):
        config = GAEConfig(level=level, gamma=0.5, gamma_token=1.0, lam=1.0)
        targets = credit(config).targets
        assert [float(y[0]) for y in targets] == pytest.approx(observed_returns(REWARDS, lengths, config).tolist())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GAEConfig(gamma=0.9, gamma_token=0.9), False),
        (GAEConfig(level="token"), False),
        (GAEConfig(level="token", gamma=0.9), True),
        (GAEConfig(level="bilevel", gamma=0.9), False),
        (GAEConfig(level="bilevel", gamma_token=0.9), True),
    ],
)
def test_it_is_known_whether_longer_actions_discount_more(config: GAEConfig, expected: bool) -> None:
    assert config.discounts_tokens is expected


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"level": "segment"}, "turn, token or bilevel"),
        ({"gamma": 1.1}, "gamma must be from 0 to 1"),
        ({"lam": -0.1}, "lam must be from 0 to 1"),
        ({"gamma_token": math.nan}, "gamma_token must be from 0 to 1"),
        ({"lam_token": 2.0}, "lam_token must be from 0 to 1"),
        ({"length_adaptive": 0.0}, "length_adaptive must be positive"),
    ],
)
def test_configs_that_make_no_sense_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        GAEConfig(**options)
