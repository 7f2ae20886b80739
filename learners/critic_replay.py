"""A critic that learns from old experience: what the staleness gate drops for the policy, and what was trained on.

Store -> a draw of whole trajectories -> ratios of the policy as it is, values of the target network -> targets ->
critic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from turngate.learners.batch import TokenBatch, lay_out
from turngate.learners.checkpoint import read_state, write_state
from turngate.learners.critic import Critic, ValueReader, ValueTargets, after_actions
from turngate.learners.guided import log_selections
from turngate.learners.policy_model import ScoringModel
from turngate.learners.policy_state import score_tokens
from turngate.learners.replay import ReplayConfig, ReplayStore, as_batch, trajectory_lag
from turngate.learners.replay_targets import ReplayTargets, TargetChoice, TargetKind, choose_target, state_value_targets
from turngate.learners.target_network import TargetNetwork
from turngate.learners.targets import TurnSteps, q_one_step, retrace
from turngate.learners.turns import RewardsOf, action_turns, turn_tokens
from turngate.runtime.errors import ConfigError
from turngate.runtime.learner import lean_trajectory
from turngate.runtime.types import Trajectory

__all__ = ["CriticReplay"]


@dataclass(frozen=True, slots=True)
class _Draw:
    """Trajectories drawn together, with everything their targets are made of."""

    tokens: TokenBatch
    positions: list[list[int]]
    """Per trajectory, the first token of each of its turns."""
    steps: list[TurnSteps]
    lags: list[int]
    actions: "_Actions | None"
    """The ends of the actions, when the critic has action values."""
    is_guided: bool
    """Whether values had a say in some of it: then even what is fresh is not the policy's own."""


@dataclass(frozen=True, slots=True)
class _Actions:
    """The ends of the same actions; trajectories without a place for each of them have none."""

    tokens: TokenBatch
    positions: list[list[int]]
    values: list[Tensor]
    """Q(h_t, a_t) of the target network, (T,) per trajectory."""


class CriticReplay:
    """Trains a critic on a store of old trajectories.

    State: the store, the target network, and the generator of the draws. Values are V at the start of turns and, with
    `action_values`, Q at their end; those of tokens in between are left to fresh experience.
    """

    def __init__(
        self,
        config: ReplayConfig,
        critic: Critic,
        *,
        rewards: RewardsOf,
        gamma: float,
        temperature: float,
        microbatch_tokens: int,
        seed: int,
    ) -> None:
        """Raises: ConfigError: Retrace is asked of a critic without action values."""
        if config.target == "retrace" and not critic.config.action_values:
            raise ConfigError("target retrace must have action values: set CriticConfig(action_values=True)")
        self.config, self._critic, self._rewards, self._gamma = config, critic, rewards, gamma
        self._temperature, self._microbatch_tokens = temperature, microbatch_tokens
        self.store = ReplayStore(config)
        self.target = TargetNetwork(critic.model, tau=config.target_tau)
        self._reader = ValueReader(self.target.module, critic.config, microbatch_tokens)
        self.generator = torch.Generator().manual_seed(seed)

    def __repr__(self) -> str:
        return f"<CriticReplay {self.store!r} {self.target!r}>"

    def learn(self, policy: ScoringModel, new: Sequence[Trajectory], *, policy_version: int) -> dict[str, float]:
        """Take in `new` trajectories, learn from a draw of what is there, and return how that went.

        Args: policy: the policy whose values are wanted, as it is now; it is only read.
        """
        self.store.put([_without_candidates(lean_trajectory(trajectory)) for trajectory in new], policy_version)
        self.store.evict(policy_version)
        metrics = {f"replay_{name}": float(n) for name, n in msgspec.structs.asdict(self.store.statistics()).items()}
        if self.store.is_ready:
            drawn = self.store.sample(self.config.batch_trajectories, self.generator, policy_version=policy_version)
            if drawn:
                metrics |= self._learn_from(self._evaluate(policy, drawn, policy_version), policy_version)
        # Also while nothing is drawn: fresh experience moves the critic, and targets must not start from a blank one.
        self.target.update(self._critic.model, self._critic.version)
        return metrics

    def save(self, folder: Path) -> None:
        """Write the store, the target network and the generator; each file whole or not at all."""
        self.store.save(folder)
        write_state(folder / "replay.pt", {"target": self.target.state_dict(), "generator": self.generator.get_state()})

    def restore(self, folder: Path) -> None:
        """Go on from what `save` wrote. Raises: LearnerError: it cannot be read."""

        def apply(saved: dict[str, Any]) -> None:
            self.target.load_state_dict(saved["target"])
            self.generator.set_state(saved["generator"])

        self.store.restore(folder)
        read_state(folder / "replay.pt", apply)

    def _evaluate(self, policy: ScoringModel, drawn: Sequence[Trajectory], version: int) -> _Draw:
        """Lay the draw out and score it: with the policy as it is now, and with the target network's values."""
        batch = as_batch(drawn, policy_version=version)
        tokens = lay_out(batch, [[True]] * len(drawn), vocabulary_size=policy.config.vocab_size)
        limit, temperature = self._microbatch_tokens, self._temperature
        logprobs_N, _ = score_tokens(policy, tokens, temperature=temperature, microbatch_tokens=limit)
        gaps_N = logprobs_N.to(torch.float64) - tokens.behaviour_logprobs_N.to(torch.float64)
        values_N, bootstraps = self._reader.values(tokens), self._reader.bootstraps(drawn)
        steps: list[TurnSteps] = []
        positions: list[list[int]] = []
        for number, turns in turn_tokens(tokens).items():
            chosen = log_selections(drawn[number])  # what guidance added to the log-probs of drawing the actions
            positions.append([int(at[0]) for at in turns.values()])
            rewards_T = action_turns(drawn[number], self._rewards(drawn[number])).rewards_T
            log_ratios_T = torch.stack([gaps_N[at].sum() for at in turns.values()])
            log_ratios_T = log_ratios_T - torch.tensor([chosen.get(turn, 0.0) for turn in turns], dtype=torch.float64)
            values_T = values_N[positions[-1]].to(torch.float64)
            steps.append(TurnSteps(rewards_T, values_T, log_ratios_T, bootstraps[number]))
        lags = [trajectory_lag(t, version) for t in drawn]
        is_guided = tokens.base_logprobs_N is not None or any(map(log_selections, drawn))
        return _Draw(tokens, positions, steps, lags, self._actions(tokens, steps), is_guided)

    def _actions(self, tokens: TokenBatch, steps: Sequence[TurnSteps]) -> _Actions | None:
        if not self._critic.config.action_values:
            return None
        ends = after_actions(tokens, max_length=self._critic.model.config.max_context)
        values_N, found = self._reader.values(ends), turn_tokens(ends)
        positions: list[list[int]] = []
        for number, step in enumerate(steps):
            at = [int(where[0]) for where in found.get(number, {}).values()]
            positions.append(at if len(at) == len(step.rewards_T) else [])
        return _Actions(ends, positions, [values_N[at].to(torch.float64) for at in positions])

    def _learn_from(self, draw: _Draw, policy_version: int) -> dict[str, float]:
        ratios = [steps.log_ratios_T for steps in draw.steps]
        has_actions = draw.actions is not None
        choice = choose_target(
            ratios,
            self.config,
            lag_max=max(draw.lags),
            is_action_value=has_actions,
            is_guided=draw.is_guided,
        )
        return choice.metrics() | self._move_values(draw, choice, policy_version)

    def _move_values(self, draw: _Draw, choice: TargetChoice, policy_version: int) -> dict[str, float]:
        """Move V and Q towards their targets and return how that went."""
        metrics: dict[str, float] = {}
        kind, critic_version = choice.kind, self._critic.version
        if (ends := draw.actions) is not None:
            of_actions = [self._action_target(draw, i, kind) for i in range(len(draw.steps))]
            made = self._kept(of_actions, kind, draw, choice, policy_version)
            metrics |= made.metrics(critic_version=critic_version)
            metrics |= _prefixed("replay_action_", self._move(ends.tokens, ends.positions, made.targets))
            if kind == "one_step":
                return metrics  # V is that of the policy that acted; Q is not, and V learns from fresh experience
            kind = "vtrace" if kind == "retrace" else kind
        of_states = state_value_targets(draw.steps, kind, self.config, gamma=self._gamma)
        made = self._kept(of_states, kind, draw, choice, policy_version)
        metrics |= made.metrics(critic_version=critic_version)
        return metrics | _prefixed("replay_", self._move(draw.tokens, draw.positions, made.targets))

    def _kept(
        self, targets: Sequence[Tensor], kind: TargetKind, draw: _Draw, choice: TargetChoice, policy_version: int
    ) -> ReplayTargets:
        """Return targets together with what they hold for."""
        return ReplayTargets(
            targets=tuple(targets),
            target=kind,
            policy_version=policy_version,
            target_version=self.target.version,
            ess_ratio=choice.ess_ratio,
            lag_mean=sum(draw.lags) / len(draw.lags),
            lag_max=max(draw.lags),
        )

    def _action_target(self, draw: _Draw, number: int, kind: TargetKind) -> Tensor:
        assert draw.actions is not None
        steps, q_T = draw.steps[number], draw.actions.values[number]
        if not len(q_T):
            return q_T
        if kind == "one_step":
            return q_one_step(steps.rewards_T, steps.next_values, gamma=self._gamma)
        return retrace(
            steps.rewards_T,
            q_T,
            steps.values_T,
            steps.log_ratios_T,
            bootstrap=steps.bootstrap,
            gamma=self._gamma,
            lam=self.config.lam,
        ).targets_T

    def _move(
        self, tokens: TokenBatch, positions: Sequence[Sequence[int]], targets: Sequence[Tensor]
    ) -> dict[str, float]:
        targets_N, mask_N = torch.zeros(len(tokens.mask_N)), torch.zeros_like(tokens.mask_N)
        for at, towards_T in zip(positions, targets, strict=True):
            targets_N[list(at)] = towards_T.to(torch.float32)
            mask_N[list(at)] = True
        old_N = self._critic.values(tokens.masked(mask_N))
        return self._critic.learn(tokens, ValueTargets(targets_N, mask_N, old_N), epochs=1)


def _without_candidates(trajectory: Trajectory) -> Trajectory:
    """Return a trajectory without the draws that decisions chose among: many times its own tokens, and never read."""
    if all(turn.decision is None for turn in trajectory.turns):
        return trajectory
    turns = tuple(
        turn
        if turn.decision is None
        else msgspec.structs.replace(turn, decision=msgspec.structs.replace(turn.decision, candidates=()))
        for turn in trajectory.turns
    )
    return msgspec.structs.replace(trajectory, turns=turns)


def _prefixed(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    return {prefix + name: value for name, value in metrics.items()}
