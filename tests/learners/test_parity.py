"""The comparison of sampler and learner."""

import math
from typing import Any

import pytest
import torch

from turngate.learners.batch import lay_out
from turngate.learners.parity import ParityReport, measure_parity, require_parity
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.errors import LearnerError


def test_only_tokens_of_the_learners_own_version_are_compared(lab: Any, model: PolicyModel) -> None:
    generator = torch.Generator().manual_seed(0)
    members = [lab.sample_trajectory(model, generator, name=f"t{v}", version=v) for v in (4, 5)]
    tokens = lay_out(lab.make_batch([members], policy_version=5), [[True, True]], vocabulary_size=24)
    logprobs_N = tokens.behaviour_logprobs_N + torch.where(tokens.versions_N == 4, 1.0, 0.25)
    report = measure_parity(tokens, logprobs_N, policy_version=5)
    assert report.tokens == members[1].policy_tokens
    assert report.max_abs == pytest.approx(0.25)
    assert report.worst.startswith("trajectory t5, turn ")


def test_nothing_to_compare_is_no_failure(lab: Any, model: PolicyModel) -> None:
    tokens = lay_out(lab.sample_batch(model, [[0.0, 1.0]]), [[True, True]], vocabulary_size=24)
    report = measure_parity(tokens, tokens.behaviour_logprobs_N, policy_version=3)
    assert report.tokens == 0
    assert math.isnan(report.max_abs)  # 0 would look like perfect agreement
    require_parity(report, 1e-4)


@pytest.mark.parametrize("gap", [2e-4, float("nan"), float("inf")])
def test_a_gap_above_the_tolerance_is_an_error(gap: float) -> None:
    with pytest.raises(LearnerError, match="here"):
        require_parity(ParityReport(5, gap, gap, "here"), 1e-4)


def test_a_gap_at_the_tolerance_passes() -> None:
    require_parity(ParityReport(5, 1e-4, 1e-4, "here"), 1e-4)
