"""GAE on two levels: turns among each other, then the tokens of each turn.

The last token of an action has the turn's Q-value: `Q(c_t, w_<L; w_L) = Q(h_t, a_t)`. The return form keeps that.
Source: VAGEN, Wang et al. 2025 (2510.16907).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from turngate.learners.advantages.gae import Gae, backward, check_discounts, gae, steps_of
from turngate.learners.ratios import ShapeError, check_shapes
from turngate.runtime.errors import ConfigError

__all__ = ["BilevelForm", "BilevelGae", "gae_bilevel"]

BilevelForm: TypeAlias = Literal["return", "adv_init"]
"""What a turn's last token gets: the turn's return minus its own value, or the turn's advantage as it is."""


class BilevelGae(NamedTuple):
    """Advantages and targets of one trajectory's turns and of their tokens, detached."""

    turns: Gae
    """(U,)"""
    tokens: list[Gae]
    """(L_u,) per turn."""


def gae_bilevel(
    rewards_U: Tensor,
    values: Sequence[Tensor],
    *,
    bootstrap: float | None,
    gamma_turn: float = 1.0,
    lam_turn: float = 0.95,
    gamma_token: float = 1.0,
    lam_token: float = 1.0,
    form: BilevelForm = "return",
    token_rewards: Sequence[Tensor] | None = None,
) -> BilevelGae:
    """Return the advantages and targets of one trajectory's turns and tokens.

    With the return form and gamma_token 1: the last token's advantage plus value is the turn's; with lam_token 0 the
    token advantages of a turn sum to the turn's; with lam_token 1 the first token's is the turn's; with all four
    factors 1 it is flat token GAE. A gamma_token below 1 discounts long actions more than short ones.
    Args: rewards_U: what each turn earned. values: (L_u,) per turn, V before each token; the first is the turn's
    V(c_u). bootstrap: as for `gae`. token_rewards: (L_u,) per turn, paid on top (a KL penalty); the turn pass sees
    their sum, and the last token's part leaves out what the tokens before it were paid.
    Raises: ShapeError, ConfigError; LearnerError: something is not finite.
    """
    check_discounts(gamma_token=gamma_token, lam_token=lam_token)
    if form not in ("return", "adv_init"):
        raise ConfigError(f"form must be return or adv_init: got {form!r}")
    _check_turns(rewards_U, values, token_rewards)
    tokens = [steps_of(values_L, "values") for values_L in values]
    paid = (
        [[0.0] * len(v) for v in tokens] if token_rewards is None else [steps_of(r, "rewards") for r in token_rewards]
    )
    total_U = rewards_U.detach().to(torch.float64) + rewards_U.new_tensor([sum(r) for r in paid], dtype=torch.float64)
    first_U = torch.tensor([v[0] for v in tokens], dtype=torch.float64)
    turns = gae(total_U, first_U, bootstrap=bootstrap, gamma=gamma_turn, lam=lam_turn)
    starts = turns.targets_T if form == "return" else turns.advantages_T
    made: list[Gae] = []
    for start, token_values, token_paid, like in zip(starts.tolist(), tokens, paid, values, strict=True):
        # A reward that makes the recursion start with the wanted advantage: nothing follows the last token here.
        tail = start - sum(token_paid[:-1]) + (0.0 if form == "return" else token_values[-1])
        advantages = backward([*token_paid[:-1], tail], token_values, 0.0, gamma_token, lam_token)
        advantages_L, values_L = torch.tensor([advantages, token_values], dtype=torch.float64)
        made.append(Gae(advantages_L.to(like), (advantages_L + values_L).to(like)))
    like = values[0] if values else rewards_U
    return BilevelGae(Gae(turns.advantages_T.to(like), turns.targets_T.to(like)), made)


def _check_turns(rewards_U: Tensor, values: Sequence[Tensor], token_rewards: Sequence[Tensor] | None) -> None:
    if rewards_U.shape != (len(values),):
        raise ShapeError(f"rewards must be one per turn: expected ({len(values)},), got {tuple(rewards_U.shape)}")
    if (empty := next((u for u, values_L in enumerate(values) if not len(values_L)), None)) is not None:
        raise ShapeError(
            f"every turn must have a token: got none (turn {empty}); an injected turn is no action of the policy: "
            "leave it out and add its reward to the turn before"
        )
    if token_rewards is not None:
        if len(token_rewards) != len(values):
            raise ShapeError(f"token rewards must be per turn: expected {len(values)}, got {len(token_rewards)}")
        for rewards_L, values_L in zip(token_rewards, values, strict=True):
            check_shapes(token_rewards=rewards_L, values=values_L)
