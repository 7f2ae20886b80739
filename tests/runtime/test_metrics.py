"""Statistics against numbers worked by hand, the JSON-lines writer, and the lag meter."""

import asyncio
import json
import math
import statistics
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.envs.base import End, Task
from turngate.runtime.clock import ManualClock
from turngate.runtime.events import Events, GroupFinished, RolloutFinished, UpdateFinished, WeightsPublished
from turngate.runtime.metrics import LoopLagMeter, MetricsWriter, RunningMean, quantiles, wilson_interval
from turngate.runtime.testing import run_virtual
from turngate.runtime.types import Group, Trajectory


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (0, 0, 0.0, 1.0),
        (0, 10, 0.0, 0.27753),  # z^2 / (n + z^2)
        (10, 10, 0.72247, 1.0),
        (5, 10, 0.23659, 0.76341),
        (81, 263, 0.25529, 0.36621),  # Newcombe 1998, table I: 0.2553 to 0.3662
    ],
)
def test_wilson_interval_agrees_with_published_values(successes, trials, low, high):
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-6)


@pytest.mark.parametrize("trials", range(1, 50))
def test_wilson_interval_ends_exactly_where_it_must(trials):
    assert wilson_interval(0, trials)[0] == 0.0
    assert wilson_interval(trials, trials)[1] == 1.0


def test_wilson_interval_refuses_impossible_counts():
    with pytest.raises(ValueError, match="between 0 and trials: got 3 of 2"):
        wilson_interval(3, 2)


def test_quantiles_interpolate_between_order_statistics():
    assert quantiles([4.0, 1.0, 3.0, 2.0], [0.0, 0.5, 0.75, 1.0]) == [1.0, 2.5, 3.25, 4.0]
    assert math.isnan(quantiles([], [0.5])[0])
    with pytest.raises(ValueError, match="between 0 and 1"):
        quantiles([1.0], [1.5])


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_running_mean_agrees_with_two_passes(values):
    running = RunningMean()
    for value in values:
        running.add(value)
    assert running.mean == pytest.approx(statistics.fmean(values), abs=1e-6)
    assert running.std == pytest.approx(statistics.stdev(values), abs=1e-3)


def emit(events, event):
    getattr(events, Events.SLOTS[type(event)])(event)


def test_events_become_json_lines_with_their_time(tmp_path):
    events, clock = Events(), ManualClock(100.0)
    trajectory = Trajectory(id="x", task=Task("t"), end=End.env_error, error="broke", started_s=1.0, ended_s=3.5)
    with MetricsWriter(tmp_path / "events.jsonl", events, clock=clock) as writer:
        emit(events, RolloutFinished(trajectory))
        clock.advance(2.0)
        emit(events, GroupFinished(Group(id="g", task=Task("t"), order=4, trajectories=(trajectory,))))
        emit(events, UpdateFinished(3, {"loss": 0.5}, 1.25))
        writer.write("note", {"text": "hello"})
        assert writer.lines == 4
    assert events.weights_published is None
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert lines[0] == {
        "event": "rollout_finished",
        "time_s": 0.0,
        "trajectory_id": "x",
        "task_id": "t",
        "end": "env_error",
        "reward": 0,
        "turns": 0,
        "policy_tokens": 0,
        "oldest_version": -1,
        "newest_version": -1,
        "restarted_from": None,
        "injected_turns": 0,
        "seconds": 2.5,
        "error": "broke",
    }
    assert lines[1] == {
        "event": "group_finished",
        "time_s": 2.0,
        "group_id": "g",
        "task_id": "t",
        "order": 4,
        "restarted_from": None,
        "rewards": [0],
    }
    assert lines[2] == {"event": "update_finished", "time_s": 2.0, "policy_version": 3, "seconds": 1.25, "loss": 0.5}
    assert lines[3] == {"event": "note", "time_s": 2.0, "text": "hello"}


def test_lines_are_readable_while_the_run_goes_on(tmp_path):
    events = Events()
    with MetricsWriter(tmp_path / "events.jsonl", events):
        emit(events, WeightsPublished(1, 0.5))
        assert json.loads((tmp_path / "events.jsonl").read_text())["policy_version"] == 1


def test_lag_is_nothing_on_an_idle_loop_and_seen_on_a_blocked_one():
    async def idle():
        async with LoopLagMeter(interval_s=0.1) as meter:
            await asyncio.sleep(10)
        return meter.quantiles_s(0.5, 1.0), len(meter._lags)

    lags, count = run_virtual(idle())
    assert lags == pytest.approx([0.0, 0.0], abs=1e-9)
    assert count in (99, 100)

    async def blocked():
        async with LoopLagMeter(interval_s=0.001) as meter:
            await asyncio.sleep(0.005)
            time.sleep(0.05)  # noqa: ASYNC251 - blocking is the point
            await asyncio.sleep(0.005)
        return meter.worst_s

    assert asyncio.run(blocked()) > 0.04


def test_the_lag_meter_keeps_the_newest_only():
    async def main():
        async with LoopLagMeter(interval_s=0.1, size=8) as meter:
            await asyncio.sleep(10)
        return len(meter._lags)

    assert run_virtual(main()) == 8
