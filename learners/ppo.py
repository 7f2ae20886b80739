"""PPO with a critic: every action against what was expected of the situation it was taken in.

Credit per turn (one advantage for all tokens of an action), per token, or bi-level: turns first, then the tokens within
each. Episodes that the collector cut short bootstrap from the value of their last context.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import msgspec
import torch
from torch import Tensor

from turngate.learners.advantages import masked_whiten
from turngate.learners.batch import TokenBatch
from turngate.learners.credit import Credit, Keep, Scored
from turngate.learners.critic import Critic, CriticConfig, ValueReader, ValueTargets, after_actions
from turngate.learners.critic_replay import CriticReplay
from turngate.learners.episode_credit import EpisodeCredit, GAEConfig, compute_episode_credit, observed_returns
from turngate.learners.panels_credit import turn_gap_panel, valued_turns_panel
from turngate.learners.policy_learner import PolicyLearner
from turngate.learners.policy_model import mark_value_kind, model_source
from turngate.learners.replay import ReplayConfig
from turngate.learners.turns import ActionTurns, action_turns, kept_trajectories, spread_turns, turn_tokens
from turngate.learners.value_metrics import (
    SuccessPredictions,
    ValuePredictions,
    bootstrap_share,
    success_metrics,
    value_metrics,
)
from turngate.learners.voting import critic_handling
from turngate.runtime.engine.config import ValueKind
from turngate.runtime.engine.model import Scores
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.files import write_atomically
from turngate.runtime.types import Batch, Trajectory

__all__ = ["PPO"]

_KIND_FILE = "values.json"
_EXCLUDED: tuple[str, ...] = ("failed", "unscorable", "no_last_context", "empty")


class _Values(msgspec.Struct, frozen=True):
    """What a checkpoint's value head puts out."""

    kind: ValueKind


@dataclass(frozen=True, slots=True)
class _Episode:
    """One trained episode: its actions, where their tokens are, and what follows the last."""

    number: int
    trajectory: Trajectory
    actions: ActionTurns
    positions: tuple[Tensor, ...]
    """Per action, the positions of its tokens in the token batch."""
    bootstrap: float | None
    """V of the last context when the episode was cut short; None when it ended."""


@dataclass(kw_only=True)
class PPO(PolicyLearner):
    """A learner with a critic. Sources: Schulman et al. 2017 (1707.06347); turns as steps: Li et al. 2025 (2512.17008).

    Groups mean nothing to it: `group_size=1` works, and every episode teaches, whether its siblings differ or not.
    """

    credit: GAEConfig = field(default=GAEConfig())
    """How finely credit is assigned, with its discounts and traces."""
    critic: CriticConfig = field(default=CriticConfig())
    whiten: bool = True
    """Bring the advantages of a batch to mean 0 and deviation 1 over its policy tokens."""
    replay: ReplayConfig | None = None
    """Old experience for a critic of its own: what it learned from before, and what became too old for the policy."""
    critic_updates: int = 0
    """Updates at the start in which the critic alone learns."""
    mistake_drop: float = 0.25
    """Fall of V from one turn to the next that the metrics of recovery by value call a mistake."""

    needs_last_context: ClassVar[bool] = True
    """Tells the runtime to record what the model would have seen next when an episode is cut short."""

    _replay: CriticReplay | None = field(default=None, init=False, repr=False, compare=False)
    _critic: Critic | None = field(default=None, init=False, repr=False, compare=False)

    def _kinds(self) -> dict[str, type]:
        kinds = super()._kinds() | {"credit": GAEConfig, "critic": CriticConfig}
        return kinds | ({} if self.replay is None else {"replay": ReplayConfig})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.mistake_drop > 0:
            raise ConfigError(f"mistake_drop must be positive: got {self.mistake_drop} (PPO)")
        if self.critic.place != "separate" and (self.replay is not None or self.critic_updates):
            # The trunk is the policy: a head cannot learn alone, nor from what the policy must not see.
            what = "replay" if self.replay is not None else "critic_updates"
            raise ConfigError(f"{what} must have a critic of its own: got place='trunk'; use place='separate'")
        if self.replay is not None:
            self._check_replay()
        if self.credit.level == "token" and self.credit.gamma < 1 and self.rewards.shaped_by:
            raise ConfigError(
                f"potentials must share a discount per turn: got gamma={self.credit.gamma} per token; use gamma=1, or "
                "level='turn'"
            )
        if self.critic.kind == "success" and self.rewards.adds_rewards:
            raise ConfigError(
                "a success critic must learn from returns within [0, 1]: got penalties or shaped rewards; use "
                "CriticConfig(kind='scalar')"
            )

    def _check_replay(self) -> None:
        """Raise when replay would pull the critic to other values than fresh experience does."""
        if self.credit.discounts_tokens:
            raise ConfigError(
                "replay must have a discount per turn: got one per token; its targets step from turn to turn: use "
                "gamma=1 with level='token', gamma_token=1 with 'bilevel'"
            )
        if self.kl_coef and self.kl_in == "reward":
            raise ConfigError(
                "replay must learn from rewards without a KL penalty: got kl_in='reward'; use kl_in='loss_ratio_k3', "
                "or kl_coef=0"
            )

    @property
    def advantage_unit(self) -> Literal["token", "turn"]:
        """Turns, or tokens with finer credit."""
        return "turn" if self.credit.level == "turn" else "token"

    @property
    def wants_stale(self) -> bool:
        """Tells the runtime whether groups that are too old for the policy are of use."""
        return self.replay is not None

    @property
    def turn_discount(self) -> float:
        """Discount per turn."""
        return self.credit.gamma

    def load(self, folder: Path | None) -> None:
        """Get ready from a checkpoint, or from `model` when None, of which a critic of its own starts as a copy."""
        if folder is not None:
            self._check_kind(folder / _KIND_FILE)
        super().load(folder)
        if self.critic.place == "trunk":
            mark_value_kind(self._loaded.model, self.critic.kind)
        else:
            model = model_source(self.model).load(None if folder is None else folder / "critic", value_head=True)
            self._critic = Critic(model, self.critic, seed=self.seed + 1, microbatch_tokens=self.microbatch_tokens)
            if self.replay is not None:
                self._replay = CriticReplay(
                    self.replay,
                    self._critic,
                    rewards=self.turn_rewards,
                    gamma=self.credit.gamma,
                    temperature=self.sampling.temperature,
                    microbatch_tokens=self.microbatch_tokens,
                    seed=self.seed + 2,
                )
            if folder is not None:
                self._critic.restore(folder / "critic")
                if self._replay is not None:
                    self._replay.restore(folder / "critic")

    def save(self, folder: Path) -> None:
        """Write a checkpoint: the policy's, and the critic's under `critic`."""
        super().save(folder)
        write_atomically(folder / _KIND_FILE, msgspec.json.encode(_Values(self.critic.kind)))
        if self._critic is not None:
            self._critic.save(folder / "critic")
        if self._replay is not None:
            self._replay.save(folder / "critic")

    def _check_kind(self, path: Path) -> None:
        """Raise when the head of a checkpoint says something else than values of this kind: a logit is no value."""
        if not path.exists():
            return  # from before it was written
        try:
            kind = msgspec.json.decode(path.read_bytes(), type=_Values).kind
        except (OSError, msgspec.MsgspecError) as error:
            raise LearnerError(f"checkpoint must be readable: {error} ({path}); use an older one") from error
        if kind != self.critic.kind:
            raise ConfigError(
                f"the critic must be of the checkpoint's kind: expected {kind}, got {self.critic.kind} ({path}); use "
                f"CriticConfig(kind={kind!r}), or start anew"
            )

    @property
    def _needs_value_head(self) -> bool:
        return self.critic.place == "trunk"

    def _select(self, batch: Batch) -> tuple[Keep, dict[str, float]]:
        """Every episode trains whose reward and continuation are known."""
        count: dict[str, int] = dict.fromkeys(_EXCLUDED, 0)
        keep: list[list[bool]] = []
        for group in batch.groups:
            reasons = [self._unusable(trajectory) for trajectory in group.trajectories]
            keep.append([not r for r in reasons])
            for r in filter(None, reasons):
                count[r] += 1
        return keep, {f"excluded_{name}": float(n) for name, n in count.items()}

    def _unusable(self, trajectory: Trajectory) -> str:
        """Return why an episode has no value targets, one of _EXCLUDED; empty when it has."""
        handling = critic_handling(trajectory.end)
        if handling == "drop":
            return "failed"
        actions = action_turns(trajectory, self.turn_rewards(trajectory))
        if not actions.turns:
            return "empty"
        if actions.rewards_T.isnan().any():
            return "unscorable"
        longest = self._loaded.model.config.max_context - 1
        is_known = 0 < len(trajectory.last_context) // 4 <= longest
        return "no_last_context" if handling == "bootstrap" and not is_known else ""

    def _credit(self, scored: Scored) -> Credit:
        tokens = scored.tokens
        generated = tokens.masked(tokens.generated_N)
        # 1. What the critic expects, and what each episode says to that.
        values_N = self._reader.values(generated)
        episodes = self._episodes(scored.batch, scored.keep, generated)
        credits = [self._episode_credit(episode, values_N, scored.kl_N) for episode in episodes]
        metrics = self._critic_metrics(episodes, credits, values_N)
        # 2. The same along the tokens.
        advantages_N, targets = self._along_tokens(episodes, credits, values_N)
        if self.critic.kind == "success":
            is_outside_N = (targets.targets_N < 0) | (targets.targets_N > 1)
            # Some come from traces that overshoot; many say that the returns are no success probabilities.
            metrics["value_targets_clamped_fraction"] = float(is_outside_N.sum()) / max(int(targets.mask_N.sum()), 1)
        # 3. A critic of its own learns; a head on the trunk does so beside the policy.
        if self._critic is not None:
            metrics |= self._critic.learn(generated, targets)
            if self.critic.action_values:
                metrics |= self._learn_actions(self._critic, generated, episodes, credits)
        if self._replay is not None:
            metrics |= self._replay.learn(
                self._loaded.model, self._for_replay(scored), policy_version=scored.batch.policy_version
            )
        # 4. What the policy is told.
        if self.whiten:
            advantages_N = masked_whiten(advantages_N, tokens.mask_N)
        is_warming_up = self._loaded.updates < self.critic_updates
        return Credit(
            torch.zeros_like(advantages_N) if is_warming_up else advantages_N,
            # Silent altogether: an entropy bonus or a KL term must not move the policy either.
            torch.full_like(tokens.mask_N, is_warming_up),
            metrics,
            values=None if self._critic is not None else targets,
        )

    @property
    def _reader(self) -> ValueReader:
        """What expectations are read off: the critic of its own, or the head on the trunk."""
        if self._critic is not None:
            return self._critic.reader
        return ValueReader(self._loaded.model, self.critic, self.microbatch_tokens)

    def _episodes(self, batch: Batch, keep: Keep, tokens: TokenBatch) -> list[_Episode]:
        kept = list(kept_trajectories(batch, keep))
        bootstraps = self._reader.bootstraps([trajectory for _, trajectory in kept])
        positions = turn_tokens(tokens)
        episodes: list[_Episode] = []
        for (number, trajectory), bootstrap in zip(kept, bootstraps, strict=True):
            actions = action_turns(trajectory, self.turn_rewards(trajectory))
            where = tuple(positions[number][turn] for turn in actions.turns)
            episodes.append(_Episode(number, trajectory, actions, where, bootstrap))
        return episodes

    def _episode_credit(self, episode: _Episode, values_N: Tensor, kl_N: Tensor | None) -> EpisodeCredit:
        has_penalty = kl_N is not None and self.kl_in == "reward"
        return compute_episode_credit(
            episode.actions.rewards_T,
            [values_N[at] for at in episode.positions],
            bootstrap=episode.bootstrap,
            config=self.credit,
            token_rewards=[-self.kl_coef * kl_N[at] for at in episode.positions]
            if has_penalty and kl_N is not None
            else None,
        )

    def _along_tokens(
        self, episodes: Sequence[_Episode], credits: Sequence[EpisodeCredit], values_N: Tensor
    ) -> tuple[Tensor, ValueTargets]:
        """Return the advantages (N,), 0 where nothing was generated, and what the critic learns."""
        advantages_N, targets_N = torch.zeros_like(values_N), torch.zeros_like(values_N)
        has_target_N = torch.zeros_like(values_N, dtype=torch.bool)
        for episode, credit in zip(episodes, credits, strict=True):
            for at, of_turn, towards in zip(episode.positions, credit.advantages, credit.targets, strict=True):
                learned = at[:1] if self.credit.level == "turn" else at
                advantages_N[at] = of_turn
                targets_N[learned] = towards[: len(learned)]
                has_target_N[learned] = True
        return advantages_N, ValueTargets(targets_N, has_target_N, values_N)

    def _value_loss(self, scores: Scores, values: ValueTargets, at_P: Tensor, mask_N: Tensor) -> Tensor:
        assert scores.values_M is not None  # the trunk has a head
        at_V = values.mask_N[at_P].nonzero().squeeze(-1)
        old_V, targets_V = values.old_N[at_P][at_V], values.targets_N[at_P][at_V]
        loss = self.critic.loss(scores.values_M[at_V], targets_V, old_V).sum()
        return self.critic.coef * loss / max(int((values.mask_N & mask_N).sum()), 1)

    def _learn_actions(
        self, critic: Critic, tokens: TokenBatch, episodes: Sequence[_Episode], credits: Sequence[EpisodeCredit]
    ) -> dict[str, float]:
        """Teach Q(h_t, a_t) at the end of every action; its target is the turn's, whatever the level of credit."""
        targets = {
            episode.number: dict(zip(episode.actions.turns, credit.action_targets_T.tolist(), strict=True))
            for episode, credit in zip(episodes, credits, strict=True)
        }
        ends = after_actions(tokens, max_length=critic.model.config.max_context)
        targets_N = spread_turns(ends, targets)
        old_N = critic.values(ends)
        learned = critic.learn(ends, ValueTargets(targets_N, ends.mask_N, old_N))
        return {f"action_{name}": value for name, value in learned.items()}

    def _for_replay(self, scored: Scored) -> list[Trajectory]:
        """Return what the store takes in: episodes with value targets, fresh ones and those too old for the policy."""
        fresh = [t for _, t in kept_trajectories(scored.batch, scored.keep)]
        stale = [t for group in scored.batch.stale for t in group.trajectories if not self._unusable(t)]
        return [*stale, *fresh]

    def _critic_metrics(
        self, episodes: list[_Episode], credits: list[EpisodeCredit], values_N: Tensor
    ) -> dict[str, float]:
        """Return how good the values at the start of turns were, before the update; over terminal episodes alone."""
        ended = [e for e in episodes if e.bootstrap is None]
        # Penalties per token are paid on top of the turn's own: the two levels then differ by them.
        has_levels = self.credit.level == "bilevel" and not (self.kl_coef and self.kl_in == "reward")
        metrics = turn_gap_panel(credits) if has_levels else {}
        metrics["orphaned_reward"] = sum(e.actions.orphaned for e in episodes)
        share = bootstrap_share([e.trajectory.end for e in episodes])
        if share is not None:
            metrics["bootstrap_share"] = share
        if cut := [e for e in episodes if e.bootstrap is not None]:
            # Without the environment's last answer: the next prompt was never tokenised, V of what is there is used.
            metrics["bootstrap_prefix_fraction"] = sum(not e.trajectory.last_context_is_whole for e in cut) / len(cut)
        if not ended:
            return metrics
        values = [values_N[torch.stack([at[0] for at in e.positions])] for e in ended]
        returns = [observed_returns(e.actions.rewards_T, [len(at) for at in e.positions], self.credit) for e in ended]
        index_P = torch.cat([torch.arange(len(v)) for v in values])
        metrics |= value_metrics(ValuePredictions(torch.cat(values), torch.cat(returns), index_P))
        if self.critic.kind == "success":
            is_success = [torch.full((len(e.positions),), e.trajectory.outcome > 0) for e in ended]
            metrics |= success_metrics(SuccessPredictions(torch.cat(values), torch.cat(is_success), index_P))
        return metrics | valued_turns_panel(
            [e.trajectory for e in ended],
            [e.actions.turns for e in ended],
            values,
            returns,
            [credit.turn_advantages_T for e, credit in zip(episodes, credits, strict=True) if e.bootstrap is None],
            tau=self.mistake_drop,
        )
