"""Live progress of a run as lines on a terminal: a subscriber like any other."""

import sys
from typing import TextIO

from turngate.runtime.events import EvaluationFinished, Events, UpdateFinished

__all__ = ["show_progress"]


def show_progress(events: Events, *, every: int = 1, file: TextIO | None = None) -> None:
    """Print a line for each evaluation and for every `every`-th update.

    `success` is over the batch just trained on; `lag` is mean and maximum staleness of its tokens in policy versions;
    `learner` and `slots` are the shares of time the learner worked and the rollout slots were taken.
    """

    def on_update(event: UpdateFinished) -> None:
        if event.policy_version % every == 0:
            m = event.metrics
            _say(
                f"update {m['update']:4.0f}  success {m['success']:.2f}  lag {m['lag_mean']:.1f}/{m['lag_max']:.0f}  "
                f"{m['episodes_per_s']:5.1f} episodes/s  {m['policy_tokens_per_s']:6.0f} tokens/s  "
                f"learner {m['learner_busy_share']:4.0%}  slots {m['slots_busy_share']:4.0%}",
                file,
            )

    def on_evaluation(event: EvaluationFinished) -> None:
        rate = event.successes / max(1, event.episodes)
        _say(f"{event.name}: success {rate:.3f} on {event.episodes} episodes in {event.seconds:.1f} s", file)

    events.subscribe(UpdateFinished, on_update)
    events.subscribe(EvaluationFinished, on_evaluation)


def _say(line: str, file: TextIO | None) -> None:
    print(line, file=file or sys.stdout, flush=True)
