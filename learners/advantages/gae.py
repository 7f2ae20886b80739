"""Generalised advantage estimation: over turns, over the tokens of flattened trajectories, over segments.

One trajectory at a time, so that nothing can leak into the next. How it ended is an argument: `bootstrap` is the
value of what follows a truncation, None where nothing follows. Source: Schulman et al. 2016 (1506.02438).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from turngate.envs.base import End
from turngate.learners.ratios import ShapeError, check_shapes
from turngate.runtime.errors import ConfigError, LearnerError

__all__ = [
    "FlatGae",
    "Gae",
    "bootstrap_value",
    "gae",
    "gae_batch",
    "gae_flat_tokens",
    "gae_segments",
    "length_adaptive_lambda",
]


class Gae(NamedTuple):
    """Advantages and value targets of one trajectory, detached, in the dtype of the values."""

    advantages_T: Tensor
    targets_T: Tensor
    """Advantage plus value, taken before any whitening: the critic regresses on these."""


class FlatGae(NamedTuple):
    """The same for tokens, exactly 0 where the mask is False."""

    advantages_T: Tensor
    targets_T: Tensor
    dropped_rewards: int
    """Rewards other than 0 before the first policy token: no action can have earned them."""
    dropped_total: float
    """Their sum."""


def gae(rewards_T: Tensor, values_T: Tensor, *, bootstrap: float | None, gamma: float = 1.0, lam: float = 0.95) -> Gae:
    """Return advantages and targets (T,) of one trajectory's steps, turns or tokens.

    `A_t = delta_t + gamma lam A_{t+1}` with `delta_t = r_t + gamma V_{t+1} - V_t`; no steps give empty tensors.
    Args: values_T: V before each step, all predicted at collection or all re-evaluated, never mixed. bootstrap: None
    when the trajectory terminated; else V of the context (or, inside an action, of the prefix) behind the last step,
    whatever cut it. `bootstrap_value` tells from the recorded end.
    Raises: ShapeError, ConfigError; LearnerError: a reward, value or bootstrap is not finite.
    """
    check_discounts(gamma=gamma, lam=lam)
    rewards, values = steps_of(rewards_T, "rewards"), steps_of(values_T, "values")
    check_shapes(rewards=rewards_T, values=values_T)
    advantages = backward(rewards, values, last_value(bootstrap), gamma, lam)
    return _with_targets(advantages, values, like=values_T)


def gae_segments(
    rewards: Sequence[Tensor],
    values: Sequence[Tensor],
    *,
    bootstrap: float | None,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Gae:
    """Return advantages and targets of all turns of a trajectory whose context was rewritten.

    A segment's end is neither terminal nor a boundary: the value after a rewrite is that of the rewritten context.
    Args: rewards, values: (T_s,) per segment, in order.
    """
    if len(rewards) != len(values):
        raise ShapeError(f"rewards and values must have one tensor per segment: got {len(rewards)} and {len(values)}")
    for rewards_T, values_T in zip(rewards, values, strict=True):
        check_shapes(rewards=rewards_T, values=values_T)
    if not values:
        raise LearnerError("segments must not be empty: got none; leave trajectories without turns out")
    return gae(torch.cat(list(rewards)), torch.cat(list(values)), bootstrap=bootstrap, gamma=gamma, lam=lam)


def bootstrap_value(end: End, value: float | None) -> float | None:
    """Return what `gae` takes as `bootstrap`: None after a terminal end, whatever a critic says about it.

    Args: value: V of the last context, or of the prefix when the cut fell inside an action.
    Raises: LearnerError: a truncation without a value, or a failure of the machinery, which has no target at all.
    """
    if end.is_terminal:
        return None
    if not end.is_truncation:
        raise LearnerError(f"the episode must have ended by the task or a limit: got {end.value}; drop it")
    if value is None:
        raise LearnerError(
            f"a truncated trajectory must have the value of its last context: got None (end {end.value}); "
            "its return is not over: evaluate the critic there, or leave the trajectory out"
        )
    return value


def gae_batch(
    rewards: Sequence[Tensor],
    values: Sequence[Tensor],
    ends: Sequence[End],
    last_values: Sequence[float | None],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> list[Gae | None]:
    """Return the estimate of each trajectory (T_i,), by its recorded end; None for failures, which do not count.

    Args: last_values: V of each last context, read for truncations alone.
    """
    lengths = {len(rewards), len(values), len(ends), len(last_values)}
    if len(lengths) > 1:
        raise ShapeError(f"rewards, values, ends and last_values must have one length: got {sorted(lengths)}")
    return [
        None if end.is_failure else gae(r, v, bootstrap=bootstrap_value(end, last), gamma=gamma, lam=lam)
        for r, v, end, last in zip(rewards, values, ends, last_values, strict=True)
    ]


def gae_flat_tokens(
    mask_T: Tensor,
    rewards_T: Tensor,
    values_T: Tensor,
    *,
    bootstrap: float | None,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> FlatGae:
    """Return advantages and targets (T,) of one trajectory's tokens, segments laid end to end.

    Policy tokens alone are transitions: what follows a turn's last token is V of the next turn's first, and the
    length of observations does not matter. A reward on a masked token belongs to the policy token before it.
    Args: mask_T: True on policy tokens. values_T: V before each token, not read where the mask is False.
    """
    check_shapes(mask=mask_T, rewards=rewards_T, values=values_T)
    check_discounts(gamma=gamma, lam=lam)
    mask_T = mask_T.bool()
    rewards, dropped = _earned(mask_T, rewards_T)
    values = steps_of(values_T[mask_T], "values")
    estimate = _with_targets(backward(rewards, values, last_value(bootstrap), gamma, lam), values, like=values_T)
    advantages_T, targets_T = torch.zeros_like(values_T), torch.zeros_like(values_T)
    advantages_T[mask_T], targets_T[mask_T] = estimate
    return FlatGae(advantages_T.detach(), targets_T.detach(), len(dropped), sum(dropped))


def length_adaptive_lambda(tokens: int, *, alpha: float = 0.05) -> float:
    """Return `1 - 1 / (alpha tokens)`, at least 0: long responses get longer traces. Source: VAPO (2504.05118).

    For the policy's advantages; the critic's targets keep lambda 1.
    """
    if not alpha > 0 or tokens < 1:
        raise ConfigError(f"alpha must be above 0 and tokens 1 or more: got {alpha} and {tokens}")
    return max(0.0, 1.0 - 1.0 / (alpha * tokens))


# What the bi-level form shares; floats, because the recursion is sequential and tensors of one element are slow.


def backward(rewards: list[float], values: list[float], last: float, gamma: float, lam: float) -> list[float]:
    """Return the recursion's advantages, from the last step to the first."""
    advantages, carry, following = [0.0] * len(values), 0.0, last
    for t in reversed(range(len(values))):
        carry = rewards[t] + gamma * following - values[t] + gamma * lam * carry
        advantages[t], following = carry, values[t]
    return advantages


def steps_of(tensor_T: Tensor, name: str) -> list[float]:
    """Return a (T,) tensor as floats; raises ShapeError or LearnerError where it holds anything else."""
    if tensor_T.ndim != 1:
        raise ShapeError(f"{name} must be those of one trajectory: expected shape (T,), got {tuple(tensor_T.shape)}")
    if not tensor_T.is_floating_point():
        raise LearnerError(f"{name} must be floating point: got {tensor_T.dtype}; results are given back in that dtype")
    steps: list[float] = tensor_T.detach().to(torch.float64).tolist()
    if (bad := next((t for t, x in enumerate(steps) if not math.isfinite(x)), None)) is not None:
        raise LearnerError(f"{name} must be finite: got {steps[bad]} (step {bad}); a critic or environment gave it")
    return steps


def last_value(bootstrap: float | None) -> float:
    """Return the value behind the last step."""
    if bootstrap is None:
        return 0.0
    if not math.isfinite(bootstrap):
        raise LearnerError(f"bootstrap must be finite: got {bootstrap}; the critic gave it at the last context")
    return float(bootstrap)


def check_discounts(**factors: float) -> None:
    """Raise ConfigError unless every discount and trace lies in [0, 1]."""
    for name, factor in factors.items():
        if not 0 <= factor <= 1:
            raise ConfigError(f"{name} must be from 0 to 1: got {factor}")


def _with_targets(advantages: list[float], values: list[float], *, like: Tensor) -> Gae:
    advantages_T = torch.tensor(advantages, dtype=torch.float64)
    targets_T = advantages_T + torch.tensor(values, dtype=torch.float64)
    return Gae(advantages_T.to(like), targets_T.to(like))


def _earned(mask_T: Tensor, rewards_T: Tensor) -> tuple[list[float], list[float]]:
    """Return the reward of each policy token, and the rewards before the first one."""
    earned: list[float] = []
    dropped: list[float] = []
    for is_policy, reward in zip(mask_T.tolist(), steps_of(rewards_T, "rewards"), strict=True):
        if is_policy:
            earned.append(reward)
        elif reward and earned:
            earned[-1] += reward
        elif reward:
            dropped.append(reward)
    return earned, dropped
