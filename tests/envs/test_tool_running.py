"""Calls at once: order, deadlines, cancellation at every wait."""

import asyncio
import gc
from functools import partial

import pytest

from turngate.envs.tool_running import Call, Ended, _left_behind, run_calls
from turngate.runtime.testing import cancel_everywhere, run_virtual


async def after(delay_s: float, value: object) -> object:
    await asyncio.sleep(delay_s)
    return value


async def broken() -> None:
    raise ValueError("no")


async def deaf(until: asyncio.Event) -> str:
    """Ignores every cancellation."""
    while True:
        try:
            await until.wait()
            return "late"
        except asyncio.CancelledError:
            continue


async def cancels_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(1)


def test_answers_come_in_the_order_of_the_calls_and_not_of_their_ends():
    async def main() -> tuple[list[Ended], float]:
        calls = [Call(partial(after, delay_s, delay_s), 10) for delay_s in (3, 1, 2)]
        return await run_calls(calls, grace_s=1), asyncio.get_running_loop().time()

    ended, seconds = run_virtual(main())
    assert [how.value for how in ended] == [3, 1, 2]
    assert seconds == 3


def test_each_call_has_its_own_deadline_and_its_own_error():
    async def main() -> tuple[list[Ended], float]:
        calls = [Call(partial(after, 9, "a"), 5), Call(broken, 5), Call(partial(after, 9, "b"), 10)]
        return await run_calls(calls, grace_s=1), asyncio.get_running_loop().time()

    ended, seconds = run_virtual(main())
    assert [how.timed_out for how in ended] == [True, False, False]
    assert isinstance(ended[1].error, ValueError)
    assert ended[2].value == "b"
    assert seconds == 9


def test_a_call_that_ignores_its_cancellation_is_left_behind_after_its_grace():
    async def main() -> float:
        until = asyncio.Event()
        (how,) = await run_calls([Call(partial(deaf, until), 5)], grace_s=2)
        seconds = asyncio.get_running_loop().time()
        assert how == Ended(timed_out=True, left_behind=True)
        assert len(_left_behind) == 1
        until.set()
        await asyncio.sleep(1)
        assert not _left_behind
        return seconds

    assert run_virtual(main()) == 7


def test_a_call_that_cancels_itself_is_an_error_and_cancels_nobody_else():
    async def main() -> list[Ended]:
        return await run_calls([Call(cancels_itself, 5), Call(partial(after, 1, "a"), 5)], grace_s=1)

    first, second = run_virtual(main())
    assert "nobody had cancelled it" in str(first.error)
    assert second.value == "a"


def test_cancelled_at_any_wait_every_call_ends():
    ends: list[str] = []

    async def noting(delay_s: float) -> None:
        try:
            await asyncio.sleep(delay_s)
        finally:
            ends.append("ended")

    async def main() -> list[Ended]:
        calls = [Call(partial(noting, 1), 5), Call(partial(noting, 9), 2), Call(partial(noting, 2), 5)]
        return await run_calls(calls, grace_s=1)

    def check(outcome: object) -> None:
        assert len(ends) == 3
        ends.clear()

    assert cancel_everywhere(main, check) >= 2


def test_cancelled_with_a_deaf_call_the_turn_ends_after_the_grace():
    async def main() -> float:
        until = asyncio.Event()
        turn = asyncio.ensure_future(run_calls([Call(partial(deaf, until), 100)], grace_s=2))
        await asyncio.sleep(1)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        seconds = asyncio.get_running_loop().time()
        until.set()
        await asyncio.sleep(1)
        assert not _left_behind
        return seconds

    assert run_virtual(main()) == 3


def test_cancelled_again_while_it_stops_the_turn_ends_at_once():
    async def main() -> float:
        until = asyncio.Event()
        turn = asyncio.ensure_future(run_calls([Call(partial(deaf, until), 100)], grace_s=50))
        for _ in range(2):
            await asyncio.sleep(1)
            turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        seconds = asyncio.get_running_loop().time()
        until.set()
        await asyncio.sleep(1)
        return seconds

    assert run_virtual(main()) == 2


def test_what_a_call_raises_when_it_is_cancelled_is_nobodys_business():
    async def breaks_on_the_way_out() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            raise ValueError("in its cleanup")

    async def main() -> list[dict[str, object]]:
        unseen: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unseen.append(context))
        turn = asyncio.ensure_future(run_calls([Call(breaks_on_the_way_out, 50)], grace_s=1))
        await asyncio.sleep(1)
        turn.cancel()
        await asyncio.wait({turn})
        assert turn.cancelled()
        (late,) = await run_calls([Call(breaks_on_the_way_out, 5)], grace_s=1)
        assert late.timed_out
        del turn, late
        gc.collect()
        return unseen

    assert run_virtual(main()) == []


async def test_nothing_to_run_is_nothing_done():
    assert await run_calls([], grace_s=1) == []
