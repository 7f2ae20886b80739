"""Live progress of a run as lines on a terminal: a subscriber like any other."""

import sys
import time
from typing import TextIO

from turngate.envs.base import End
from turngate.runtime.events import EvaluationFinished, Events, RolloutFinished, UpdateFinished

__all__ = ["show_progress"]

_WARN_EVERY = 10
"""Updates between two warnings that there was nothing to learn from: a solved task would repeat it without end."""
_ERROR_CHARS = 160
_QUIET_S = 30.0
"""A longer silence while episodes end looks like a run that hangs."""


def show_progress(events: Events, *, every: int = 1, file: TextIO | None = None) -> None:
    """Print a line for each evaluation and for every `every`-th update.

    `success` is over the episodes of the batch just trained on that began at their task's start, `truncated` the share
    of them that were cut short, if any; `from restarts` is the success of those that began in a kept state;
    `lag` is mean and maximum staleness of its tokens in policy versions; `learner` and `slots` are the shares of time
    the learner worked and the rollout slots were taken. A line of its own says how many rollouts failed since the line
    before, and another one, at most every tenth update, that an update had nothing to learn from. While an evaluation
    or an update takes long, a line every half minute says how many of its episodes have ended.
    """
    progress = _Progress(every, file)
    events.subscribe(RolloutFinished, progress.on_rollout)
    events.subscribe(UpdateFinished, progress.on_update)
    events.subscribe(EvaluationFinished, progress.on_evaluation)


class _Progress:
    # State.
    _failed: int  # rollouts since they were last reported
    _first_failure: str
    _quiet_until: int  # no warning before this update
    _ended: int  # rollouts since the last update or evaluation
    _said_s: float  # when the last line was printed

    def __init__(self, every: int, file: TextIO | None) -> None:
        self._every, self._file = every, file
        self._failed, self._first_failure, self._quiet_until = 0, "", 0
        self._ended, self._said_s = 0, time.monotonic()

    def on_rollout(self, event: RolloutFinished) -> None:
        trajectory = event.trajectory
        self._ended += 1
        if time.monotonic() - self._said_s > _QUIET_S:
            self._say(f"  episodes ended: {self._ended}, the last one by {trajectory.end.value}")
        if not trajectory.end.is_failure or trajectory.end is End.cancelled:  # stopping a run is not an error
            return
        if not self._failed:
            error = " ".join(trajectory.error.split())[:_ERROR_CHARS]
            self._first_failure = f"{trajectory.id}, {trajectory.end.value}: {error}"
        self._failed += 1

    def on_update(self, event: UpdateFinished) -> None:
        m, self._ended = event.metrics, 0
        if event.policy_version % self._every == 0:
            truncated = f"truncated {m['truncated']:.2f}  " if m["truncated"] > 0 else ""
            # NaN when nobody but restarted or injected episodes is in the batch.
            success = f"{m['success']:.2f}" if m["success"] >= 0 else "   -"
            restarts = f"from restarts {m['restart_success']:.2f}  " if "restart_success" in m else ""
            self._say(
                f"update {m['update']:4.0f}  success {success}  {restarts}{truncated}"
                f"lag {m['lag_mean']:.1f}/{m['lag_max']:.0f}  "
                f"{m['episodes_per_s']:5.1f} episodes/s  {m['policy_tokens_per_s']:6.0f} tokens/s  "
                f"learner {m['learner_busy_share']:4.0%}  slots {m['slots_busy_share']:4.0%}"
            )
            self._say_failures()
        if m["update"] >= self._quiet_until and (why := _why_no_signal(m)):
            self._quiet_until = int(m["update"]) + _WARN_EVERY
            self._say(f"warning: update {m['update']:.0f} had nothing to learn from: {why}")

    def on_evaluation(self, event: EvaluationFinished) -> None:
        rate, self._ended = event.successes / max(1, event.episodes), 0
        self._say(f"{event.name}: success {rate:.3f} on {event.episodes} episodes in {event.seconds:.1f} s")
        self._say_failures()

    def _say_failures(self) -> None:
        if self._failed:
            self._say(f"  failed rollouts since the last line: {self._failed}; the first: {self._first_failure}")
            self._failed = 0

    def _say(self, line: str) -> None:
        self._said_s = time.monotonic()
        print(line, file=self._file or sys.stdout, flush=True)


def _why_no_signal(m: dict[str, float]) -> str:
    """Return what to look at when an update could not change the policy; empty when it could.

    Learners of your own may not report these figures; then nothing is said.
    """
    degenerate, steps = m.get("degenerate_fraction", 0.0), m.get("optimizer_steps", 1.0)
    if degenerate < 1 and steps > 0:
        return ""
    if (unscorable := m.get("excluded_unscorable", 0.0)) and 2 * unscorable >= m.get("trajectories", 0.0):
        return (
            f"{unscorable:.0f} of its episodes have no known reward, since a score is missing; look at "
            "what the scorers said last: runtime.scorers.statistics()"
        )
    if m["truncated"] >= 0.5 and "bootstrap_share" not in m:  # PPO trains those
        return (
            f"{m['truncated']:.0%} of its episodes were cut short, and those do not train; raise the limits, or let "
            "the environment end such episodes with End.budget"
        )
    if degenerate == 1 and m.get("groups_compared", 1.0) == 0:
        return "no group had two members that vote; raise group_size, or use credit that needs no siblings (PPO)"
    if degenerate == 1:
        return (
            f"in no group did the rewards differ (mean {m['reward']:g}); look at rewards and ends in a transcript: "
            "too hard, solved, or never rewarded?"
        )
    return "no optimizer step was taken; look at the learner's figures in metrics.jsonl"
