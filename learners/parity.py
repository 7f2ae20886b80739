"""The first thing to check in any RL run: the trainer and the sampler must agree on what was sampled.

Where the learner's own version produced a token, both compute the same log-prob from the same weights and the same
context, so any difference is a bug: wrong alignment, wrong template, wrong temperature, torn weights. Where values
guided tokens, that holds for the log-probs before guidance, which the record has beside those of the draw.

Any but what rounding makes: sharp models magnify the last digits of float32. How much is measured, not assumed.
"""

import copy
import math
from collections.abc import Callable

import msgspec
from torch import Tensor

from turngate.learners.batch import TokenBatch
from turngate.learners.policy_model import ScoringModel
from turngate.learners.policy_state import score_tokens
from turngate.runtime.engine.model import PolicyModel, Scores
from turngate.runtime.engine.packing import Packed
from turngate.runtime.errors import LearnerError

__all__ = ["ParityReport", "measure_parity", "measure_rounding", "require_parity"]

_ROUNDING_MARGIN = 4.0
"""Two programs round differently: their distance may be this many times the error that one of them was seen to make."""


class ParityReport(msgspec.Struct, frozen=True):
    """How far training-time and behaviour log-probs are apart on tokens of lag 0."""

    tokens: int
    """Number of tokens compared."""
    max_abs: float = math.nan
    mean_abs: float = math.nan
    """NaN when there was nothing to compare."""
    worst: str = ""
    """Where the largest difference is, with both values."""
    worst_row: int = 0
    """Row of the batch that it is in."""


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
        worst_row=int(tokens.row_ids_N[worst]),
    )


def measure_rounding(
    model: ScoringModel, tokens: TokenBatch, logprobs_N: Tensor, row: int, *, temperature: float
) -> float:
    """Return the largest distance of the learner's log-probs on one row from the same pass in float64.

    NaN for models of others: whether they can be computed in float64 is not known. Copies the model.
    """
    if not isinstance(model, PolicyModel):
        return math.nan
    alone = tokens.masked(tokens.rows_mask([row]))
    exact_N, _ = score_tokens(_InFloat64(model), alone, temperature=temperature, microbatch_tokens=1)
    return float((exact_N - logprobs_N)[alone.mask_N].abs().max())


class _InFloat64:
    def __init__(self, model: PolicyModel) -> None:
        self.config, self._model = model.config, copy.deepcopy(model).double()

    def score(self, packed: Packed, *, temperature: float = 1.0, with_entropy: bool = False) -> Scores:
        logprobs_M, entropy_M, _ = self._model.score(packed, temperature=temperature, with_entropy=with_entropy)
        return Scores(logprobs_M.float(), None if entropy_M is None else entropy_M.float(), None)


def require_parity(report: ParityReport, tolerance: float, *, rounding: Callable[[], float] | None = None) -> None:
    """Raise LearnerError when the largest difference exceeds `tolerance` or is no number; no tokens are no failure.

    Args: rounding: says what rounding makes where the difference is largest, asked only when that exceeds `tolerance`;
        a few times as much is no fault either.
    """
    if not report.tokens or report.max_abs <= tolerance:
        return
    rounded = rounding() if rounding is not None and math.isfinite(report.max_abs) else math.nan
    if report.max_abs <= _ROUNDING_MARGIN * rounded:
        return
    seen = "" if math.isnan(rounded) else f"; rounding makes {rounded:.1g} there"
    raise LearnerError(
        f"training log-probs must match the sampler's at lag 0: expected within {tolerance}, got "
        f"{report.max_abs:.2g} at worst, {report.mean_abs:.2g} on average over {report.tokens} tokens "
        f"({report.worst}{seen}); check that sampling temperature, template and weights are the learner's, that the "
        "server recomputes its cache after a weight update, and that it reports the log-probs it samples from; a "
        "server of lower precision needs a larger parity_tolerance, or parity='report'"
    )
