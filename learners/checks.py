"""When a learner with a policy gradient must not go on: missing rewards, unexplained lag, data that says nothing."""

import logging

from turngate.learners.batch import TokenBatch
from turngate.learners.off_policy_choice import OffPolicy, OffPolicyName, require_off_policy_choice
from turngate.learners.policy_state import PolicyState
from turngate.learners.reward_scheme import RewardScheme
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.types import Batch, Sampling, Trajectory

__all__ = [
    "require_ess",
    "require_fresh",
    "require_scores",
    "require_token_correction",
    "require_whole_vocabulary",
    "warn_of_unpaid",
]

_log = logging.getLogger("turngate.learner")


def require_scores(scheme: RewardScheme, batch: Batch) -> None:
    """Raise ConfigError when no turn of an ended episode has a score that the rewards rely on."""
    trajectories = _ended(batch)
    missing = set(scheme.absent(trajectories)) & set(scheme.scores)
    if trajectories and missing:
        given = sorted({name for t in trajectories for turn in t.turns for name in turn.scores})
        raise ConfigError(
            f"scores must be there to learn from: no turn of the first batch has one called "
            f"{', '.join(sorted(missing))}, they have {', '.join(given) or 'no scores at all'}; the scorer failed "
            "every time (its first failure is in the log), or has another name"
        )


def warn_of_unpaid(scheme: RewardScheme, batch: Batch) -> bool:
    """Log which components the rewards rely on and nobody was paid, and return whether there are any."""
    trajectories = _ended(batch)
    unpaid = set(scheme.absent(trajectories)) - set(scheme.scores)
    if unpaid:
        paid = sorted({name for t in trajectories for turn in t.turns for name in turn.rewards})
        _log.warning(
            "rewards rely on components that nobody was paid in a batch with successes: %s; paid were %s; correct "
            "the names, unless they are rare",
            ", ".join(sorted(unpaid)),
            ", ".join(paid) or "none",
        )
    return bool(unpaid)


def require_fresh(off_policy: OffPolicy | OffPolicyName | None, tokens: TokenBatch, policy_version: int) -> None:
    """Raise ConfigError when tokens that train are old, or were guided, and nobody said how to correct for that."""
    require_token_correction(off_policy, is_guided=tokens.base_logprobs_N is not None)
    lag_P = policy_version - tokens.versions_N[tokens.mask_N]
    require_off_policy_choice(off_policy, int(lag_P.max()) if len(lag_P) else 0)


def require_token_correction(off_policy: OffPolicy | OffPolicyName | None, *, is_guided: bool) -> None:
    """Raise ConfigError when values guide single tokens and nobody said how to correct for that."""
    if is_guided and off_policy is None:
        raise ConfigError(
            "off_policy must be chosen to learn from guided tokens: got None, which takes them for the policy's own; "
            "use 'decoupled', which weighs the policy over the guided distribution ('bypass' clips around that, and "
            "drops what guidance has moved further)"
        )


def require_ess(state: PolicyState, ess_ratio: float, *, at_least: float, batches: int) -> None:
    """Count the batches in a row whose effective sample size is too small. Raises: LearnerError: they are `batches`."""
    state.low_ess_batches = state.low_ess_batches + 1 if ess_ratio < at_least else 0
    if state.low_ess_batches >= batches:
        raise LearnerError(
            f"effective sample size must be at least {at_least} of the tokens: got {ess_ratio:.3f} "
            f"after {batches - 1} batches as low; lower max_staleness or the learning rates"
        )


def require_whole_vocabulary(sampling: Sampling) -> None:
    """Raise ConfigError when top-p or top-k cut the distribution that ratios are formed over."""
    if sampling.top_p < 1.0 or sampling.top_k > 0:
        raise ConfigError(
            f"sampling must keep the whole vocabulary to form ratios: got top_p={sampling.top_p}, "
            f"top_k={sampling.top_k}; use top_p=1, top_k=0, or allow_truncated_sampling=True and accept the bias"
        )


def _ended(batch: Batch) -> list[Trajectory]:
    return [t for group in batch.groups for t in group.trajectories if t.end.is_terminal]
