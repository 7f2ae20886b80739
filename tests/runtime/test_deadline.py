"""One watch for all deadlines of a loop: exact, cheap to move, and gone when the scopes are."""

import asyncio
import gc
import weakref

import pytest

from turngate.runtime.deadline import Alarm, Deadline, DeadlineExceeded, _watch_of
from turngate.runtime.testing import run_virtual


def now():
    return asyncio.get_running_loop().time()


async def sleep_under(limit_s, seconds, what="nap"):
    """Return (what happened, when)."""
    try:
        with Deadline() as deadline:
            deadline.set(now() + limit_s, what)
            await asyncio.sleep(seconds)
    except DeadlineExceeded as error:
        return error.what, now()
    return "done", now()


async def end_of(body, *args):
    """Return (which deadline ended the body, when); the cancellation it used must be gone."""
    try:
        with Deadline() as deadline:
            await body(deadline, *args)
    except DeadlineExceeded as error:
        assert asyncio.current_task().cancelling() == 0
        return error.what, now()
    return "done", now()


def test_a_deadline_cancels_its_body_at_its_time_and_says_which_it_was():
    assert run_virtual(sleep_under(5, 3)) == ("done", 3.0)
    assert run_virtual(sleep_under(3, 5)) == ("nap", 3.0)


def test_many_deadlines_pass_each_at_its_own_time():
    async def main():
        return await asyncio.gather(*(sleep_under(limit, 50, limit) for limit in (7, 3, 90, 3, 5)))

    assert run_virtual(main()) == [(7, 7.0), (3, 3.0), ("done", 50.0), (3, 3.0), (5, 5.0)]


def test_the_deadline_last_set_counts_whether_later_or_earlier():
    async def body(deadline, first_s, second_s):
        deadline.set(first_s, "first")
        await asyncio.sleep(1)
        deadline.set(second_s, "second")
        await asyncio.sleep(100)

    assert run_virtual(end_of(body, 10, 20)) == ("second", 20.0)
    assert run_virtual(end_of(body, 20, 10)) == ("second", 10.0)


def test_moved_back_and_forth_a_deadline_fires_once():
    async def body(deadline):
        for turn in range(50):
            deadline.set(now() + 5, "turn")
            deadline.set(now() + 1 + turn % 3, "tool")
            await asyncio.sleep(0.5)
        await asyncio.sleep(100)

    assert run_virtual(end_of(body)) == ("tool", 24.5 + 1 + 49 % 3)


def test_nested_deadlines_tell_inner_from_outer():
    async def body(outer, outer_s, inner_s):
        outer.set(outer_s, "outer")
        if inner_s < outer_s:
            assert await sleep_under(inner_s, 100, "inner") == ("inner", inner_s)
            await asyncio.sleep(100)
        else:
            await sleep_under(inner_s, 100, "inner")

    assert run_virtual(end_of(body, 10, 5)) == ("outer", 10.0)
    assert run_virtual(end_of(body, 5, 10)) == ("outer", 5.0)
    assert run_virtual(end_of(body, 5, 5)) == ("outer", 5.0)  # the outer one is the wider reason


def test_a_cancellation_from_outside_stays_one():
    async def main():
        task = asyncio.ensure_future(sleep_under(10, 100))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        both = asyncio.ensure_future(sleep_under(1, 100))
        asyncio.get_running_loop().call_later(1, both.cancel)
        with pytest.raises(asyncio.CancelledError):
            await both

    run_virtual(main())


def test_it_nests_with_asyncios_own_timeouts():
    async def main(ours_s, theirs_s):
        try:
            async with asyncio.timeout(theirs_s):
                with Deadline() as deadline:
                    deadline.set(ours_s, "ours")
                    await asyncio.sleep(100)
        except DeadlineExceeded:
            return "ours"
        except TimeoutError:
            return "theirs"

    assert run_virtual(main(1, 2)) == "ours"
    assert run_virtual(main(2, 1)) == "theirs"


def test_a_swallowed_deadline_is_raised_at_the_next_one():
    async def main():
        with Deadline() as deadline:
            deadline.set(1, "first")
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                pass
            assert not deadline.cancelled_from_outside()
            deadline.set(20, "second")

    with pytest.raises(DeadlineExceeded, match="first"):
        run_virtual(main())


def test_thousands_of_scopes_leave_no_timer_and_no_task_behind():
    async def main():
        with Deadline() as outer:
            outer.set(1e6, "outer")
            for _ in range(5000):
                assert (await sleep_under(600, 0.001))[0] == "done"
            watch = outer._watch
            assert len(watch._heap) <= 64 + 2 * 2 + 1
        assert (watch._heap, watch.opened, watch._timer) == ([], 0, None)

    run_virtual(main())


def test_a_finished_task_is_not_kept_alive_by_its_deadline():
    class Result:
        pass

    async def work():
        with Deadline() as deadline:
            deadline.set(now() + 600, "work")
            await asyncio.sleep(0)
        return Result()

    async def main():
        with Deadline() as outer:
            outer.set(1e6, "outer")
            result = weakref.ref(await asyncio.ensure_future(work()))
            await asyncio.sleep(0)  # the callback that woke us held the task
            gc.collect()
            return result()

    assert run_virtual(main()) is None


def test_an_alarm_rings_once_at_its_time_unless_it_is_closed_before():
    async def main():
        now = asyncio.get_running_loop().time
        rung = []

        def alarm_at(at):
            return Alarm(now() + at, lambda: rung.append((at, now())))

        alarms = [alarm_at(at) for at in (3, 1, 2)]
        alarms[2].close()
        alarms[2].close()
        await asyncio.sleep(10)
        for alarm in alarms:
            alarm.close()
        watch = _watch_of(asyncio.get_running_loop())
        return rung, watch.opened, watch._timer, repr(alarms[2])

    rung, opened, timer, closed = run_virtual(main())
    assert rung == [(1, 1.0), (3, 3.0)]
    assert (opened, timer, closed) == (0, None, "<Alarm at 2.000, closed>")


def test_what_an_alarm_raises_harms_no_other_deadline():
    async def main():
        loop = asyncio.get_running_loop()
        reported, rung = [], []
        loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
        alarms = [Alarm(1.0, lambda: 1 // 0), Alarm(1.0, lambda: rung.append(1)), Alarm(2.0, lambda: rung.append(2))]
        await asyncio.sleep(5)
        for alarm in alarms:
            alarm.close()
        return reported, rung

    reported, rung = run_virtual(main())
    assert (type(reported[0]), rung) == (ZeroDivisionError, [1, 2])


def test_an_alarm_that_is_never_closed_goes_when_the_next_loop_comes():
    class Held:
        def ring(self):
            pass

    async def leak():
        loop, held = asyncio.get_running_loop(), Held()
        Alarm(loop.time() + 1000, held.ring)
        return weakref.ref(loop), weakref.ref(held)

    first = asyncio.run(leak())
    second = asyncio.run(leak())
    gc.collect()
    assert [each() for each in first] == [None, None]
    assert second[1]() is not None
