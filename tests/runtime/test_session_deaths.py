"""A thousand sessions that die in every way leave no session, request, task, timer or slot behind."""

import asyncio
import gc
from random import Random

from turngate.envs.base import End, Task
from turngate.runtime import deadline as deadline_module
from turngate.runtime.agent import Agent
from turngate.runtime.errors import EndpointError, SessionError
from turngate.runtime.events import Events, RolloutFinished
from turngate.runtime.limits import Limits
from turngate.runtime.runtime import Runtime
from turngate.runtime.testing import FakeEndpoint, VirtualTimeLoop, run_virtual

HI = [{"role": "user", "content": "hi"}]
SESSIONS = 1000
DEATHS = 1400
"""Some die in line for a slot, before they have a session."""


def make_runtime(random):
    def answer(_):
        return EndpointError("down") if random.random() < 0.1 else "yes"

    events, ends = Events(), []
    events.subscribe(RolloutFinished, lambda event: ends.append(event.trajectory.end))
    endpoint = FakeEndpoint(answer, latency_s=lambda: random.random() * 10)
    limits = Limits(max_turns=8, rollout_timeout_s=60, close_timeout_s=5)
    return Runtime(endpoint, limits=limits, events=events, max_concurrent=64), ends


async def raises(session, task):
    await session.chat(HI)
    raise RuntimeError("oops")


async def never_awaits(session, task):
    return 1.0


async def hangs(session, task):
    await session.chat(HI)
    await asyncio.get_running_loop().create_future()


async def asks_too_much(session, task):
    while True:
        await session.chat(HI)


async def seals_twice(session, task):
    await session.chat(HI)
    session.seal()
    session.seal(End.failure)
    await session.chat(HI)  # too late


async def leaves_tasks(session, task):
    for _ in range(3):
        stray = asyncio.ensure_future(session.chat(HI))
        stray.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.sleep(0.1)
    return 0.5


async def ignores_cancellation(session, task):
    while True:
        try:
            await session.chat(HI)
            await asyncio.sleep(100)
        except (asyncio.CancelledError, EndpointError, SessionError):
            await asyncio.sleep(0)


AGENTS = [raises, never_awaits, hangs, asks_too_much, seals_twice, leaves_tasks, ignores_cancellation]


async def in_slot(runtime, agent, at):
    async with runtime.slots.hold():
        await runtime.rollout(Agent(agent), Task(f"t{at}"), seed=at)


async def by_hand(runtime):
    async with runtime.session() as session:
        await session.chat(HI)
        await session.chat(HI)


async def forgotten(runtime):
    session = runtime.session()
    await session.chat(HI)


async def cancelled_some_time(make, random):
    task = asyncio.ensure_future(make())
    for _ in range(random.randrange(12)):
        await asyncio.sleep(random.choice([0, 0, 1]))
    task.cancel()
    await asyncio.wait({task})


def deaths(runtime, random, count):
    """Coroutines that each open a session and lose it in a way of its own."""
    for at in range(count):
        agent = AGENTS[at % len(AGENTS)]
        way = at % 4
        if way == 0:
            yield in_slot(runtime, agent, at)
        elif way == 1:
            yield cancelled_some_time(lambda agent=agent, at=at: in_slot(runtime, agent, at), random)
        elif way == 2:
            yield cancelled_some_time(lambda: by_hand(runtime), random)
        else:
            yield forgotten(runtime)


def test_whatever_sessions_die_of_nothing_is_left():
    random = Random(1)
    runtime, ends = make_runtime(random)

    async def main():
        await asyncio.gather(*deaths(runtime, random, DEATHS), return_exceptions=True)
        await asyncio.sleep(61)  # those that were forgotten end at their deadline
        others = asyncio.all_tasks() - {asyncio.current_task()}
        watch = deadline_module._watch_of(asyncio.get_running_loop())
        return others, watch.opened, watch._heap, runtime.sessions.statistics()

    others, scopes, heap, statistics = run_virtual(main())
    assert (others, scopes, heap) == (set(), 0, [])
    assert (statistics.open, len(runtime.sessions._alarms)) == (0, 0)
    assert statistics.sealed == statistics.created == len(ends) >= SESSIONS
    assert (runtime.slots.held, runtime.slots.waiting, runtime.endpoint.in_flight) == (0, 0, 0)
    assert {End.env_error, End.success, End.timeout, End.turn_limit, End.cancelled, End.endpoint_error} <= set(ends)


def test_sessions_whose_loop_is_closed_under_them_are_gone_with_it():
    random = Random(2)
    runtime, _ = make_runtime(random)

    async def main(doomed):
        tasks = [asyncio.ensure_future(death) for death in doomed]
        await asyncio.wait(tasks, timeout=random.random() * 20)

    def live_and_die():
        loop = VirtualTimeLoop()
        loop.run_until_complete(main(deaths(runtime, random, 40)))
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()

    for _ in range(10):
        live_and_die()
    gc.collect()
    assert runtime.sessions.statistics().open == 0
    assert (runtime.slots.held, runtime.slots.waiting, runtime.endpoint.in_flight) == (0, 0, 0)


def test_a_runtime_serves_one_asyncio_run_after_the_other():
    runtime, ends = make_runtime(Random(3))

    async def main():
        digit = "yes"  # a closure serves as well as a function

        async def agent(session, task):
            reply = await session.chat(HI)
            return float(reply.text == digit)

        return await runtime.rollout(Agent(agent), Task("t"))

    trajectories = [run_virtual(main()) for _ in range(2)]
    assert [t.end for t in trajectories] == [End.success] * 2 == ends
