"""Sections 1.3-1.5 and 3: step groups, turn-index baselines, trees, GAE, segments."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.learners.vector_adapters.case import Adapter, Case, Values, numbers
from tests.learners.vector_adapters.ends import ENDS
from turngate.envs.base import End
from turngate.learners.advantages import (
    Gae,
    GroupScheme,
    add_step_advantages,
    gae,
    gae_batch,
    gae_bilevel,
    gae_flat_tokens,
    gae_segments,
    group_advantages,
    intra_inter_advantages,
    length_adaptive_lambda,
    step_group_advantages,
    step_returns,
    tree_values,
    turn_index_advantages,
)
from turngate.runtime.errors import ConfigError
from turngate.runtime.recorder import Recorder
from turngate.runtime.types import Completion


def ragged(case: Case, values: Any) -> list[Tensor]:
    return [torch.tensor(numbers(row), dtype=case.dtype) for row in values]


def as_lists(values: list[Tensor]) -> list[list[float]]:
    return [row.tolist() for row in values]


def traces(case: Case, *names: str) -> dict[str, float]:
    return {name: case.params[name] for name in names if name in case.params}


# --- 1.3-1.5


def gigpo(case: Case) -> Values:
    rewards = ragged(case, case.inputs["traj_rewards"])
    scale = {"std": "std_sample"}.get(case.params.get("scale", "none"), case.params.get("scale", "none"))
    scheme = GroupScheme("mean", scale, case.params.get("eps", 1e-6))
    gamma = case.params.get("gamma", 0.95)
    episode = group_advantages(torch.stack([r.sum() for r in rewards]), scheme=scheme).advantages_G
    steps = step_group_advantages(rewards, case.inputs["anchors"], gamma=gamma, scheme=scheme)
    total = add_step_advantages(episode, steps.advantages, omega=case.params.get("omega", 1.0))
    returns = [step_returns(r, gamma=gamma) for r in rewards]
    lists = {"step_returns": returns, "step": steps.advantages, "total": total}
    return {"episode": episode} | {name: as_lists(values) for name, values in lists.items()}


def turn_index_baseline(case: Case) -> Values:
    rewards, gamma = ragged(case, case.inputs["traj_rewards"]), case.params.get("gamma", 1.0)
    if case.params.get("mode") == "per_index_truncated":
        with pytest.raises(ConfigError, match="biased"):
            turn_index_advantages(rewards, gamma=gamma, peers="alive")
    return {"advantages": as_lists(turn_index_advantages(rewards, gamma=gamma))}


def nested_zscore(case: Case) -> Values:
    """Show what a second normalisation leaves of the first; the product has no such form."""
    scores, tree = case.real("scores"), torch.tensor(case.inputs["tree"])
    scheme = GroupScheme("mean", "std_sample", case.params["eps"])

    def within_trees(values: Tensor) -> Tensor:
        out = torch.zeros_like(values)
        for t in tree.unique():
            out[tree == t] = group_advantages(values[tree == t], scheme=scheme).advantages_G
        return out

    return {
        "nested": within_trees(group_advantages(scores, scheme=scheme).advantages_G),
        "intra_tree": within_trees(scores),
        "sum_of_inter_and_intra": intra_inter_advantages(scores, case.inputs["tree"], scheme=scheme),
    }


def values_of_tree(case: Case) -> Values:
    children, leaves = case.inputs["children"], case.inputs["leaf_reward"]
    return {
        "child_weighted": tree_values(children, leaves),
        "leaf_weighted": tree_values(children, leaves, weighting="leaf"),
    }


# --- 3: critics


def named(estimate: Gae) -> Values:
    return {"advantages": estimate.advantages_T, "returns": estimate.targets_T}


def one_trajectory(case: Case) -> Values:
    bootstrap = case.inputs["bootstrap"]
    return named(gae(case.real("rewards"), case.real("values"), bootstrap=bootstrap, **traces(case, "gamma", "lam")))


def flat_tokens(case: Case) -> Values:
    out = gae_flat_tokens(
        case.mask("mask", "token_rewards"),
        case.real("token_rewards"),
        case.real("token_values"),
        bootstrap=case.inputs["bootstrap"],
        **traces(case, "gamma", "lam"),
    )
    return {"advantages": out.advantages_T, "returns": out.targets_T, "dropped": out.dropped_rewards}


def compare(case: Case) -> Values | None:
    """Observation tokens between two policy tokens must change nothing."""
    if "gapped" not in case.inputs:
        return None
    out: dict[str, Tensor] = {}
    for name in ("compact", "gapped"):
        layout = case.inputs[name]
        mask = torch.tensor(layout["mask"]).bool()
        rewards, values = ragged(case, [layout["rewards"], layout["values"]])
        bootstrap = case.inputs.get("bootstrap")
        estimate = gae_flat_tokens(mask, rewards, values, bootstrap=bootstrap, **traces(case, "gamma", "lam"))
        out[name] = estimate.advantages_T[mask]
    return {"compact_adv": out["compact"], "gapped_adv_at_policy_tokens": out["gapped"]}


def bilevel(case: Case) -> Values:
    renamed = {"gamma_turn": "gamma_turn", "lam_turn": "lam_turn", "gamma_tok": "gamma_token", "lam_tok": "lam_token"}
    out = gae_bilevel(
        case.real("turn_rewards"),
        ragged(case, case.inputs["turn_token_values"]),
        bootstrap=case.inputs["bootstrap"],
        form=case.params.get("variant", "return"),
        token_rewards=ragged(case, case.inputs["token_rewards"]) if case.inputs.get("token_rewards") else None,
        **{name: case.params[key] for key, name in renamed.items() if key in case.params},
    )
    return {
        "turn_adv": out.turns.advantages_T,
        "turn_ret": out.turns.targets_T,
        "token_adv": as_lists([t.advantages_T for t in out.tokens]),
        "token_ret": as_lists([t.targets_T for t in out.tokens]),
    }


def segments(case: Case) -> Values:
    made = case.inputs["segments"]
    rewards, values = (ragged(case, [segment[name] for segment in made]) for name in ("rewards", "values"))
    bootstrap = case.inputs["bootstrap"]
    out = named(gae_segments(rewards, values, bootstrap=bootstrap, **traces(case, "gamma", "lam")))
    return out | {"wrong_if_segment_end_is_terminal": out["advantages"]}


def batch(case: Case) -> Values:
    members = case.inputs["batch"]
    ends = {"terminated": End.failure, "truncated": End.turn_limit, **ENDS}
    estimates = gae_batch(
        ragged(case, [m["rewards"] for m in members]),
        ragged(case, [m["values"] for m in members]),
        [ends[m["end"]] for m in members],
        [m.get("v_last") for m in members],
        **traces(case, "gamma", "lam"),
    )
    return {"per_trajectory": [None if e is None else named(e) for e in estimates]}


def adaptive_lambda(case: Case) -> Values:
    return {"lam": [length_adaptive_lambda(n, alpha=case.params["alpha"]) for n in case.inputs["n_tokens"]]}


def segment_masks(case: Case) -> Values:
    """Play the turns through the recorder, which sees prompts and completions alone.

    An observation that no later prompt of its segment quotes is not in the record: the model never saw it there.
    """
    recorder, fresh = Recorder(), iter(range(10_000))
    context: list[int] = []
    trailing: dict[int, int] = {}
    for index, turn in enumerate(case.inputs["turns"]):
        if turn["segment"] not in trailing:
            context = []
        context += [next(fresh) for _ in range(turn.get("prompt", 0))]
        action = [next(fresh) for _ in range(turn["action"])]
        recorder.add(Completion("text", action, [-1.0] * len(action), [0] * len(action), list(context)), index)
        context += action + [next(fresh) for _ in range(turn["observation"])]
        trailing[turn["segment"]] = turn["observation"]
    made = recorder.segments()
    return {
        "masks": [[*s.policy_mask, *[0] * trailing[i]] for i, s in enumerate(made)],
        "turn_id": [[*s.turn_values(), *[-1] * trailing[i]] for i, s in enumerate(made)],
        "policy_tokens": recorder.policy_tokens,
    }


ADAPTERS: dict[str, Adapter] = {
    "gae": one_trajectory,
    "gae_batch": batch,
    "gae_bilevel": bilevel,
    "gae_flat_tokens": flat_tokens,
    "gae_segments": segments,
    "gigpo": gigpo,
    "length_adaptive_lambda": adaptive_lambda,
    "nested_zscore": nested_zscore,
    "segment_masks": segment_masks,
    "tree_values": values_of_tree,
    "turn_index_baseline": turn_index_baseline,
}
