"""A bounded store of finished trajectories for critics, apart from the policy's buffer.

What is too old for a policy still says what happened after an action. A critic may learn from it, given targets that
account for who acted (see `learners.replay_targets`). Trajectories are kept whole: traces run over ordered turns, and
only whole trajectories are resampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import msgspec
import torch

from turngate.learners.targets import check_truncation
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.files import write_atomically
from turngate.runtime.types import NO_VERSION, Batch, Group, Trajectory

__all__ = [
    "REPLAY_FILE",
    "ReplayConfig",
    "ReplayStatistics",
    "ReplayStore",
    "ReplayTarget",
    "as_batch",
    "trajectory_lag",
]

ReplayTarget: TypeAlias = Literal["auto", "vtrace", "retrace", "one_step"]
"""`auto` decides by lag, effective sample size and what is known of the behaviour policy."""

REPLAY_FILE = "replay.msgpack"
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """How much old experience a critic keeps, how it is drawn, and what it is trained towards."""

    capacity_trajectories: int | None = 512
    capacity_tokens: int | None = None
    """Most generated tokens kept. One of the two capacities must be set; what came first leaves first."""
    batch_trajectories: int = 16
    """Trajectories drawn per critic update."""
    start_after: int = 32
    """Trajectories that must be there before any are drawn."""
    max_lag: int = 16
    """Trajectories whose oldest token is more versions behind than this are never drawn."""
    kappa: float = 1.0
    """Trajectories are drawn with weight kappa^lag; 1 draws uniformly. A heuristic without published evidence."""
    target: ReplayTarget = "auto"
    lam: float = 0.95
    rho_bar: float | None = 1.0
    c_bar: float | None = 1.0
    """Truncations of V-trace; None truncates nothing."""
    min_ess_ratio: float = 0.1
    """Below it ratios count as unusable, and `auto` looks one step ahead."""
    ess_level: Literal["turn", "trajectory"] = "turn"
    """Whose ratios are judged: of single actions, which is what targets truncate, or their products over trajectories,
    of which a handful can never fall below 0.1."""
    target_tau: float = 0.1
    """Share of the critic that its target network takes over per update (ArCHer, 2402.19446); 1 has none."""

    def __post_init__(self) -> None:
        if self.capacity_trajectories is None and self.capacity_tokens is None:
            raise ConfigError("capacity must be bounded: got None twice; set capacity_trajectories or capacity_tokens")
        for name in ("capacity_trajectories", "capacity_tokens", "batch_trajectories", "start_after"):
            count: int | None = getattr(self, name)
            if count is not None and count < 1:
                raise ConfigError(f"{name} must be 1 or more: got {count} (ReplayConfig)")
        if self.capacity_trajectories is not None and self.start_after > self.capacity_trajectories:
            raise ConfigError(
                f"start_after must fit the capacity: expected at most {self.capacity_trajectories}, got "
                f"{self.start_after}; replay would never start"
            )
        if self.max_lag < 0:
            raise ConfigError(f"max_lag must be 0 or more: got {self.max_lag} (ReplayConfig)")
        for name in ("kappa", "target_tau"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be above 0 and at most 1: got {getattr(self, name)} (ReplayConfig)")
        for name in ("lam", "min_ess_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must lie in [0, 1]: got {getattr(self, name)} (ReplayConfig)")
        if self.target not in get_args(ReplayTarget):
            raise ConfigError(f"target must be one of {', '.join(get_args(ReplayTarget))}: got {self.target!r}")
        if self.ess_level not in ("turn", "trajectory"):
            raise ConfigError(f"ess_level must be turn or trajectory: got {self.ess_level!r}")
        check_truncation(rho_bar=self.rho_bar, c_bar=self.c_bar)


class ReplayStatistics(msgspec.Struct, frozen=True):
    """What a store holds and what became of everything it was offered."""

    trajectories: int
    policy_tokens: int
    oldest_version: int
    newest_version: int
    """Of the oldest token of each trajectory; NO_VERSION when the store is empty."""
    taken: int
    sampled: int
    """Trajectories ever taken in, and ever drawn, repeats counted."""
    evicted_full: int
    evicted_old: int
    refused_failed: int
    """The machinery failed: the episode says nothing about values."""
    refused_untrainable: int
    """No generated tokens, or none with ids and log-probs."""
    refused_old: int
    refused_duplicate: int
    refused_large: int
    """Alone over the token capacity."""


class _Entry(msgspec.Struct, frozen=True):
    """A trajectory, when it came, and the version of its oldest token, which is slow to find again."""

    trajectory: Trajectory
    entered_version: int
    oldest_version: int


class _Saved(msgspec.Struct, frozen=True):
    format: int
    entries: list[_Entry]
    counts: dict[str, int]


def trajectory_lag(trajectory: Trajectory, policy_version: int) -> int:
    """Return how many versions the oldest generated token is behind; 0 for a trajectory without any."""
    oldest, _ = trajectory.version_range()
    return 0 if oldest == NO_VERSION else policy_version - oldest


def as_batch(trajectories: Sequence[Trajectory], *, policy_version: int) -> Batch:
    """Return trajectories as a batch to lay out for a critic: each a group of its own, so none is compared."""
    groups = tuple(Group(id=f"replay-{i}", task=t.task, order=i, trajectories=(t,)) for i, t in enumerate(trajectories))
    return Batch(groups=groups, policy_version=policy_version)


class ReplayStore:
    """Finished trajectories, oldest arrival first.

    State: the entries by trajectory id in order of arrival, their number of generated tokens, and counters.
    """

    def __init__(self, config: ReplayConfig) -> None:
        self.config = config
        self._entries: dict[str, _Entry] = {}
        self._policy_tokens = 0
        self._counts = dict.fromkeys(_COUNTERS, 0)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        s = self.statistics()
        versions = f"versions {s.oldest_version}-{s.newest_version}" if s.trajectories else "empty"
        return f"<ReplayStore {s.trajectories} trajectories, {s.policy_tokens} tokens, {versions}>"

    @property
    def is_ready(self) -> bool:
        """True when enough trajectories are there to draw from."""
        return len(self._entries) >= self.config.start_after

    def put(self, trajectories: Sequence[Trajectory], version: int) -> int:
        """Take in whole trajectories at the learner's `version` and return how many; the rest is counted by reason.

        What came first leaves when there is no more room.
        """
        taken = 0
        for trajectory in trajectories:
            entry = _Entry(trajectory, version, trajectory.version_range()[0])
            if reason := self._refusal(entry):
                self._counts[reason] += 1
                continue
            self._entries[trajectory.id] = entry
            self._policy_tokens += trajectory.policy_tokens
            taken += 1
            self._make_room()
        self._counts["taken"] += taken
        return taken

    def sample(self, n: int, generator: torch.Generator, *, policy_version: int) -> list[Trajectory]:
        """Draw up to `n` different trajectories with weight kappa^lag; fewer when fewer are young enough.

        Args: generator: the only source of luck; equal states of store and generator draw the same, in one order.
        Raises: LearnerError: a trajectory claims a version above `policy_version`.
        """
        young = [e for e in self._entries.values() if self._lag(e, policy_version) <= self.config.max_lag]
        if not young or n < 1:
            return []
        # Gumbel keys: the n largest of log-weight + noise are a weighted draw without replacement, and kappa^lag never
        # underflows.
        uniform_I = torch.rand(len(young), generator=generator, dtype=torch.float64)
        lags_I = torch.tensor([self._lag(e, policy_version) for e in young], dtype=torch.float64)
        keys_I = lags_I * torch.tensor(self.config.kappa, dtype=torch.float64).log() - (-uniform_I.log()).log()
        drawn = keys_I.argsort(descending=True, stable=True)[:n].tolist()
        self._counts["sampled"] += len(drawn)
        return [young[i].trajectory for i in drawn]

    def evict(self, policy_version: int) -> int:
        """Forget every trajectory that is too old to be drawn again, and return how many there were."""
        old = [e for e in self._entries.values() if self._lag(e, policy_version) > self.config.max_lag]
        for entry in old:
            self._remove(entry)
        self._counts["evicted_old"] += len(old)
        return len(old)

    def statistics(self) -> ReplayStatistics:
        """Return the counts as they are now."""
        versions = [e.oldest_version for e in self._entries.values()]
        return ReplayStatistics(
            trajectories=len(self._entries),
            policy_tokens=self._policy_tokens,
            oldest_version=min(versions, default=NO_VERSION),
            newest_version=max(versions, default=NO_VERSION),
            **self._counts,
        )

    def save(self, folder: Path) -> None:
        """Write `replay.msgpack`, whole or not at all; order and counters included.

        Raises: OSError: the disk refuses; an older file is as it was.
        """
        saved = _Saved(_FORMAT, list(self._entries.values()), self._counts)
        write_atomically(folder / REPLAY_FILE, msgspec.msgpack.encode(saved))

    def restore(self, folder: Path) -> None:
        """Replace the content by what `save` wrote; a smaller capacity drops what came first.

        Raises: LearnerError: it cannot be read; the store is as it was.
        """
        path = folder / REPLAY_FILE
        try:
            saved = msgspec.msgpack.decode(path.read_bytes(), type=_Saved)
        except (OSError, msgspec.MsgspecError) as error:
            raise LearnerError(f"replay must be readable: {error} ({path}); use an older checkpoint") from error
        if saved.format != _FORMAT or set(saved.counts) != set(_COUNTERS):
            raise LearnerError(f"replay must have format {_FORMAT}: got {saved.format} ({path}); start without it")
        self._entries = {entry.trajectory.id: entry for entry in saved.entries}
        self._policy_tokens = sum(entry.trajectory.policy_tokens for entry in saved.entries)
        self._counts = dict(saved.counts)
        self._make_room()

    def _refusal(self, entry: _Entry) -> str:
        """Return the counter of the reason why an entry is not taken, empty when it is."""
        trajectory, capacity = entry.trajectory, self.config.capacity_tokens
        if trajectory.end.is_failure:
            return "refused_failed"
        if not trajectory.trainable or entry.oldest_version == NO_VERSION:
            return "refused_untrainable"
        if entry.entered_version - entry.oldest_version > self.config.max_lag:
            return "refused_old"
        if trajectory.id in self._entries:
            return "refused_duplicate"
        return "refused_large" if capacity is not None and trajectory.policy_tokens > capacity else ""

    def _make_room(self) -> None:
        while self._is_over_capacity():
            self._remove(next(iter(self._entries.values())))
            self._counts["evicted_full"] += 1

    def _is_over_capacity(self) -> bool:
        trajectories, tokens = self.config.capacity_trajectories, self.config.capacity_tokens
        return (trajectories is not None and len(self._entries) > trajectories) or (
            tokens is not None and self._policy_tokens > tokens
        )

    def _remove(self, entry: _Entry) -> None:
        del self._entries[entry.trajectory.id]
        self._policy_tokens -= entry.trajectory.policy_tokens

    @staticmethod
    def _lag(entry: _Entry, policy_version: int) -> int:
        lag = policy_version - entry.oldest_version
        if lag < 0:
            raise LearnerError(
                f"policy_version must be at least that of the data: expected {entry.oldest_version} or more, got "
                f"{policy_version} (trajectory {entry.trajectory.id}); restore the store with its learner"
            )
        return lag


_COUNTERS = tuple(ReplayStatistics.__struct_fields__[4:])
