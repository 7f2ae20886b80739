"""Effective sample size and distances between policies."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turngate.learners.mismatch import effective_sample_size, mismatch_metrics

weights = st.lists(st.floats(-30, 30), min_size=1, max_size=12)


@given(weights, st.floats(-500, 500))
def test_effective_sample_size_lies_between_1_and_n_and_ignores_a_common_factor(
    logs: list[float], shift: float
) -> None:
    log_w = torch.tensor(logs, dtype=torch.float64)
    ess = effective_sample_size(log_w)
    assert 1 - 1e-9 <= ess.ess <= len(logs) + 1e-9
    assert effective_sample_size(log_w + shift).ess == pytest.approx(ess.ess, rel=1e-6)


def test_equal_weights_are_worth_all_samples() -> None:
    assert effective_sample_size(torch.zeros(5)).ess_ratio == pytest.approx(1.0)


def test_no_samples_are_worth_nothing() -> None:
    assert effective_sample_size(torch.zeros(0)).ess_ratio == 0.0


def test_small_token_drifts_multiply_into_useless_trajectories() -> None:
    drift = torch.tensor([0.05, -0.03, 0.08, 0.0], dtype=torch.float64)
    assert effective_sample_size(drift.repeat_interleave(100)).ess_ratio > 0.99
    assert effective_sample_size(drift * 100).ess_ratio < 0.3


def test_b2_14_metrics_are_over_policy_tokens_and_before_clamping() -> None:
    logp = torch.tensor([[-1.0, 0.0, -0.5]])
    behaviour = torch.tensor([[-2.0, -50.0, -30.5]])
    out = mismatch_metrics(logp, behaviour, torch.tensor([[True, False, True]]))
    assert out.max_abs == pytest.approx(30.0)
    assert out.mean_abs == pytest.approx(15.5)
    assert out.kl_k1 == pytest.approx(-15.5)


def test_divergences_of_one_token_by_hand() -> None:
    out = mismatch_metrics(torch.tensor([-1.0]), torch.tensor([-1.0 - math.log(2)]), torch.tensor([True]))
    assert out.kl_k3 == pytest.approx(1.0 - math.log(2), rel=1e-6)
    assert out.second_moment == pytest.approx(math.log(2) ** 2, rel=1e-6)
    assert out.chi2 == pytest.approx(3.0, rel=1e-6)


def test_nothing_to_measure_gives_zeros() -> None:
    out = mismatch_metrics(torch.zeros(2), torch.ones(2), torch.zeros(2).bool())
    assert out.max_abs == 0.0
