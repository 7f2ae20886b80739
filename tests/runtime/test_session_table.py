"""Sessions by key, and the end of those that nobody ends."""

import asyncio
import gc
import math
import weakref

import pytest

from turngate.envs.base import End
from turngate.runtime import deadline as deadline_module
from turngate.runtime.errors import ConfigError, SessionSealed
from turngate.runtime.limits import Limits
from turngate.runtime.session_table import SessionTable
from turngate.runtime.testing import FakeEndpoint, run_virtual
from turngate.runtime.types import Sampling

HI = [{"role": "user", "content": "hi"}]


def make_table(*, latency_s=0.0, **options):
    return SessionTable(FakeEndpoint(lambda _: "yes", latency_s=latency_s), sampling=Sampling(), **options)


async def test_a_session_is_found_by_its_key_while_it_is_open():
    table = make_table()
    first, second = table.create(), table.create(key="mine")
    assert (table.find(first.key), table.find("mine"), table.find("nobody's")) == (first, second, None)
    assert (first.id, first.task.id, len(first.key)) == ("session-1", "session-1", 32)
    with pytest.raises(ConfigError, match=r"session key must be new: a session with it is open \(session-2\)"):
        table.create(key="mine")
    assert repr(table) == "<SessionTable 2 open, 2 created>"
    first.seal()
    second.seal()
    with pytest.raises(SessionSealed, match=r"its episode is over \(session session-2\)"):
        table.find("mine")
    assert (len(table), table.statistics().sealed) == (0, 2)


async def test_keys_of_old_sessions_are_forgotten_in_the_end(monkeypatch):
    table = make_table()
    table._ended._size = 2
    keys = [table.create(key=f"k{at}").key for at in range(3)]
    for key in keys:
        table.find(key).seal()
    assert table.find("k0") is None
    with pytest.raises(SessionSealed):
        table.find("k2")


def test_a_forgotten_session_ends_at_its_deadline_with_what_it_had():
    async def play():
        table = make_table(limits=Limits(rollout_timeout_s=60))
        sessions = [table.create(), table.create(timeout_s=5), table.create(timeout_s=math.inf)]
        for session in sessions:
            await session.chat(HI)
        await asyncio.sleep(10)
        states = [session.state for session in sessions]
        await asyncio.sleep(100)
        sessions[2].seal()
        return states, [session.trajectory for session in sessions], table.statistics()

    states, trajectories, statistics = run_virtual(play())
    assert states == ["open", "sealed", "open"]
    assert [(t.end, t.ended_s - t.started_s, len(t.turns)) for t in trajectories] == [
        (End.timeout, 60.0, 1),
        (End.timeout, 5.0, 1),
        (End.failure, 110.0, 1),
    ]
    assert trajectories[1].error == "session must end within 5 s: it did not (session session-2)"
    assert (statistics.open, statistics.timed_out, statistics.orphaned) == (0, 2, 0)


def test_a_deadline_interrupts_a_request_under_way():
    async def play():
        session = make_table(latency_s=100.0).create(timeout_s=5)
        with pytest.raises(SessionSealed, match="it ended with timeout"):
            await session.chat(HI)
        return session.trajectory

    trajectory = run_virtual(play())
    assert trajectory.ended_s - trajectory.started_s == 5.0


async def test_all_deadlines_share_one_timer_that_goes_with_the_last_session():
    table = make_table()
    sessions = [table.create() for _ in range(100)]
    watch = deadline_module._watch_of(asyncio.get_running_loop())
    assert watch.opened >= 100
    for session in sessions:
        session.seal()
    assert (watch.opened, watch._timer, watch._heap) == (0, None, [])


def test_sessions_of_a_loop_that_was_closed_are_sealed_and_hold_no_loop():
    table = make_table(latency_s=60)

    async def leak():
        session = table.create()
        waiting = asyncio.ensure_future(session.chat(HI))
        await asyncio.sleep(0)
        return session, waiting, weakref.ref(asyncio.get_running_loop())

    loop = asyncio.new_event_loop()
    session, waiting, alive = loop.run_until_complete(leak())
    waiting.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    del loop, waiting
    assert session.state == "open"
    assert (table.statistics().orphaned, len(table)) == (1, 0)
    assert (session.trajectory.end, session.trajectory.error) == (End.cancelled, "its event loop was closed")
    gc.collect()
    assert alive() is None


def test_a_new_loop_finds_no_sessions_of_the_old_one():
    table = make_table()

    async def open_one():
        return table.create()

    first = asyncio.run(open_one())
    second = asyncio.run(open_one())
    assert (first.state, second.state, len(table)) == ("sealed", "open", 1)


async def test_a_sealed_session_is_not_kept():
    table = make_table()
    session = table.create()
    await session.chat(HI)
    session.seal()
    gone = weakref.ref(session)
    del session
    gc.collect()
    assert gone() is None
