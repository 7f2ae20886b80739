"""Critic losses (2.9) and off-policy value targets (4)."""

import torch

from tests.learners.vector_adapters.case import Adapter, Case, Values, gradient, numbers
from turngate.learners.targets import (
    TurnSteps,
    VTrace,
    q_one_step,
    replay_weights,
    retrace,
    turn_log_ratios,
    vtrace,
    vtrace_batch,
)
from turngate.learners.value_losses import value_bce, value_loss_clipped

__all__ = ["ADAPTERS"]


def clipped(case: Case) -> Values:
    values = case.real("v").requires_grad_()
    mask = case.mask("mask", "v")
    out = value_loss_clipped(values, case.real("v_old"), case.real("target"), mask, eps=case.params["eps"])
    return {"per_item_loss": out.loss, "grad_v": gradient(out.loss.sum(), values)}


def bce(case: Case) -> Values:
    logits = case.real("logit").requires_grad_()
    out = value_bce(logits, case.real("target"), case.mask("mask", "logit"))
    return {"per_item_loss": out.loss, "grad_logit": gradient(out.loss.sum(), logits)}


def from_ragged(case: Case) -> torch.Tensor:
    """Return the log-ratio per turn of ragged token log-ratios, through packed arrays with a context token before."""
    ragged = numbers(case.inputs["token_log_ratio"])
    ids = torch.tensor([-1] + [t for t, turn in enumerate(ragged) for _ in turn])
    logprobs = torch.tensor([0.0] + [x for turn in ragged for x in turn], dtype=case.dtype)
    return turn_log_ratios(logprobs, torch.zeros_like(logprobs), ids, turns=len(ragged))


def turn_log_rho(case: Case) -> Values:
    log_rho = from_ragged(case)
    tokens = [torch.tensor(turn, dtype=torch.float64) for turn in numbers(case.inputs["token_log_ratio"])]
    product = torch.stack([turn.clamp(max=0.0).sum().exp() for turn in tokens])
    return {"log_rho": log_rho, "min1_of_product": log_rho.clamp(max=0.0).exp(), "product_of_min1": product}


def vtrace_options(case: Case) -> Values:
    names = {"gamma", "lam", "rho_bar", "c_bar", "pg_rho_bar"}
    renamed = {"lambda": "lam", "lambda_": "lam"}
    return {renamed.get(k, k): v for k, v in case.params.items() if renamed.get(k, k) in names}


def named(out: VTrace) -> Values:
    return {"vs": out.targets_T, "pg_advantages": out.pg_advantages_T}


def one_vtrace(case: Case) -> Values:
    logs = from_ragged(case) if "token_log_ratio" in case.inputs else case.real("log_rho")
    bootstrap = numbers(case.inputs["bootstrap"])
    rewards, values = case.real("rewards"), case.real("values")
    return named(vtrace(rewards, values, logs.to(case.dtype), bootstrap=bootstrap, **vtrace_options(case)))


def many_vtrace(case: Case) -> Values:
    def steps(one: Values) -> TurnSteps:
        rewards, values, logs = (
            torch.tensor(numbers(one[k]), dtype=case.dtype) for k in ("rewards", "values", "log_rho")
        )
        return TurnSteps(rewards, values, logs, numbers(one["bootstrap"]))

    out = vtrace_batch([steps(one) for one in case.inputs["trajectories"]], **vtrace_options(case))
    targets, advantages = torch.cat([v.targets_T for v in out]), torch.cat([v.pg_advantages_T for v in out])
    return named(VTrace(targets, advantages))


def q_targets(case: Case) -> Values:
    def optional(name: str) -> torch.Tensor | None:
        return case.real(name) if name in case.inputs else None

    out = retrace(
        case.real("rewards"),
        case.real("q_taken"),
        case.real("v_pi"),
        optional("log_rho"),
        kind=case.params.get("kind", "retrace"),
        policy_probs_T=optional("pi_taken"),
        bootstrap=numbers(case.inputs["bootstrap"]),
        gamma=case.params.get("gamma", 1.0),
        lam=case.params.get("lam", 1.0),
    )
    return {"targets": out.targets_T, "c": out.traces_T}


def one_step(case: Case) -> Values:
    return {"targets": q_one_step(case.real("rewards"), case.real("v_next"), gamma=case.params.get("gamma", 1.0))}


def weights(case: Case) -> Values:
    options = {k: v for k, v in case.params.items() if k in ("kappa", "rho_cap", "max_lag")}
    out = replay_weights(case.real("log_rho_traj"), torch.tensor(case.inputs["lag"]), **options)
    return {"raw": out.raw_I, "kept": out.keep_I, "normalised": out.weights_I}


ADAPTERS: dict[str, Adapter] = {
    "bce_value": bce,
    "q_one_step": one_step,
    "replay_weights": weights,
    "retrace": q_targets,
    "turn_log_rho": turn_log_rho,
    "value_loss_clipped": clipped,
    "vtrace": one_vtrace,
    "vtrace_batch": many_vtrace,
    "vtrace_from_tokens": one_vtrace,
}
