"""Estimators of the KL divergence between the current policy and a reference, and what their gradients really are."""

from dataclasses import dataclass

from torch import Tensor

from turngate.learners.ratios import LOG_RATIO_CLAMP, check_shapes

__all__ = ["KLTerms", "kl_terms"]


@dataclass(frozen=True, slots=True)
class KLTerms:
    """Per-token estimates of KL(current || reference) from samples of the current policy (Schulman 2020).

    Values: E k1 = E k3 = KL; k2 is biased. Gradients when differentiated, on-policy: k1 gives 0, k2 gives the gradient
    of KL(current || reference), k3 that of KL(reference || current), and ratio * k3 with the ratio differentiated too
    gives ratio * k1, the unbiased reverse-KL gradient. So: k1 in the reward, k2 or ratio * k3 in the loss.
    """

    k1: Tensor
    k2: Tensor
    k3: Tensor


def kl_terms(logprobs: Tensor, ref_logprobs: Tensor) -> KLTerms:
    """Return k1, k2 and k3 per token; differentiable in `logprobs`.

    Raises: ShapeError: the inputs differ in shape.
    """
    check_shapes(logprobs=logprobs, ref_logprobs=ref_logprobs)
    x = (ref_logprobs - logprobs).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    # expm1 keeps small divergences: e^x - 1 - x loses all digits in float32 below |x| = 1e-4.
    return KLTerms(k1=-x, k2=x.square() / 2, k3=x.expm1() - x)
