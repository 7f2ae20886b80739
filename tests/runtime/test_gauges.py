import math
import time

import msgspec
import pytest

from turngate.envs.base import End, Task
from turngate.runtime.buffer import Buffer
from turngate.runtime.events import Events, GroupDropped
from turngate.runtime.gauges import RunGauges
from turngate.runtime.ledger import Ledger
from turngate.runtime.metrics import LoopLagMeter
from turngate.runtime.slots import Slots
from turngate.runtime.staleness import StalenessLimit
from turngate.runtime.types import Batch, Group, RestartedFrom, Segment, Trajectory, Turn


def _batch() -> Batch:
    def member(end: End, versions: list[int]) -> Trajectory:
        segment = Segment.of(
            [0, *versions],
            [0] + [1] * len(versions),
            [0.0] * (1 + len(versions)),
            [-1, *versions],
            [-1] + [0] * len(versions),
        )
        turn = Turn(
            index=0, segment=0, start=1, length=len(versions), text="a", rewards={"outcome": float(end is End.success)}
        )
        return Trajectory(id="a", task=Task("t"), end=end, segments=(segment,), turns=(turn,))

    members = (member(End.success, [3, 3, 4]), member(End.turn_limit, [5]))
    return Batch(groups=(Group(id="g", task=Task("t"), order=0, trajectories=members),), policy_version=6)


def _gauges() -> tuple[RunGauges, Buffer, Ledger]:
    return RunGauges(Slots(4), LoopLagMeter()), Buffer(groups_per_batch=1, limit=StalenessLimit()), Ledger()


def _tell(events: Events, event: GroupDropped) -> None:
    if (hear := events.group_dropped) is not None:
        hear(event)


def test_a_row_describes_the_batch_by_trajectory_and_by_token() -> None:
    gauges, buffer, ledger = _gauges()
    row = gauges.row(_batch(), buffer, ledger)
    assert (row["success"], row["truncated"], row["turns"], row["tokens"]) == (0.5, 0.5, 1.0, 2.0)
    assert (row["lag_max"], row["lag_mean"], row["lag_min"], row["version_span_max"]) == (3, 2.25, 1, 1)


def test_environment_steps_are_the_turns_of_every_episode_restarted_ones_included() -> None:
    gauges, buffer, ledger = _gauges()
    (group,) = _batch().groups
    first, second = group.trajectories
    restart = RestartedFrom("b", turn=1, policy_version=5, reason="invalid")
    again = Turn(index=1, segment=0, start=1, length=1, text="b")
    members = (msgspec.structs.replace(first, turns=(*first.turns, again), restarted_from=restart), second)
    batch = Batch(groups=(msgspec.structs.replace(group, trajectories=members),), policy_version=6)
    row = gauges.row(batch, buffer, ledger)
    assert (row["env_steps"], row["turns"]) == (3.0, 1.0)


def test_shares_split_the_wall_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    gauges, buffer, ledger = _gauges()
    with gauges.waiting():
        now[0] += 2.0
    with gauges.learning():
        now[0] += 5.0
    with gauges.publishing():
        now[0] += 1.0
    now[0] += 2.0
    row = gauges.row(_batch(), buffer, ledger)
    assert (row["learner_waiting_share"], row["learner_busy_share"], row["publishing_share"]) == (0.2, 0.5, 0.1)
    assert row["episodes_per_s"] == pytest.approx(0.2)
    assert row["policy_tokens_per_s"] == pytest.approx(0.4)


def test_a_taken_batch_is_described_by_its_staleness() -> None:
    event = _gauges()[0].batch_taken(_batch())
    assert (event.rollouts, event.policy_tokens) == (2, 4)
    assert (event.staleness_min, event.staleness_mean, event.staleness_max) == (1, 2.25, 3)


def test_dropped_rollouts_count_by_reason_and_length_within_an_interval() -> None:
    gauges, buffer, ledger = _gauges()
    for name in "abc":
        ledger.draw(name)
    ledger.drop("ab", "stale")
    ledger.drop("c", "group_incomplete")
    events = Events()
    with gauges.hearing(events):
        _tell(events, GroupDropped("g0", "t", "stale", rollouts=2, policy_tokens=20, staleness=3))
        _tell(events, GroupDropped("g1", "t", "group_incomplete", rollouts=1, policy_tokens=4))
    _tell(events, GroupDropped("g2", "t", "stale", rollouts=9, policy_tokens=9))
    row = gauges.row(_batch(), buffer, ledger)
    assert (row["rollouts_dropped"], row["rollouts_dropped_stale"], row["rollouts_dropped_group_incomplete"]) == (
        3,
        2,
        1,
    )
    assert (row["dropped_rollouts"], row["dropped_tokens"]) == (3, 8.0)
    assert row["dropped_tokens_share"] == 24 / 28  # the batch itself has 4 tokens
    after = gauges.row(_batch(), buffer, ledger)
    assert (after["dropped_rollouts"], after["dropped_tokens_share"]) == (0, 0)
    assert math.isnan(after["dropped_tokens"])
    assert after["rollouts_dropped_stale"] == 2  # of the whole run


def test_the_gate_shows_in_the_row() -> None:
    gauges, buffer, ledger = _gauges()
    buffer.submit()
    row = gauges.row(_batch(), buffer, ledger)
    assert (row["groups_ready"], row["groups_running"], row["groups_capacity"]) == (0, 1, 2)
