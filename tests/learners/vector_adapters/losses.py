"""Section 2: log-probs, policy losses, off-policy corrections, KL, entropy, aggregation."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from tests.learners.vector_adapters.case import Adapter, Case, Values, gradient
from turngate.learners.aggregation import aggregate, token_weights
from turngate.learners.filters import second_moment_keep
from turngate.learners.kl import kl_terms
from turngate.learners.logprobs import (
    entropy_from_logits,
    entropy_from_top_k,
    sampling_log_softmax,
    selected_logprobs,
    token_logprobs,
)
from turngate.learners.losses import cispo_loss, decoupled_ppo_loss, ppo_loss, reinforce_loss, unit_ratio_loss
from turngate.learners.offpolicy import interpolated_proximal, is_weights
from turngate.learners.ratios import LOG_RATIO_CLAMP


def aligned_logp(case: Case) -> Values:
    logp = token_logprobs(case.real("logits"), torch.tensor(case.inputs["tokens"]))
    mask = case.mask("mask", "tokens")
    return {"logp": logp, "sum_over_mask": logp[mask].sum()}


def behaviour_logp(case: Case) -> Values:
    logits, token = case.real("logits"), case.inputs["token"]
    options = {k: v for k, v in case.params.items() if k in ("temperature", "top_k", "top_p")}
    logp = sampling_log_softmax(logits, **options)[token]
    raw = selected_logprobs(logits.unsqueeze(0), torch.tensor([token]))
    return {"logp": logp, "raw_logp": raw.squeeze(0), "wrong_raw_over_temperature": logp}


def reduced(case: Case, per_token: Tensor, mask: Tensor, mode: str | None, of: Tensor) -> Values:
    """Return gradient, and loss when the case names an aggregation; without one the gradient is of the plain sum."""
    loss = (per_token * mask).sum() if mode is None else aggregate(per_token, weights_of(case, mask, mode))
    return {"loss": loss, "grad_logp": gradient(loss, of)}


def weights_of(case: Case, mask: Tensor, mode: str) -> Tensor:
    constants = ("length_constant", "l_const", "L_const", "constant")
    return token_weights(
        mask,
        cast("Any", mode),
        turn_ids=case.ids("turn_id", mask),
        trajectory_ids=case.ids("traj_id", mask),
        group_ids=case.ids("group_id", mask),
        length_constant=next((case.params[c] for c in constants if c in case.params), None),
        count_empty=case.params.get("count_empty", False),
    )


def ppo_token(case: Case, mode: str | None) -> Values:
    logp, mask = case.real("logp").requires_grad_(), case.mask()
    clamp = case.params.get("log_ratio_clip", LOG_RATIO_CLAMP)
    out = ppo_loss(logp, case.real("prox"), case.real("adv"), mask, clip=case.clip(), log_ratio_clamp=clamp)
    n = max(int(mask.sum()), 1)  # nothing at all is clipped when everything is masked
    return reduced(case, out.loss, mask, mode, logp) | {
        "per_token_loss": out.loss,
        "clip_frac_high": int(out.is_clipped_high.sum()) / n,
        "clip_frac_low": int(out.is_clipped_low.sum()) / n,
        "dual_frac": int(out.is_clipped_dual.sum()) / n,
    }


def cispo(case: Case, mode: str | None) -> Values:
    logp, mask = case.real("logp").requires_grad_(), case.mask()
    loss, coefficient = cispo_loss(logp, case.real("prox"), case.real("adv"), mask, clip=case.clip())
    return reduced(case, loss, mask, mode, logp) | {"per_token_loss": loss, "coef": coefficient}


def decoupled_ppo(case: Case, mode: str | None) -> Values:
    logp, prox, mask = case.real("logp").requires_grad_(), case.real("prox"), case.mask()
    importance = is_weights(prox, case.real("beh"), mask, case.correction("is_"), unit_ids=row_group(case, mask))
    out = decoupled_ppo_loss(logp, prox, importance.weights, case.real("adv"), mask, clip=case.clip())
    return reduced(case, out.loss, mask, mode, logp) | {"weights": importance.weights, "per_token_loss": out.loss}


def reinforce_is(case: Case, mode: str | None) -> Values:
    logp, mask = case.real("logp").requires_grad_(), case.mask()
    importance = is_weights(logp, case.real("beh"), mask, case.correction("is_"), unit_ids=row_group(case, mask))
    loss = reinforce_loss(logp, importance.weights, case.real("adv"), mask)
    return reduced(case, loss, mask, mode, logp) | {"weights": importance.weights, "per_token_loss": loss}


def unit_ratio(case: Case) -> Values:
    logp, mask = case.real("logp").requires_grad_(), case.mask()
    units = torch.tensor(case.inputs["unit_id"])
    out = unit_ratio_loss(
        logp,
        case.real("prox"),
        case.real("adv"),
        units,
        mask,
        kind=case.params["kind"],
        clip=case.clip(),
        reduce=case.params.get("reduce", "mean_over_units"),
    )
    grad = gradient(out.loss, logp)
    return {"loss": out.loss, "grad_logp": grad, "rho": out.ratios_U, "clipped": out.is_clipped_U}


def compare(case: Case) -> Values | None:
    if "unit_id" not in case.inputs:
        return None
    token = ppo_token(case, "token_mean")
    case.params = {"kind": "prod", **case.params}
    action = unit_ratio(case)
    return {
        "token_loss": token["loss"],
        "token_grad": token["grad_logp"],
        "token_ratio": (case.real("logp") - case.real("prox")).exp().flatten(),
        "action_loss": action["loss"],
        "action_grad": action["grad_logp"],
        "action_ratio": action["rho"].squeeze(),
        "action_clipped": action["clipped"].squeeze(),
    }


def row_group(case: Case, mask: Tensor) -> Tensor | None:
    return case.ids("row_group", mask)


def importance_weights(case: Case) -> Values:
    target = "prox" if "prox" in case.inputs else "logp"
    mask = case.mask("mask", target)
    correction = case.correction()
    out = is_weights(case.real(target), case.real("beh"), mask, correction, unit_ids=row_group(case, mask))
    return {"weights": out.weights, "keep": out.keep}


def prox_loglinear(case: Case) -> Values:
    versions = torch.tensor(case.inputs["versions"])
    version = case.params["current_version"]
    prox, alpha = interpolated_proximal(case.real("logp"), case.real("beh"), versions, policy_version=version)
    return {"prox": prox, "alpha": alpha}


def kl(case: Case) -> Values:
    logp = case.real("logp").requires_grad_()
    terms = kl_terms(logp, case.real("ref"))
    out: Values = {"k1": terms.k1, "k2": terms.k2, "k3": terms.k3}
    if "ratio" in case.inputs:
        anchor = (logp - case.real("ratio").log()).detach()
        out["k3_is"] = (logp - anchor).exp() * terms.k3
    return out | {f"grad_{name}": gradient(value.sum(), logp) for name, value in out.items()}


def kl_gradients(case: Case) -> Values:
    logits, ref_logits = case.real("logits").requires_grad_(), case.real("ref_logits")
    logp, ref = torch.log_softmax(logits, -1), torch.log_softmax(ref_logits, -1)
    terms, probs = kl_terms(logp, ref), logp.exp().detach()
    reverse = (logp.exp() * (logp - ref)).sum()
    forward = (ref.exp() * (ref - logp)).sum()
    estimates = {"k1": terms.k1, "k2": terms.k2, "k3": terms.k3}
    out: Values = {f"E_{name}": (probs * value).sum() for name, value in estimates.items()}
    out |= {f"E_grad_{name}": gradient((probs * value).sum(), logits) for name, value in estimates.items()}
    grads = {"grad_kl_reverse": gradient(reverse, logits), "grad_kl_forward": gradient(forward, logits)}
    return out | grads | {"kl_reverse": reverse, "kl_forward": forward}


def entropy(case: Case) -> Values:
    logits = case.real("logits").requires_grad_()
    h = entropy_from_logits(logits)
    return {"entropy": h, "grad_logits": gradient(h.sum(), logits)}


def entropy_topk(case: Case) -> Values:
    logits = case.real("logits")
    top = torch.log_softmax(logits, -1).topk(case.params["k"]).values
    return {"full": entropy_from_logits(logits), **entropy_from_top_k(top)}


def agg(case: Case) -> Values:
    mask = case.mask("mask", "token_loss")
    weights = weights_of(case, mask, case.params["mode"])
    return {"loss": aggregate(case.real("token_loss"), weights), "weights": weights}


def agg_microbatches(case: Case) -> Values:
    token_loss, mask = case.real("token_loss"), case.mask("mask", "token_loss")
    weights = weights_of(case, mask, case.params["mode"])
    parts = [aggregate(token_loss[rows], weights[rows]) for rows in case.params["micro_batches"]]
    total = torch.stack(parts).sum()
    return {"loss": total, "micro_contributions": torch.stack(parts), "wrong_mean_of_means": total}


def m2po(case: Case) -> Values:
    mask = case.mask("mask", "log_ratio")
    return {"keep": second_moment_keep(case.real("log_ratio"), mask, threshold=case.params["threshold"])}


ADAPTERS: dict[str, Adapter] = {
    "agg": agg,
    "agg_microbatches": agg_microbatches,
    "behaviour_logp": behaviour_logp,
    "entropy_from_logits": entropy,
    "entropy_topk": entropy_topk,
    "is_weights": importance_weights,
    "kl_expected_gradients": kl_gradients,
    "kl_terms": kl,
    "m2po_keep": m2po,
    "prox_loglinear": prox_loglinear,
    "token_aligned_logp": aligned_logp,
    "unit_ratio_loss": unit_ratio,
}
TOKEN_LOSSES: dict[str, Callable[[Case, str | None], Values]] = {
    "cispo": cispo,
    "decoupled_ppo": decoupled_ppo,
    "ppo_token": ppo_token,
    "reinforce_is": reinforce_is,
}
"""Their `fn` may name an aggregation after a plus sign."""
