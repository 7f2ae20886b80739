import asyncio

import pytest

from turngate.runtime.errors import ConfigError
from turngate.runtime.slots import Slots


async def _hold(slots: Slots, priority: int, log: list[int], release: asyncio.Event) -> None:
    async with slots.hold(priority):
        log.append(priority)
        await release.wait()


async def test_slots_bound_what_is_held_and_serve_the_oldest_first() -> None:
    slots, log, release = Slots(2), list[int](), asyncio.Event()
    tasks = [asyncio.create_task(_hold(slots, p, log, release)) for p in (5, 6, 9, 7, 8)]
    await asyncio.sleep(0)
    assert (slots.held, slots.waiting, log) == (2, 3, [5, 6])
    release.set()
    await asyncio.gather(*tasks)
    assert log == [5, 6, 7, 8, 9]
    assert (slots.held, slots.waiting) == (0, 0)


async def test_a_cancelled_waiter_leaves_the_line() -> None:
    slots, log, release = Slots(1), list[int](), asyncio.Event()
    holder = asyncio.create_task(_hold(slots, 0, log, release))
    waiter = asyncio.create_task(_hold(slots, 1, log, release))
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert slots.waiting == 0
    release.set()
    await holder
    assert slots.held == 0


async def test_a_slot_granted_and_cancelled_in_the_same_tick_is_passed_on() -> None:
    slots, log, release = Slots(1), list[int](), asyncio.Event()
    first = asyncio.create_task(_hold(slots, 0, log, release))
    second = asyncio.create_task(_hold(slots, 1, log, release))
    third = asyncio.create_task(_hold(slots, 2, log, release))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)  # first has released: second's grant is set, second has not run yet
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    release.set()
    await third
    assert log[-1] == 2
    assert slots.held == 0


async def test_a_slot_comes_back_when_its_holder_raises() -> None:
    slots = Slots(1)
    with pytest.raises(KeyError):
        async with slots.hold():
            raise KeyError("x")
    assert slots.held == 0


def test_no_slots_is_an_error() -> None:
    with pytest.raises(ConfigError, match="1 or more: got 0"):
        Slots(0)
