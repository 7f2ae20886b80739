"""What every learner with a policy gradient shares; credit assignment is what they differ in.

One update: who trains -> token batch -> log-probs of the policy as it is -> checks -> credit -> a few optimizer steps
on random parts -> report. `GRPO` and `PPO` say who trains and what each token's advantage is.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import torch
from torch import Tensor

from turngate.learners.aggregation import AGGREGATIONS, Aggregation, token_weights
from turngate.learners.batch import TokenBatch, lay_out, microbatches, minibatches
from turngate.learners.checks import (
    require_ess,
    require_fresh,
    require_scores,
    require_token_correction,
    require_whole_vocabulary,
    warn_of_unpaid,
)
from turngate.learners.credit import Credit, Keep, Scored
from turngate.learners.critic import ValueTargets
from turngate.learners.guided import check_guidance, read_guided
from turngate.learners.hacking import HackingConfig, HackingMonitor
from turngate.learners.logprobs import check_temperature
from turngate.learners.losses import Clip
from turngate.learners.mismatch import sampler_mismatch
from turngate.learners.objective import KLPlace, Objective, Surrogate, UpdateData
from turngate.learners.off_policy_choice import OffPolicy, OffPolicyName, require_off_policy_choice
from turngate.learners.optimizers import MuonAdamW, Schedule
from turngate.learners.panels import PanelInput, compute_panels, watch_rewards
from turngate.learners.parity import measure_parity, measure_rounding, require_parity
from turngate.learners.policy_model import ModelChoice, ScoringModel, model_source, require_model_choice
from turngate.learners.policy_state import PolicyState, StepTally, score_tokens
from turngate.learners.reward_scheme import RewardScheme
from turngate.learners.turns import recorded_rewards
from turngate.runtime.engine.model import Scores
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.guidance import Guidance
from turngate.runtime.seeds import require_seed
from turngate.runtime.types import Batch, Sampling, TokenGuidance, Trajectory, UpdateReport

__all__ = ["Credit", "Keep", "Parity", "PolicyLearner", "Scored"]

Parity: TypeAlias = Literal["error", "report"]
"""What a difference between sampler and learner at lag 0 is on the first batches: an error, or only a metric."""

_UNIT_SIZES = ("token", "turn", "trajectory")


@dataclass(kw_only=True)
class PolicyLearner(ABC):
    """A learner with a clipped policy gradient. Light and picklable until `load`.

    The defaults are what worked for small models on a CPU; none of them is proven for agents in general.
    """

    model: ModelChoice = field(kw_only=False)
    """Model to start from, a folder or `HuggingFaceModel(folder, ...)`; also the reference of the KL term."""
    off_policy: OffPolicy | OffPolicyName | None = None
    """What bridges the gap between sampler and policy, with its weights and filters. Must be chosen for asynchronous
    training; None trains on data of the current policy alone, and refuses older data."""
    guided_weight_max: float | None = 5.0
    """Truncation of the weight 1 / (N w) of turns whose action was chosen among draws (`Guidance`). With a softmax of
    values in [0, 1] weights reach e^beta; what is cut is reported. None truncates nothing."""
    rewards: RewardScheme = field(default=RewardScheme())
    """What is learned from: by default what the environment paid. Evaluations never see it."""
    hacking: HackingConfig = field(default=HackingConfig())
    """When signs of reward hacking become alarms."""
    surrogate: Surrogate = "clip"
    """What is clipped, and over which unit."""
    clip: tuple[float, float] | Clip | None = None
    """Offsets below and above ratio 1; None stands for (0.2, 0.28) per token, every other surrogate needs its own."""
    aggregation: Aggregation | Literal["auto"] = "auto"
    """`auto`: a mean over the units of the surrogate; over tokens, when it has none and every trajectory is one
    segment, else over trajectories."""
    length_constant: float | None = None
    """Divisor of seq_mean_token_sum_norm."""
    epochs: int = 1
    minibatches: int = 2
    """Optimizer steps per epoch; trajectories are dealt into them at random."""
    muon_lr: float | None = 2e-3
    """Of hidden matrices; None gives them to AdamW, too, which suits models that were pretrained with it."""
    adamw_lr: float = 1e-3
    schedule: Schedule = field(default=Schedule(warmup_updates=5))
    updates: int = 0
    """Length of the run, for the decay of the learning rates; 0 leaves that to `schedule`."""
    max_grad_norm: float = 1.0
    kl_coef: float = 0.0
    kl_in: KLPlace = "reward"
    entropy_coef: float = 0.0
    sampling: Sampling = field(default=Sampling())
    """How the rollouts are sampled: log-probs are taken at this temperature."""
    allow_truncated_sampling: bool = False
    """Train although top-p or top-k cut the distribution, with ratios over the whole vocabulary: biased."""
    parity: Parity = "error"
    parity_tolerance: float = 1e-4
    parity_batches: int = 3
    """Batches with fresh tokens on which a parity failure is an error; later ones only report it."""
    min_ess_ratio: float = 0.05
    """Stop when the token-level effective sample size stays below this share for `min_ess_batches` batches in a row:
    the data says nothing any more. In one batch a single token of ratio e^7, which the loss truncates, can do that."""
    min_ess_batches: int = 3
    microbatch_tokens: int = 8192
    """Tokens per forward pass; changes speed and memory, not the result beyond rounding."""
    seed: int = 0

    _state: PolicyState | None = field(default=None, init=False, repr=False, compare=False)
    _has_warned: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        name_of = type(self).__name__
        require_model_choice(self.model)
        for name, kind in self._kinds().items():
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name} must be {kind.__name__}(...): got {getattr(self, name)!r} ({name_of})")
        for name in ("epochs", "minibatches", "microbatch_tokens", "min_ess_batches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive: got {getattr(self, name)} ({name_of})")
        for name in ("max_grad_norm", "parity_tolerance"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive: got {getattr(self, name)} ({name_of})")
        if self.guided_weight_max is not None and not self.guided_weight_max >= 1:
            raise ConfigError(f"guided_weight_max must be at least 1: got {self.guided_weight_max} ({name_of})")
        if self.aggregation != "auto" and self.aggregation not in AGGREGATIONS:
            raise ConfigError(f"aggregation must be auto or one of {', '.join(AGGREGATIONS)}: got {self.aggregation!r}")
        if self.aggregation == "seq_mean_token_sum_norm" and self.length_constant is None:
            raise ConfigError("length_constant must be set for seq_mean_token_sum_norm: got None; use the token limit")
        if self.parity not in ("error", "report"):
            raise ConfigError(f"parity must be error or report: got {self.parity!r}")
        require_seed(self.seed, name_of)
        check_temperature(self.sampling.temperature)
        if not self.allow_truncated_sampling:
            require_whole_vocabulary(self.sampling)
        if self.updates and not self.schedule.total_updates:
            self.schedule = msgspec.structs.replace(self.schedule, total_updates=self.updates)
        ratio, advantage = self.objective.ratio_unit, self.advantage_unit
        if _UNIT_SIZES.index(ratio) > _UNIT_SIZES.index(advantage):
            raise ConfigError(
                f"one ratio cannot serve two advantages: got surrogate={self.surrogate!r}, a ratio per {ratio}, with "
                f"credit per {advantage}; choose a finer surrogate or coarser credit ({name_of})"
            )

    def _kinds(self) -> dict[str, type]:
        """Return of which class the values of some fields must be, where another would only be noticed later."""
        return {"rewards": RewardScheme, "hacking": HackingConfig, "schedule": Schedule, "sampling": Sampling}

    # --- what a learner decides

    @property
    def advantage_unit(self) -> Literal["token", "turn", "trajectory"]:
        """The largest unit within which all tokens have the same advantage; ratios per unit need at least theirs."""
        return "token"

    @abstractmethod
    def _select(self, batch: Batch) -> tuple[Keep, dict[str, float]]:
        """Return who trains, and why others do not, as metrics."""

    @abstractmethod
    def _credit(self, scored: Scored) -> Credit:
        """Return the advantage of every token."""

    @property
    def _needs_value_head(self) -> bool:
        """Whether the policy's model must have one."""
        return False

    @property
    def turn_discount(self) -> float:
        """Discount per turn, which shaping by potentials must share."""
        return 1.0

    def turn_rewards(self, trajectory: Trajectory) -> Sequence[float]:
        """Return what each recorded turn is paid; NaN where that cannot be told."""
        if self.rewards.is_plain:
            return recorded_rewards(trajectory)
        return self.rewards.rewards(trajectory, gamma=self.turn_discount).total_T.tolist()

    def _value_loss(self, scores: Scores, values: ValueTargets, at_P: Tensor, mask_N: Tensor) -> Tensor:
        """Return one forward pass's share of the value loss of a head on the trunk; (): normalised over `mask_N`."""
        raise NotImplementedError(f"{type(self).__name__} gives value targets to the trunk but no loss for them")

    # --- the protocol

    @property
    def objective(self) -> Objective:
        """The loss in use."""
        return Objective(
            surrogate=self.surrogate,
            clip=Clip(*self.clip) if isinstance(self.clip, tuple) else self.clip,
            off_policy=self.off_policy,
            kl_coef=self.kl_coef,
            kl_in=self.kl_in,
            entropy_coef=self.entropy_coef,
        )

    def load(self, folder: Path | None) -> None:
        """Get ready from a checkpoint, or from `model` when None.

        Raises: ConfigError, PublishError: no model in the folder. LearnerError: the checkpoint is unreadable.
        """
        source = model_source(self.model)
        model = source.load(None if folder is None else folder / "model", value_head=self._needs_value_head)
        reference = source.reference(model) if self.kl_coef else None
        optimizer = MuonAdamW(model, muon_lr=self.muon_lr, adamw_lr=self.adamw_lr)
        monitor = HackingMonitor(self.hacking)
        self._state = PolicyState(model, optimizer, seed=self.seed, reference=reference, monitor=monitor)
        if folder is not None:
            self._state.restore(folder)

    def update(self, batch: Batch) -> UpdateReport:
        """Learn from one batch and report what happened.

        Raises: LearnerError: parity failed, the data is too far off-policy, or a loss or gradient is not finite; the
        weights are those of the last complete optimizer step. RecordError: a trajectory contradicts itself.
        """
        state = self._loaded
        # 1. Who trains; lay their tokens out.
        if state.updates == 0:
            require_scores(self.rewards, batch)
        self._has_warned = self._has_warned or warn_of_unpaid(self.rewards, batch)
        keep, metrics = self._select(batch)
        tokens = lay_out(batch, keep, vocabulary_size=state.model.config.vocab_size)
        guided = read_guided(batch, keep, tokens, upper=self.guided_weight_max)
        if guided.weights_N is not None:
            self._require_turn_weights(LearnerError)
        # 2. The policy as it is now: anchor of the clip, and the check that sampler and learner agree.
        generated = tokens.masked(tokens.generated_N)  # tokens too old to train still cost what they cost
        proximal_N, entropy_N = self._score(state.model, generated)
        metrics |= self._measure(tokens, proximal_N, entropy_N, batch.policy_version)
        reference_N = self._score(state.reference, generated)[0] if state.reference else None
        kl_N = None if reference_N is None else proximal_N - reference_N
        if kl_N is not None:
            metrics["reference_kl_k1"] = float(kl_N[tokens.mask_N].sum()) / max(tokens.policy_tokens, 1)
        # 3. What each token was worth.
        scored = Scored(batch, keep, tokens, proximal_N, entropy_N, kl_N)
        credit = self._credit(scored)
        # 4. A few steps on random parts of it.
        data = UpdateData(
            tokens,
            advantages_N=torch.where(tokens.mask_N, credit.advantages_N, 0.0),
            proximal_N=proximal_N,
            reference_N=reference_N,
            is_silent_N=credit.is_silent_N,
            mode=self.objective.default_mode(tokens) if self.aggregation == "auto" else self.aggregation,
            policy_version=batch.policy_version,
            turn_weights_N=guided.weights_N,
        )
        tally = StepTally()
        for _ in range(self.epochs):
            for rows in minibatches(tokens, self.minibatches, state.generator):
                self._step(state, data, credit.values, rows, tally)
        metrics["lr_factor"] = self.schedule.factor(state.updates)
        state.updates += 1
        panels = self._panels(scored, credit, metrics.get("reference_kl_k1"))
        return UpdateReport(panels | metrics | guided.metrics | credit.metrics | tally.metrics())

    def save_weights(self, path: Path) -> None:
        """Write the policy's weights to one safetensors file, whole or not at all.

        What it holds is for servers, whose model is the one that training started from: a value head goes along only
        if that has one. Of a model with adapters they are all that is written.
        """
        self._loaded.model.save_weights(path)

    def save(self, folder: Path) -> None:
        """Write a checkpoint: a whole model folder under `model`, and everything else in `learner.pt`."""
        self._loaded.save(folder)
        model_source(self.model).copy_companions(folder / "model")

    @property
    def _loaded(self) -> PolicyState:
        if self._state is None:
            raise LearnerError("load() must come first: the learner has no weights yet")
        return self._state

    def _score(self, model: ScoringModel, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        temperature = self.sampling.temperature
        return score_tokens(model, tokens, temperature=temperature, microbatch_tokens=self.microbatch_tokens)

    def _measure(self, tokens: TokenBatch, proximal_N: Tensor, entropy_N: Tensor, version: int) -> dict[str, float]:
        """Return how policy and sampler differ; raise where they must not."""
        state = self._loaded
        require_fresh(self.off_policy, tokens, version)
        parity = measure_parity(tokens, proximal_N, policy_version=version)
        if self.parity == "error" and parity.tokens and state.parity_batches < self.parity_batches:
            where = (state.model, tokens, proximal_N, parity.worst_row)
            rounding = partial(measure_rounding, *where, temperature=self.sampling.temperature)
            require_parity(parity, self.parity_tolerance, rounding=rounding)
            state.parity_batches += 1
        metrics = sampler_mismatch(tokens, proximal_N, policy_version=version)
        ess_ratio = metrics["ess_token_ratio"] if tokens.policy_tokens else 1.0
        require_ess(state, ess_ratio, at_least=self.min_ess_ratio, batches=self.min_ess_batches)
        return metrics | {
            "entropy": float(entropy_N[tokens.mask_N].mean()) if tokens.policy_tokens else 0.0,
            "policy_tokens": float(tokens.policy_tokens),
            "parity_tokens": float(parity.tokens),
            "parity_max_abs": parity.max_abs,
        }

    def _panels(self, scored: Scored, credit: Credit, kl: float | None) -> dict[str, float]:
        """Return what the batch looked like, and what the watch for reward hacking says of it."""
        trajectories = [t for group in scored.batch.groups for t in group.trajectories]
        paid = [None if t.end.is_failure else self.rewards.rewards(t, gamma=self.turn_discount) for t in trajectories]
        data = PanelInput(
            scored.batch,
            scored.keep,
            scored.tokens,
            proximal_N=scored.proximal_N,
            entropy_N=scored.entropy_N,
            advantages_N=credit.advantages_N,
            rewards=paid,
        )
        return compute_panels(data) | watch_rewards(self._loaded.monitor, data, kl=kl)

    @property
    def needs_scores(self) -> tuple[str, ...]:
        """Tells the runtime which scorers must be there."""
        return self.rewards.scores

    def check_staleness(self, max_staleness: int) -> None:
        """Refuse to start asynchronous training without a choice of `off_policy`.

        Raises: ConfigError: there is none; the message explains the options.
        """
        require_off_policy_choice(self.off_policy, max_staleness)

    def check_guidance(self, guidance: Guidance | None, tokens: TokenGuidance | None) -> None:
        """Refuse to start on the experience of a guided policy that no weight leads back from.

        Raises: ConfigError: actions are chosen greedily, or what was chosen for the loss cannot take the correction.
        """
        check_guidance(guidance, tokens)
        require_token_correction(self.off_policy, is_guided=tokens is not None)
        if guidance is not None:
            self._require_turn_weights(ConfigError)

    def _require_turn_weights(self, kind: type[ConfigError] | type[LearnerError]) -> None:
        if self.objective.ratio_unit == "trajectory":
            raise kind(
                "surrogate must have ratios within turns to learn from guided turns, each with a weight of its own: "
                f"got {self.surrogate!r}, a ratio per trajectory; use 'clip', 'turn_prod' or 'turn_geo'"
            )

    def _step(
        self, state: PolicyState, data: UpdateData, values: ValueTargets | None, rows: list[int], tally: StepTally
    ) -> None:
        """Take one optimizer step on `rows`; none when no token of them can move the policy."""
        state.optimizer.zero_grad()  # of a step that was left half-way by an error
        tokens, objective = data.tokens, self.objective
        mask_N = tokens.rows_mask(rows)
        weights_N = token_weights(
            mask_N,
            data.mode,
            row_ids=tokens.row_ids_N,
            turn_ids=tokens.turn_ids_N,
            trajectory_ids=tokens.trajectory_ids_N,
            group_ids=tokens.group_ids_N,
            length_constant=self.length_constant,
        )
        importance_N = objective.importance(data, mask_N)
        tally.steps += 1
        tally.tokens += int(mask_N.sum())
        tally.rejected += int((mask_N & (importance_N == 0)).sum())
        # Rows without any gradient need no forward pass; their weight in the means is already counted.
        moves_N = objective.active_mask(data, mask_N)
        if values is not None:
            moves_N = moves_N | (values.mask_N & mask_N)
        whole = objective.needs_whole_trajectories
        active = tokens.row_ids_N[moves_N].unique().tolist()
        for micro in microbatches(tokens, active, self.microbatch_tokens, whole_trajectories=whole):
            at_P = micro.positions_P
            with_entropy = self.entropy_coef != 0
            scores = state.model.score(micro.packed, temperature=self.sampling.temperature, with_entropy=with_entropy)
            loss, surrogate = objective.loss(scores, data, at_P, weights_N[at_P], importance_N[at_P])
            if values is not None:
                value_loss = self._value_loss(scores, values, at_P, mask_N)
                tally.value_loss += float(value_loss.detach())
                loss = loss + value_loss
            torch.autograd.backward(loss)
            tally.add(loss, surrogate)
        if active:
            state.step(self.max_grad_norm, self.schedule, tally)
