"""Cancellations that nobody asked for end where they began."""

import asyncio

import anyio
import pytest

from turngate.runtime.strays import strays_end_here
from turngate.runtime.testing import run_virtual


async def raises():
    raise asyncio.CancelledError


async def cancels_its_task():
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(1.0)


@pytest.mark.parametrize("inside", [raises, cancels_its_task])
def test_a_stray_ends_its_block_and_nothing_else(inside):
    done = []

    async def one(call):
        with strays_end_here():
            await call()
        await asyncio.sleep(1.0)
        done.append(call)

    async def quiet():
        await asyncio.sleep(2.0)

    async def play():
        async with anyio.create_task_group() as tg:
            tg.start_soon(one, inside)
            tg.start_soon(one, quiet)

    run_virtual(play())
    assert done == [inside, quiet]


@pytest.mark.parametrize("how", ["group", "task", "timeout"])
def test_a_cancellation_from_outside_goes_through(how):
    done = []

    async def one():
        with strays_end_here():
            await asyncio.sleep(3.0)
        done.append("went on")

    async def group():
        async with anyio.create_task_group() as tg:
            tg.start_soon(one)
            await asyncio.sleep(1.0)
            if how == "group":
                tg.cancel_scope.cancel()

    async def play():
        if how == "timeout":
            with anyio.move_on_after(2.0):
                await group()
            return
        task = asyncio.ensure_future(group())
        await asyncio.sleep(2.0)
        task.cancel()
        await asyncio.wait({task})

    run_virtual(play())
    assert done == []
