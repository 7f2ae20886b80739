"""What a batch looked like to its learner: panels of outcome, groups, lag and policy. Pure functions.

Means are over policy tokens, turns, trajectories or groups as each function says, never over padding, and before any
clamping. A number that the data does not define is left out. `docs/metrics.md` lists all of them.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turngate.envs.base import End
from turngate.learners.batch import TokenBatch
from turngate.learners.reward_scheme import TurnRewards
from turngate.runtime.outcomes import is_clean_root
from turngate.runtime.types import Batch, Trajectory

__all__ = [
    "PanelInput",
    "group_panel",
    "lag_panel",
    "outcome_panel",
    "pass_at_k",
    "policy_panel",
    "quantiles_of",
    "starts_turn",
]

_LAGS = 5
"""Staleness from which on one bin holds all: bounds beyond 4 are rare, and what counts is whether there is a tail."""
_VALID = 8
"""The same for the number of valid members of a group."""
_PASS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class PanelInput:
    """One update's data, as credit was computed from it."""

    batch: Batch
    keep: Sequence[Sequence[bool]]
    """Per group and member: whether it trains."""
    tokens: TokenBatch
    proximal_N: Tensor
    """Log-probs and entropies before the update."""
    entropy_N: Tensor
    advantages_N: Tensor
    rewards: Sequence[TurnRewards | None]
    """What was learned from, per trajectory; None for failures of the machinery."""

    @property
    def trajectories(self) -> list[Trajectory]:
        """All trajectories, in the order of `trajectory_ids_N`."""
        return [trajectory for group in self.batch.groups for trajectory in group.trajectories]


def outcome_panel(data: PanelInput) -> dict[str, float]:
    """Return how episodes ended and what they earned, over those that the policy alone played from their task's start.

    `end_<reason>` is over all of these (`outcome_trajectories`), `gold_return` over those that did not fail
    (`gold_trajectories`), `reward_<component>` as learned from over the scorable ones (`reward_trajectories`),
    `pass_at_<k>` over groups with k of them that did not fail (`pass_at_<k>_groups`).
    """
    pairs = [(t, r) for t, r in zip(data.trajectories, data.rewards, strict=True) if is_clean_root(t)]
    metrics = {"outcome_trajectories": float(len(pairs))}
    if pairs:
        metrics |= {f"end_{end.value}": sum(t.end is end for t, _ in pairs) / len(pairs) for end in End}
    gold = [t.outcome for t, _ in pairs if not t.end.is_failure and math.isfinite(t.outcome)]
    metrics["gold_trajectories"] = float(len(gold))
    if gold:
        metrics["gold_return"] = math.fsum(gold) / len(gold)
    scorable = [r for _, r in pairs if r is not None and r.is_scorable]
    metrics["reward_trajectories"] = float(len(scorable))
    for name in dict.fromkeys(name for r in scorable for name in r.components):
        metrics[f"reward_{name}"] = math.fsum(float(r.components[name].sum()) for r in scorable if name in r.components)
        metrics[f"reward_{name}"] /= len(scorable)
    return metrics | _pass_metrics(data.batch)


def pass_at_k(successes: int, tries: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k tries succeeds: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al. 2021 (2107.03374). Needs 1 <= k <= tries.
    """
    return 1.0 - math.comb(tries - successes, k) / math.comb(tries, k)


def group_panel(data: PanelInput) -> dict[str, float]:
    """Return what groups have to tell: fractions over all `groups`, whether or not a member counts.

    All members that train succeeded, or none did; `groups_valid_<n>` have n members that train. The spread within
    groups is a mean over those with two or more known returns (`groups_compared`). Tokens that are too old to train on
    count against all generated tokens of the members that train.
    """
    groups, trajectories = data.batch.groups, data.trajectories
    returns = [math.nan if r is None else float(r.total_T.sum()) for r in data.rewards]
    counts, stds = [0] * (_VALID + 2), list[float]()
    succeeded = failed = kept = start = 0
    for keep in data.keep:
        members = [start + member for member, is_kept in enumerate(keep) if is_kept]
        start += len(keep)
        counts[min(len(members), _VALID + 1)] += 1
        kept += len(members)
        successes = sum(trajectories[number].end is End.success for number in members)
        succeeded += bool(members) and successes == len(members)
        failed += bool(members) and not successes
        known = [returns[number] for number in members if math.isfinite(returns[number])]
        if len(known) > 1:
            stds.append(statistics.stdev(known))
    generated = int(data.tokens.generated_N.sum())
    stale = generated - data.tokens.policy_tokens
    widest = min(max((len(group.trajectories) for group in groups), default=0), _VALID + 1)
    metrics = {
        "groups": float(len(groups)),
        "trajectories": float(len(trajectories)),
        "trained_trajectories_fraction": kept / max(len(trajectories), 1),
        "groups_all_succeeded_fraction": succeeded / max(len(groups), 1),
        "groups_all_failed_fraction": failed / max(len(groups), 1),
        "groups_compared": float(len(stds)),
        "excluded_stale_tokens": float(stale),
        "excluded_stale_tokens_fraction": stale / max(generated, 1),
    }
    metrics |= {f"groups_valid_{_bin(n, _VALID + 1)}": float(counts[n]) for n in range(widest + 1)}
    return metrics | ({"group_reward_std_within": math.fsum(stds) / len(stds)} if stds else {})


def lag_panel(data: PanelInput) -> dict[str, float]:
    """Return how many trained tokens, and trajectories by their oldest one, have which staleness.

    `log_ratio_abs_fresh` is the mean distance to the sampler over tokens of staleness 0 (`lag_tokens_0`): what two
    programs make of the same weights. `log_ratio_abs_stale` is over all others: that, and what training changed.
    """
    tokens, mask_N = data.tokens, data.tokens.mask_N
    lag_P = data.batch.policy_version - tokens.versions_N[mask_N]
    oldest_I = torch.full((len(tokens.trajectory_names),), -1, dtype=torch.int64)
    oldest_I.scatter_reduce_(0, tokens.trajectory_ids_N[mask_N], lag_P, "amax")
    metrics: dict[str, float] = {}
    for name, lags in (("tokens", lag_P), ("trajectories", oldest_I[oldest_I >= 0])):
        counts = torch.bincount(lags.clamp(max=_LAGS), minlength=_LAGS + 1).tolist()
        metrics |= {f"lag_{name}_{_bin(lag, _LAGS)}": float(count) for lag, count in enumerate(counts)}
    gap_P = (data.proximal_N[mask_N].to(torch.float64) - tokens.sampler_logprobs[mask_N].to(torch.float64)).abs()
    for name, chosen_P in (("fresh", lag_P == 0), ("stale", lag_P > 0)):
        if bool(chosen_P.any()):
            metrics[f"log_ratio_abs_{name}"] = float(gap_P[chosen_P].mean())
    return metrics


def policy_panel(data: PanelInput) -> dict[str, float]:
    """Return entropy by place in the turn, and quantiles of the log-ratio of the policy over its sampler.

    Over policy tokens: `entropy_first_token` over those that begin a turn (`first_tokens`), `entropy_later_tokens` over
    the rest.
    """
    tokens, mask_N = data.tokens, data.tokens.mask_N
    first_N = mask_N & starts_turn(tokens)
    metrics = {"first_tokens": float(first_N.sum())}
    for name, chosen_N in (("first_token", first_N), ("later_tokens", mask_N & ~first_N)):
        if bool(chosen_N.any()):
            metrics[f"entropy_{name}"] = float(data.entropy_N[chosen_N].to(torch.float64).mean())
    gap_P = data.proximal_N[mask_N].to(torch.float64) - tokens.behaviour_logprobs_N[mask_N].to(torch.float64)
    return metrics | quantiles_of(gap_P, "sampler_log_ratio")


def starts_turn(tokens: TokenBatch) -> Tensor:
    """Return bool (N,): the generated tokens that are the first of their turn."""
    at_N, turns_N = tokens.generated_N, tokens.turn_ids_N
    is_first_N = at_N.clone()
    # Rows need no look: each begins with context.
    is_first_N[1:] &= ~(at_N[:-1] & (turns_N[:-1] == turns_N[1:]))
    return is_first_N


def quantiles_of(values: Tensor, name: str) -> dict[str, float]:
    """Return the 1st, 50th and 99th percentile as order statistics under names with _q01, _q50, _q99."""
    ordered = values.detach().flatten().sort().values
    last = len(ordered) - 1
    return {f"{name}_q{q:02}": float(ordered[round(q / 100 * last)]) for q in (1, 50, 99)} if last >= 0 else {}


def _pass_metrics(batch: Batch) -> dict[str, float]:
    played = [[t for t in g.trajectories if is_clean_root(t) and not t.end.is_failure] for g in batch.groups]
    metrics: dict[str, float] = {}
    for k in _PASS:
        found = [pass_at_k(sum(t.end is End.success for t in m), len(m), k) for m in played if len(m) >= k]
        if found:
            metrics |= {f"pass_at_{k}": math.fsum(found) / len(found), f"pass_at_{k}_groups": float(len(found))}
    return metrics


def _bin(value: int, last: int) -> str:
    return f"{value}_plus" if value == last else str(value)
