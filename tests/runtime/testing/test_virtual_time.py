"""Virtual time: hours in milliseconds, in the right order, with real code."""

import asyncio

import anyio
import pytest

from turngate.runtime.testing import run_virtual


def test_time_jumps_to_the_next_timer_and_keeps_the_order():
    async def main():
        loop, log = asyncio.get_running_loop(), []

        async def nap(seconds):
            await asyncio.sleep(seconds)
            log.append((loop.time(), seconds))

        await asyncio.gather(nap(7200), nap(1), nap(0.5))
        return log

    assert run_virtual(main()) == [(0.5, 0.5), (1.0, 1), (7200.0, 7200)]


def test_timeouts_of_asyncio_and_anyio_fire_on_time():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.sleep(3600)
        with anyio.move_on_after(12):
            await anyio.sleep_forever()
        with pytest.raises(TimeoutError), anyio.fail_after(8):
            await anyio.sleep(9)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 50.0


def test_a_deadlock_is_named_instead_of_hanging():
    async def wait_for_ever():
        await asyncio.Event().wait()

    async def main():
        await asyncio.create_task(wait_for_ever(), name="the waiter")

    with pytest.raises(RuntimeError, match=r"nothing is ready or scheduled at 0 s; waiting for ever: .*the waiter"):
        run_virtual(main())


def test_real_sockets_are_refused():
    async def main():
        await asyncio.open_connection("127.0.0.1", 1)

    with pytest.raises(RuntimeError, match="virtual time must not meet real I/O"):
        run_virtual(main())


def test_threads_are_waited_for_and_time_stands_still_meanwhile():
    async def main():
        async with asyncio.timeout(5):
            total = await asyncio.to_thread(sum, range(100_000))
        return total, asyncio.get_running_loop().time()

    assert run_virtual(main()) == (4999950000, 0.0)
