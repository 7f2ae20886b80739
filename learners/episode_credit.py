"""One episode's advantages and value targets, from what its actions were paid and what a critic says of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from turngate.learners.advantages.bilevel import gae_bilevel
from turngate.learners.advantages.gae import gae, length_adaptive_lambda
from turngate.learners.advantages.steps import step_returns
from turngate.runtime.errors import ConfigError

__all__ = ["CreditLevel", "EpisodeCredit", "GAEConfig", "compute_episode_credit", "observed_returns"]

CreditLevel: TypeAlias = Literal["turn", "token", "bilevel"]
"""`turn`: one advantage per action, on all its tokens; only V at the start of turns is used and learned. `token`: every
token is a step, observations are skipped. `bilevel`: advantages of actions first, then of the tokens within each, so
that the last token of an action carries what the action was worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GAEConfig:
    """Discounts and traces. Source: Schulman et al. 2016 (1506.02438); bi-level: Wang et al. 2025 (2510.16907)."""

    level: CreditLevel = "turn"
    gamma: float = 1.0
    """Discount per turn; per token with level `token`."""
    lam: float = 0.95
    """Trace per turn; per token with level `token`."""
    gamma_token: float = 1.0
    lam_token: float = 1.0
    """Within an action, for `bilevel`. Below 1, long actions are discounted more than short ones."""
    length_adaptive: float | None = None
    """alpha of lambda = 1 - 1 / (alpha * length), which replaces `lam` in advantages; the critic's targets get lambda 1
    then (Yue et al. 2025, VAPO, 2504.05118). The length is in turns, in tokens with level `token`."""

    def __post_init__(self) -> None:
        if self.level not in ("turn", "token", "bilevel"):
            raise ConfigError(f"level must be turn, token or bilevel: got {self.level!r}")
        for name in ("gamma", "lam", "gamma_token", "lam_token"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be from 0 to 1: got {getattr(self, name)} (GAEConfig)")
        if self.length_adaptive is not None and not self.length_adaptive > 0:
            raise ConfigError(f"length_adaptive must be positive: got {self.length_adaptive}")

    @property
    def discounts_tokens(self) -> bool:
        """True when more tokens between two turns discount more: there is no discount per turn then."""
        return (self.level == "token" and self.gamma < 1) or (self.level == "bilevel" and self.gamma_token < 1)


@dataclass(frozen=True, slots=True)
class EpisodeCredit:
    """Per turn of one episode, one tensor each over its tokens (L_t,)."""

    advantages: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    """Value targets; for level `turn` only the first entry of each is one."""
    turn_advantages_T: Tensor
    action_targets_T: Tensor
    """Targets of Q(h_t, a_t): what the critic should say once the action is complete."""


def compute_episode_credit(
    rewards_T: Tensor,
    values: Sequence[Tensor],
    *,
    bootstrap: float | None,
    config: GAEConfig,
    token_rewards: Sequence[Tensor] | None = None,
) -> EpisodeCredit:
    """Return advantages and targets of one episode.

    Args: rewards_T: what each action was paid. values: per turn, V before each of its tokens. bootstrap: V of the last
    context when the episode was cut short, None when it ended. token_rewards: paid for single tokens beside that, in
    the shapes of `values` (a KL penalty).
    """
    estimate = _of_tokens if config.level == "token" else _of_turns
    if config.length_adaptive is None:
        return estimate(rewards_T, values, bootstrap, token_rewards, config, config.lam)
    length = sum(map(len, values)) if config.level == "token" else len(values)
    lam = length_adaptive_lambda(length, alpha=config.length_adaptive)
    of_policy = estimate(rewards_T, values, bootstrap, token_rewards, config, lam)
    of_critic = estimate(rewards_T, values, bootstrap, token_rewards, config, 1.0)
    return replace(of_policy, targets=of_critic.targets, action_targets_T=of_critic.action_targets_T)


def observed_returns(rewards_T: Tensor, lengths: Sequence[int], config: GAEConfig) -> Tensor:
    """Return what came after the start of each turn of a finished episode, (T,), discounted like its targets.

    Args: lengths: tokens of each action.
    """
    if config.level != "token":
        return step_returns(rewards_T, gamma=config.gamma)
    ends_T = torch.tensor(lengths).cumsum(0)
    paid_P = torch.zeros(sum(lengths), dtype=torch.float64)
    paid_P[ends_T - 1] += rewards_T
    return step_returns(paid_P, gamma=config.gamma)[ends_T - torch.tensor(lengths)].to(rewards_T)


def _of_turns(
    rewards_T: Tensor,
    values: Sequence[Tensor],
    bootstrap: float | None,
    token_rewards: Sequence[Tensor] | None,
    config: GAEConfig,
    lam: float,
) -> EpisodeCredit:
    """Every action is a step, and for `bilevel` every token one within it."""
    both = gae_bilevel(
        rewards_T,
        values,
        bootstrap=bootstrap,
        gamma_turn=config.gamma,
        lam_turn=lam,
        gamma_token=config.gamma_token,
        lam_token=config.lam_token,
        token_rewards=token_rewards,
    )
    if config.level == "bilevel":
        advantages, targets = zip(*both.tokens, strict=True)
        return EpisodeCredit(advantages, targets, *both.turns)
    spread = [(a.expand(len(v)), y.expand(len(v))) for a, y, v in zip(*both.turns, values, strict=True)]
    advantages, targets = zip(*spread, strict=True)
    return EpisodeCredit(advantages, targets, *both.turns)


def _of_tokens(
    rewards_T: Tensor,
    values: Sequence[Tensor],
    bootstrap: float | None,
    token_rewards: Sequence[Tensor] | None,
    config: GAEConfig,
    lam: float,
) -> EpisodeCredit:
    """Every token is a step; an action is paid at its last one."""
    lengths = [len(v) for v in values]
    paid_P = torch.zeros(sum(lengths), dtype=torch.float64)
    if token_rewards is not None:
        paid_P += torch.cat(list(token_rewards))
    paid_P[torch.tensor(lengths).cumsum(0) - 1] += rewards_T
    flat = gae(paid_P, torch.cat(list(values)).to(torch.float64), bootstrap=bootstrap, gamma=config.gamma, lam=lam)
    advantages, targets = (x.to(values[0]).split(lengths) for x in flat)
    # What an action was worth is what its last token was: nothing of the action is left to choose there.
    return EpisodeCredit(
        advantages, targets, torch.stack([a[-1] for a in advantages]), torch.stack([y[-1] for y in targets])
    )
