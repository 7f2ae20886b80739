"""Value guidance of single tokens: log pi(w) + beta Q(w) over the likeliest tokens, renormalised.

Order of operations: temperature and truncation, then the candidates, then beta Q, then renormalise, then draw.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from turngate.runtime.engine.sequence import LiveSequence
from turngate.runtime.engine.values import Values

__all__ = ["guided_logprobs", "likeliest", "tilt_rows"]


def likeliest(base_BV: Tensor, top_k_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens of each row, (B, K) with the largest K of all rows, and which of them a row wants."""
    most = min(int(top_k_B.max()), base_BV.shape[1])
    tokens_BK = base_BV.topk(most, dim=1).indices
    return tokens_BK, torch.arange(most) < top_k_B[:, None]


def guided_logprobs(
    base_BV: Tensor,
    tokens_BK: Tensor,
    wanted_BK: Tensor,
    q_BK: Tensor,
    *,
    beta_B: Tensor,
    tail_is_base_B: Tensor,
    v_state_B: Tensor,
) -> Tensor:
    """Return the log-probs, shape (B, V), that a guided token is drawn from: record these, not the base's.

    Args: base_BV: log-probs of the base. tokens_BK, wanted_BK: the candidates, see `likeliest`. q_BK: their values.
        tail_is_base_B: whether tokens outside the candidates keep the value of the prefix, `v_state_B`, and so their
            support; else they are left out.
    Source: Mudgal et al. 2024, controlled decoding (arXiv 2310.17022); Han et al. 2024 (arXiv 2405.06639).
    """
    tail_B = torch.where(tail_is_base_B, beta_B * v_state_B, -torch.inf)
    tilt_BV = tail_B[:, None].expand_as(base_BV).clone()
    tilt_BV.scatter_(1, tokens_BK, torch.where(wanted_BK, beta_B[:, None] * q_BK, tail_B[:, None]))
    return (base_BV + tilt_BV).log_softmax(dim=1)


def tilt_rows(base_BV: Tensor, sequences: Sequence[LiveSequence], values: Values) -> Tensor:
    """Return the log-probs to draw each next token from, shape (B, V): guided where asked for, else the base's."""
    lines = [line for line, sequence in enumerate(sequences) if sequence.request.guidance is not None]
    guided = [sequences[line] for line in lines]
    asked = [sequence.request.guidance for sequence in guided if sequence.request.guidance is not None]
    base_GV = base_BV[lines]
    tokens_GK, wanted_GK = likeliest(base_GV, torch.tensor([one.top_k for one in asked]))
    rows = [sequence.row for sequence in guided]
    positions_G = torch.tensor([len(sequence.ids) for sequence in guided])
    out_BV = base_BV.clone()
    out_BV[lines] = guided_logprobs(
        base_GV,
        tokens_GK,
        wanted_GK,
        values.of_continuations(rows, tokens_GK, positions_G),
        beta_B=torch.tensor([one.beta for one in asked], dtype=base_BV.dtype),
        tail_is_base_B=torch.tensor([one.tail == "base" for one in asked]),
        v_state_B=values.of_prefixes(rows),
    )
    return out_BV
