"""Value guidance of single tokens: log pi(w) + beta Q(w) over the likeliest tokens, renormalised.

Order of operations: temperature and truncation, then the candidates, then beta Q, then renormalise, then draw.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from turngate.runtime.engine.sampler import Tilt
from turngate.runtime.engine.sequence import LiveSequence
from turngate.runtime.engine.values import Values
from turngate.runtime.types import TokenGuidance

__all__ = ["guided_logprobs", "tilt_of"]


def guided_logprobs(
    base_BV: Tensor,
    tokens_BK: Tensor,
    q_BK: Tensor,
    *,
    beta_B: Tensor,
    tail_is_base_B: Tensor,
    v_state_B: Tensor,
) -> Tensor:
    """Return the log-probs, shape (B, V), that a guided token is drawn from: record these, not the base's.

    Args: base_BV: log-probs of the base, of which some may be -inf. tokens_BK: the candidates, the likeliest tokens.
        q_BK: their values. tail_is_base_B: whether tokens outside the candidates keep the value of the prefix,
        `v_state_B`, and so their support; else they are left out.
    Source: Mudgal et al. 2024, controlled decoding (arXiv 2310.17022); Han et al. 2024 (arXiv 2405.06639).
    """
    tail_B = torch.where(tail_is_base_B, v_state_B, -torch.inf)
    q_BV = tail_B[:, None].repeat(1, base_BV.shape[1]).scatter_(1, tokens_BK, q_BK)
    # Values matter by their differences. Taken from the best that can be drawn, they neither overflow nor drown what
    # the base says of equally good tokens, however large beta is.
    best_B1 = q_BV.masked_fill(base_BV == -torch.inf, -torch.inf).amax(dim=1, keepdim=True)
    tilt_BV = beta_B[:, None] * (q_BV - best_B1).clamp_(max=0.0)
    tilt_BV.masked_fill_(q_BV == -torch.inf, -torch.inf)  # also with beta 0
    return (base_BV + tilt_BV).log_softmax(dim=1)


def tilt_of(sequences: Sequence[LiveSequence], values: Values) -> Tilt | None:
    """Return how the next tokens of some of these sequences are guided; None where none of them is."""
    asked = [sequence.request.guidance for sequence in sequences]
    # Beta 0 is the base, bit for bit; but for a tail that is left out.
    guided = {
        line: one for line, one in enumerate(asked) if one is not None and not (one.beta == 0 and one.tail == "base")
    }
    if not guided:
        return None
    rows = [sequences[line].row for line in guided]
    positions_G = torch.tensor([len(sequences[line].ids) for line in guided])
    settings = list(guided.values())
    return Tilt(list(guided), lambda base_GV: _tilted(base_GV, rows, positions_G, settings, values))


def _tilted(
    base_GV: Tensor, rows: Sequence[int], positions_G: Tensor, settings: Sequence[TokenGuidance], values: Values
) -> Tensor:
    """Return the guided log-probs of all lines: one pass of the critic for each number of candidates."""
    out_GV = torch.empty_like(base_GV)
    widths = [min(one.top_k, base_GV.shape[1]) for one in settings]
    for width in set(widths):
        lines = [line for line, own in enumerate(widths) if own == width]
        of_lines = [rows[line] for line in lines]
        base_BV = base_GV[lines]
        tokens_BK = base_BV.topk(width, dim=1).indices
        out_GV[lines] = guided_logprobs(
            base_BV,
            tokens_BK,
            values.of_continuations(of_lines, tokens_BK, positions_G[lines]),
            beta_B=torch.tensor([settings[line].beta for line in lines], dtype=base_BV.dtype),
            tail_is_base_B=torch.tensor([settings[line].tail == "base" for line in lines]),
            v_state_B=values.of_prefixes(of_lines),
        )
    return out_GV
