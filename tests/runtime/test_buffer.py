import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.envs.base import End, Task
from turngate.runtime.buffer import Buffer
from turngate.runtime.errors import StalenessError
from turngate.runtime.staleness import LatePolicy, StalenessLimit
from turngate.runtime.types import Group, Segment, Trajectory


def _group(order: int, *versions: int) -> Group:
    segment = Segment.of(
        range(len(versions)), [1] * len(versions), [-0.5] * len(versions), versions, [0] * len(versions)
    )
    task = Task(f"t{order}")
    trajectory = Trajectory(id=f"g{order}.0", task=task, segments=(segment,), end=End.success)
    return Group(id=f"g{order}", task=task, order=order, trajectories=(trajectory,))


def _buffer(size: int = 2, eta: int = 1, late: LatePolicy = "wait", stale: list[Group] | None = None) -> Buffer:
    on_stale = None if stale is None else stale.append
    return Buffer(groups_per_batch=size, limit=StalenessLimit(max_staleness=eta, late=late), on_stale=on_stale)


def _taken(buffer: Buffer) -> list[int] | None:
    """Return the orders of the next batch if one is complete."""
    batch = buffer.take_now()
    return None if batch is None else [group.order for group in batch.groups]


def test_the_submit_gate_opens_by_one_batch_per_version() -> None:
    buffer = _buffer(size=2, eta=1)
    assert [buffer.submit() for _ in range(buffer.capacity())] == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="needs capacity"):
        buffer.submit()
    for order in range(2):
        buffer.put(_group(order, 0))
    assert _taken(buffer) == [0, 1]
    assert buffer.capacity() == 0
    buffer.advance(1)
    assert buffer.capacity() == 2


def test_wait_consumes_in_submission_order_and_waits_for_stragglers() -> None:
    buffer = _buffer(size=2, eta=1)
    for _ in range(4):
        buffer.submit()
    for order in (3, 1, 2):
        buffer.put(_group(order, 0))
    assert _taken(buffer) is None
    buffer.put(_group(0, 0))
    assert _taken(buffer) == [0, 1]


def test_a_withdrawn_straggler_no_longer_blocks() -> None:
    buffer = _buffer(size=2, eta=1)
    for _ in range(3):
        buffer.submit()
    buffer.put(_group(1, 0))
    buffer.put(_group(2, 0))
    buffer.withdraw(0)
    assert _taken(buffer) == [1, 2]


def test_drop_discards_and_reports_what_is_too_old_and_returns_its_place() -> None:
    stale: list[Group] = []
    buffer = _buffer(size=1, eta=1, late="drop", stale=stale)
    orders = [buffer.submit(), buffer.submit()]
    buffer.put(_group(orders[1], 0))
    assert _taken(buffer) == [1]
    buffer.advance(1)
    buffer.put(_group(buffer.submit(), 1))
    assert _taken(buffer) == [2]
    buffer.advance(2)
    buffer.put(_group(orders[0], 0, 0, 2))  # started at version 0: its oldest token is 2 versions behind
    assert [group.order for group in stale] == [0]
    assert buffer.dropped_stale == 1
    assert buffer.capacity() == 2


def test_drop_keeps_what_is_exactly_at_the_bound() -> None:
    buffer = _buffer(size=1, eta=1, late="drop")
    buffer.submit()
    buffer.submit()
    buffer.put(_group(1, 0))
    buffer.put(_group(0, 0))
    assert _taken(buffer) == [1]
    buffer.advance(1)
    assert _taken(buffer) == [0]


def test_mask_keeps_a_group_with_any_young_token_and_names_the_oldest_trainable_version() -> None:
    buffer = _buffer(size=1, eta=0, late="mask")
    buffer.submit()
    buffer.put(_group(0, 0))
    assert _taken(buffer) == [0]
    buffer.advance(1)
    buffer.submit()
    buffer.put(_group(1, 0, 1))
    batch = buffer.take_now()
    assert batch is not None
    assert batch.min_version == 1


def test_a_token_older_than_the_bound_never_leaves_the_buffer() -> None:
    buffer = _buffer(size=1, eta=0, late="wait")
    buffer.submit()
    buffer.put(_group(0, 0))
    buffer.policy_version = 1  # as if a version had been published behind the buffer's back
    with pytest.raises(StalenessError, match="at most 0: got 1"):
        _taken(buffer)


def test_versions_grow_by_one() -> None:
    with pytest.raises(RuntimeError, match="expected 1, got 2"):
        _buffer().advance(2)


def test_nothing_is_submitted_that_the_run_could_not_use() -> None:
    buffer = Buffer(groups_per_batch=2, limit=StalenessLimit(max_staleness=3), last_version=2)
    assert buffer.capacity() == 4
    for order in [buffer.submit() for _ in range(4)]:
        buffer.put(_group(order, 0))
    assert _taken(buffer) == [0, 1]
    buffer.advance(1)
    assert buffer.capacity() == 0


async def test_take_waits_until_enough_groups_are_complete() -> None:
    buffer = _buffer(size=2)
    orders = [buffer.submit(), buffer.submit()]
    taker = asyncio.create_task(buffer.take())
    await asyncio.sleep(0)
    buffer.put(_group(orders[0], 0))
    await asyncio.sleep(0)
    assert not taker.done()
    buffer.put(_group(orders[1], 0))
    assert [g.order for g in (await taker).groups] == [0, 1]


async def test_a_cancelled_take_takes_nothing() -> None:
    buffer = _buffer(size=1)
    buffer.submit()
    taker = asyncio.create_task(buffer.take())
    await asyncio.sleep(0)
    taker.cancel()
    await asyncio.gather(taker, return_exceptions=True)
    buffer.put(_group(0, 0))
    assert _taken(buffer) == [0]


@given(
    seed=st.integers(0, 10**6),
    size=st.integers(1, 3),
    eta=st.integers(0, 3),
    late=st.sampled_from(["wait", "drop"]),
)
def test_no_consumed_token_is_older_than_the_bound_whatever_finishes_when(
    seed: int, size: int, eta: int, late: LatePolicy
) -> None:
    # P15: random durations, failures and publishing moments; the learner must also never be starved for ever.
    luck = random.Random(seed)
    buffer = Buffer(groups_per_batch=size, limit=StalenessLimit(max_staleness=eta, late=late))
    running: dict[int, list[int]] = {}
    consumed = 0
    for _ in range(300):
        while buffer.capacity() > 0 and luck.random() < 0.9:
            running[buffer.submit()] = [buffer.policy_version]
        for order, versions in list(running.items()):
            versions.append(buffer.policy_version)
            if luck.random() < 0.3:
                del running[order]
                if luck.random() < 0.1:
                    buffer.withdraw(order)
                else:
                    buffer.put(_group(order, *versions))
        if luck.random() < 0.7 and (orders := _taken(buffer)) is not None:
            consumed += len(orders)
            buffer.advance(buffer.policy_version + 1)
    assert consumed == buffer.policy_version * size
    assert buffer.policy_version > 3


@pytest.mark.parametrize("late", ["drop", "mask"])
def test_the_newest_stale_groups_go_with_the_next_batch_and_the_others_are_counted(late: LatePolicy) -> None:
    buffer = Buffer(groups_per_batch=1, limit=StalenessLimit(max_staleness=3, late=late), keep_stale=2)
    orders = [buffer.submit() for _ in range(4)]
    for version in range(1, 5):
        buffer.advance(version)
    for order in orders[:3]:
        assert not buffer.put(_group(order, 0))
    assert (buffer.dropped_stale, buffer.statistics().stale_lost) == (3, 1)
    buffer.put(_group(orders[3], 4))
    batch = buffer.take_now()
    assert batch is not None
    assert ([g.order for g in batch.groups], [g.order for g in batch.stale]) == ([3], [1, 2])
    buffer.put(_group(buffer.submit(), 4))
    batch = buffer.take_now()
    assert batch is not None
    assert batch.stale == ()  # each goes with one batch


def test_stale_groups_are_not_kept_unless_asked_for() -> None:
    buffer = _buffer(size=1, eta=0, late="drop")
    order = buffer.submit()
    buffer.advance(1)
    buffer.put(_group(order, 0))
    buffer.put(_group(buffer.submit(), 1))
    batch = buffer.take_now()
    assert batch is not None
    assert (batch.stale, buffer.dropped_stale, buffer.stale_lost) == ((), 1, 0)
