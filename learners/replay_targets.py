"""Which value target a critic gets from old experience, and what must be kept with it.

| data | target | why |
|---|---|---|
| lag 0, not guided | GAE | unbiased |
| older or guided, ratios known and usable | V-trace (state values), Retrace (action values) | corrects what followed |
| ratios unusable, or behaviour policy unknown | one step | needs no ratio |
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from turngate.learners.advantages.gae import gae
from turngate.learners.mismatch import effective_sample_size
from turngate.learners.replay import ReplayConfig
from turngate.learners.targets import TurnSteps, q_one_step, vtrace
from turngate.runtime.errors import ConfigError, LearnerError

__all__ = [
    "TARGET_KINDS",
    "ReplayTargets",
    "TargetChoice",
    "TargetKind",
    "choose_target",
    "state_value_targets",
]

TargetKind: TypeAlias = Literal["gae", "vtrace", "retrace", "one_step"]
TARGET_KINDS: tuple[TargetKind, ...] = ("gae", "vtrace", "retrace", "one_step")


@dataclass(frozen=True, slots=True)
class TargetChoice:
    """A target, and the numbers it was chosen by."""

    kind: TargetKind
    because: Literal["configured", "on_policy", "usable_ratios", "low_ess", "unknown_behaviour"]
    ess_ratio: float | None
    """At the level the config judges by; None when the behaviour policy is unknown: there is no ratio."""
    ess_turn_ratio: float | None
    ess_trajectory_ratio: float | None
    """Effective sample size over the number of turns, and of trajectories."""
    trace_mean: float | None
    """Mean of min(1, ratio) over turns. An effective sample size does not see that *all* ratios are tiny, and then
    V-trace targets hardly move from the values."""

    def metrics(self) -> dict[str, float]:
        """Return the numbers that are defined, and which target was used."""
        numbers = {
            "replay_ess_turn_ratio": self.ess_turn_ratio,
            "replay_ess_trajectory_ratio": self.ess_trajectory_ratio,
            "replay_trace_mean": self.trace_mean,
        }
        used = {f"replay_target_{kind}": float(kind == self.kind) for kind in TARGET_KINDS}
        return used | {name: value for name, value in numbers.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTargets:
    """Targets together with what they hold for: another policy or another target network makes them wrong."""

    targets: tuple[Tensor, ...]
    """One (T,) per trajectory, detached."""
    target: TargetKind
    policy_version: int
    """The policy whose values these are estimates of, and whose log-probs made the ratios."""
    target_version: int
    """Of the network that gave the values inside the targets."""
    ess_ratio: float | None
    lag_mean: float
    lag_max: int
    """Over trajectories, by their oldest tokens."""

    def __post_init__(self) -> None:
        if any(t.requires_grad for t in self.targets):
            raise LearnerError("targets must be detached: got one with a gradient; values move to them, not they")

    def metrics(self, *, critic_version: int) -> dict[str, float]:
        """Return age of data and of the target network; lags over trajectories."""
        return {
            "replay_drawn_trajectories": float(len(self.targets)),
            "replay_turns": float(sum(len(t) for t in self.targets)),
            "replay_lag_mean": self.lag_mean,
            "replay_lag_max": float(self.lag_max),
            "replay_target_version_lag": float(critic_version - self.target_version),
        }


def choose_target(
    log_ratios: Sequence[Tensor],
    config: ReplayConfig,
    *,
    lag_max: int,
    is_behaviour_known: bool = True,
    is_action_value: bool = False,
    is_guided: bool = False,
) -> TargetChoice:
    """Return the target for trajectories drawn together.

    A target named in the config is used whatever the ratios, except where the behaviour policy is unknown and there are
    none. `one_step` estimates the current policy only for action values; for state values it is the value of the policy
    that acted, and must be called so. V-trace at log-ratio 0 is GAE, so young trajectories among old ones lose nothing.
    Args: log_ratios: current over behaviour, one (T,) per trajectory; may be empty when the behaviour is unknown.
    lag_max: largest staleness among the trajectories. is_behaviour_known: False for actions whose log-probs were not
    recorded or are not those they were drawn with (guided without a record). is_action_value: the critic estimates Q.
    is_guided: values had a say in some actions: even fresh ones have ratios then.
    Raises: LearnerError: a log-ratio is NaN or +inf, or the behaviour is known and there is none.
    """
    if not is_behaviour_known:
        return TargetChoice("one_step", "unknown_behaviour", None, None, None, None)
    turns = torch.cat([x.detach().to(torch.float64).flatten() for x in log_ratios]) if log_ratios else torch.zeros(0)
    if not len(turns):
        raise LearnerError("log_ratios must hold a turn: got none; say so if the behaviour policy is unknown")
    if bool(turns.isnan().any()) or bool((turns == math.inf).any()):
        raise LearnerError("log-ratios must be numbers below infinity: got NaN or inf; look at both log-probs")
    sums = torch.stack([x.detach().to(torch.float64).sum() for x in log_ratios if len(x)])
    of_turns, of_trajectories = _ess_ratio(turns), _ess_ratio(sums)
    decisive = of_turns if config.ess_level == "turn" else of_trajectories
    trace_mean = float(turns.clamp(max=0.0).exp().mean())

    def choice(
        kind: TargetKind, because: Literal["configured", "on_policy", "usable_ratios", "low_ess"]
    ) -> TargetChoice:
        return TargetChoice(kind, because, decisive, of_turns, of_trajectories, trace_mean)

    if config.target != "auto":
        return choice(config.target, "configured")
    if lag_max == 0 and not is_guided:
        return choice("gae", "on_policy")
    if decisive < config.min_ess_ratio:
        return choice("one_step", "low_ess")
    return choice("retrace" if is_action_value else "vtrace", "usable_ratios")


def state_value_targets(
    trajectories: Sequence[TurnSteps], kind: TargetKind, config: ReplayConfig, *, gamma: float = 1.0
) -> tuple[Tensor, ...]:
    """Return the targets (T,) of V(h_t), per trajectory, each on its own and detached.

    `one_step` is r_t + gamma V(h_{t+1}): the value of the policy that took a_t, one step long.
    Raises: ConfigError: `retrace`, which is for action values. Else as `targets.vtrace`.
    """
    if kind == "retrace":
        raise ConfigError("target retrace must have a critic of action values: got state values; use vtrace or auto")
    return tuple(_state_value_target(steps, kind, config, gamma) for steps in trajectories)


def _state_value_target(steps: TurnSteps, kind: TargetKind, config: ReplayConfig, gamma: float) -> Tensor:
    rewards_T, values_T, bootstrap = steps.rewards_T, steps.values_T, steps.bootstrap
    if kind == "gae":
        return gae(rewards_T, values_T, bootstrap=bootstrap, gamma=gamma, lam=config.lam).targets_T
    if kind == "one_step":
        return q_one_step(rewards_T, steps.next_values, gamma=gamma)
    return vtrace(
        rewards_T,
        values_T,
        steps.log_ratios_T,
        bootstrap=bootstrap,
        gamma=gamma,
        lam=config.lam,
        rho_bar=config.rho_bar,
        c_bar=config.c_bar,
    ).targets_T


def _ess_ratio(log_weights: Tensor) -> float:
    # Actions that the current policy would never take weigh nothing: 0 / 0 without this.
    if bool((log_weights == -math.inf).all()):
        return 0.0
    return effective_sample_size(log_weights).ess_ratio
