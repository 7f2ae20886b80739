"""Return-to-go over policy tokens, and whitening over masked arrays."""

import torch
from torch import Tensor

from turngate.learners.advantages.gae import check_discounts, steps_of
from turngate.learners.ratios import check_shapes
from turngate.runtime.errors import LearnerError

__all__ = ["masked_whiten", "reward_to_go"]


def reward_to_go(token_rewards_T: Tensor, mask_T: Tensor, *, gamma: float) -> Tensor:
    """Return the discounted return from each policy token on, 0 where the mask is False; (T,) or (B, T).

    Only policy tokens cost a discount, so the length of observations does not matter; a reward written on a masked
    token belongs to the nearest earlier policy token. One before the first policy token is nobody's and is left out.
    Source: Hu 2025, REINFORCE++ (2501.03262).
    Raises: ShapeError, ConfigError; LearnerError: a reward is not finite.
    """
    check_shapes(token_rewards=token_rewards_T, mask=mask_T)
    check_discounts(gamma=gamma)
    if token_rewards_T.ndim > 1:
        rows = [reward_to_go(r, m, gamma=gamma) for r, m in zip(token_rewards_T, mask_T, strict=True)]
        return torch.stack(rows) if rows else torch.zeros_like(token_rewards_T)
    rewards, mask = steps_of(token_rewards_T, "token rewards"), mask_T.tolist()
    returns, following, orphan = [0.0] * len(mask), 0.0, 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            returns[t] = following = rewards[t] + orphan + gamma * following
            orphan = 0.0
        else:
            orphan += rewards[t]
    return torch.tensor(returns, dtype=torch.float64).to(token_rewards_T)


def masked_whiten(x: Tensor, mask: Tensor, *, ddof: int = 1, eps: float = 1e-8) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) with statistics over masked-in entries only; 0 elsewhere; detached.

    For advantages, never for value targets. Fewer entries than `ddof + 1` have no variance and give 0.
    Raises: ShapeError; LearnerError: a masked-in entry is not finite, and would make every other one NaN.
    """
    check_shapes(x=x, mask=mask)
    inside_P = x.detach()[mask].to(torch.float64)
    if not torch.isfinite(inside_P).all():
        raise LearnerError(
            f"x must be finite where the mask is True: got {int((~inside_P.isfinite()).sum())} that are not"
        )
    whitened = torch.zeros_like(x)
    if len(inside_P) > ddof:
        deviations_P = inside_P - inside_P.mean()
        variance = deviations_P.square().sum() / (len(inside_P) - ddof)
        whitened[mask] = (deviations_P / (variance + eps).sqrt()).to(x.dtype)
    return whitened
