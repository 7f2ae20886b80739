"""What a collection of episodes says: success with intervals, by end, pass@k, tokens and cost."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from turngate.envs.base import End
from turngate.runtime.errors import ConfigError
from turngate.runtime.metrics import wilson_interval
from turngate.runtime.types import Trajectory

__all__ = ["EndShare", "EpisodeRow", "EpisodeSummary", "Prices", "pass_at_k", "summarise_rows"]


class EpisodeRow(msgspec.Struct, frozen=True):
    """What is kept in memory of an episode that lies in the file."""

    id: str
    task_id: str
    end: End
    reward: float
    turns: int
    policy_tokens: int
    error: str
    is_trainable: bool

    @classmethod
    def of(cls, trajectory: Trajectory) -> "EpisodeRow":
        """Return the row of an episode."""
        return cls(
            trajectory.id,
            trajectory.task.id,
            trajectory.end,
            trajectory.reward,
            len(trajectory.turns),
            trajectory.policy_tokens,
            trajectory.error if trajectory.end.is_failure else "",
            trajectory.trainable,
        )


class Prices(msgspec.Struct, frozen=True):
    """What tokens cost, per million, in whatever currency."""

    prompt: float = 0.0
    completion: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"prices must be 0 or more per million tokens: got {value} ({name})")

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Return the cost of so many tokens."""
        return (self.prompt * prompt_tokens + self.completion * completion_tokens) / 1e6


class EndShare(msgspec.Struct, frozen=True):
    """How many episodes ended in one way: of the scored ones, or of all for failures of the machinery."""

    count: int
    share: float
    low: float
    high: float
    """95 % Wilson interval of the share."""


class EpisodeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Figures over episodes. Failures of the machinery are counted apart and are in no rate, never a silent 0."""

    episodes: int
    scored: int
    """Episodes that ended terminally or by truncation."""
    failed: int
    successes: int
    success: float | None
    """None when nothing was scored."""
    success_low: float
    success_high: float
    """95 % Wilson interval, as if episodes were independent: several samples of few tasks say less than it claims."""
    ends: dict[str, EndShare]
    pass_at: dict[int, float]
    """pass@k: the chance that one of k episodes of a task succeeds, mean over tasks with at least k scored ones."""
    tasks: int
    mean_reward: float
    mean_turns: float
    mean_policy_tokens: float
    """Means are over scored episodes; tokens are 0 where the server gives no ids."""
    trainable: int
    """Episodes recorded with ids and log-probs."""
    prompt_tokens: int
    completion_tokens: int
    """As the server counted them, failed and retried requests that it answered included."""
    cost: float
    first_error: str

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def pass_at_k(scored: int, successes: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k episodes succeeds, from `scored` >= k of a task.

    Source: Chen et al. 2021, eq. 1 (arXiv 2107.03374): 1 - C(n - c, k) / C(n, k).
    Raises: ValueError: not 0 <= successes <= scored, or not 1 <= k <= scored.
    """
    if not 0 <= successes <= scored or not 1 <= k <= scored:
        raise ValueError(f"pass@k needs successes <= scored and 1 <= k <= scored: got {successes}, {scored}, k = {k}")
    return 1.0 - math.comb(scored - successes, k) / math.comb(scored, k)


def summarise_rows(
    rows: Sequence[EpisodeRow],
    *,
    samples: int,
    prompt_tokens: int = 0,
    completion_tokens: int = 0,
    prices: Prices = Prices(),  # noqa: B008 - frozen
) -> EpisodeSummary:
    """Summarise episodes, `samples` of each task when all are there."""
    scored = [row for row in rows if not row.end.is_failure]
    successes = sum(row.end is End.success for row in scored)
    low, high = wilson_interval(successes, len(scored))
    count = max(1, len(scored))
    return EpisodeSummary(
        episodes=len(rows),
        scored=len(scored),
        failed=len(rows) - len(scored),
        successes=successes,
        success=successes / len(scored) if scored else None,
        success_low=low,
        success_high=high,
        ends=_ends(rows, len(scored)),
        pass_at=_pass_at(scored, samples),
        tasks=len({row.task_id for row in rows}),
        mean_reward=sum(row.reward for row in scored) / count,
        mean_turns=sum(row.turns for row in scored) / count,
        mean_policy_tokens=sum(row.policy_tokens for row in scored) / count,
        trainable=sum(row.is_trainable for row in scored),
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        cost=prices.cost(prompt_tokens, completion_tokens),
        first_error=next((row.error for row in rows if row.end.is_failure), ""),
    )


def _ends(rows: Sequence[EpisodeRow], scored: int) -> dict[str, EndShare]:
    found: dict[str, EndShare] = {}
    for end, count in Counter(row.end for row in rows).most_common():
        of = len(rows) if end.is_failure else scored
        found[end.value] = EndShare(count, count / of, *wilson_interval(count, of))
    return found


def _pass_at(scored: Iterable[EpisodeRow], samples: int) -> dict[int, float]:
    by_task: dict[str, list[bool]] = defaultdict(list)
    for row in scored:
        by_task[row.task_id].append(row.end is End.success)
    found: dict[int, float] = {}
    for k in range(1, samples + 1):
        values = [pass_at_k(len(ends), sum(ends), k) for ends in by_task.values() if len(ends) >= k]
        if values:
            found[k] = math.fsum(values) / len(values)
    return found


def _lines(summary: EpisodeSummary) -> list[str]:
    rate = "-" if summary.success is None else f"{summary.success:.3f}"
    lines = [
        f"success {rate} [{summary.success_low:.3f}, {summary.success_high:.3f}]  "
        f"({summary.successes} of {summary.scored} scored episodes, {summary.tasks} tasks)"
    ]
    lines += [
        f"  {name:<18} {end.count:>6}  {end.share:.3f} [{end.low:.3f}, {end.high:.3f}]"
        for name, end in summary.ends.items()
    ]
    if len(summary.pass_at) > 1:
        lines.append("  ".join(f"pass@{k} {value:.3f}" for k, value in summary.pass_at.items()))
    lines.append(
        f"reward {summary.mean_reward:.3f}, {summary.mean_turns:.1f} turns, {summary.mean_policy_tokens:.0f} policy "
        f"tokens an episode; {summary.trainable} can be trained on"
    )
    cost = f", cost {summary.cost:.4f}" if summary.cost else ""
    lines.append(f"tokens: {summary.prompt_tokens} in prompts, {summary.completion_tokens} generated{cost}")
    if summary.failed:
        lines.append(f"{summary.failed} failed by the machinery, first: {summary.first_error}")
    return lines
