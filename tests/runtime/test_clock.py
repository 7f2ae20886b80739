"""Clocks."""

import asyncio

import pytest

from turngate.runtime.clock import LoopClock, ManualClock, SystemClock
from turngate.runtime.testing import run_virtual


def test_the_manual_clock_moves_only_forward_and_only_when_told():
    clock = ManualClock(5.0)
    clock.advance(2.5)
    assert clock.now() == 7.5
    with pytest.raises(ValueError, match="must move forward"):
        clock.advance(-1)


def test_the_loop_clock_follows_virtual_time():
    async def main():
        await asyncio.sleep(3600)
        return LoopClock().now()

    assert run_virtual(main()) == 3600.0


def test_the_system_clock_never_goes_back():
    clock = SystemClock()
    assert clock.now() <= clock.now()
