"""Return-to-go over policy tokens, and whitening over masked arrays."""

import torch
from torch import Tensor

from turngate.learners.ratios import check_shapes

__all__ = ["masked_whiten", "reward_to_go"]


def reward_to_go(token_rewards_T: Tensor, mask_T: Tensor, *, gamma: float) -> Tensor:
    """Return the discounted return from each policy token on, 0 where the mask is False; (T,) or (B, T).

    Only policy tokens cost a discount, so the length of observations does not matter; a reward written on a masked
    token belongs to the nearest earlier policy token. One before the first policy token is nobody's and is left out.
    Source: Hu 2025, REINFORCE++ (2501.03262).
    """
    check_shapes(token_rewards=token_rewards_T, mask=mask_T)
    columns = []
    returns = torch.zeros_like(token_rewards_T[..., 0])
    orphan = torch.zeros_like(returns)
    for t in reversed(range(token_rewards_T.shape[-1])):
        reward, is_policy = token_rewards_T[..., t], mask_T[..., t]
        returns = torch.where(is_policy, reward + orphan + gamma * returns, returns)
        orphan = torch.where(is_policy, 0.0, orphan + reward)
        columns.append(torch.where(is_policy, returns, 0.0))
    return torch.stack(columns[::-1], dim=-1)


def masked_whiten(x: Tensor, mask: Tensor, *, ddof: int = 1, eps: float = 1e-8) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) with statistics over masked-in entries only; 0 elsewhere.

    For advantages, never for value targets. Fewer entries than `ddof + 1` have no variance and give 0.
    """
    check_shapes(x=x, mask=mask)
    inside_P = x[mask].to(torch.float64)
    whitened = torch.zeros_like(x)
    if len(inside_P) > ddof:
        deviations_P = inside_P - inside_P.mean()
        variance = deviations_P.square().sum() / (len(inside_P) - ddof)
        whitened[mask] = (deviations_P / (variance + eps).sqrt()).to(x.dtype)
    return whitened
