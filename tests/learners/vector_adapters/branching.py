"""Sections 5 and 6: Monte Carlo estimates, budgets, allocation, and how a guided policy chooses."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from tests.learners.vector_adapters.case import Adapter, Case, Values, numbers
from turngate.runtime.allocation import expected_best_of_noisy_means, neyman_allocation, successive_halving
from turngate.runtime.branch_budget import branching_cost
from turngate.runtime.engine.guidance import guided_logprobs
from turngate.runtime.metrics import wilson_interval
from turngate.runtime.monte_carlo import (
    Z_95,
    estimate,
    leave_one_out_advantages,
    newcombe_interval,
    optimal_continuations,
    two_level_variance,
    vine_advantages,
)
from turngate.runtime.search import uct_scores
from turngate.runtime.selection import (
    best_of_n_kl_bound,
    beta_for_kl,
    enumerated_probs,
    kl_to_base,
    log_selection_weight,
    selection_probs,
    soft_success,
)

__all__ = ["ADAPTERS"]


def mc_q(case: Case) -> Values:
    found = estimate([float(r) for r in numbers(case.inputs["returns"])])
    values: Values = {"mean": found.mean, "se_sample": found.standard_error}
    if found.successes is not None:
        rate, z = found.mean, case.params.get("z", Z_95)
        values |= {
            "se_plugin": math.sqrt(rate * (1 - rate) / found.count),
            "wilson95": list(found.wilson(z=z)),
            "beta_jeffreys_mean": found.beta_mean(),
            "beta_jeffreys95": list(found.beta()),
            "beta_uniform_mean": found.beta_mean(prior=1.0),
            "beta_uniform95": list(found.beta(prior=1.0)),
        }
    return values


def wilson(case: Case) -> Values:
    z = case.params.get("z", Z_95)
    return {"interval": list(wilson_interval(case.inputs["successes"], case.inputs["n"], z=z))}


def newcombe(case: Case) -> Values:
    (sq, kq), (sv, kv) = case.inputs["q"], case.inputs["v"]
    q, v = sq / kq, sv / kv
    return {
        "advantage": q - v,
        "interval": list(newcombe_interval(sq, kq, sv, kv, z=case.params.get("z", Z_95))),
        "se_independent": math.sqrt(q * (1 - q) / kq + v * (1 - v) / kv),
    }


def v_loo(case: Case) -> Values:
    q_N = numbers(case.inputs["q_of_sampled_actions"])
    mean = sum(q_N) / len(q_N)
    return {"v_mean": mean, "adv_mean": [q - mean for q in q_N], "adv_loo": leave_one_out_advantages(q_N)}


def vine(case: Case) -> Values:
    values, rewards = numbers(case.inputs["mc_values"]), numbers(case.inputs["turn_rewards"])
    return {"advantages": vine_advantages(values, rewards, gamma=case.params.get("gamma", 1.0))}


def two_level(case: Case) -> Values:
    between, within = case.inputs["var_between"], case.inputs["var_within"]
    designs = case.inputs["designs"]
    return {
        "variance": [two_level_variance(between, within, outcomes, kc) for outcomes, kc in designs],
        "naive_ignoring_between": within / (designs[0][0] * designs[0][1]),
    }


def optimal_kc(case: Case) -> Values:
    i = case.inputs
    kc = optimal_continuations(
        i["var_between"], i["var_within"], outcome_cost=i["cost_outcome"], continuation_cost=i["cost_cont"]
    )
    return {"kc": kc}


def budget(case: Case) -> Values:
    resample = case.params.get("resample_outcome", False)
    cost = branching_cost(case.inputs["T"], case.inputs["K"], case.params["estimate"], resample_outcome=resample)
    return {name: getattr(cost, name) for name in cost.__struct_fields__}


def halving(case: Case) -> Values:
    table, arms = case.inputs["reward_table"], case.params["n_arms"]
    pulled = [0] * arms

    def pull(arm: int, count: int) -> list[float]:
        row = [float(table[arm][(pulled[arm] + k) % len(table[arm])]) for k in range(count)]
        pulled[arm] += count
        return row

    winner, rounds = successive_halving(pull, arms, case.params["budget"])
    log = [
        {"arms": list(r.arms), "pulls_each": r.pulls_each, "means": list(r.means), "kept": list(r.kept)} for r in rounds
    ]
    return {"winner": [winner], "log": log, "pulls_used": sum(pulled)}


def neyman(case: Case) -> Values:
    return {"k": neyman_allocation(case.inputs["sigmas"], case.params["total"], at_least=case.params.get("k_min", 0))}


def uct(case: Case) -> Values:
    visits: Counter[str] = Counter()
    totals: dict[str, float] = {}
    for arm, value in case.inputs["backups"]:
        visits[arm] += 1
        totals[arm] = totals.get(arm, 0.0) + value
    c, names = case.params["c"], list(totals)
    scores = uct_scores([totals[n] for n in names], [visits[n] for n in names], exploration=c)
    bonus = [score - totals[n] / visits[n] for score, n in zip(scores, names, strict=True)]
    return {
        "visits": dict(visits),
        "mean": {n: totals[n] / visits[n] for n in names},
        "uct": dict(zip(names, scores, strict=True)),
        # What the product gives under this name: the right score, never the mean divided by visits once more.
        "wrong_mean_divided_by_visits_again": {n: totals[n] / visits[n] + b for n, b in zip(names, bonus, strict=True)},
    }


def winners_curse(case: Case) -> Values:
    p = case.params
    return {"expected_max_of_means": expected_best_of_noisy_means(p["arms"], p["K"], p["p"]), "true_max": p["p"]}


def enumerated(case: Case) -> Values:
    base, q = numbers(case.inputs["base_logp"]), numbers(case.inputs["q"])
    probs = enumerated_probs(base, q, numbers(case.params["beta"]))
    return {"probs": probs, "kl_to_base": kl_to_base(probs, base)}


def sampled(case: Case) -> Values:
    q, p = numbers(case.inputs["q_of_draws"]), case.params
    return {"select": selection_probs(q, numbers(p["beta"]), floor=p.get("floor", 0.0))}


def marginal(pi: Sequence[float], n: int, choose: Callable[[tuple[int, ...]], Sequence[float]]) -> list[float]:
    """Return the marginal of the chosen action over all n draws from pi, by enumeration."""
    total = [0.0] * len(pi)
    for draws in itertools.product(range(len(pi)), repeat=n):
        weight = math.prod(pi[a] for a in draws)
        for action, probability in zip(draws, choose(draws), strict=True):
            total[action] += weight * probability
    return total


def sampled_marginals(case: Case) -> Values:
    pi, q = numbers(case.inputs["pi"]), numbers(case.inputs["q"])
    beta = numbers(case.params["beta"])
    logs = [math.log(p) for p in pi]

    def draws_only(draws: tuple[int, ...]) -> list[float]:
        return selection_probs([q[a] for a in draws], beta)

    def counted_twice(draws: tuple[int, ...]) -> list[float]:
        return enumerated_probs([logs[a] for a in draws], [q[a] for a in draws], beta)

    def distinct(draws: tuple[int, ...], base: bool) -> list[float]:
        firsts = sorted(set(draws))
        prior = [logs[a] if base else 0.0 for a in firsts]
        probs = dict(zip(firsts, enumerated_probs(prior, [q[a] for a in firsts], beta), strict=True))
        return [probs[a] if draws.index(a) == at else 0.0 for at, a in enumerate(draws)]

    def best(draws: tuple[int, ...]) -> list[float]:
        return selection_probs([q[a] for a in draws], math.inf)

    return {
        "target": enumerated_probs(logs, q, beta),
        **{f"n{n}": marginal(pi, n, draws_only) for n in (1, 2, 4, 8)},
        "double_count_n8": marginal(pi, 8, counted_twice),
        "double_count_limit": enumerated_probs([2 * lp for lp in logs], q, beta),
        "dedup_n4": marginal(pi, 4, lambda draws: distinct(draws, base=False)),
        "dedup_with_base_prob_n4": marginal(pi, 4, lambda draws: distinct(draws, base=True)),
        "best_of_4": marginal(pi, 4, best),
    }


def kl_bound(case: Case) -> Values:
    return {"bound": [best_of_n_kl_bound(n) for n in case.inputs["n"]]}


def selection_logweight(case: Case) -> Values:
    q, base = numbers(case.inputs["q_of_draws"]), numbers(case.inputs["base_action_logp"])
    p = case.params
    probs = selection_probs(q, numbers(p["beta"]), floor=p.get("floor", 0.0))
    logs = [log_selection_weight(probs, index) for index in range(len(probs))]
    return {
        "log_n_w": logs,
        "behaviour_logp_augmented": [lp + log for lp, log in zip(base, logs, strict=True)],
        "is_weight_to_base": [math.exp(-log) for log in logs],
    }


def token_guided(case: Case) -> Values:
    p = case.params
    logits, q = case.real("base_logits").double(), case.real("q").double()
    temperature = p.get("temperature", 1.0)
    base = torch.log_softmax(logits / temperature, -1)
    tokens = base.unsqueeze(0).topk(p["top_k"]).indices
    guided = guided_logprobs(
        base.unsqueeze(0),
        tokens,
        q.unsqueeze(0).gather(1, tokens),
        beta_B=torch.tensor([float(numbers(p["beta"]))], dtype=torch.float64),
        tail_is_base_B=torch.tensor([p.get("tail", "zero") == "base"]),
        v_state_B=torch.tensor([p.get("v_state", 0.0)], dtype=torch.float64),
    )[0]
    return {
        "guided_logp": guided,
        "base_logp": base,
        "behaviour_logp_of_token_1": float(guided[1]),
        "ratio_base_over_guided_token_1": float(torch.exp(base[1] - guided[1])),
    }


def guided_ratio(case: Case) -> Values:
    guided, current = case.real("guided_logp"), case.real("current_logp")
    log_ratio = current - guided
    return {"correct_log_ratio": log_ratio, "wrong_if_base_logged": log_ratio}


def soft_q_bernoulli(case: Case) -> Values:
    beta, rates = case.params["beta"], numbers(case.inputs["p"])

    return {
        "soft_q": [soft_success(p, beta) for p in rates],
        "weight_mean_q": [math.exp(beta * p) for p in rates],
        "weight_soft_q": [math.exp(beta * soft_success(p, beta)) for p in rates],
        "small_beta_soft_q": [soft_success(p, 1e-4) for p in rates],
    }


def beta_for_target(case: Case) -> Values:
    base = [math.log(p) for p in numbers(case.inputs["base_p"])]
    return {"beta": beta_for_kl(base, numbers(case.inputs["q"]), case.params["target_kl"])}


ADAPTERS: dict[str, Adapter] = {
    "mc_q": mc_q,
    "wilson": wilson,
    "newcombe_diff": newcombe,
    "v_loo": v_loo,
    "vine": vine,
    "two_level_variance": two_level,
    "optimal_kc": optimal_kc,
    "branch_budget": budget,
    "successive_halving": halving,
    "neyman": neyman,
    "uct": uct,
    "winners_curse": winners_curse,
    "guided_enumerated": enumerated,
    "guided_sampled": sampled,
    "marginal_of_sampled": sampled_marginals,
    "best_of_n_kl_bound": kl_bound,
    "selection_logweight": selection_logweight,
    "token_guided": token_guided,
    "guided_ratio": guided_ratio,
    "soft_q_bernoulli": soft_q_bernoulli,
    "beta_for_kl": beta_for_target,
}
