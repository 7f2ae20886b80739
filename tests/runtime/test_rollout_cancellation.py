"""A rollout cancelled at every one of its waits: typed end, environment closed once, nothing leaked, siblings well."""

import asyncio
from typing import Any

import anyio
import pytest

from turngate.envs.base import End, Task
from turngate.envs.testing import EchoEnv, HangingEnv, RaisingEnv
from turngate.runtime.context import summarise
from turngate.runtime.events import Events, RolloutFinished
from turngate.runtime.limits import Limits
from turngate.runtime.rollout import run_rollout
from turngate.runtime.testing import FakeEndpoint, cancel_everywhere, run_virtual
from turngate.runtime.types import Trajectory

TASK = Task("t", "Go.")


class WaitingEnv(EchoEnv):
    """Waits in every method, more than once."""

    live = 0

    async def reset(self, task, seed):
        WaitingEnv.live += 1
        await asyncio.sleep(1)
        return await super().reset(task, seed)

    async def step(self, action):
        await asyncio.sleep(0)
        await asyncio.sleep(1)
        return await super().step(action)

    async def aclose(self):
        await super().aclose()
        await asyncio.sleep(0)
        await asyncio.sleep(1)
        WaitingEnv.live -= 1


async def shorten(summary, messages):
    await asyncio.sleep(1)
    return f"{summary}|{len(messages)}"


def test_cancelled_at_every_wait_a_rollout_closes_its_environment_and_reports_itself():
    made: list[WaitingEnv] = []
    reported: list[Trajectory] = []
    finished: list[Trajectory] = []
    endpoints: list[FakeEndpoint] = []
    kept: list[list[Any]] = [made, reported, finished, endpoints]

    def make():
        for each in kept:
            each.clear()
        events = Events()
        events.subscribe(RolloutFinished, lambda event: finished.append(event.trajectory))
        endpoints.append(FakeEndpoint(["one", "two", "three"], latency_s=1))

        def make_env():
            made.append(WaitingEnv())
            return made[-1]

        return run_rollout(
            make_env,
            TASK,
            endpoints[0],
            context=summarise(shorten, after_turns=1),
            events=events,
            on_cancelled=reported.append,
        )

    def check(outcome):
        assert [env.closed for env in made] == [1] * len(made)
        assert WaitingEnv.live == 0  # every close ran to its end
        assert endpoints[0].in_flight == 0
        if not outcome.cancelled:
            assert outcome.result.end is End.success
            assert (reported, finished) == ([], [outcome.result])
            return
        (trajectory,) = reported
        assert finished == reported
        assert (trajectory.end, trajectory.error) == (End.cancelled, "cancelled from outside")
        assert [turn.index for turn in trajectory.turns] == list(range(len(trajectory.turns)))
        recorded = sum(sum(segment.policy_mask) for segment in trajectory.segments)
        assert recorded == trajectory.policy_tokens

    waits = cancel_everywhere(make, check)
    assert waits == 12  # a reset, three turns of one wait for the model and two for the environment, a summary, a close


@pytest.mark.parametrize("env", [lambda: RaisingEnv(1), lambda: HangingEnv(1), lambda: HangingEnv("aclose")])
def test_cancelled_at_every_wait_of_a_failing_environment_nothing_leaks(env):
    made: list[EchoEnv] = []

    def make():
        made.clear()

        def make_env():
            made.append(env())
            return made[-1]

        limits = Limits(tool_timeout_s=5, close_timeout_s=2)
        return run_rollout(make_env, TASK, FakeEndpoint(["one", "two", "three"], latency_s=1), limits=limits)

    def check(outcome):
        assert [each.closed for each in made] == [1] * len(made)

    assert cancel_everywhere(make, check) >= 3


def test_cancelled_by_an_anyio_scope_the_close_is_not_cut_short():
    env = WaitingEnv()

    async def main():
        with anyio.move_on_after(2.5) as scope:
            await run_rollout(lambda: env, TASK, FakeEndpoint(["one", "two"], latency_s=1))
        return scope.cancelled_caught, asyncio.get_running_loop().time()

    assert run_virtual(main()) == (True, 3.5)  # closing takes its second
    assert (env.closed, WaitingEnv.live) == (1, 0)


def test_a_cancelled_rollout_harms_no_sibling():
    async def main():
        rollouts = [
            asyncio.ensure_future(run_rollout(WaitingEnv, TASK, FakeEndpoint(["a", "b", "c"], latency_s=1)))
            for _ in range(3)
        ]
        asyncio.get_running_loop().call_later(2.5, rollouts[1].cancel)
        return await asyncio.gather(*rollouts, return_exceptions=True)

    first, second, third = run_virtual(main())
    assert (first.end, third.end) == (End.success, End.success)
    assert isinstance(second, asyncio.CancelledError)
