"""Mistakes and recoveries as numbers, and which states are worth starting from again. Pure functions of plain numbers.

A mistake is a turn after which the estimated value has dropped by `tau` or more, or one that the environment or whoever
knows flags as such. The state is recovered once the value is back at its level before the mistake, the episode when it
ends in success all the same.
"""

import math
from collections.abc import Sequence

import msgspec

from turngate.runtime.errors import ConfigError

__all__ = [
    "EpisodeMistakes",
    "PlayedEpisode",
    "RecoveryMetrics",
    "beta_learnability",
    "find_mistakes",
    "mixed_with_uniform",
    "recovery_metrics",
    "restart_weights",
]


class PlayedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """One episode, as far as the metrics need it."""

    success: bool
    values: tuple[float, ...] = ()
    """Value before each turn and then the outcome: one more than there are turns. Empty when nobody estimated it."""
    flags: tuple[bool, ...] = ()
    """Whether each turn was a mistake by the environment's word; they replace value drops."""
    injected: tuple[bool, ...] = ()
    """Whether each turn was chosen by something other than the policy; empty says none was."""


class EpisodeMistakes(msgspec.Struct, frozen=True):
    """The mistakes of one episode."""

    mistakes: tuple[int, ...]
    """Turns, from 0."""
    latency: tuple[int | None, ...]
    """Turns from just after each mistake until the value was back; None when it never was, or values are not known."""
    injected: tuple[bool, ...]
    """Whether each was chosen by something other than the policy."""


class RecoveryMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """How a set of episodes went; rates over nothing are NaN. Which kind of mistakes they count must be told beside."""

    per_episode: tuple[EpisodeMistakes, ...]
    mistake_rate_per_turn: float
    """Mistakes over all turns."""
    state_recovery_rate: float
    """Mistakes after which the value came back, over all mistakes of episodes with values."""
    mean_latency: float
    """Turns until it did, over those."""
    episode_recovery_rate: float
    """Successes over the episodes with a mistake."""
    clean_success_rate: float
    """Successes over the episodes without one."""
    self_inflicted_rate_per_turn: float
    """The policy's own mistakes over the policy's own turns."""
    injected_recovery_rate: float
    """Successes over the episodes with an injected mistake."""
    self_inflicted_recovery_rate: float
    """Successes over the episodes with a mistake of the policy's own."""


def find_mistakes(episode: PlayedEpisode, *, tau: float = 0.0) -> EpisodeMistakes:
    """Return the mistakes of one episode: its flags, or else the turns t with V_{t+1} - V_t <= -tau.

    Raises: ConfigError: values that are not finite, lengths that do not belong together, or `tau` not positive where
        values decide.
    """
    values = episode.values
    turns = _turns(episode)
    if episode.flags:
        mistakes = [t for t, flag in enumerate(episode.flags) if flag]
    elif values:
        if not tau > 0:
            raise ConfigError(f"tau must be positive: got {tau}; a mistake is a drop in value of at least tau")
        mistakes = [t for t in range(turns) if values[t + 1] - values[t] <= -tau]
    else:
        mistakes = []
    latency = [_latency(values, t) for t in mistakes]
    injected = [bool(episode.injected) and episode.injected[t] for t in mistakes]
    return EpisodeMistakes(tuple(mistakes), tuple(latency), tuple(injected))


def recovery_metrics(episodes: Sequence[PlayedEpisode], *, tau: float = 0.0) -> RecoveryMetrics:
    """Return how often episodes go wrong, and how often and how fast they come right again.

    With noisy values the drops are noise too: use flags, or values from Monte Carlo continuations. Raises as
    `find_mistakes`.
    """
    found = [find_mistakes(episode, tau=tau) for episode in episodes]
    pairs = list(zip(episodes, found, strict=True))
    turns = sum(map(_turns, episodes))
    own_turns = turns - sum(sum(e.injected) for e in episodes)
    own = sum(not injected for f in found for injected in f.injected)
    latencies = [latency for e, f in pairs if e.values for latency in f.latency]
    recovered = [latency for latency in latencies if latency is not None]
    return RecoveryMetrics(
        per_episode=tuple(found),
        mistake_rate_per_turn=_rate(sum(len(f.mistakes) for f in found), turns),
        state_recovery_rate=_rate(len(recovered), len(latencies)),
        mean_latency=_rate(sum(recovered), len(recovered)),
        episode_recovery_rate=_success([e for e, f in pairs if f.mistakes]),
        clean_success_rate=_success([e for e, f in pairs if not f.mistakes]),
        self_inflicted_rate_per_turn=_rate(own, own_turns),
        injected_recovery_rate=_success([e for e, f in pairs if any(f.injected)]),
        self_inflicted_recovery_rate=_success([e for e, f in pairs if not all(f.injected)]),
    )


def beta_learnability(successes: int, tries: int, *, a: float = 1.0, b: float = 1.0) -> float:
    """Return the posterior mean of p (1 - p) under a Beta(a, b) prior: (a+s)(b+f) / ((a+b+n)(a+b+n+1)).

    A state never tried keeps weight, one that always or never succeeds loses it. Source: learnability sampling,
    Rutherford et al. 2024 (arXiv 2408.15099), which weighs by p (1 - p).
    Raises: ConfigError: not 0 <= successes <= tries, or a prior that is not positive.
    """
    if not 0 <= successes <= tries or not (a > 0 and b > 0):
        raise ConfigError(
            f"learnability needs 0 <= successes <= tries and a, b > 0: got {successes}, {tries}, {a}, {b}"
        )
    n = a + b + tries
    return (a + successes) * (b + tries - successes) / (n * (n + 1))


def restart_weights(success_rates: Sequence[float], *, floor: float) -> list[float]:
    """Return probabilities proportional to p (1 - p), mixed with a uniform distribution of weight `floor`.

    Source: as `beta_learnability`, which needs no estimate of p from few tries.
    Raises: ConfigError: a rate or `floor` is outside [0, 1].
    """
    if not all(0 <= p <= 1 for p in success_rates):
        raise ConfigError(f"success rates must be within [0, 1]: got {list(success_rates)}")
    return mixed_with_uniform([p * (1 - p) for p in success_rates], floor=floor)


def mixed_with_uniform(scores: Sequence[float], *, floor: float) -> list[float]:
    """Return (1 - floor) * scores / sum(scores) + floor / n; uniform when all scores are 0.

    Raises: ConfigError: `floor` is outside [0, 1], or a score is negative or not finite.
    """
    if not 0 <= floor <= 1:
        raise ConfigError(f"floor must be within [0, 1]: got {floor}")
    if not all(0 <= score < math.inf for score in scores):
        raise ConfigError(f"scores must be finite and not negative: got {list(scores)}")
    total, count = math.fsum(scores), len(scores)
    if total == 0:
        return [1 / count] * count if count else []
    return [(1 - floor) * score / total + floor / count for score in scores]


def _turns(episode: PlayedEpisode) -> int:
    lengths = {len(part) for part in (episode.flags, episode.injected) if part}
    if episode.values:
        lengths.add(len(episode.values) - 1)
        if not all(map(math.isfinite, episode.values)):
            raise ConfigError(f"values must be finite: got {list(episode.values)}")
    if len(lengths) > 1:
        raise ConfigError(
            f"an episode's values, flags and injected must belong together: got {len(episode.values)} values, "
            f"{len(episode.flags)} flags, {len(episode.injected)} injected; values are one more than turns"
        )
    return lengths.pop() if lengths else 0


def _latency(values: Sequence[float], mistake: int) -> int | None:
    for t in range(mistake + 1, len(values)):
        if values[t] >= values[mistake]:
            return t - mistake - 1
    return None


def _success(episodes: Sequence[PlayedEpisode]) -> float:
    return _rate(sum(e.success for e in episodes), len(episodes))


def _rate(count: float, total: int) -> float:
    return count / total if total else math.nan
