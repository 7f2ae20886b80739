"""Section 9: admission, lag, effective sample size, mismatch."""

import torch

from tests.learners.vector_adapters.case import Adapter, Case, Values
from turngate.learners.mismatch import effective_sample_size, mismatch_metrics
from turngate.runtime.staleness import capacity, lag_stats


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


ADAPTERS: dict[str, Adapter] = {
    "capacity": fresh_capacity,
    "capacity_trace": capacity_trace,
    "ess": ess,
    "ess_levels": ess_levels,
    "lag_stats": lag,
    "mismatch_metrics": mismatch,
    "staleness_simulation": staleness_simulation,
}
