"""What one optimizer step minimises: the surrogate of the policy, its weights, and the regularisers beside it.

Three choices make the policy loss: `surrogate` (what is clipped, and over which unit), `clip` (how far), and
`off_policy` (what is done about data that another policy sampled).
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from turngate.learners.aggregation import Aggregation, aggregate
from turngate.learners.batch import TokenBatch
from turngate.learners.filters import M2PO, filter_keep
from turngate.learners.kl import kl_terms
from turngate.learners.losses import (
    Clip,
    Granularity,
    TokenLoss,
    cispo_loss,
    ppo_loss,
    reinforce_loss,
    unit_ppo_loss,
    weighted,
)
from turngate.learners.off_policy_choice import OffPolicy, OffPolicyName
from turngate.learners.offpolicy import Correction, CorrectionUnit, interpolated_proximal, is_weights
from turngate.learners.ratios import check_finite, log_ratio, unit_constants, unit_index
from turngate.runtime.engine.model import Scores
from turngate.runtime.errors import ConfigError, LearnerError

__all__ = ["KLPlace", "Objective", "Surrogate", "UpdateData"]

Surrogate: TypeAlias = Literal["clip", "cispo", "turn_prod", "turn_geo", "sequence_geo"]
"""`clip`: PPO per token. `cispo`: the clipped ratio is a constant weight, so that no token loses its gradient. The
others have one ratio per unit: `turn_prod` the likelihood ratio of a turn, which grows like exp(length * drift), so
that long actions are clipped more; `turn_geo` and `sequence_geo` (GSPO) its geometric mean per token, free of length
but no likelihood ratio, with clip ranges about 100 times smaller. A unit has one advantage."""
KLPlace: TypeAlias = Literal["reward", "loss_k2", "loss_ratio_k3"]
"""`reward`: subtract k1, detached, from the return, in groups whose returns differ without it. The others differentiate
an estimator whose gradient is that of KL(current || reference); k1 in the loss has none and is not offered."""

_UNITS: dict[str, tuple[CorrectionUnit, Granularity]] = {
    "turn_prod": ("turn", "prod"),
    "turn_geo": ("turn", "geo"),
    "sequence_geo": ("trajectory", "geo"),
}
_CLIP_HINTS = {
    "cispo": "Clip(1.0, 4.0) caps the weight at 5 and has no lower bound, the canonical form",
    "turn_prod": "whole-action ratios need more room than tokens, say Clip(0.2, 0.28) for turns of a few tokens",
    "turn_geo": "geometric ratios stay near 1, say Clip(0.003, 0.004)",
    "sequence_geo": "GSPO uses Clip(3e-4, 4e-4)",
}


@dataclass(frozen=True, slots=True)
class UpdateData:
    """What all optimizer steps of one update share; (N,) arrays over the token batch."""

    tokens: TokenBatch
    advantages_N: Tensor
    proximal_N: Tensor
    """Log-probs under the weights at the start of the update."""
    reference_N: Tensor | None
    """Log-probs under the reference policy, when there is one."""
    is_silent_N: Tensor
    """Tokens of degenerate groups: no advantage, and so no other force either (huggingface/trl#7068)."""
    mode: Aggregation
    policy_version: int | None = None
    """The learner's version, which lag is counted from; only interpolation reads it."""
    turn_weights_N: Tensor | None = None
    """Weight of the turn whose action was chosen among draws, see `learners.guided`; None when none was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One way to turn advantages into a loss. Exactly one correction covers each gap between policies."""

    surrogate: Surrogate = "clip"
    clip: Clip | None = None
    """None stands for Clip(0.2, 0.28) per token; every other surrogate needs its own."""
    off_policy: OffPolicy | OffPolicyName | None = None
    """None is for data of the current policy alone, where all choices but `none` are the same first step; it clips like
    `bypass`."""
    kl_coef: float = 0.0
    kl_in: KLPlace = "reward"
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.surrogate not in get_args(Surrogate):
            raise ConfigError(f"surrogate must be one of {', '.join(get_args(Surrogate))}: got {self.surrogate!r}")
        if not isinstance(self.clip, Clip | None):
            raise ConfigError(f"clip must be Clip(low, high) or a pair of offsets: got {self.clip!r}")
        if not self.kl_coef >= 0:
            raise ConfigError(f"kl_coef must be 0 or more: got {self.kl_coef}; it is a cost")
        if self.surrogate != "clip" and self.clip is None:
            raise ConfigError(
                f"clip must be given with surrogate={self.surrogate!r}: no range fits every granularity; "
                f"{_CLIP_HINTS[self.surrogate]}"
            )
        if self.surrogate == "cispo" and self.clip and self.clip.dual is not None:
            raise ConfigError("dual clip must be None with surrogate='cispo': its weights are capped already")
        if self.kl_in not in ("reward", "loss_k2", "loss_ratio_k3"):
            raise ConfigError(f"kl_in must be reward, loss_k2 or loss_ratio_k3: got {self.kl_in!r}")
        self._check_surrogate(self.choice)

    def _check_surrogate(self, choice: OffPolicy) -> None:
        if choice.kind in ("reinforce", "none") and self.surrogate != "clip":
            raise ConfigError(
                f"surrogate must be left at 'clip' with off_policy={choice.kind!r}, which has no ratio to clip: got "
                f"{self.surrogate!r}; use 'decoupled' or 'bypass'"
            )
        if self.surrogate not in _UNITS:
            return
        unit = _UNITS[self.surrogate][0]
        given = choice.correction
        if given is not None and (given.level == "token" or (unit, given.unit) == ("trajectory", "turn")):
            raise ConfigError(
                f"correction must have one weight per {unit} with surrogate={self.surrogate!r}: got level "
                f"{given.level!r} over {given.unit}s; use level='unit_geo' or 'unit_prod' with unit={unit!r}"
            )
        if any(isinstance(chosen, M2PO) for chosen in choice.filters):
            raise ConfigError(
                f"filters must keep {unit}s whole with surrogate={self.surrogate!r}: got M2PO, which drops tokens; use "
                "GeometricFilter or OPSM"
            )

    @property
    def choice(self) -> OffPolicy:
        """The off-policy choice in use, spelled out."""
        if isinstance(self.off_policy, OffPolicy):
            return self.off_policy
        return OffPolicy(kind="bypass" if self.off_policy is None else self.off_policy)

    @property
    def ratio_unit(self) -> Literal["token", "turn", "trajectory"]:
        """What has one ratio, and so one advantage."""
        return _UNITS[self.surrogate][0] if self.surrogate in _UNITS else "token"

    @property
    def has_kl_loss(self) -> bool:
        """True when the loss holds a KL term."""
        return self.kl_coef != 0 and self.kl_in != "reward"

    @property
    def needs_whole_trajectories(self) -> bool:
        """True when all rows of a trajectory must be in one forward pass: see `batch.microbatches`."""
        correction = self._correction
        spans_rows = correction.level != "token" and correction.unit == "trajectory"
        return self.surrogate == "sequence_geo" or (self.choice.weighs_in_passes and spans_rows)

    def default_mode(self, tokens: TokenBatch) -> Aggregation:
        """Return the aggregation that fits: a mean over the surrogate's units, else over tokens or trajectories."""
        if self.surrogate in _UNITS:
            return "turn_mean" if _UNITS[self.surrogate][0] == "turn" else "traj_mean"
        return "token_mean" if tokens.is_one_row_per_trajectory else "traj_mean"

    def active_mask(self, data: UpdateData, mask_N: Tensor) -> Tensor:
        """Return which tokens of a step can move the policy at all; rows without any are left out of the passes."""
        has_advantage_N = data.advantages_N != 0
        if self.has_kl_loss or self.entropy_coef != 0:
            # A lone member that keeps its reward has an advantage in a group that is degenerate.
            has_advantage_N = has_advantage_N | ~data.is_silent_N
        if self.needs_whole_trajectories:
            is_active_I = torch.zeros(len(data.tokens.trajectory_names), dtype=torch.bool, device=mask_N.device)
            is_active_I[data.tokens.trajectory_ids_N[mask_N & has_advantage_N]] = True
            return mask_N & is_active_I[data.tokens.trajectory_ids_N]
        return mask_N & has_advantage_N

    def importance(self, data: UpdateData, mask_N: Tensor) -> Tensor:
        """Return the weight of each token's surrogate for one optimizer step, before it is cut into passes.

        Weights of proximal over behaviour, times those of guided turns, times what the filters keep. Rejected tokens
        have weight 0. All of it stands outside the clip: a factor of the advantage, not of the ratio.
        Raises: LearnerError: a value that the step reads is not finite. ConfigError: advantages differ inside a unit.
        """
        choice, behaviour_N = self.choice, data.tokens.behaviour_logprobs_N
        self._check_step(data, mask_N)
        weights_N = mask_N.to(data.proximal_N.dtype)
        if choice.kind == "decoupled" and not choice.weighs_in_passes:
            units_N = self._unit_ids(data, mask_N, self._correction.unit)
            made = is_weights(data.proximal_N, behaviour_N, mask_N, self._correction, unit_ids=units_N)
            weights_N = made.weights
        if data.turn_weights_N is not None and choice.kind != "none":
            weights_N = weights_N * data.turn_weights_N
        for chosen in choice.filters:
            trajectories_N = data.tokens.trajectory_ids_N
            keep_N = filter_keep(chosen, data.proximal_N, behaviour_N, data.advantages_N, mask_N, trajectories_N)
            weights_N = weights_N * keep_N
        return weights_N

    def loss(
        self, scores: Scores, data: UpdateData, at_P: Tensor, weights_P: Tensor, importance_P: Tensor
    ) -> tuple[Tensor, TokenLoss]:
        """Return one forward pass's share of the step's loss, and its surrogate per token.

        Args: at_P: positions of the scored tokens in the token batch. weights_P: their aggregation weights.
        importance_P: from `importance`.
        Raises: LearnerError: a log-prob is not finite, or a unit is not whole in this pass.
        """
        logprobs_P = scores.logprobs_M
        anchor_P, importance_P = self._bridge(logprobs_P.detach(), data, at_P, importance_P)
        surrogate = self._surrogate(logprobs_P, anchor_P, importance_P, data, at_P)
        loss = aggregate(surrogate.loss, weights_P)
        if self.has_kl_loss and data.reference_N is not None:
            kl = kl_terms(logprobs_P, data.reference_N[at_P])
            # The estimators are for samples of the current policy: stale ones need the same weights as the surrogate.
            ratio_P = importance_P * log_ratio(logprobs_P, anchor_P).exp()
            terms_P = ratio_P.detach() * kl.k2 if self.kl_in == "loss_k2" else ratio_P * kl.k3
            loss = loss + self.kl_coef * aggregate(terms_P, weights_P)
        if scores.entropy_M is not None:
            loss = loss - self.entropy_coef * aggregate(scores.entropy_M, weights_P)
        return loss, surrogate

    @property
    def _correction(self) -> Correction:
        if self.choice.correction is not None:
            return self.choice.correction
        if self.surrogate not in _UNITS:
            return Correction()
        unit, granularity = _UNITS[self.surrogate]
        return Correction("unit_prod" if granularity == "prod" else "unit_geo", unit=unit)

    def _bridge(self, fixed_P: Tensor, data: UpdateData, at_P: Tensor, importance_P: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the ratio is taken against, and the weight that covers the rest of the way to the sampler."""
        choice, behaviour_P = self.choice, data.tokens.behaviour_logprobs_N[at_P]
        if choice.kind == "bypass":
            return behaviour_P, importance_P
        if not choice.weighs_in_passes:
            return data.proximal_N[at_P], importance_P
        anchor_P = fixed_P
        if choice.kind == "decoupled":
            if data.policy_version is None:
                raise LearnerError("policy_version must be set to interpolate by lag: got None; pass it in UpdateData")
            versions_P = data.tokens.versions_N[at_P]
            anchor_P, _ = interpolated_proximal(fixed_P, behaviour_P, versions_P, policy_version=data.policy_version)
        mask_P = torch.ones_like(at_P, dtype=torch.bool)
        units_P = self._pass_units(data, at_P, self._correction.unit) if self._correction.level != "token" else None
        made = is_weights(anchor_P, behaviour_P, mask_P, self._correction, unit_ids=units_P)
        return anchor_P, importance_P * made.weights

    def _surrogate(
        self, logprobs_P: Tensor, anchor_P: Tensor, importance_P: Tensor, data: UpdateData, at_P: Tensor
    ) -> TokenLoss:
        advantages_P, mask_P = data.advantages_N[at_P], torch.ones_like(at_P, dtype=torch.bool)
        clip = self.clip or Clip()
        if self.choice.kind in ("reinforce", "none"):
            loss_P = reinforce_loss(logprobs_P, importance_P, advantages_P, mask_P)
            ratio_P = log_ratio(logprobs_P.detach(), data.proximal_N[at_P]).exp()
            return TokenLoss(loss_P, ratio_P, ~mask_P, ~mask_P, ~mask_P)
        if self.surrogate == "clip":
            made = ppo_loss(logprobs_P, anchor_P, advantages_P, mask_P, clip=clip)
        elif self.surrogate == "cispo":
            loss_P, _ = cispo_loss(logprobs_P, anchor_P, advantages_P, mask_P, clip=clip)
            ratio_P = log_ratio(logprobs_P.detach(), anchor_P).exp()
            made = TokenLoss(loss_P, ratio_P, ~mask_P, ~mask_P, ~mask_P)  # capped tokens keep a gradient
        else:
            unit, kind = _UNITS[self.surrogate]
            units_P = self._pass_units(data, at_P, unit)
            made = unit_ppo_loss(logprobs_P, anchor_P, advantages_P, units_P, mask_P, kind=kind, clip=clip)
        return weighted(made, importance_P, mask_P)

    def _check_step(self, data: UpdateData, mask_N: Tensor) -> None:
        """Raise before the first pass, so that no half-made gradient is left behind."""
        tokens = data.tokens
        arrays = {"advantages": data.advantages_N, "proximal log-probs": data.proximal_N}
        arrays["behaviour log-probs"] = tokens.behaviour_logprobs_N
        if data.reference_N is not None:
            arrays["reference log-probs"] = data.reference_N
        check_finite(mask_N, **arrays)
        if self.surrogate in _UNITS:
            units_N = self._unit_ids(data, mask_N, _UNITS[self.surrogate][0])
            unit_constants(data.advantages_N, units_N, int(units_N.max()) + 1 if len(units_N) else 0)

    @staticmethod
    def _unit_ids(data: UpdateData, mask_N: Tensor, unit: CorrectionUnit) -> Tensor:
        """Return the number of each token's unit, -1 where the mask is False."""
        tokens = data.tokens
        keys = [tokens.trajectory_ids_N] if unit == "trajectory" else [tokens.trajectory_ids_N, tokens.turn_ids_N]
        return unit_index(mask_N, *keys)[0]

    def _pass_units(self, data: UpdateData, at_P: Tensor, unit: CorrectionUnit) -> Tensor:
        """Return the unit of each token of a pass. Raises: LearnerError: a trajectory is only partly in it."""
        tokens = data.tokens
        if unit == "turn":
            return unit_index(
                torch.ones_like(at_P, dtype=torch.bool), tokens.trajectory_ids_N[at_P], tokens.turn_ids_N[at_P]
            )[0]
        units_P = tokens.trajectory_ids_N[at_P]
        have_I = torch.bincount(units_P, minlength=len(tokens.trajectory_names))
        want_I = torch.bincount(tokens.trajectory_ids_N[tokens.mask_N], minlength=len(tokens.trajectory_names))
        if ((have_I > 0) & (have_I != want_I)).any():
            raise LearnerError(
                "a trajectory must be whole in one forward pass to have one ratio: got a part of it; use "
                "microbatches(..., whole_trajectories=True)"
            )
        return units_P
