"""What branching costs: the formulas to plan with, and the account that no branch gets past."""

from typing import Literal, TypeAlias

import msgspec

from turngate.runtime.errors import ConfigError, check_kind

__all__ = ["BranchCost", "BranchLedger", "BranchLimits", "Estimand", "branching_cost"]

Estimand: TypeAlias = Literal["Q", "V"]
"""Q: the recorded action, then the policy. V: the policy from the state before the action."""


class BranchCost(msgspec.Struct, frozen=True, kw_only=True):
    """What branching at every turn of an episode takes when every continuation runs to the episode's last turn."""

    rollouts: int
    model_turns: int
    env_steps: int
    replay_steps_without_snapshots: int
    """Further environment steps when prefixes are replayed, for want of snapshots."""


def branching_cost(turns: int, continuations: int, estimand: Estimand, *, resample_outcome: bool = True) -> BranchCost:
    """Return the cost of `continuations` from each of `turns` decision points, continued up to turn `turns`.

    Args: resample_outcome: re-execute the recorded action in every branch (Q only); False takes the observed outcome as
        given, which is right for environments whose steps are deterministic.
    """
    if turns < 0 or continuations < 0:
        raise ValueError(f"turns and continuations must not be negative: got {turns} and {continuations}")
    before = sum(range(turns))  # sum of t, and of T - 1 - t
    rollouts = turns * continuations
    model_turns = continuations * (before if estimand == "Q" else before + turns)
    executed = rollouts if estimand == "Q" and resample_outcome else 0
    return BranchCost(
        rollouts=rollouts,
        model_turns=model_turns,
        env_steps=model_turns + executed,
        replay_steps_without_snapshots=continuations * before,
    )


class BranchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Caps on all branches together; None is no cap."""

    rollouts: int | None = None
    model_tokens: int | None = None
    env_steps: int | None = None
    snapshot_bytes: int | None = None
    """Held at one time."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if (value := getattr(self, name)) is not None and not value >= 0:
                raise ConfigError(f"{name} must be None or at least 0: got {value} (BranchLimits)")


class BranchLedger:
    """Counts what branches spend and refuses new ones past a cap; what is running may finish."""

    # State: spent so far, but for snapshot_bytes, which is held now.
    rollouts: int
    model_tokens: int
    model_turns: int
    env_steps: int
    snapshot_bytes: int
    most_snapshot_bytes: int
    refused: int

    def __init__(self, limits: BranchLimits | None = None) -> None:
        check_kind("limits", limits, BranchLimits, "BranchLedger")
        self.limits = limits or BranchLimits()
        self.rollouts = self.model_tokens = self.model_turns = self.env_steps = 0
        self.snapshot_bytes = self.most_snapshot_bytes = self.refused = 0

    def __repr__(self) -> str:
        return f"<BranchLedger {self.rollouts} rollouts, {self.model_tokens} tokens, {self.env_steps} env steps>"

    def admit(self) -> bool:
        """Whether one more branch may start; if so, it is counted. Refusals are counted, too."""
        if self.exhausted():
            self.refused += 1
            return False
        self.rollouts += 1
        return True

    def exhausted(self) -> str:
        """Return the name of a cap that is reached; empty while there is room."""
        for name in ("rollouts", "model_tokens", "env_steps"):
            limit = getattr(self.limits, name)
            if limit is not None and getattr(self, name) >= limit:
                return name
        return ""

    def spend(self, *, model_turns: int = 0, model_tokens: int = 0, env_steps: int = 0) -> None:
        """Count what a branch has used."""
        self.model_turns += model_turns
        self.model_tokens += model_tokens
        self.env_steps += env_steps

    def hold(self, snapshot_bytes: int) -> bool:
        """Whether a snapshot of that size may be kept; if so, it is counted until `release`."""
        limit = self.limits.snapshot_bytes
        if limit is not None and self.snapshot_bytes + snapshot_bytes > limit:
            self.refused += 1
            return False
        self.snapshot_bytes += snapshot_bytes
        self.most_snapshot_bytes = max(self.most_snapshot_bytes, self.snapshot_bytes)
        return True

    def release(self, snapshot_bytes: int) -> None:
        """A snapshot is no longer kept."""
        self.snapshot_bytes -= snapshot_bytes
