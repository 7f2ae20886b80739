import io
from types import SimpleNamespace

import pytest

from turngate.envs.base import End, Task
from turngate.runtime import progress
from turngate.runtime.events import EvaluationFinished, Events, RolloutFinished, UpdateFinished
from turngate.runtime.progress import show_progress
from turngate.runtime.types import Trajectory

METRICS = {
    "update": 10.0,
    "success": 0.5,
    "reward": 0.25,
    "truncated": 0.0,
    "lag_mean": 0.75,
    "lag_max": 2.0,
    "episodes_per_s": 12.34,
    "policy_tokens_per_s": 987.0,
    "learner_busy_share": 0.5,
    "slots_busy_share": 0.914,
    "degenerate_fraction": 0.5,
    "optimizer_steps": 4.0,
}
LINE = "lag 0.8/2   12.3 episodes/s     987 tokens/s  learner  50%  slots  91%"


class Screen:
    """A run's events, and the lines that they became."""

    def __init__(self, every: int = 1) -> None:
        self.events, self._out = Events(), io.StringIO()
        show_progress(self.events, every=every, file=self._out)

    def update(self, number: int, **changes: float) -> None:
        assert self.events.update_finished is not None
        self.events.update_finished(UpdateFinished(number, {**METRICS, "update": float(number), **changes}, 0.1))

    def rollout(self, end: End, error: str = "") -> None:
        assert self.events.rollout_finished is not None
        self.events.rollout_finished(RolloutFinished(Trajectory(id="g3.1", task=Task("t"), end=end, error=error)))

    def evaluation(self) -> None:
        assert self.events.evaluation_finished is not None
        self.events.evaluation_finished(EvaluationFinished("after", 10, 512, 470, 0.9, 6.04))

    def lines(self) -> list[str]:
        assert self.events.failures == 0
        return self._out.getvalue().splitlines()


def test_every_nth_update_and_every_evaluation_is_a_line() -> None:
    screen = Screen(every=5)
    for version in range(1, 11):
        screen.update(version)
    screen.evaluation()
    assert screen.lines() == [
        f"update    5  success 0.50  {LINE}",
        f"update   10  success 0.50  {LINE}",
        "after: success 0.918 on 512 episodes in 6.0 s",
    ]


def test_truncations_are_shown_where_there_are_any() -> None:
    screen = Screen()
    screen.update(3, truncated=0.125)
    assert screen.lines() == [f"update    3  success 0.50  truncated 0.12  {LINE}"]


def test_failed_rollouts_are_counted_since_the_last_line_with_the_first_error() -> None:
    screen = Screen()
    screen.rollout(End.env_error, "KeyError: 'secret'\n  in step")
    screen.rollout(End.tool_error, "another")
    screen.rollout(End.success)
    screen.rollout(End.cancelled, "stopped")
    screen.update(1)
    screen.update(2)
    screen.rollout(End.endpoint_error, "no answer")
    screen.evaluation()
    assert [line for line in screen.lines() if "failed" in line] == [
        "  failed rollouts since the last line: 2; the first: g3.1, env_error: KeyError: 'secret' in step",
        "  failed rollouts since the last line: 1; the first: g3.1, endpoint_error: no answer",
    ]
    assert screen.lines()[2].startswith("update    2")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"degenerate_fraction": 1.0, "optimizer_steps": 0.0}, "in no group did the rewards differ (mean 0.25); look"),
        ({"degenerate_fraction": 1.0, "optimizer_steps": 0.0, "truncated": 0.75}, "75% of its episodes were cut short"),
        ({"optimizer_steps": 0.0}, "no optimizer step was taken; look"),
        ({"optimizer_steps": 0.0, "truncated": 1.0, "bootstrap_share": 1.0}, "no optimizer step was taken; look"),
        ({"optimizer_steps": 0.0, "truncated": 0.75, "excluded_unscorable": 2.0}, "2 of its episodes have no known"),
        ({"degenerate_fraction": 1.0, "groups_compared": 0.0}, "no group had two members that vote; raise group_size"),
    ],
)
def test_an_update_without_signal_is_a_warning_that_says_what_to_look_at(changes: dict[str, float], says: str) -> None:
    screen = Screen(every=100)
    screen.update(7, **changes)
    (warning,) = screen.lines()
    assert warning.startswith(f"warning: update 7 had nothing to learn from: {says}")


def test_the_warning_is_repeated_every_tenth_update_at_most() -> None:
    screen = Screen(every=100)
    for number in range(1, 25):
        screen.update(number, degenerate_fraction=1.0)
    assert [line.split(" had")[0] for line in screen.lines()] == [f"warning: update {n}" for n in (1, 11, 21)]


def test_a_learner_that_reports_other_figures_is_not_warned_about() -> None:
    screen = Screen(every=100)
    metrics = {name: value for name, value in METRICS.items() if name not in ("degenerate_fraction", "optimizer_steps")}
    assert screen.events.update_finished is not None
    screen.events.update_finished(UpdateFinished(1, metrics, 0.1))
    assert screen.lines() == []


def test_success_from_restarts_stands_beside_that_from_task_starts() -> None:
    screen = Screen()
    screen.update(3, restart_success=0.25)
    screen.update(4, success=float("nan"), truncated=float("nan"), restart_success=0.75)
    assert screen.lines() == [
        f"update    3  success 0.50  from restarts 0.25  {LINE}",
        f"update    4  success    -  from restarts 0.75  {LINE}",
    ]


def test_what_takes_long_is_told_every_half_minute_by_the_episodes_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s))
    screen = Screen(every=5)
    for passed_s in (10, 19, 2, 10, 21):  # lines after 31 and 62 seconds
        now_s += passed_s
        screen.rollout(End.success)
    screen.update(1)  # no line of its own: the count begins again all the same
    now_s += 40
    screen.rollout(End.failure)
    screen.evaluation()
    screen.rollout(End.success)
    assert screen.lines() == [
        "  episodes ended: 3, the last one by success",
        "  episodes ended: 5, the last one by success",
        "  episodes ended: 1, the last one by failure",
        "after: success 0.918 on 512 episodes in 6.0 s",
    ]
