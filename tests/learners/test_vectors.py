"""Golden numbers: every case of a vectors file, through one adapter per function it names.

Adapters read params and inputs, never a case's name. Expected keys that start with `wrong_` must differ from what the
adapter returns under the same key; all others must agree.
"""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from turngate.envs.base import End
from turngate.learners.advantages import GroupScheme, group_advantages, masked_whiten, reward_to_go, sample_advantages
from turngate.learners.aggregation import aggregate, token_weights
from turngate.learners.kl import kl_terms
from turngate.learners.logprobs import (
    entropy_from_logits,
    entropy_from_top_k,
    sampling_log_softmax,
    selected_logprobs,
    token_logprobs,
)
from turngate.learners.losses import Clip, cispo_loss, decoupled_ppo_loss, ppo_loss, reinforce_loss, unit_ratio_loss
from turngate.learners.mismatch import effective_sample_size, mismatch_metrics
from turngate.learners.offpolicy import Correction, interpolated_proximal, is_weights, second_moment_keep
from turngate.learners.ratios import LOG_RATIO_CLAMP
from turngate.learners.voting import critic_handling, group_handling
from turngate.runtime.staleness import capacity, lag_stats

Values = dict[str, Any]


class Case:
    """One golden case in one precision, with typed access to its fields."""

    def __init__(self, case: Values, dtype: torch.dtype) -> None:
        self.case, self.dtype = case, dtype
        self.params: Values = case["params"]
        self.inputs: Values = case["inputs"]

    def real(self, name: str, default: object = None) -> Tensor:
        return torch.tensor(numbers(self.inputs.get(name, default)), dtype=self.dtype)

    def mask(self, name: str = "mask", like: str = "logp") -> Tensor:
        if name in self.inputs:
            return torch.tensor(self.inputs[name]).bool()
        return torch.ones_like(self.real(like), dtype=torch.bool)

    def ids(self, name: str, like: Tensor) -> Tensor | None:
        """Integer ids in the shape of `like`; labels of any kind are numbered, one per row is spread over it."""
        values = self.inputs.get(name)
        if values is None:
            return None
        if isinstance(values[0], list):
            return torch.tensor(values)
        labels = {label: i for i, label in enumerate(dict.fromkeys(values))}
        column = torch.tensor([labels[v] for v in values])
        return column.unsqueeze(1).expand_as(like) if like.ndim == 2 else column

    def clip(self) -> Clip:
        dual = self.params.get("dual_c")
        return Clip(self.params.get("eps_low", 0.2), self.params.get("eps_high", 0.28), dual)

    def correction(self, prefix: str = "") -> Correction:
        params = {k.removeprefix(prefix): v for k, v in self.params.items()}
        return Correction(
            params.get("level", "token"),
            params.get("mode", "truncate"),
            params.get("upper", 2.0),
            params.get("lower"),
            bool(params.get("normalise", params.get("batch_normalise", False))),
        )


def numbers(value: Any) -> Any:
    """Decode the JSON spelling of NaN and infinities."""
    if isinstance(value, list):
        return [numbers(v) for v in value]
    return (
        {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value, value)
        if isinstance(value, str)
        else value
    )


def gradient(scalar: Tensor, of: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(scalar, of, retain_graph=True)
    return grad


def scheme(case: Case) -> GroupScheme:
    known = {k: v for k, v in case.params.items() if k in ("baseline", "scale", "eps", "singleton")}
    return GroupScheme(**known)


# --- 1: group-relative advantages


def group_advantage(case: Case) -> Values:
    rewards = case.real("rewards")
    valid = case.params.get("valid", case.inputs.get("valid"))
    valid_G = None if valid is None else torch.tensor(valid).bool()
    result = group_advantages(rewards, valid_G, scheme=scheme(case), batch_std=case.params.get("batch_std"))
    return {
        "advantages": result.advantages_G,
        "keep": result.keep_G,
        "n_valid": result.n_valid,
        "degenerate": result.is_degenerate,
    }


def group_advantage_dedup(case: Case) -> Values:
    right = sample_advantages(case.inputs["traj_of_sample"], case.real("traj_reward"), scheme=scheme(case))
    return {"sample_advantages": right, "wrong_if_samples_vote": right}


def whiten(case: Case) -> Values:
    x, mask = case.real("x"), case.mask("mask", "x")
    return {"y": masked_whiten(x, mask, ddof=case.params.get("ddof", 1), eps=case.params.get("eps", 1e-8))}


def to_go(case: Case) -> Values:
    mask = case.mask("mask", "token_rewards")
    return {"returns": reward_to_go(case.real("token_rewards"), mask, gamma=case.params.get("gamma", 1.0))}


# --- 2: policy losses


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
    n = int(mask.sum())
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


def compare(case: Case) -> Values:
    if "unit_id" not in case.inputs:
        raise NotImplementedError(f"compare: no adapter for inputs {sorted(case.inputs)}")
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


# --- 3.5: ends

ENDS = {
    "success": End.success,
    "failure": End.failure,
    "budget_is_failure": End.budget,
    "max_turns_collector": End.turn_limit,
    "max_tokens": End.token_limit,
    "wall_timeout": End.timeout,
    "context_overflow": End.context_overflow,
    "cancelled_stale": End.cancelled,
    "env_crash": End.env_error,
    "infrastructure_error": End.endpoint_error,
}


def end_reason(case: Case) -> Values:
    ends = [ENDS[reason] for reason in case.inputs["reasons"]]
    return {
        "terminated": [end.is_terminal for end in ends],
        "critic_handling": [critic_handling(end) for end in ends],
        "group_handling_without_critic": [group_handling(end) for end in ends],
    }


# --- 9: staleness


def room(case: Case, version: int, accepted: int, running: int) -> Values:
    state: Values = {"policy_version": version, "accepted": accepted, "running": running}
    gate = {"max_staleness": case.params["eta"], "batch_size": case.params["batch"], **state}
    limit = case.params.get("max_concurrent")
    out = {"staleness": capacity(**gate), "capacity": capacity(**gate, max_running=limit)}
    return out if limit is None else out | {"concurrency": limit - running}


def fresh_capacity(case: Case) -> Values:
    return room(case, case.inputs["version"], case.inputs["accepted"], case.inputs["running"])


def capacity_trace(case: Case) -> Values:
    version = accepted = running = 0
    queries: list[Values] = []
    for event, n in case.inputs["events"]:
        if event == "query":
            state = {"version": version, "accepted": accepted, "running": running}
            queries.append(state | room(case, version, accepted, running))
        running += {"submit": n, "accept": -n, "reject": -n}.get(event, 0)
        accepted += n if event == "accept" else 0
        version += n if event == "publish" else 0
        if event == "recover":
            version, accepted, running = n, n * case.params["batch"], 0
    return {"queries": queries}


def staleness_simulation(case: Case) -> Values:
    durations, batch, order = case.inputs["durations"], case.params["batch"], case.params["order"]
    count = case.params.get("n", len(durations))
    version = tick = submitted = 0
    submitted_at: list[tuple[int, int]] = []  # (tick, version) per id
    finished: list[int] = []
    consumed: list[Values] = []
    while len(consumed) < count and tick < 10_000:
        while submitted < count and room(case, version, len(finished), submitted - len(finished))["capacity"] > 0:
            submitted_at.append((tick, version))
            submitted += 1
        due = [i for i in range(submitted) if i not in finished and submitted_at[i][0] + durations[i] <= tick + 1]
        finished += due
        done = [c["id"] for c in consumed]
        waiting = [i for i in finished if i not in done]
        if order == "fifo":
            # The next ids in submission order, and only when all of them are there.
            following = range(len(done), min(len(done) + batch, count))
            waiting = list(following) if all(i in waiting for i in following) else []
        if len(waiting) >= batch or (waiting and len(done) + len(waiting) == count):
            for i in waiting[:batch]:
                at = submitted_at[i][1]
                consumed.append({"id": i, "submitted_at": at, "consumed_at": version, "lag": version - at})
            version += 1
        tick += 1
    return {"consumed": consumed, "max_lag": max(c["lag"] for c in consumed), "ticks": tick}


def lag(case: Case) -> Values:
    stats = lag_stats(case.inputs["versions"], case.params["consume_version"])
    means = {"lag_mean": stats.lag_mean, "span": stats.span, "lag_first_token": stats.lag_first}
    return {"lag_max": stats.lag_max, "lag_min": stats.lag_min, **means}


def ess(case: Case) -> Values:
    out = effective_sample_size(case.real("log_w"))
    return {"ess": out.ess, "ess_ratio": out.ess_ratio, "lr_scale_sqrt": out.lr_scale_sqrt}


def ess_levels(case: Case) -> Values:
    per_token = case.real("constant_token_log_ratio").to(torch.float64)
    tokens = case.inputs["tokens_per_trajectory"]
    return {
        "token_ess_ratio": effective_sample_size(per_token.repeat_interleave(tokens)).ess_ratio,
        "trajectory_ess_ratio": effective_sample_size(per_token * tokens).ess_ratio,
    }


def mismatch(case: Case) -> Values:
    out = mismatch_metrics(case.real("logp"), case.real("beh"), case.mask())
    return {
        "kl_beh_to_cur_k1": out.kl_k1,
        "kl_beh_to_cur_k3": out.kl_k3,
        "second_moment": out.second_moment,
        "mean_abs_log_ratio": out.mean_abs,
        "max_abs_log_ratio": out.max_abs,
        "chi2": out.chi2,
    }


ADAPTERS: dict[str, Callable[[Case], Values]] = {
    "agg": agg,
    "agg_microbatches": agg_microbatches,
    "behaviour_logp": behaviour_logp,
    "capacity": fresh_capacity,
    "capacity_trace": capacity_trace,
    "compare": compare,
    "end_reason": end_reason,
    "entropy_from_logits": entropy,
    "entropy_topk": entropy_topk,
    "ess": ess,
    "ess_levels": ess_levels,
    "group_advantage": group_advantage,
    "group_advantage_dedup": group_advantage_dedup,
    "is_weights": importance_weights,
    "kl_expected_gradients": kl_gradients,
    "kl_terms": kl,
    "lag_stats": lag,
    "m2po_keep": m2po,
    "masked_whiten": whiten,
    "mismatch_metrics": mismatch,
    "prox_loglinear": prox_loglinear,
    "reward_to_go": to_go,
    "staleness_simulation": staleness_simulation,
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


def run(case: Case) -> Values:
    fn, _, mode = case.case["fn"].partition("+")
    if fn in TOKEN_LOSSES:
        return TOKEN_LOSSES[fn](case, mode or None)
    if mode or fn not in ADAPTERS:
        raise NotImplementedError(f"no adapter for fn {case.case['fn']!r}; known: {sorted(ADAPTERS | TOKEN_LOSSES)}")
    return ADAPTERS[fn](case)


def is_close(got: Any, expected: Any, rtol: float, atol: float) -> bool:
    if isinstance(got, Tensor):
        got = got.detach().tolist()
    if isinstance(expected, dict):
        return all(is_close(got[key], value, rtol, atol) for key, value in expected.items())
    if isinstance(expected, list):
        pairs = zip(got, expected, strict=True)
        return all(is_close(g, e, rtol, atol) for g, e in pairs)
    expected = numbers(expected)
    if isinstance(expected, str | bool) or expected is None:
        return bool(got == expected)
    if math.isnan(expected) or math.isinf(expected):
        return bool(got == expected or (math.isnan(got) and math.isnan(expected)))
    return abs(got - expected) <= atol + rtol * abs(expected)


def is_float64_only(case: Values) -> bool:
    """Log-ratios near the clamp, and logs whose exponentials leave float32."""
    flat = [abs(x) for x in leaves(numbers(list(case["inputs"].values()))) if isinstance(x, float) and math.isfinite(x)]
    return max(flat, default=0.0) > 15


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "golden" in metafunc.fixturenames:
        file = json.loads(metafunc.config.getoption("--vectors").read_text())
        hint = file.get("float32_tolerance_hint", {"rtol": 2e-5, "atol": 2e-6})
        default = file.get("default_tolerance", {"rtol": 1e-9, "atol": 1e-12})
        cases = [
            pytest.param((c, torch.float64, c.get("tolerance", default)), id=f"{c['name']}-float64")
            for c in file["cases"]
        ]
        cases += [
            pytest.param((c, torch.float32, hint), id=f"{c['name']}-float32")
            for c in file["cases"]
            if not is_float64_only(c)
        ]
        metafunc.parametrize("golden", cases)


def test_vector_is_reproduced(golden: tuple[Values, torch.dtype, dict[str, float]]) -> None:
    case, dtype, tolerance = golden
    got, close = run(Case(case, dtype)), (tolerance["rtol"], tolerance["atol"])
    agreeing = {key: is_close(got[key], value, *close) for key, value in case["expected"].items()}
    if "negative control" in case.get("notes", ""):
        assert not all(agreeing.values()), f"{case['name']}: produced the forbidden numbers {case['expected']}"
        return
    wrong = [key for key, is_same in agreeing.items() if is_same == key.startswith("wrong_")]
    assert not wrong, {key: (got[key], case["expected"][key]) for key in wrong}


def test_vector_of_an_unknown_function_fails() -> None:
    case = Case({"fn": "no_such_function", "params": {}, "inputs": {}}, torch.float64)
    with pytest.raises(NotImplementedError, match="no_such_function"):
        run(case)


def test_vector_comparison_sees_a_wrong_digit() -> None:
    assert is_close(torch.tensor([1.0, 2.0]), [1.0, 2.0], 1e-9, 1e-12)
    assert not is_close(torch.tensor([1.0, 2.0]), [1.0, 2.00001], 1e-9, 1e-12)
    assert is_close([math.inf], ["Infinity"], 1e-9, 0.0)
    assert not is_close([math.inf], ["-Infinity"], 1e-9, 0.0)
