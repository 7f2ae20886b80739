"""The first thing to check in any RL run: the trainer and the sampler must agree on what was sampled.

Where the learner's own version produced a token, both compute the same log-prob from the same weights and the same
context, so any difference is a bug: wrong alignment, wrong template, wrong temperature, torn weights. Where values
guided tokens, that holds for the log-probs before guidance, which the record has beside those of the draw.
"""

import math

import msgspec
from torch import Tensor

from turngate.learners.batch import TokenBatch
from turngate.runtime.errors import LearnerError

__all__ = ["ParityReport", "measure_parity", "require_parity"]


class ParityReport(msgspec.Struct, frozen=True):
    """How far training-time and behaviour log-probs are apart on tokens of lag 0."""

    tokens: int
    """Number of tokens compared."""
    max_abs: float = math.nan
    mean_abs: float = math.nan
    """NaN when there was nothing to compare."""
    worst: str = ""
    """Where the largest difference is, with both values."""


def measure_parity(tokens: TokenBatch, logprobs_N: Tensor, *, policy_version: int) -> ParityReport:
    """Compare the learner's log-probs with the sampler's on the trained tokens that `policy_version` produced."""
    is_current_N = tokens.mask_N & (tokens.versions_N == policy_version)
    positions_P = is_current_N.nonzero().squeeze(-1)
    if not len(positions_P):
        return ParityReport(0)
    gaps_P = (logprobs_N[positions_P] - tokens.sampler_logprobs[positions_P]).abs()
    worst = int(positions_P[int(gaps_P.argmax())])
    return ParityReport(
        tokens=len(positions_P),
        max_abs=float(gaps_P.max()),
        mean_abs=float(gaps_P.mean()),
        worst=f"{tokens.where(worst)}: sampled at {float(tokens.sampler_logprobs[worst]):.6f}, "
        f"learner gives {float(logprobs_N[worst]):.6f}",
    )


def require_parity(report: ParityReport, tolerance: float) -> None:
    """Raise LearnerError when the largest difference exceeds `tolerance` or is no number; no tokens are no failure."""
    if report.tokens and not report.max_abs <= tolerance:
        raise LearnerError(
            f"training log-probs must match the sampler's at lag 0: expected within {tolerance}, got "
            f"{report.max_abs:.2g} at worst, {report.mean_abs:.2g} on average over {report.tokens} tokens "
            f"({report.worst}); check that sampling temperature, template and weights are the learner's, that the "
            "server recomputes its cache after a weight update, and that it reports the log-probs it samples from; a "
            "server of lower precision needs parity='report'"
        )
