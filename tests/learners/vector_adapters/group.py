"""Section 1: group-relative advantages, whitening, return-to-go."""

import torch

from tests.learners.vector_adapters.case import Adapter, Case, Values
from turngate.learners.advantages import GroupScheme, group_advantages, masked_whiten, reward_to_go, sample_advantages


def scheme(case: Case) -> GroupScheme:
    known = {k: v for k, v in case.params.items() if k in ("baseline", "scale", "eps", "singleton")}
    return GroupScheme(**known)


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


ADAPTERS: dict[str, Adapter] = {
    "group_advantage": group_advantage,
    "group_advantage_dedup": group_advantage_dedup,
    "masked_whiten": whiten,
    "reward_to_go": to_go,
}
