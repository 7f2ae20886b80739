"""The harness itself: it finds what it is made to find."""

import asyncio

import pytest

from turngate.runtime.testing import Outcome, cancel_everywhere


def test_every_wait_is_cancelled_in_both_moments():
    outcomes: list[Outcome] = []

    async def three_waits():
        await asyncio.sleep(0)
        await asyncio.sleep(1)
        return await asyncio.sleep(1, "result")

    assert cancel_everywhere(three_waits, outcomes.append) == 3
    assert [(outcome.point, outcome.late, outcome.cancelled) for outcome in outcomes] == [
        (point, late, point <= 3) for point in (1, 2, 3, 4) for late in (False, True)
    ]
    assert outcomes[-1].result == "result"


def test_a_permit_lost_between_grant_and_use_is_found():
    """The classic: an acquire that has succeeded, but whose task is cancelled before it runs."""
    free: list[str] = []

    async def careless():
        granted = asyncio.get_running_loop().create_future()

        def grant():
            free.pop()
            granted.set_result(None)

        timer = asyncio.get_running_loop().call_later(1, grant)
        try:
            await granted
        finally:
            timer.cancel()
        free.append("permit")  # never reached when cancelled just after the grant

    lost = []

    def check(outcome):
        if outcome.late and outcome.cancelled and not free:
            lost.append(outcome.point)
        free[:] = ["permit"]

    free[:] = ["permit"]
    cancel_everywhere(careless, check)
    assert lost == [1]


def test_a_task_that_outlives_its_owner_is_named():
    async def leak():
        asyncio.get_running_loop().create_task(asyncio.sleep(100), name="orphan")
        await asyncio.sleep(0)

    with pytest.raises(AssertionError, match="orphan"):
        cancel_everywhere(leak, lambda outcome: None)
