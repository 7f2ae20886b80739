"""Value guidance of single tokens: log pi(w) + beta Q(w) over the likeliest tokens, renormalised."""

import torch
from torch import Tensor

__all__ = ["guided_logprobs"]


def guided_logprobs(
    base_BV: Tensor, q_BV: Tensor, *, beta: Tensor, top_k: Tensor, tail_is_base: Tensor, v_state: Tensor
) -> Tensor:
    """Return the log-probs, shape (B, V), that a guided token is drawn from: record these, not the base's.

    Args: base_BV: log-probs of the base after temperature. q_BV: value of each token, read for the candidates only.
        beta, top_k, v_state: (B,); the candidates are the `top_k` likeliest tokens of the base.
        tail_is_base: (B,) bool; tokens outside the candidates keep the value of the prefix, `v_state`, and so their
            support; else they are left out.
    Source: Mudgal et al. 2024, controlled decoding (arXiv 2310.17022); Han et al. 2024 (arXiv 2405.06639).
    """
    order_BV = base_BV.argsort(dim=-1, descending=True, stable=True)
    rank_BV = torch.empty_like(order_BV).scatter_(
        -1, order_BV, torch.arange(base_BV.shape[-1]).expand_as(order_BV).contiguous()
    )
    is_candidate_BV = rank_BV < top_k.unsqueeze(-1)
    tail_B = torch.where(tail_is_base, beta * v_state, torch.full_like(v_state, -torch.inf))
    tilt_BV = torch.where(is_candidate_BV, beta.unsqueeze(-1) * q_BV, tail_B.unsqueeze(-1))
    return torch.log_softmax(base_BV + tilt_BV, dim=-1)
