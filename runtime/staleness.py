"""How old experience may be: capacity at submission, lag at consumption.

Staleness of a token is the learner's policy version at consumption minus the version that produced the token. The
submit gate alone bounds the backlog, not each trajectory; the buffer checks the measured lag as well.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Literal, TypeAlias

import msgspec

from turngate.runtime.errors import ConfigError
from turngate.runtime.types import NO_VERSION, Segment

__all__ = ["LagStats", "LatePolicy", "StalenessLimit", "capacity", "lag_stats", "policy_versions"]

LatePolicy: TypeAlias = Literal["wait", "drop", "mask"]
"""What happens to rollouts that finish late: `wait` consumes in submission order and throws nothing away, `drop`
consumes in completion order, discards what is too old and runs its task again, `mask` consumes in completion order and
trains on the young enough tokens only."""


class StalenessLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The bound eta on the age of every trained token, and what to do with late rollouts."""

    max_staleness: int = 2
    """0 is exactly synchronous training."""
    late: LatePolicy = "wait"

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ConfigError(
                f"max_staleness must be 0 or more: got {self.max_staleness}; 0 means synchronous training"
            )
        if self.late not in ("wait", "drop", "mask"):
            raise ConfigError(f"late must be 'wait', 'drop' or 'mask': got {self.late!r}")


def capacity(
    *,
    max_staleness: int,
    policy_version: int,
    batch_size: int,
    accepted: int,
    running: int,
    max_running: int | None = None,
) -> int:
    """Return how many more units may be submitted now; negative when over-committed.

    Units are whatever `batch_size`, `accepted` and `running` count (here: groups). After a restore set `accepted` to
    `policy_version * batch_size` and `running` to 0, or the gate opens for everything trained before (AReaL#1345).
    Source: Fu et al. 2025, eq. 3 (arXiv 2505.24298).
    """
    room = (max_staleness + policy_version + 1) * batch_size - (accepted + running)
    return room if max_running is None else min(room, max_running - running)


class LagStats(msgspec.Struct, frozen=True):
    """Staleness of a set of tokens, in policy versions; all zero when there are no tokens."""

    lag_max: int = 0
    lag_mean: float = 0.0
    lag_min: int = 0
    span: int = 0
    """Newest minus oldest version: how many updates landed while the tokens were sampled."""
    lag_first: int = 0


def lag_stats(versions: Sequence[int], policy_version: int) -> LagStats:
    """Return the staleness of tokens with these versions when consumed at `policy_version`.

    NO_VERSION entries (context) do not count.
    """
    sampled = [v for v in versions if v != NO_VERSION]
    if not sampled:
        return LagStats()
    oldest, newest = min(sampled), max(sampled)
    return LagStats(
        lag_max=policy_version - oldest,
        lag_mean=policy_version - sum(sampled) / len(sampled),
        lag_min=policy_version - newest,
        span=newest - oldest,
        lag_first=policy_version - sampled[0],
    )


def policy_versions(segments: Iterable[Segment]) -> list[int]:
    """Return the versions of all generated tokens, in order."""
    return list(chain.from_iterable(segment.sampled_versions() for segment in segments))
