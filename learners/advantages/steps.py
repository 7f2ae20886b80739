"""Advantages of single steps: trajectories of a group that passed the same state are compared from there on.

Which steps are alike is the caller's to say, by a key per step. A key that holds a clock, a step counter or a random
id makes every step its own bucket, and then there is nothing to compare: watch `StepAdvantages.metrics`.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turngate.learners.advantages.group import GroupScheme, group_advantages
from turngate.learners.ratios import ShapeError
from turngate.runtime.errors import LearnerError

__all__ = [
    "StepAdvantages",
    "add_step_advantages",
    "edge_advantages",
    "edge_keys",
    "step_group_advantages",
    "step_returns",
]

_LARGE = 8
"""Steps per bucket from which on one bin of the histogram holds all: the usual size of a group."""


@dataclass(frozen=True, slots=True)
class StepAdvantages:
    """What the buckets of one task group say about each step."""

    advantages: list[Tensor]
    """(T_i,) per trajectory; 0 for steps of trajectories that do not count."""
    bucket_sizes: dict[int, int]
    """How many buckets hold how many steps: size -> count, smallest first."""

    def metrics(self) -> dict[str, float]:
        """Return how many buckets there are, in all and by size, steps per bucket, and the fraction of steps alone."""
        buckets = sum(self.bucket_sizes.values())
        steps = sum(size * count for size, count in self.bucket_sizes.items())
        binned: Counter[int] = Counter()
        for size, count in self.bucket_sizes.items():
            binned[min(size, _LARGE)] += count
        names = {size: f"step_buckets_of_{size}" + "_plus" * (size == _LARGE) for size in range(1, _LARGE + 1)}
        return {name: float(binned[size]) for size, name in names.items()} | {
            "step_buckets": float(buckets),
            "step_bucket_size_mean": steps / buckets if buckets else 0.0,
            "step_singleton_fraction": self.bucket_sizes.get(1, 0) / steps if steps else 0.0,
        }


def step_returns(rewards_T: Tensor, *, gamma: float = 0.95) -> Tensor:
    """Return the discounted sum of rewards from each step on, (T,), in the dtype of the rewards."""
    returns, following = [0.0] * len(rewards_T), 0.0
    for t, reward in reversed(list(enumerate(rewards_T.detach().to(torch.float64).tolist()))):
        returns[t] = following = reward + gamma * following
    return torch.tensor(returns, dtype=torch.float64).to(rewards_T)


def step_group_advantages(
    rewards: Sequence[Tensor],
    keys: Sequence[Sequence[Hashable]],
    valid_G: Tensor | None = None,
    *,
    gamma: float = 0.95,
    scheme: GroupScheme | None = None,
) -> StepAdvantages:
    """Return each step's discounted return compared with those of all steps of the group that have the same key.

    Repeats inside one trajectory count again; a step alone in its bucket gets 0. Source: GiGPO, Feng et al. 2025
    (2505.10978), eqs. 5-7.
    Args: rewards: (T_i,) per trajectory of one task group. keys: what identifies the state before each step, usually
    the observation. valid_G: False for trajectories that neither vote nor train. scheme: the mean alone unless given.
    Raises: ShapeError: a step without a key. LearnerError: an infinite reward.
    """
    buckets = _buckets(keys, _counting(rewards, keys, valid_G))
    returns = [step_returns(r.to(torch.float64), gamma=gamma) for r in rewards]
    advantages = [torch.zeros_like(returns_T) for returns_T in returns]
    for places in buckets.values():
        returns_K = torch.stack([returns[i][t] for i, t in places])
        compared_K = group_advantages(returns_K, scheme=scheme or GroupScheme("mean", "none")).advantages_G
        for (i, t), advantage in zip(places, compared_K.tolist(), strict=True):
            advantages[i][t] = advantage
    return StepAdvantages([a.to(r) for a, r in zip(advantages, rewards, strict=True)], _sizes(buckets))


def add_step_advantages(episode_G: Tensor, steps: Sequence[Tensor], *, omega: float = 1.0) -> list[Tensor]:
    """Return `A_episode + omega A_step` per step, (T_i,) per trajectory. Source: GiGPO (2505.10978), eq. 8.

    Args: episode_G: one vote per trajectory, as from `group_advantages`.
    """
    if episode_G.shape != (len(steps),):
        raise ShapeError(f"episode advantages must be one per trajectory: got {tuple(episode_G.shape)}, {len(steps)}")
    return [(episode + omega * steps_T).detach() for episode, steps_T in zip(episode_G, steps, strict=True)]


def edge_keys(observations: Sequence[Hashable], actions: Sequence[Hashable]) -> list[Hashable]:
    """Return a key per step of one trajectory: observation, action, and the observation it led to.

    Args: observations: one more than actions, the last one seen after the last action (anything that marks the end).
    """
    if len(observations) != len(actions) + 1:
        expected, got = len(actions) + 1, len(observations)
        raise ShapeError(f"observations must be one more than actions: expected {expected}, got {got}")
    return list(zip(observations[:-1], actions, observations[1:], strict=True))


def edge_advantages(
    episode_G: Tensor, keys: Sequence[Sequence[Hashable]], valid_G: Tensor | None = None
) -> StepAdvantages:
    """Return the mean group advantage over the steps that share an edge; a step nobody else took keeps its own.

    What good and bad trajectories share gets little credit either way. Source: SALT, Li et al. 2025 (2510.20022).
    Args: episode_G: from `group_advantages`. keys: per trajectory, from `edge_keys`.
    Raises: ShapeError; LearnerError: an advantage is not finite.
    """
    counts = valid_G if valid_G is not None else torch.ones_like(episode_G, dtype=torch.bool)
    if not episode_G.shape == counts.shape == (len(keys),):
        shapes = f"{tuple(episode_G.shape)}, {tuple(counts.shape)}"
        raise ShapeError(f"advantages and valid must be one per trajectory: expected ({len(keys)},), got {shapes}")
    if not torch.isfinite(episode_G).all():
        raise LearnerError(f"episode advantages must be finite: got {episode_G.tolist()}; see group_advantages")
    episode: list[float] = episode_G.detach().to(torch.float64).tolist()
    buckets = _buckets(keys, [bool(v) for v in counts])
    advantages = [torch.zeros(len(k), dtype=torch.float64) for k in keys]
    for places in buckets.values():
        mean = math.fsum(episode[i] for i, _ in places) / len(places)
        for i, t in places:
            advantages[i][t] = mean
    return StepAdvantages([a.to(episode_G) for a in advantages], _sizes(buckets))


def _counting(rewards: Sequence[Tensor], keys: Sequence[Sequence[Hashable]], valid_G: Tensor | None) -> list[bool]:
    """Return which trajectories count: those that are valid and could be scored."""
    if [len(r) for r in rewards] != [len(k) for k in keys]:
        lengths = f"{[len(r) for r in rewards]} rewards, {[len(k) for k in keys]} keys"
        raise ShapeError(f"every step must have a reward and a key: got {lengths} (per trajectory)")
    if valid_G is not None and valid_G.shape != (len(rewards),):
        raise ShapeError(f"valid must be one per trajectory: expected ({len(rewards)},), got {tuple(valid_G.shape)}")
    for i, rewards_T in enumerate(rewards):
        if torch.isinf(rewards_T).any():
            raise LearnerError(
                f"rewards must be finite: got {rewards_T.tolist()} (trajectory {i}); fix the environment"
            )
    return [not bool(torch.isnan(r).any()) and (valid_G is None or bool(valid_G[i])) for i, r in enumerate(rewards)]


def _buckets(keys: Sequence[Sequence[Hashable]], counts: Sequence[bool]) -> dict[Hashable, list[tuple[int, int]]]:
    """Return the places (trajectory, step) of each key, of the trajectories that count."""
    buckets: defaultdict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for i, keys_T in enumerate(keys):
        for t, key in enumerate(keys_T):
            if counts[i]:
                buckets[key].append((i, t))
    return dict(buckets)


def _sizes(buckets: dict[Hashable, list[tuple[int, int]]]) -> dict[int, int]:
    return dict(sorted(Counter(len(places) for places in buckets.values()).items()))
