"""Value targets from experience of another policy: V-trace, the Retrace family, one-step targets, weights of old data.

One trajectory at a time: index t of a (T,) array belongs to turn t, `bootstrap` is the value after the last turn (None
where the task ended, else V of the last context), and nothing else can reach a trajectory's targets. All recursions run
in float64; results are detached and come back in the dtype of the values. Log-ratios are those of the policy whose
value is wanted, the current one, over the one that sampled; recompute them whenever targets are recomputed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from turngate.learners.advantages.gae import check_discounts, last_value
from turngate.learners.ratios import LOG_RATIO_CLAMP, ShapeError, check_shapes, unit_sums
from turngate.runtime.errors import ConfigError, LearnerError

__all__ = [
    "TRACE_KINDS",
    "ReplayWeights",
    "Retrace",
    "TraceKind",
    "TurnSteps",
    "VTrace",
    "check_truncation",
    "q_one_step",
    "replay_weights",
    "retrace",
    "turn_log_ratios",
    "vtrace",
    "vtrace_batch",
]

TraceKind: TypeAlias = Literal["retrace", "is", "tree_backup", "q_lambda"]
"""How much of the next turn's error a Q target believes: lam * min(1, ratio), ratio, lam * pi(a), or lam."""
TRACE_KINDS: tuple[TraceKind, ...] = get_args(TraceKind)

# exp of a sum of float32 log-probs may end this far above 1.
_PROBABILITY_SLACK = 1e-4


@dataclass(frozen=True, slots=True)
class TurnSteps:
    """What one trajectory contributes to state-value targets."""

    rewards_T: Tensor
    values_T: Tensor
    """V(h_t) before turn t, all from one evaluation."""
    log_ratios_T: Tensor
    bootstrap: float | None
    """V of the last context; None at terminal ends."""

    @property
    def next_values(self) -> Tensor:
        """V after each turn, (T,); the last one is the bootstrap, 0 at terminal ends."""
        after = self.values_T.new_full(self.values_T.shape, last_value(self.bootstrap))
        after[:-1] = self.values_T[1:]
        return after


@dataclass(frozen=True, slots=True)
class VTrace:
    """Off-policy corrected targets of state values, and advantages for a policy gradient. (T,), detached."""

    targets_T: Tensor
    pg_advantages_T: Tensor
    """Already times the truncated ratio: a loss must not apply a ratio again (PufferLib#306)."""


@dataclass(frozen=True, slots=True)
class Retrace:
    """Off-policy corrected targets of action values. (T,), detached."""

    targets_T: Tensor
    traces_T: Tensor
    """The trace coefficient of each turn; the first is not used."""


@dataclass(frozen=True, slots=True)
class ReplayWeights:
    """How much each old trajectory counts. (I,), detached."""

    weights_I: Tensor
    """Mean 1 over the kept, 0 on the others."""
    raw_I: Tensor
    """Before the cut and the normalisation, for metrics."""
    keep_I: Tensor
    """bool; not older than the limit."""


def turn_log_ratios(logprobs_N: Tensor, behaviour_logprobs_N: Tensor, turn_ids_N: Tensor, *, turns: int) -> Tensor:
    """Return the log-ratio of each turn's whole action, float64 (turns,): the sum over its tokens.

    Unclipped: targets truncate the ratio of the turn, since truncating tokens before they are multiplied cuts traces
    more than the target asks for. A turn without tokens of its own (injected) gets the empty sum, 0.
    Args: turn_ids_N: turn index per token of one trajectory, all segments; negative on context, which is never read.
    Raises: ShapeError: the arrays differ in shape, or a turn id is not below `turns`. LearnerError: not finite.
    """
    check_shapes(logprobs=logprobs_N, behaviour_logprobs=behaviour_logprobs_N, turn_ids=turn_ids_N)
    inside = turn_ids_N >= 0
    if bool((turn_ids_N >= turns).any()):
        raise ShapeError(f"turn ids must be below the number of turns: got {int(turn_ids_N.max())} of {turns}")
    gaps = (logprobs_N.detach().to(torch.float64) - behaviour_logprobs_N.detach().to(torch.float64))[inside]
    if bool(gaps.isnan().any()) or bool((gaps == math.inf).any()):
        raise LearnerError("log-ratios must be numbers below infinity: got NaN or inf; look at both log-probs")
    return unit_sums(gaps, turn_ids_N[inside], turns)


def check_truncation(*, rho_bar: float | None, c_bar: float | None) -> None:
    """Raise ConfigError unless rho_bar >= c_bar > 0; None is infinite."""
    _check_positive(rho_bar=rho_bar, c_bar=c_bar)
    if (math.inf if rho_bar is None else rho_bar) < (math.inf if c_bar is None else c_bar):
        raise ConfigError(
            f"rho_bar must be at least c_bar: got {rho_bar} and {c_bar} (None is infinite); traces longer than the "
            "errors they carry lose the contraction (1802.01561)"
        )


def vtrace(
    rewards_T: Tensor,
    values_T: Tensor,
    log_ratios_T: Tensor,
    *,
    bootstrap: float | None,
    gamma: float = 1.0,
    lam: float = 1.0,
    rho_bar: float | None = 1.0,
    c_bar: float | None = 1.0,
    pg_rho_bar: float | None = 1.0,
) -> VTrace:
    """Return V-trace targets and advantages of one trajectory.

    With log-ratios 0 the targets are lambda-returns; at -inf they are the values themselves. Truncated at `rho_bar`
    the fixed point is the value of the policy proportional to min(rho_bar * mu, pi). None truncates nothing.
    Source: Espeholt et al. 2018 (1802.01561) eq. 1; lambda and the bootstrap of the advantage as in rlax.
    Args: bootstrap: value after the last turn, which gets a target like any other; None when the trajectory terminated.
    Raises: ConfigError: rho_bar < c_bar, or a parameter out of range. ShapeError: the arrays differ in length.
    LearnerError: a number is not finite (log-ratios may be -inf).
    """
    check_discounts(gamma=gamma, lam=lam)
    check_truncation(rho_bar=rho_bar, c_bar=c_bar)
    _check_positive(pg_rho_bar=pg_rho_bar)
    rewards, values, logs = _columns(rewards=rewards_T, values=values_T, log_ratios=log_ratios_T)
    targets, advantages = [0.0] * len(values), [0.0] * len(values)
    next_value = next_target = last_value(bootstrap)
    for t in reversed(range(len(values))):
        delta = _truncated(logs[t], rho_bar) * (rewards[t] + gamma * next_value - values[t])
        trace = lam * _truncated(logs[t], c_bar)
        targets[t] = values[t] + delta + gamma * trace * (next_target - next_value)
        next_q = lam * next_target + (1 - lam) * next_value
        advantages[t] = _truncated(logs[t], pg_rho_bar) * (rewards[t] + gamma * next_q - values[t])
        next_value, next_target = values[t], targets[t]
    return VTrace(_like(targets, values_T), _like(advantages, values_T))


def vtrace_batch(
    trajectories: Sequence[TurnSteps],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    rho_bar: float | None = 1.0,
    c_bar: float | None = 1.0,
    pg_rho_bar: float | None = 1.0,
) -> list[VTrace]:
    """Return V-trace of each trajectory, in order; every one is on its own, so none can leak into another.

    Shifting a flat array of targets by one gives the last turn of a truncated trajectory the first target of the next
    one (pytorch/rl#4209). Raises: as `vtrace`.
    """
    return [
        vtrace(
            steps.rewards_T,
            steps.values_T,
            steps.log_ratios_T,
            bootstrap=steps.bootstrap,
            gamma=gamma,
            lam=lam,
            rho_bar=rho_bar,
            c_bar=c_bar,
            pg_rho_bar=pg_rho_bar,
        )
        for steps in trajectories
    ]


def retrace(
    rewards_T: Tensor,
    q_values_T: Tensor,
    policy_values_T: Tensor,
    log_ratios_T: Tensor | None = None,
    *,
    kind: TraceKind = "retrace",
    policy_probs_T: Tensor | None = None,
    bootstrap: float | None,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Retrace:
    """Return targets of Q(h_t, a_t) for one trajectory: y_t = r_t + gamma (V_{t+1} + c_{t+1} (y_{t+1} - Q_{t+1})).

    Source: Munos et al. 2016 (1606.02647); the last target is r + gamma * bootstrap. `q_lambda` corrects nothing: it
    converges only when the policies are close (Harutyunyan et al. 2016, 1602.04951).
    Args: q_values_T: Q of the actions taken. policy_values_T: E[Q(h_t, a)] over a of the *current* policy: a V head
    trained on its samples, or the mean over fresh ones; the first is not used. log_ratios_T: for `retrace` and `is`.
    policy_probs_T: pi(a_t | h_t), for `tree_backup`.
    Raises: ConfigError: a parameter out of range, or what the kind reads is missing. ShapeError, LearnerError: as
    `vtrace`.
    """
    check_discounts(gamma=gamma, lam=lam)
    rewards, taken, expected = _columns(rewards=rewards_T, q_values=q_values_T, policy_values=policy_values_T)
    traces = _traces(kind, lam, len(taken), log_ratios_T, policy_probs_T)
    targets = [0.0] * len(taken)
    following = last_value(bootstrap)
    for t in reversed(range(len(taken))):
        targets[t] = rewards[t] + gamma * following
        following = expected[t] + traces[t] * (targets[t] - taken[t])
    return Retrace(_like(targets, q_values_T), _like(traces, q_values_T))


def q_one_step(rewards_T: Tensor, next_values_T: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Return r_t + gamma * V_{t+1}: a target of Q(h_t, a_t) that needs no ratio, since the action is given.

    For a critic of state values it is the value of the policy that sampled a_t, and must be called so.
    Source: Zhou et al. 2024, ArCHer (2402.19446).
    Args: next_values_T: the *current* policy's V after each turn, the last one the bootstrap (0 at terminal ends).
    Raises: ConfigError, ShapeError, LearnerError: as `vtrace`.
    """
    check_discounts(gamma=gamma)
    rewards, following = _columns(rewards=rewards_T, next_values=next_values_T)
    return _like([r + gamma * v for r, v in zip(rewards, following, strict=True)], next_values_T)


def replay_weights(
    log_ratios_I: Tensor, lags_I: Tensor, *, kappa: float = 1.0, rho_cap: float | None = 2.0, max_lag: int
) -> ReplayWeights:
    """Return min(ratio, rho_cap) * kappa^lag per trajectory: a heuristic without published evidence, off by default.

    Zeros when nothing is kept. When old data is already *sampled* by kappa^lag, weigh with kappa 1.
    Args: log_ratios_I: log-ratio of each whole trajectory. lags_I: integers; lags above `max_lag` are cut.
    Raises: ConfigError: a parameter out of range. ShapeError, LearnerError: as `vtrace`; a lag is negative.
    """
    if not 0 < kappa <= 1:
        raise ConfigError(f"kappa must be above 0 and at most 1: got {kappa}; 1 ignores age")
    if max_lag < 0:
        raise ConfigError(f"max_lag must be 0 or more: got {max_lag}")
    _check_positive(rho_cap=rho_cap)
    logs, lags = _columns(log_ratios=log_ratios_I, lags=lags_I)
    if any(lag < 0 for lag in lags):
        raise LearnerError(f"lags must be 0 or more: got {min(lags)}; the data claims a version not yet trained")
    raw = [_truncated(x, rho_cap) * kappa**lag for x, lag in zip(logs, lags, strict=True)]
    keep = [lag <= max_lag for lag in lags]
    total = sum(w for w, k in zip(raw, keep, strict=True) if k)
    scale = sum(keep) / total if total > 0 else 0.0
    weights = [w * scale if k else 0.0 for w, k in zip(raw, keep, strict=True)]
    keep_I = torch.tensor(keep, dtype=torch.bool, device=log_ratios_I.device)
    return ReplayWeights(_like(weights, log_ratios_I), _like(raw, log_ratios_I), keep_I)


def _traces(
    kind: TraceKind, lam: float, turns: int, log_ratios_T: Tensor | None, policy_probs_T: Tensor | None
) -> list[float]:
    """Return the trace coefficient of every turn."""
    if kind not in TRACE_KINDS:
        raise ConfigError(f"kind must be one of {', '.join(TRACE_KINDS)}: got {kind!r}")
    if kind == "q_lambda":
        return [lam] * turns
    read = policy_probs_T if kind == "tree_backup" else log_ratios_T
    name = "policy_probs" if kind == "tree_backup" else "log_ratios"
    if read is None:
        raise ConfigError(f"{name} must be given for kind {kind!r}: got None; q_lambda needs neither")
    (column,) = _columns(**{name: read})
    if len(column) != turns:
        raise ShapeError(f"{name} must have one entry per turn: expected {turns}, got {len(column)}")
    if kind == "tree_backup":
        if any(not 0 <= p <= 1 + _PROBABILITY_SLACK for p in column):
            raise LearnerError(f"policy_probs must lie in [0, 1]: got {column}; pass probabilities, not logarithms")
        return [lam * p for p in column]
    return [lam * _truncated(x, 1.0) for x in column] if kind == "retrace" else [_truncated(x, None) for x in column]


def _truncated(log_ratio: float, cap: float | None) -> float:
    """Return min(cap, exp(log_ratio)) without overflow."""
    ratio = math.exp(min(log_ratio, LOG_RATIO_CLAMP))
    return ratio if cap is None else min(cap, ratio)


def _columns(**arrays: Tensor) -> list[list[float]]:
    """Return 1-D arrays of one length as lists of finite floats; log-ratios may be -inf, a ratio of 0."""
    check_shapes(**arrays)
    columns: list[list[float]] = []
    for name, array in arrays.items():
        if array.ndim != 1:
            raise ShapeError(f"{name} must be (T,) of one trajectory: got shape {tuple(array.shape)}")
        column: list[float] = array.detach().to(torch.float64).tolist()
        _check_finite(**{name: [x for x in column if not (name == "log_ratios" and x == -math.inf)]})
        columns.append(column)
    return columns


def _like(column: list[float], array: Tensor) -> Tensor:
    dtype = array.dtype if array.is_floating_point() else torch.float64
    return torch.tensor(column, dtype=torch.float64).to(device=array.device, dtype=dtype)


def _check_finite(**columns: Sequence[float]) -> None:
    for name, column in columns.items():
        for t, x in enumerate(column):
            if not math.isfinite(x):
                raise LearnerError(f"{name} must be finite: got {x} (turn {t}); look at where it comes from")


def _check_positive(**caps: float | None) -> None:
    for name, cap in caps.items():
        if cap is not None and not cap > 0:
            raise ConfigError(f"{name} must be above 0: got {cap}; None truncates nothing")
