"""Rewards of turns beside the outcome: potentials, penalties, process scores. Pure functions; T counts turns here."""

from dataclasses import dataclass

import torch
from torch import Tensor

from turngate.learners.advantages.gae import check_discounts
from turngate.learners.ratios import check_shapes
from turngate.runtime.errors import ConfigError, LearnerError

__all__ = [
    "TurnPenalties",
    "min_form",
    "potential_shaping",
    "progress_form",
    "soft_overlong",
    "turn_penalties",
]


def potential_shaping(
    potentials_T: Tensor, *, gamma: float, terminated: bool, start: float = 0.0, is_own_T: Tensor | None = None
) -> Tensor:
    """Return gamma * Phi(h_{t+1}) - Phi(h_t) for each turn, shape (T,): it changes no ranking of policies.

    The discounted sum is gamma^T * Phi_T - Phi_0. The potential after a terminal turn counts as 0, whatever was given:
    otherwise it is a bonus for how the episode ended. Truncated episodes keep theirs, like a bootstrap value.
    Source: Ng et al. 1999; Grzes 2017 for episodic tasks.
    Args: potentials_T: Phi of the history after each turn; NaN where unknown. start: Phi before the first turn.
    is_own_T: False for turns that the policy did not take. They are part of the transition before them, without a
    discount of their own, and get gamma * (Phi_after - Phi_before): the two add up to the whole transition's shaping.
    """
    check_discounts(gamma=gamma)
    after_T = _turn_values(potentials_T, "potentials")
    before_T = torch.cat([torch.tensor([start], dtype=torch.float64, device=after_T.device), after_T])[:-1]
    if terminated and len(after_T):
        after_T = torch.cat([after_T[:-1], torch.zeros_like(after_T[-1:])])
    shaping_T = gamma * after_T - before_T
    if is_own_T is not None:
        check_shapes(potentials=potentials_T, is_own=is_own_T)
        shaping_T = torch.where(is_own_T, shaping_T, gamma * (after_T - before_T))
    return shaping_T.to(potentials_T.dtype)


def progress_form(
    scores_T: Tensor, *, gamma: float = 1.0, terminated: bool, start: float = 0.0, is_own_T: Tensor | None = None
) -> Tensor:
    """Return by how much each turn moved a score of the history, shape (T,): potential-based shaping by that score.

    With the value of a prover policy as the score these are process advantages.
    Source: Setlur et al. 2024, PAV (2410.08146).
    """
    return potential_shaping(scores_T, gamma=gamma, terminated=terminated, start=start, is_own_T=is_own_T)


def min_form(scores_T: Tensor, *, temperature: float = 0.1) -> Tensor:
    """Return each score times its softmin weight, shape (T,): the sum approaches the smallest as temperature falls.

    A plain sum is maximised by many mediocre turns; an episode is as good as its worst turn. A NaN makes all NaN,
    because it could be the smallest.
    Source: Cheng et al. 2025, PURE (2504.15275).
    """
    if not temperature > 0:
        raise ConfigError(f"temperature must be positive: got {temperature} (min_form)")
    scores = _turn_values(scores_T, "scores")
    return (torch.softmax(-scores / temperature, dim=-1) * scores).to(scores_T.dtype)


def soft_overlong(lengths: Tensor, *, max_length: int, cache_length: int) -> Tensor:
    """Return 0 up to max_length - cache_length, then falling linearly to -1 at max_length, -1 beyond; same shape.

    Source: Yu et al. 2025, DAPO (2503.14476), eq. 13.
    Args: cache_length: width of the slope; 0 makes it a step beyond max_length.
    """
    if not 0 <= cache_length <= max_length:
        raise ConfigError(f"cache_length must be from 0 to max_length {max_length}: got {cache_length}")
    over = lengths.to(torch.float64) - (max_length - cache_length)
    slope = -over / cache_length if cache_length else -(over > 0).to(torch.float64)
    penalty = slope.clamp(-1.0, 0.0) + 0.0  # + 0.0 turns -0.0 into 0.0
    return penalty.to(lengths.dtype if lengths.is_floating_point() else torch.float64)


@dataclass(frozen=True, slots=True)
class TurnPenalties:
    """What each turn pays, by reason; float64 (T,), 0 or negative."""

    turn_T: Tensor
    invalid_T: Tensor
    repeat_T: Tensor
    total_T: Tensor
    """The sum of the three."""


def turn_penalties(
    is_invalid_T: Tensor,
    is_repeat_T: Tensor,
    *,
    turn_cost: float = 0.0,
    invalid_penalty: float = 0.0,
    repeat_penalty: float = 0.0,
    cap: float = float("inf"),
    is_own_T: Tensor | None = None,
) -> TurnPenalties:
    """Return what each turn pays; once an episode has paid `cap`, it pays no more.

    The turn that reaches the cap pays what is left of it, in proportion. Costs are given as positive numbers.
    Args: is_own_T: False for turns that the policy did not choose; they cost nothing.
    """
    check_shapes(is_invalid=is_invalid_T, is_repeat=is_repeat_T)
    own_T = torch.ones_like(is_invalid_T, dtype=torch.bool) if is_own_T is None else is_own_T
    check_shapes(is_invalid=is_invalid_T, is_own=own_T)
    costs_3T = torch.stack(
        [
            torch.full(own_T.shape, turn_cost, dtype=torch.float64, device=own_T.device),
            invalid_penalty * is_invalid_T.to(torch.float64),
            repeat_penalty * is_repeat_T.to(torch.float64),
        ]
    )
    costs_3T = torch.where(own_T, costs_3T, 0.0)
    due_T = costs_3T.sum(0)
    left_T = (cap - (due_T.cumsum(0) - due_T)).clamp(min=0.0)
    paid_T = torch.minimum(due_T, left_T)
    share_T = torch.where(due_T > 0, paid_T / due_T.clamp(min=1e-300), 0.0)
    turn_T, invalid_T, repeat_T = 0.0 - costs_3T * share_T
    return TurnPenalties(turn_T, invalid_T, repeat_T, total_T=0.0 - paid_T)


def _turn_values(values_T: Tensor, what: str) -> Tensor:
    """Return one value per turn in float64; NaN stands for unknown, infinity for a mistake."""
    if values_T.ndim != 1 or not values_T.is_floating_point():
        raise LearnerError(f"{what} must be one float per turn: got {values_T.dtype} {tuple(values_T.shape)}")
    if values_T.isinf().any():
        raise LearnerError(f"{what} must be finite: got {values_T.tolist()}; fix what scores the turns")
    return values_T.detach().to(torch.float64)
