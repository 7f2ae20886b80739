"""Section 7: potentials, penalties, process scores, hindsight."""

from random import Random

import torch
from torch import Tensor

from tests.learners.vector_adapters.case import Case, Values
from turngate.envs.detectors import repeated_pairs
from turngate.learners.advantages import GroupScheme, group_advantages
from turngate.learners.advantages.gae import gae
from turngate.learners.hindsight import (
    goal_steps,
    hindsight_distribution,
    hindsight_goal,
    redistribute_return,
    return_conditional_credit,
)
from turngate.learners.shaping import min_form, potential_shaping, soft_overlong, turn_penalties

__all__ = ["ADAPTERS"]


def shaped(phi: Tensor, *, gamma: float, terminated: bool) -> Tensor:
    """Shape by potentials of all T + 1 histories, the start's first."""
    return potential_shaping(phi[1:], gamma=gamma, terminated=terminated, start=float(phi[0]))


def pbrs(case: Case) -> Values:
    gamma, terminated = case.params["gamma"], case.params.get("terminated", True)
    phi = case.real("phi")
    shaping = shaped(phi, gamma=gamma, terminated=terminated)
    turns = len(shaping)
    last = 0.0 if terminated else float(phi[-1])
    discounted = sum(gamma**t * float(f) for t, f in enumerate(shaping))
    return {"shaping": shaping, "discounted_sum": discounted, "identity": gamma**turns * last - float(phi[0])}


def pbrs_gae(case: Case) -> Values:
    """Shaped rewards with a critic of V - Phi; the last potential given is that of the terminal state."""
    gamma, lam = case.params["gamma"], case.params["lam"]
    rewards, values, phi = case.real("rewards"), case.real("values"), case.real("phi")
    plain = gae(rewards, values, bootstrap=None, gamma=gamma, lam=lam)
    shaping = shaped(phi, gamma=gamma, terminated=True)
    moved = gae(rewards + shaping, values - phi[: len(values)], bootstrap=None, gamma=gamma, lam=lam)
    return {"advantages": plain.advantages_T, "advantages_shaped_with_v_minus_phi": moved.advantages_T}


def pbrs_group(case: Case) -> Values:
    gamma = case.params.get("gamma", 1.0)
    members = [torch.tensor(rewards, dtype=case.dtype) for rewards in case.inputs["turn_rewards"]]
    potentials = [torch.tensor(phi, dtype=case.dtype) for phi in case.inputs["phi"]]
    discounts = [gamma ** torch.arange(len(rewards), dtype=case.dtype) for rewards in members]
    shaping = [shaped(phi, gamma=gamma, terminated=True) for phi in potentials]
    returns = torch.stack([(d * r).sum() for d, r in zip(discounts, members, strict=True)])
    after = torch.stack([(d * (r + f)).sum() for d, r, f in zip(discounts, members, shaping, strict=True)])
    scheme = GroupScheme("mean", "none")
    return {
        "returns": returns,
        "shaped_returns": after,
        "advantages": group_advantages(returns, scheme=scheme).advantages_G,
        "advantages_shaped": group_advantages(after, scheme=scheme).advantages_G,
    }


def progress_group(case: Case) -> Values:
    """A negative control's inputs: progress is paid as differences here, never as it stands."""
    values = pbrs_group(case)
    return {"returns": values["shaped_returns"], "advantages": values["advantages_shaped"]}


def overlong(case: Case) -> Values:
    limits = {"max_length": case.params["l_max"], "cache_length": case.params["l_cache"]}
    return {"penalty": soft_overlong(case.real("length"), **limits)}


def penalties(case: Case) -> Values:
    steps = case.inputs["steps"]
    repeats = repeated_pairs((step["obs"], step["action"]) for step in steps)
    paid = turn_penalties(
        torch.tensor([not step["valid"] for step in steps], dtype=torch.bool),
        torch.tensor(repeats, dtype=torch.bool),
        turn_cost=case.params.get("c_turn", 0.0),
        invalid_penalty=case.params.get("c_invalid", 0.0),
        repeat_penalty=case.params.get("c_repeat", 0.0),
        cap=case.params.get("cap", float("inf")),
    )
    return {"penalty": paid.total_T}


def pure(case: Case) -> Values:
    scores = case.real("step_rewards")
    transformed = min_form(scores, temperature=case.params["temperature"])
    return {"transformed": transformed, "sum": transformed.sum(), "min": scores.min()}


def her(case: Case) -> Values:
    achieved = case.inputs["achieved"]
    after = case.params.get("after", 0)
    goal = hindsight_goal(achieved, strategy=case.params["strategy"], after=after, random=Random(0))
    steps = goal_steps(achieved, goal)
    return {
        "goal": goal,
        "rewards": [step.reward for step in steps],
        "terminated": [step.end is not None for step in steps],
        "length": len(steps),
    }


def hca_return(case: Case) -> Values:
    """Exact hindsight probabilities; an action's advantage is the mean credit over the two returns it can lead to."""
    policy, success = case.real("pi"), case.real("p_success")
    given = {1.0: hindsight_distribution(policy, success), 0.0: hindsight_distribution(policy, 1 - success)}
    bound = case.params.get("max_ratio", float("inf"))
    advantages = torch.zeros_like(policy)
    for z, hindsight in given.items():
        returns = torch.full_like(policy, z)
        credit = return_conditional_credit(policy, hindsight, returns, max_ratio=bound)
        advantages += (success if z else 1 - success) * credit
    return {
        "h_given_success": given[1.0],
        "h_given_failure": given[0.0],
        "advantage_from_hindsight": advantages,
        "advantage_true": success - (policy * success).sum(),
    }


def redistribute(case: Case) -> Values:
    """The first prediction is of the start; what it already knew is paid at the first turn."""
    rewards = redistribute_return(case.real("predicted_return")[1:], case.inputs["final_return"])
    return {"rewards": rewards, "sum": rewards.sum()}


ADAPTERS = {
    "hca_return": hca_return,
    "her": her,
    "pbrs": pbrs,
    "pbrs_gae": pbrs_gae,
    "pbrs_group": pbrs_group,
    "progress_group": progress_group,
    "pure_min_form": pure,
    "redistribute": redistribute,
    "soft_overlong": overlong,
    "turn_penalties": penalties,
}
