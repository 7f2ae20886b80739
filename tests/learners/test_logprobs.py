"""Log-probs: aligned with their tokens, and of the distribution that was sampled."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turngate.learners.logprobs import (
    entropy_from_logits,
    entropy_from_top_k,
    sampling_log_softmax,
    selected_logprobs,
    token_logprobs,
)
from turngate.runtime.errors import ConfigError

LOGITS = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, math.log(2.0)], [9.0, 0.0, 0.0]], dtype=torch.float64)


def test_b2_5_the_log_prob_of_a_token_comes_from_the_position_before_it() -> None:
    logp = token_logprobs(LOGITS, torch.tensor([0, 0, 2]))
    assert logp[0].item() == 0.0
    assert logp[1].item() == pytest.approx(2.0 - math.log(math.exp(2) + math.e + 1))
    assert logp[2].item() == pytest.approx(math.log(0.5))


def test_b2_6_temperature_acts_on_logits_not_on_log_probs() -> None:
    cold = selected_logprobs(LOGITS[:1], torch.tensor([1]), temperature=0.5).item()
    raw = selected_logprobs(LOGITS[:1], torch.tensor([1])).item()
    assert cold == pytest.approx(2.0 - math.log(math.exp(4) + math.exp(2) + 1))
    assert cold != pytest.approx(raw / 0.5)


def test_b2_7_top_k_and_top_p_renormalise_on_what_is_kept() -> None:
    top_k = sampling_log_softmax(LOGITS[0], top_k=2).exp()
    assert top_k.tolist() == [pytest.approx(math.e / (math.e + 1)), pytest.approx(1 / (math.e + 1)), 0.0]
    # The probabilities are 0.67, 0.24, 0.09: two tokens reach 0.9.
    top_p = sampling_log_softmax(LOGITS[0], top_p=0.9)
    torch.testing.assert_close(top_p.exp(), top_k)
    assert sampling_log_softmax(LOGITS[0], top_p=0.5).exp().tolist() == [1.0, 0.0, 0.0]


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8), st.floats(0.2, 3), st.integers(0, 9), st.floats(0.05, 1.0))
def test_sampling_distributions_sum_to_one(logits: list[float], temperature: float, top_k: int, top_p: float) -> None:
    logp = sampling_log_softmax(torch.tensor(logits), temperature=temperature, top_k=top_k, top_p=top_p)
    assert logp.exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    assert logp.argmax() in (torch.tensor(logits) == max(logits)).nonzero()


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_greedy_sampling_has_no_log_probs(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature must be positive"):
        selected_logprobs(LOGITS, torch.tensor([0, 0, 0]), temperature=temperature)


def test_entropy_of_a_uniform_row_is_log_v() -> None:
    assert entropy_from_logits(torch.zeros(2, 8)).tolist() == [pytest.approx(math.log(8))] * 2


def test_a_forbidden_token_adds_no_entropy() -> None:
    assert entropy_from_logits(torch.tensor([0.0, 0.0, -math.inf])).item() == pytest.approx(math.log(2.0))


@given(st.lists(st.floats(-4, 4), min_size=4, max_size=8), st.integers(1, 4))
def test_b2_16_top_k_entropies_bound_the_full_one_from_below(logits: list[float], k: int) -> None:
    values = torch.tensor(logits, dtype=torch.float64)
    full = entropy_from_logits(values).item()
    parts = entropy_from_top_k(torch.log_softmax(values, 0).topk(k).values)
    assert parts["partial_sum"].item() <= parts["tail_bound_low"].item() + 1e-12 <= full + 1e-9
