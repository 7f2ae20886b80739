"""How long a slow tool takes: fixed, or drawn per step from a heavy-tailed distribution."""

import random

import msgspec

__all__ = ["HeavyTail", "compute_latency_s"]


class HeavyTail(msgspec.Struct, frozen=True, kw_only=True):
    """Pareto (Lomax) waiting times: most are short, a few are very long."""

    mean_s: float
    shape: float = 1.5
    """Tail exponent, above 1 so that the mean exists; below 2 the variance does not."""
    max_s: float = float("inf")
    """Waits are cut here, as a tool's own timeout would."""

    def __post_init__(self) -> None:
        if not (self.mean_s >= 0 and self.shape > 1 and self.max_s > 0):
            raise ValueError(f"HeavyTail must have mean_s >= 0, shape > 1 and max_s > 0: got {self}")


def compute_latency_s(latency: float | HeavyTail, seed: int, step: int) -> float:
    """Return the seconds that step number `step` of the episode with `seed` takes; equal arguments, equal answer."""
    if not isinstance(latency, HeavyTail):
        return latency
    drawn = random.Random(f"latency {seed} {step}").random()
    tail: float = (1 - drawn) ** (-1 / latency.shape) - 1
    # Lomax with scale (shape - 1) * mean has the wanted mean; inverse of its distribution function.
    return min(latency.max_s, latency.mean_s * (latency.shape - 1) * tail)
