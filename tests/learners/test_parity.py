"""The comparison of sampler and learner."""

import copy
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from turngate.learners.batch import lay_out, microbatches
from turngate.learners.parity import ParityReport, measure_parity, measure_rounding, require_parity
from turngate.learners.policy_state import score_tokens
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


def _rounded(lab: Any, model: PolicyModel) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Return tokens of an exact sampler, the learner's log-probs for them, and those in float64."""
    generator = torch.Generator().manual_seed(0)
    members = [lab.sample_trajectory(model, generator, name=f"t{n}", version=3) for n in range(4)]
    tokens = lay_out(lab.make_batch([members], policy_version=3), [[True] * 4], vocabulary_size=24)
    logprobs_N, _ = score_tokens(model, tokens, temperature=1.0, microbatch_tokens=512)
    doubled = copy.deepcopy(model).double()
    exact_N = torch.zeros_like(logprobs_N)
    for micro in microbatches(tokens, range(len(tokens.row_lengths)), 512):
        exact_N[micro.positions_P] = doubled.score(micro.packed).logprobs_M.detach().float()
    return replace(tokens, behaviour_logprobs_N=exact_N), logprobs_N, exact_N


def test_what_rounding_makes_is_no_disagreement(lab: Any, model: PolicyModel) -> None:
    tokens, logprobs_N, exact_N = _rounded(lab, model)
    report = measure_parity(tokens, logprobs_N, policy_version=3)
    rounding = partial(measure_rounding, model, tokens, logprobs_N, report.worst_row, temperature=1.0)
    tolerance = report.max_abs / 2
    assert tolerance > 0
    assert rounding() == pytest.approx(float((logprobs_N - exact_N).abs().max()))
    require_parity(report, tolerance, rounding=rounding)
    with pytest.raises(LearnerError, match="at worst"):
        require_parity(report, tolerance)


def test_a_gap_that_rounding_does_not_explain_is_an_error_that_says_what_rounding_makes(
    lab: Any, model: PolicyModel
) -> None:
    tokens, logprobs_N, _ = _rounded(lab, model)
    report = measure_parity(tokens, logprobs_N + 2e-4, policy_version=3)
    rounding = partial(measure_rounding, model, tokens, logprobs_N, report.worst_row, temperature=1.0)
    assert 0 < rounding() < 1e-5
    with pytest.raises(LearnerError, match=r"rounding makes \d"):
        require_parity(report, 1e-4, rounding=rounding)


def test_of_models_of_others_rounding_is_not_known(lab: Any, model: PolicyModel) -> None:
    class Foreign:
        config = model.config
        score = model.score

    tokens, logprobs_N, _ = _rounded(lab, model)
    assert math.isnan(measure_rounding(Foreign(), tokens, logprobs_N, 0, temperature=1.0))
    with pytest.raises(LearnerError, match=r"of its segment: sampled at [-.\d]+, learner gives [-.\d]+\)"):
        require_parity(measure_parity(tokens, logprobs_N + 1, policy_version=3), 1e-4, rounding=lambda: math.nan)
