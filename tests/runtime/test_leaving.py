"""Calls that behave pass through; one that ignores its cancellation is left."""

import asyncio
import sys
from typing import Any, cast

import anyio
import pytest

from turngate.runtime.leaving import Exited, LeavableCalls
from turngate.runtime.testing import run_virtual


async def stubborn():
    while True:
        try:
            await asyncio.sleep(50)
        except asyncio.CancelledError:
            pass


def test_cancelled_by_a_scope_a_stubborn_call_is_left_and_the_scope_knows_its_cancellation():
    left_at = []

    async def main():
        with anyio.move_on_after(10) as scope:
            call = LeavableCalls("test", grace_s=0.0)
            try:
                await call.run("call", stubborn)
            finally:
                left_at.append(asyncio.get_running_loop().time())
        assert asyncio.current_task().cancelling() == 0
        return scope.cancelled_caught

    assert run_virtual(main()) is True
    assert left_at == [10.0]


async def test_what_a_call_returns_and_raises_passes_through():
    calls = LeavableCalls("test", grace_s=1)

    async def add(a, *, b):
        await asyncio.sleep(0)
        return a + b

    assert await calls.run("add", add, 1, b=2) == 3
    future = asyncio.get_running_loop().create_future()
    future.set_result(4)
    assert await calls.run("future", lambda: future) == 4
    assert await calls.run("task", lambda: asyncio.ensure_future(add(2, b=3))) == 5
    with pytest.raises(TypeError, match="await"):
        await calls.run("nothing", cast(Any, lambda: None))
    with pytest.raises(RuntimeError, match="StopIteration"):
        await calls.run("stop", lambda: next(iter(())))
    with pytest.raises(Exited, match="SystemExit"):
        await calls.run("exit", sys.exit)
