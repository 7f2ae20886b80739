"""Log-probabilities of tokens: aligned, of the distribution sampled from, and its entropy."""

import torch
from torch import Tensor

from turngate.runtime.errors import ConfigError

__all__ = ["entropy_from_logits", "entropy_from_top_k", "sampling_log_softmax", "selected_logprobs", "token_logprobs"]


def token_logprobs(logits_TV: Tensor, token_ids_T: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return log-probs (..., T) of `token_ids_T`, each from the logits one position earlier; position 0 gets 0."""
    logprobs_T = selected_logprobs(logits_TV[..., :-1, :], token_ids_T[..., 1:], temperature=temperature)
    return torch.cat([logprobs_T.new_zeros((*logprobs_T.shape[:-1], 1)), logprobs_T], dim=-1)


def selected_logprobs(logits_PV: Tensor, token_ids_P: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return log-probs (P,) of one token per row of logits, after temperature."""
    check_temperature(temperature)
    logits_PV = logits_PV if temperature == 1.0 else logits_PV / temperature
    chosen_P = logits_PV.gather(-1, token_ids_P.unsqueeze(-1)).squeeze(-1)
    return chosen_P - logits_PV.logsumexp(dim=-1)


def sampling_log_softmax(logits_PV: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Return the log-probs (P, V) a sampler draws from: temperature, then top-k, then top-p, renormalised.

    Tokens outside the kept set get -inf. The most likely token is always kept; ties are broken by token id.
    """
    check_temperature(temperature)
    logprobs_PV = torch.log_softmax(logits_PV / temperature, dim=-1)
    vocabulary = logprobs_PV.shape[-1]
    if not 0 < top_k < vocabulary and top_p >= 1.0:
        return logprobs_PV
    sorted_PV, order_PV = logprobs_PV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(vocabulary, device=logits_PV.device)
    kept_PV = (rank_V < (top_k if top_k > 0 else vocabulary)).expand_as(sorted_PV)
    if top_p < 1.0:
        probs_PV = torch.log_softmax(sorted_PV.masked_fill(~kept_PV, -torch.inf), dim=-1).exp()
        # A token is kept while the mass before it is short of top_p, so the set just reaches top_p.
        kept_PV = kept_PV & ((probs_PV.cumsum(dim=-1) - probs_PV < top_p) | (rank_V == 0))
    kept_PV = torch.zeros_like(kept_PV).scatter(-1, order_PV, kept_PV)
    return torch.log_softmax(logprobs_PV.masked_fill(~kept_PV, -torch.inf), dim=-1)


def entropy_from_logits(logits_PV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return the entropy (P,) in nats of each row's distribution, from the full logits."""
    check_temperature(temperature)
    logprobs_PV = torch.log_softmax(logits_PV if temperature == 1.0 else logits_PV / temperature, dim=-1)
    probs_PV = logprobs_PV.exp()
    # 0 * -inf is 0 here: a forbidden token adds no entropy.
    return -(probs_PV * logprobs_PV.masked_fill(probs_PV == 0, 0.0)).sum(dim=-1)


def entropy_from_top_k(logprobs_PK: Tensor) -> dict[str, Tensor]:
    """Return what the k largest log-probs tell about the entropy, each (P,).

    `partial_sum` leaves the tail out; `tail_bound_low` adds the tail as one lump, still a lower bound;
    `renormalised` is the entropy of the top k alone, which is no bound; `covered_mass` is their probability.
    """
    probs_PK = logprobs_PK.exp()
    covered_P = probs_PK.sum(dim=-1)
    partial_P = -(probs_PK * logprobs_PK.masked_fill(probs_PK == 0, 0.0)).sum(dim=-1)
    tail_P = (1.0 - covered_P).clamp_min(0.0)
    return {
        "partial_sum": partial_P,
        "renormalised": entropy_from_logits(logprobs_PK),
        "tail_bound_low": partial_P - torch.xlogy(tail_P, tail_P),
        "covered_mass": covered_P,
    }


def check_temperature(temperature: float) -> None:
    """Raise ConfigError unless `temperature` gives a distribution with finite log-probs."""
    if not temperature > 0.0 or temperature == float("inf"):
        raise ConfigError(
            f"temperature must be positive: got {temperature}; greedy sampling has no log-probs to learn from"
        )
