"""What a set of episodes says about a policy: success with its interval, by end, and the episodes themselves."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from turngate.envs.base import End
from turngate.runtime.metrics import wilson_interval
from turngate.runtime.types import Trajectory

__all__ = ["Evaluation", "summarise_episodes"]


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Success over episodes that say something about the policy; failures of the machinery are counted apart."""

    successes: int
    scored: int
    """Episodes that ended terminally or by truncation; the denominator of `success`."""
    failed: int
    """Episodes the machinery failed; excluded, never a silent 0."""
    interval: tuple[float, float]
    """95 % Wilson interval of the success rate."""
    ends: dict[str, int]
    mean_reward: float
    mean_turns: float
    mean_policy_tokens: float
    first_error: str
    """What failed first, when the machinery failed; empty otherwise."""
    trajectories: tuple[Trajectory, ...]

    @property
    def success(self) -> float:
        """Share of scored episodes that ended in success; NaN when none were scored."""
        return self.successes / self.scored if self.scored else float("nan")

    def __str__(self) -> str:
        low, high = self.interval
        failed = f", {self.failed} failed by the machinery, first: {self.first_error}" if self.failed else ""
        return f"{self.success:.3f} [{low:.3f}, {high:.3f}] (n = {self.scored}{failed})"

    def figures(self) -> dict[str, float | dict[str, int]]:
        """Return the numbers without the episodes, for JSON reports."""
        return {
            "success": self.success,
            "success_low": self.interval[0],
            "success_high": self.interval[1],
            "scored": self.scored,
            "failed": self.failed,
            "mean_reward": self.mean_reward,
            "mean_turns": self.mean_turns,
            "mean_policy_tokens": self.mean_policy_tokens,
            "ends": self.ends,
        }


def summarise_episodes(trajectories: Sequence[Trajectory]) -> Evaluation:
    """Summarise episodes. Means are over scored episodes; 0 when there are none."""
    scored = [t for t in trajectories if not t.end.is_failure]
    successes = sum(t.end is End.success for t in scored)
    count = max(1, len(scored))
    return Evaluation(
        successes=successes,
        scored=len(scored),
        failed=len(trajectories) - len(scored),
        interval=wilson_interval(successes, len(scored)),
        ends=dict(Counter(t.end.value for t in trajectories)),
        mean_reward=sum(t.reward for t in scored) / count,
        mean_turns=sum(len(t.turns) for t in scored) / count,
        mean_policy_tokens=sum(t.policy_tokens for t in scored) / count,
        first_error=next((t.error for t in trajectories if t.end.is_failure), ""),
        trajectories=tuple(trajectories),
    )
