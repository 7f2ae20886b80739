"""GRPO: trajectories against their siblings, a clipped token loss, no critic.

One update: votes -> token batch -> log-probs of the policy as it is -> checks -> a few optimizer steps -> report.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import torch
from torch import Tensor

from turngate.learners.advantages.group import GROUP_PRESETS, GroupScheme
from turngate.learners.aggregation import AGGREGATIONS, Aggregation, token_weights
from turngate.learners.batch import TokenBatch, lay_out, microbatches, minibatches
from turngate.learners.logprobs import check_temperature
from turngate.learners.losses import Clip
from turngate.learners.mismatch import sampler_mismatch
from turngate.learners.objective import KLPlace, Objective, OffPolicy, UpdateData
from turngate.learners.offpolicy import Correction
from turngate.learners.optimizers import MuonAdamW, Schedule
from turngate.learners.parity import measure_parity, require_parity
from turngate.learners.policy_state import PolicyState, StepTally, score_tokens
from turngate.learners.voting import BatchAdvantages, assess
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.files import write_atomically
from turngate.runtime.types import Batch, Sampling, UpdateReport

__all__ = ["GRPO", "Parity"]

Parity: TypeAlias = Literal["error", "report"]
"""What a difference between sampler and learner at lag 0 is on the first batches: an error, or only a metric."""


@dataclass(kw_only=True)
class GRPO:
    """A learner of group-relative advantages. Light and picklable until `load`.

    The defaults are what worked for small models on a CPU; none of them is proven for agents in general.
    """

    model: Path | str = field(kw_only=False)
    """Model folder to start from; also the reference of the KL term."""
    preset: str | GroupScheme = "dr_grpo"
    """How siblings are compared: `grpo`, `dr_grpo`, `rloo`, `batch_std`, or a scheme of your own."""
    clip: tuple[float, float] | Clip = (0.2, 0.28)
    """Offsets below and above ratio 1."""
    off_policy: OffPolicy = "decoupled"
    """What bridges the gap between sampler and policy; `none` is plain REINFORCE, without ratio and clip."""
    correction: Correction | None = None
    """Weights of `decoupled` and `reinforce`; None stands for token-level truncation at 2, and
    `Correction(lower=1.0, upper=1.0)` for no correction under the same clip."""
    aggregation: Aggregation | Literal["auto"] = "auto"
    """`auto`: token_mean when every trajectory is one segment, else traj_mean."""
    length_constant: float | None = None
    """Divisor of seq_mean_token_sum_norm."""
    epochs: int = 1
    minibatches: int = 2
    """Optimizer steps per epoch; trajectories are dealt into them at random."""
    muon_lr: float = 2e-3
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
    min_group_fraction: float = 0.5
    """Groups with a smaller share of usable members are dropped."""
    score_truncations: bool = False
    """Let episodes that the collector cut short vote with the reward they have."""
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

    def __post_init__(self) -> None:
        for name in ("epochs", "minibatches", "microbatch_tokens", "min_ess_batches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive: got {getattr(self, name)} (GRPO)")
        for name in ("max_grad_norm", "parity_tolerance"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive: got {getattr(self, name)} (GRPO)")
        if isinstance(self.preset, str) and self.preset not in GROUP_PRESETS:
            raise ConfigError(f"preset must be one of {', '.join(GROUP_PRESETS)}: got {self.preset!r}")
        if self.aggregation != "auto" and self.aggregation not in AGGREGATIONS:
            raise ConfigError(f"aggregation must be auto or one of {', '.join(AGGREGATIONS)}: got {self.aggregation!r}")
        if self.aggregation == "seq_mean_token_sum_norm" and self.length_constant is None:
            raise ConfigError("length_constant must be set for seq_mean_token_sum_norm: got None; use the token limit")
        if self.parity not in ("error", "report"):
            raise ConfigError(f"parity must be error or report: got {self.parity!r}")
        check_temperature(self.sampling.temperature)
        if (self.sampling.top_p < 1.0 or self.sampling.top_k > 0) and not self.allow_truncated_sampling:
            raise ConfigError(
                "sampling must keep the whole vocabulary to form ratios: "
                f"got top_p={self.sampling.top_p}, top_k={self.sampling.top_k}; "
                "use top_p=1, top_k=0, or allow_truncated_sampling=True and accept the bias"
            )
        if self.updates and not self.schedule.total_updates:
            self.schedule = msgspec.structs.replace(self.schedule, total_updates=self.updates)
        _ = self.objective  # checks its own part

    @property
    def scheme(self) -> GroupScheme:
        """The group statistics in use."""
        return GROUP_PRESETS[self.preset] if isinstance(self.preset, str) else self.preset

    @property
    def objective(self) -> Objective:
        """The loss in use."""
        return Objective(
            clip=self.clip if isinstance(self.clip, Clip) else Clip(*self.clip),
            off_policy=self.off_policy,
            correction=self.correction,
            kl_coef=self.kl_coef,
            kl_in=self.kl_in,
            entropy_coef=self.entropy_coef,
        )

    def load(self, folder: Path | None) -> None:
        """Get ready from a checkpoint, or from `model` when None.

        Raises: ConfigError, PublishError: no model in the folder. LearnerError: the checkpoint is unreadable.
        """
        model = PolicyModel.load(Path(self.model) if folder is None else folder / "model")
        reference = PolicyModel.load(Path(self.model)).requires_grad_(False) if self.kl_coef else None
        optimizer = MuonAdamW(model, muon_lr=self.muon_lr, adamw_lr=self.adamw_lr)
        self._state = PolicyState(model, optimizer, seed=self.seed, reference=reference)
        if folder is not None:
            self._state.restore(folder)

    def update(self, batch: Batch) -> UpdateReport:
        """Learn from one batch and report what happened.

        Raises: LearnerError: parity failed, the data is too far off-policy, or a loss or gradient is not finite; the
        weights are those of the last complete optimizer step. RecordError: a trajectory contradicts itself.
        """
        state = self._loaded
        # 1. Who votes and who trains; lay their tokens out.
        votes = self._assess(batch)
        tokens = lay_out(batch, votes.keep, vocabulary_size=state.model.config.vocab_size)
        # 2. The policy as it is now: anchor of the clip, and the check that sampler and learner agree.
        proximal_N, entropy_N = self._score(state.model, tokens)
        metrics = self._measure(tokens, proximal_N, entropy_N, batch.policy_version)
        reference_N = self._score(state.reference, tokens)[0] if state.reference else None
        if reference_N is not None:
            kl_I = tokens.sum_by_trajectory(proximal_N - reference_N)
            metrics["reference_kl_k1"] = float(kl_I.sum()) / max(tokens.policy_tokens, 1)
            if self.kl_in == "reward":
                votes = self._assess(batch, penalties_I=self.kl_coef * kl_I)
        # 3. A few steps on random parts of it.
        data = UpdateData(
            tokens,
            advantages_N=torch.where(tokens.mask_N, votes.advantages_I[tokens.trajectory_ids_N], 0.0),
            proximal_N=proximal_N,
            reference_N=reference_N,
            is_silent_N=votes.is_degenerate_Q[tokens.group_ids_N],
            mode=self._mode(tokens),
        )
        tally = StepTally()
        for _ in range(self.epochs):
            for rows in minibatches(tokens, self.minibatches, state.generator):
                self._step(state, data, rows, tally)
        state.updates += 1
        return UpdateReport(votes.metrics | metrics | tally.metrics())

    def save_weights(self, path: Path) -> None:
        """Write the policy's weights to one safetensors file, whole or not at all."""
        self._loaded.model.save_weights(path)

    def save(self, folder: Path) -> None:
        """Write a checkpoint: a whole model folder under `model`, and everything else in `learner.pt`."""
        self._loaded.save(folder)
        tokenizer = Path(self.model) / "tokenizer.json"
        if tokenizer.exists():
            write_atomically(folder / "model" / "tokenizer.json", tokenizer.read_bytes())

    @property
    def _loaded(self) -> PolicyState:
        if self._state is None:
            raise LearnerError("load() must come first: the learner has no weights yet")
        return self._state

    def _assess(self, batch: Batch, penalties_I: Tensor | None = None) -> BatchAdvantages:
        return assess(
            batch,
            self.scheme,
            min_group_fraction=self.min_group_fraction,
            score_truncations=self.score_truncations,
            penalties_I=penalties_I,
        )

    def _score(self, model: PolicyModel, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        temperature = self.sampling.temperature
        return score_tokens(model, tokens, temperature=temperature, microbatch_tokens=self.microbatch_tokens)

    def _mode(self, tokens: TokenBatch) -> Aggregation:
        if self.aggregation != "auto":
            return self.aggregation
        return "token_mean" if tokens.is_one_row_per_trajectory else "traj_mean"

    def _measure(self, tokens: TokenBatch, proximal_N: Tensor, entropy_N: Tensor, version: int) -> dict[str, float]:
        """Return how policy and sampler differ; raise where they must not."""
        state = self._loaded
        parity = measure_parity(tokens, proximal_N, policy_version=version)
        if self.parity == "error" and parity.tokens and state.parity_batches < self.parity_batches:
            require_parity(parity, self.parity_tolerance)
            state.parity_batches += 1
        metrics = sampler_mismatch(tokens, proximal_N, policy_version=version)
        self._require_sample(metrics["ess_token_ratio"] if tokens.policy_tokens else 1.0)
        return metrics | {
            "entropy": float(entropy_N[tokens.mask_N].mean()) if tokens.policy_tokens else 0.0,
            "policy_tokens": float(tokens.policy_tokens),
            "parity_tokens": float(parity.tokens),
            "parity_max_abs": parity.max_abs,
        }

    def _require_sample(self, ess_ratio: float) -> None:
        """Raise when the batches have said nothing for too long."""
        state = self._loaded
        state.low_ess_batches = state.low_ess_batches + 1 if ess_ratio < self.min_ess_ratio else 0
        if state.low_ess_batches >= self.min_ess_batches:
            raise LearnerError(
                f"effective sample size must be at least {self.min_ess_ratio} of the tokens: got {ess_ratio:.3f} "
                f"after {self.min_ess_batches - 1} batches as low; lower max_staleness or the learning rates"
            )

    def _step(self, state: PolicyState, data: UpdateData, rows: list[int], tally: StepTally) -> None:
        """Take one optimizer step on `rows`; none when no token of them can move the policy."""
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
        # Rows without any gradient need no forward pass; their weight in the means is already counted.
        active = tokens.row_ids_N[objective.active_mask(data, mask_N)].unique().tolist()
        for micro in microbatches(tokens, active, self.microbatch_tokens):
            at_P = micro.positions_P
            with_entropy = self.entropy_coef != 0
            scores = state.model.score(micro.packed, temperature=self.sampling.temperature, with_entropy=with_entropy)
            loss, surrogate = objective.loss(scores, data, at_P, weights_N[at_P], importance_N[at_P])
            torch.autograd.backward(loss)
            tally.add(loss, surrogate)
        if active:
            state.step(self.max_grad_norm, self.schedule, tally)
