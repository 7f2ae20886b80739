"""GRPO: trajectories against their siblings, a clipped loss, no critic.

Credit is one number per trajectory, or finer: steps against steps taken in the same situation (GiGPO), returns-to-go
against the siblings' at the same turn, or Monte Carlo values from branches (VinePPO).
"""

import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from turngate.learners.advantages.group import GROUP_PRESETS, GroupScheme
from turngate.learners.credit import Credit, Keep, Scored
from turngate.learners.policy_learner import PolicyLearner
from turngate.learners.step_credit import AnchorKeys, StepGroups, observation_keys, step_group_credit, turn_index_credit
from turngate.learners.vine import valued_members, vine_credit
from turngate.learners.voting import BatchAdvantages, assess
from turngate.runtime.errors import ConfigError
from turngate.runtime.group_branching import MC_VALUE
from turngate.runtime.types import Batch

__all__ = ["GRPO", "GroupCredit"]

GroupCredit: TypeAlias = Literal["trajectory", "turn_index", "vine"] | StepGroups
"""`trajectory`: one advantage for all tokens of an episode. `turn_index`: return-to-go minus the mean of the siblings'
at the same turn. `vine`: each turn against values from branches, which `train(..., branching=Branching())` provides.
`StepGroups(...)`: the trajectory's plus that of each step among the steps from the same situation."""


@dataclass(kw_only=True)
class GRPO(PolicyLearner):
    """A learner of group-relative advantages. Source: Shao et al. 2024 (2402.03300)."""

    preset: str | GroupScheme = "dr_grpo"
    """How siblings are compared: `grpo`, `dr_grpo`, `rloo`, `batch_std`, or a scheme of your own."""
    credit: GroupCredit = "trajectory"
    """How finely credit is assigned within an episode."""
    anchor: AnchorKeys = field(default=observation_keys)
    """For `StepGroups`: names the situation before each turn; by default what the environment said last."""
    min_group_fraction: float = 0.5
    """Groups with a smaller share of usable members are dropped."""
    score_truncations: bool = False
    """Let episodes that the collector cut short vote with the reward they have."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.preset, str) and self.preset not in GROUP_PRESETS:
            raise ConfigError(f"preset must be one of {', '.join(GROUP_PRESETS)}: got {self.preset!r}")
        if not isinstance(self.preset, str | GroupScheme):
            raise ConfigError(f"preset must be a name or a GroupScheme: got {self.preset!r}; leave it out for dr_grpo")
        if self.credit not in ("trajectory", "turn_index", "vine") and not isinstance(self.credit, StepGroups):
            raise ConfigError(f"credit must be trajectory, turn_index, vine or StepGroups(...): got {self.credit!r}")
        if self.anchor is not observation_keys and not isinstance(self.credit, StepGroups):
            raise ConfigError(f"anchor must go with credit=StepGroups(...), which alone reads it: got {self.credit!r}")
        if self.credit == "trajectory" and (why := self.rewards.trajectory_noop):
            raise ConfigError(f"rewards must matter to the credit: {why}")
        if isinstance(self.credit, StepGroups) and self.credit.gamma < 1 and self.rewards.shaped_by:
            # The episode's own return has no discount: only at 1 is there one that shaping can share with both.
            raise ConfigError(
                f"{' and '.join(self.rewards.shaped_by)} must share one discount per turn with all credit: got "
                f"gamma={self.credit.gamma} for steps and none for episodes; use StepGroups(gamma=1)"
            )
        if self.credit in ("turn_index", "vine"):
            self._check_turn_credit()
        if self.credit == "vine" and not self.rewards.is_plain:
            raise ConfigError(
                "rewards must be the environment's own with credit='vine': continuations are paid nothing else, and "
                f"values must be of what is learned from; got {self.rewards!r}"
            )

    def _check_turn_credit(self) -> None:
        """Raise for choices that credit by turn would leave unread."""
        if self.kl_coef and self.kl_in == "reward":
            raise ConfigError(
                f"a KL penalty must be part of the loss with credit={self.credit!r}, which compares what turns were "
                "paid: got kl_in='reward'; use kl_in='loss_ratio_k3', or kl_coef=0"
            )
        if self.preset not in ("dr_grpo", "rloo"):
            baseline = "a value from branches" if self.credit == "vine" else "always the mean of the others"
            raise ConfigError(
                f"preset must be left alone with credit={self.credit!r}, whose baseline is {baseline}: got "
                f"{self.preset!r}; leave it out"
            )

    @property
    def advantage_unit(self) -> Literal["turn", "trajectory"]:
        """Trajectories, or turns with finer credit."""
        return "trajectory" if self.credit == "trajectory" else "turn"

    @property
    def scheme(self) -> GroupScheme:
        """The group statistics in use."""
        return GROUP_PRESETS[self.preset] if isinstance(self.preset, str) else self.preset

    def _select(self, batch: Batch) -> tuple[Keep, dict[str, float]]:
        votes = self._assess(batch)
        if self.credit == "vine":
            keep, missing = valued_members(batch, score_truncations=self.score_truncations)
            return keep, votes.metrics | missing
        return votes.keep, votes.metrics

    @property
    def needs_scores(self) -> tuple[str, ...]:
        """Tells the runtime which scorers, or branches, must be there."""
        return (*super().needs_scores, *((MC_VALUE,) if self.credit == "vine" else ()))

    def _credit(self, scored: Scored) -> Credit:
        tokens = scored.tokens
        if self.credit == "vine":  # no group is degenerate: nothing is compared within it
            return Credit(vine_credit(scored, self.turn_rewards), torch.zeros_like(tokens.mask_N), {})
        penalties_I = None
        if scored.kl_N is not None and self.kl_in == "reward":
            penalties_I = self.kl_coef * tokens.sum_by_trajectory(scored.kl_N)
        votes = self._assess(scored.batch, penalties_I)
        advantages_N = votes.advantages_I[tokens.trajectory_ids_N]
        metrics: dict[str, float] = {}
        if isinstance(self.credit, StepGroups):
            extra_N, metrics = step_group_credit(scored, self.credit, self.anchor, self.turn_rewards)
            advantages_N = advantages_N + extra_N
        elif self.credit == "turn_index":
            advantages_N = turn_index_credit(scored, self.turn_rewards)
        return Credit(advantages_N, votes.is_degenerate_Q[tokens.group_ids_N], metrics)

    def _assess(self, batch: Batch, penalties_I: Tensor | None = None) -> BatchAdvantages:
        return assess(
            batch,
            self.scheme,
            min_group_fraction=self.min_group_fraction,
            score_truncations=self.score_truncations,
            penalties_I=penalties_I,
            return_of=lambda trajectory: math.fsum(self.turn_rewards(trajectory)),
        )
