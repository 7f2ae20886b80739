"""Drawing tokens: temperature, top-k, top-p, and one reproducible uniform number per sequence and position.

The uniform of a token is a hash of its sequence's seed and the token's index, so equal seeds give equal tokens
whatever else is in the batch. Tokens are drawn by inverting the cumulative distribution in float64.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

__all__ = ["Drawn", "SamplingRows", "Tilt", "draw", "raw_logprobs", "top_logprobs", "uniforms"]

UInt64s: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint64]]"
Int64s: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"
Float64s: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float64]]"

# Constants of splitmix64 (Steele, Lea, Flood 2014): a full-period counter with a strong output mix.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
# Spreads seeds over the counter's period, so that neighbouring seeds do not share a stretch of it.
_SEED_SALT = np.uint64(0xD1B54A32D192ED03)


class Tilt(NamedTuple):
    """Lines of a batch whose tokens are drawn from another distribution than the base's; the others are not touched."""

    lines: list[int]
    of: Callable[[Tensor], Tensor]
    """Given these lines' log-probs after temperature and truncation, float64 (G, V), returns those to draw from."""


class SamplingRows:
    """How each row draws its next token: one column per setting, one line per row; written by the batcher."""

    def __init__(self, rows: int) -> None:
        self.temperature = np.ones(rows)
        """0 is greedy."""
        self.top_p = np.ones(rows)
        self.top_k = np.zeros(rows, dtype=np.int64)
        """0 keeps the whole vocabulary."""
        self.seed = np.zeros(rows, dtype=np.uint64)
        self.index = np.zeros(rows, dtype=np.int64)
        """Index of the next token among the generated ones."""

    def move(self, source: int, target: int) -> None:
        """Copy one row's settings over another's."""
        for column in (self.temperature, self.top_p, self.top_k, self.seed, self.index):
            column[target] = column[source]


class Drawn(NamedTuple):
    """One drawn token per row, and the log of the distribution it was drawn from."""

    tokens_B: Int64s
    logprobs_B: Float64s
    """Log-prob of the token under that distribution; of the untempered model for greedy rows."""
    distribution_BV: Tensor
    """Log-probs of the whole vocabulary, float64; -inf where nothing could be drawn."""
    base_logprobs_B: Float64s
    """Log-prob of the token before anything was tilted."""


def uniforms(seed_B: UInt64s, index_B: Int64s) -> Float64s:
    """Return one number in the open interval (0, 1) per row, a pure function of seed and index."""
    start_B = _mix(seed_B ^ _SEED_SALT)
    bits_B = _mix(start_B + _GOLDEN * (index_B.astype(np.uint64) + np.uint64(1)))
    # 52 bits and half a step: exact in float64, never 0 and never 1.
    result: Float64s = ((bits_B >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return result


def draw(logits_BV: Tensor, rows: SamplingRows, first: int, last: int, tilt: Tilt | None = None) -> Drawn:
    """Draw one token for each of the rows first..last-1 from their logits, shape (last - first, V).

    Raises: FloatingPointError: some logits are not finite.
    """
    scores_BV = _base_scores(logits_BV, rows, first, last)
    base_GV: Tensor | None = None
    if tilt is not None:
        base_GV = scores_BV[tilt.lines].log_softmax(dim=1)
        tilted_GV = tilt.of(base_GV)
        scores_BV[tilt.lines] = tilted_GV - tilted_GV.amax(dim=1, keepdim=True)
    mass_BV = scores_BV.exp().cumsum_(dim=1)
    total_B1 = mass_BV[:, -1:].clone()
    if not total_B1.isfinite().all():
        raise FloatingPointError(
            "logits must be finite: got NaN or infinity; the weights overflow, look at the learner"
        )
    uniform_B = uniforms(rows.seed[first:last], rows.index[first:last])
    # The first token whose cumulated mass reaches the target: the target is positive, so its own mass is too.
    tokens_B1 = torch.searchsorted(mass_BV, torch.from_numpy(uniform_B)[:, None] * total_B1)
    greedy_B = rows.temperature[first:last] == 0
    if greedy_B.any():
        # argmax of the scores, the lowest id among equals.
        lines = np.flatnonzero(greedy_B)
        tokens_B1[lines] = (scores_BV[lines] == 0).double().argmax(dim=1, keepdim=True)
    distribution_BV = scores_BV.sub_(total_B1.log_())
    logprobs_B = distribution_BV.gather(1, tokens_B1)[:, 0]
    base_B = logprobs_B
    if tilt is not None and base_GV is not None:
        base_B = logprobs_B.clone()
        base_B[tilt.lines] = base_GV.gather(1, tokens_B1[tilt.lines])[:, 0]
    return Drawn(tokens_B1[:, 0].numpy(), logprobs_B.numpy(), distribution_BV, base_B.numpy())


def top_logprobs(distribution_V: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """Return the likeliest tokens of one distribution with their log-probs, best first; impossible ones left out."""
    values, tokens = distribution_V.topk(min(count, len(distribution_V)))
    pairs = zip(tokens.tolist(), values.tolist(), strict=True)
    return tuple((token, value) for token, value in pairs if value > -np.inf)


def raw_logprobs(logits_TV: Tensor) -> Tensor:
    """Return the log-probs of the model itself, float64 on the CPU, shape (T, V)."""
    return torch.log_softmax(logits_TV.double().cpu(), dim=-1)


def _base_scores(logits_BV: Tensor, rows: SamplingRows, first: int, last: int) -> Tensor:
    """Return unnormalised log-probs after temperature and truncation, at most 0, float64 on the CPU."""
    temperature_B = rows.temperature[first:last]
    greedy_B = temperature_B == 0
    scores_BV = logits_BV.double().cpu()
    # The maximum goes first: dividing by a tiny temperature then makes zeros and -inf, never inf - inf.
    scores_BV = scores_BV - scores_BV.amax(dim=1, keepdim=True)
    if (temperature_B != 1).any():
        scores_BV = scores_BV / torch.from_numpy(np.where(greedy_B, 1.0, temperature_B))[:, None]
    top_k_B, top_p_B = rows.top_k[first:last], rows.top_p[first:last]
    cut_B = ((top_k_B > 0) | (top_p_B < 1)) & ~greedy_B
    if cut_B.any():
        lines = np.flatnonzero(cut_B)
        scores_BV[lines] = _truncate(scores_BV[lines], top_k_B[lines], top_p_B[lines])
    return scores_BV


def _truncate(scores_BV: Tensor, top_k_B: Int64s, top_p_B: Float64s) -> Tensor:
    """Return scores with -inf outside the top k, and then outside the smallest set of probability top_p.

    Ties at the border are broken by the lower id. The likeliest token always stays: nothing is before it.
    """
    sorted_BV, order_BV = scores_BV.sort(dim=1, descending=True, stable=True)
    ranks_V = torch.arange(scores_BV.shape[1])
    keep_k_B1 = torch.from_numpy(np.where(top_k_B > 0, top_k_B, scores_BV.shape[1]))[:, None]
    sorted_BV = sorted_BV.masked_fill(ranks_V >= keep_k_B1, -torch.inf)
    probs_BV = sorted_BV.softmax(dim=1)
    before_BV = probs_BV.cumsum(dim=1) - probs_BV
    outside_BV = before_BV >= torch.from_numpy(top_p_B)[:, None]
    # A top_p of 1 cuts no tail by rounding.
    outside_BV &= torch.from_numpy(top_p_B < 1)[:, None]
    sorted_BV = sorted_BV.masked_fill(outside_BV, -torch.inf)
    return torch.empty_like(scores_BV).scatter_(1, order_BV, sorted_BV)


def _mix(state_B: UInt64s) -> UInt64s:
    """Output function of splitmix64; wraps around."""
    state_B = (state_B ^ (state_B >> np.uint64(30))) * _MIX_1
    state_B = (state_B ^ (state_B >> np.uint64(27))) * _MIX_2
    result: UInt64s = state_B ^ (state_B >> np.uint64(31))
    return result
