"""How far apart two policies are on the tokens of a batch: effective sample size, KL, moments of the log-ratio.

All of it in float64, over policy tokens only, before any clamping.
"""

import math

import msgspec
import torch
from torch import Tensor

from turngate.learners.batch import TokenBatch
from turngate.learners.offpolicy import Correction, is_weights
from turngate.learners.ratios import check_shapes

__all__ = ["EffectiveSampleSize", "MismatchMetrics", "effective_sample_size", "mismatch_metrics", "sampler_mismatch"]


class EffectiveSampleSize(msgspec.Struct, frozen=True):
    """How many equally weighted samples the weights are worth."""

    ess: float
    ess_ratio: float
    """ess / n; 1 means the weights are uniform, 1/n that one sample has all the weight."""
    lr_scale_sqrt: float
    """sqrt(ess_ratio): a learning-rate factor (Huang et al. 2026, VCPO, 2602.17616)."""


class MismatchMetrics(msgspec.Struct, frozen=True):
    """Divergences estimated from samples of the behaviour policy; means over policy tokens."""

    kl_k1: float
    kl_k3: float
    """Estimates of KL(behaviour || current): k1 unbiased and noisy, k3 unbiased and non-negative."""
    second_moment: float
    mean_abs: float
    max_abs: float
    """Of the log-ratio current over behaviour."""
    chi2: float
    """Estimate of E[ratio^2] - 1 of current over behaviour."""


def effective_sample_size(log_weights_N: Tensor) -> EffectiveSampleSize:
    """Return (sum w)^2 / sum w^2 from log-weights, without overflow; n = 0 gives zeros."""
    logs_N = log_weights_N.detach().to(torch.float64).flatten()
    if not len(logs_N):
        return EffectiveSampleSize(0.0, 0.0, 0.0)
    ess = float((2 * logs_N.logsumexp(0) - (2 * logs_N).logsumexp(0)).exp())
    ratio = ess / len(logs_N)
    return EffectiveSampleSize(ess, ratio, math.sqrt(ratio))


def mismatch_metrics(logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> MismatchMetrics:
    """Return how far the current policy is from the one that sampled; zeros when no token counts."""
    check_shapes(logprobs=logprobs, behaviour=behaviour_logprobs, mask=mask)
    d_P = (logprobs.detach()[mask].to(torch.float64)) - behaviour_logprobs.detach()[mask].to(torch.float64)
    if not len(d_P):
        return MismatchMetrics(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    return MismatchMetrics(
        kl_k1=float(-d_P.mean()),
        kl_k3=float((d_P.expm1() - d_P).mean()),
        second_moment=float(d_P.square().mean()),
        mean_abs=float(d_P.abs().mean()),
        max_abs=float(d_P.abs().max()),
        chi2=float((2 * d_P).exp().mean() - 1),
    )


def sampler_mismatch(tokens: TokenBatch, proximal_N: Tensor, *, policy_version: int) -> dict[str, float]:
    """Return how far the policy has moved from the one that sampled a batch, before any clamping.

    Fractions and means are over trained tokens; `ess_trajectory_ratio` is over trajectories with trained tokens.
    """
    mask_N, behaviour_N = tokens.mask_N, tokens.behaviour_logprobs_N
    distance = mismatch_metrics(proximal_N, behaviour_N, mask_N)
    gap_N = proximal_N.to(torch.float64) - behaviour_N.to(torch.float64)
    trained = tokens.trajectory_ids_N[mask_N].unique()
    truncated_N = is_weights(proximal_N, behaviour_N, mask_N, Correction()).is_truncated
    lag_P = (policy_version - tokens.versions_N[mask_N]).to(torch.float64)
    return {
        "sampler_kl_k1": distance.kl_k1,
        "sampler_kl_k3": distance.kl_k3,
        "log_ratio_abs_mean": distance.mean_abs,
        "log_ratio_abs_max": distance.max_abs,
        "log_ratio_second_moment": distance.second_moment,
        "ess_token_ratio": effective_sample_size(gap_N[mask_N]).ess_ratio,
        "ess_trajectory_ratio": effective_sample_size(tokens.sum_by_trajectory(gap_N)[trained]).ess_ratio,
        "tis_truncated_fraction": float(truncated_N.sum()) / max(tokens.policy_tokens, 1),
        "trained_lag_mean": float(lag_P.mean()) if len(lag_P) else 0.0,
        "trained_lag_max": float(lag_P.max()) if len(lag_P) else 0.0,
    }
