"""Slots and threads: no more at once than allowed, nothing lost when cancelled, nobody waits for a hung thread."""

import asyncio
import contextvars
import subprocess
import sys
import threading

import pytest

from turngate.envs.tool_threads import Slots, run_in_thread
from turngate.runtime.testing import cancel_everywhere, run_virtual


def test_no_more_run_at_once_than_there_are_slots_and_the_first_come_first():
    order: list[int] = []

    async def one(slots: Slots, index: int) -> None:
        await slots.here().acquire()
        order.append(index)
        await asyncio.sleep(1)
        slots.here().release()

    async def main() -> float:
        slots = Slots(2)
        await asyncio.gather(*(one(slots, index) for index in range(6)))
        assert slots.here().free == 2
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 3
    assert order == list(range(6))


def test_a_cancelled_wait_for_a_slot_leaves_none_behind():
    left: list[tuple[int, int]] = []

    async def main() -> None:
        slots = Slots(1).here()
        await slots.acquire()
        asyncio.get_running_loop().call_later(1, slots.release)
        try:
            await slots.acquire()
            slots.release()
        except asyncio.CancelledError:
            await asyncio.sleep(2)  # whatever the order, the slot comes back
            raise
        finally:
            left.append((slots.free, len(slots._waiting)))

    assert cancel_everywhere(main, lambda outcome: None) == 1
    assert left == [(1, 0)] * len(left)


def test_cancelled_waits_do_not_pile_up_behind_a_tool_that_hangs():
    async def main() -> int:
        slots = Slots(1).here()
        await slots.acquire()
        waits = [asyncio.ensure_future(slots.acquire()) for _ in range(3)]
        await asyncio.sleep(0)
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)
        return len(slots._waiting)

    assert run_virtual(main()) == 0


def test_a_slot_handed_over_to_a_cancelled_wait_goes_on():
    async def main() -> int:
        slots = Slots(1).here()
        await slots.acquire()
        waiter = asyncio.ensure_future(slots.acquire())
        await asyncio.sleep(0)
        slots.release()  # handed over, and cancelled before it could say thanks
        waiter.cancel()
        await asyncio.wait({waiter})
        return slots.free

    assert run_virtual(main()) == 1


def test_each_event_loop_counts_for_itself():
    slots = Slots(1)

    async def take() -> None:
        await slots.here().acquire()

    run_virtual(take())
    run_virtual(take())  # would wait for ever if the first loop still counted
    assert len(slots._loops) <= 1


async def test_a_thread_returns_its_value_in_the_callers_context():
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name")
    name.set("caller")
    released = asyncio.Event()
    value = await run_in_thread(lambda: (name.get(), threading.current_thread().daemon), released.set)
    assert value == ("caller", True)
    await released.wait()


async def test_a_cancelled_wait_for_a_thread_releases_only_when_the_thread_ends():
    go, released = threading.Event(), asyncio.Event()
    task = asyncio.ensure_future(run_in_thread(go.wait, released.set))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert not released.is_set()
    go.set()
    await asyncio.wait_for(released.wait(), 5)


async def test_a_thread_that_cannot_be_started_gives_its_slot_back(monkeypatch):
    def refuse(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    released: list[int] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        await run_in_thread(lambda: None, lambda: released.append(1))
    assert released == [1]


def test_a_hung_thread_does_not_keep_the_process_alive_nor_break_what_comes_after():
    code = """
import asyncio, threading
from turngate.envs import ToolCall, ToolSet, tool
go = threading.Event()
@tool(timeout_s=0.05, max_concurrent=1)
def hang() -> str:
    go.wait()
    return "late"
tools = ToolSet([hang])
for _ in range(2):
    (answer,) = asyncio.run(tools.run([ToolCall("1", "hang", "")]))
    print(answer.problem)
go.set()
threading.Event().wait(0.05)  # the threads end now, and find their loops closed
go.clear()
print(asyncio.run(tools.run([ToolCall("1", "hang", "")]))[0].problem)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.stderr, done.returncode) == (["timeout"] * 3, "", 0)
