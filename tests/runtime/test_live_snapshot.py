"""Snapshots for value functions, who ask from any task."""

import asyncio

import pytest

from turngate.envs.base import End, Task
from turngate.envs.fakes import CoinFlipEnv
from turngate.runtime import Limits, Runtime
from turngate.runtime.errors import EnvError
from turngate.runtime.guidance import Guidance
from turngate.runtime.testing import FakeEndpoint, cancel_at_every_tick, run_virtual

TASK = Task("t", "go")


class Watched(CoinFlipEnv):
    """Takes its time, and says how many have called it at once and how often it was saved."""

    def __init__(self, seen, delay_s=1.0):
        super().__init__(2)
        self.seen, self.delay_s, self.inside = seen, delay_s, 0

    async def _busy(self, what):
        self.inside += 1
        self.seen["most"] = max(self.seen.get("most", 0), self.inside)
        self.seen[what] = self.seen.get(what, 0) + 1
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.inside -= 1

    async def snapshot(self):
        await self._busy("snapshots")
        return await super().snapshot()

    async def step(self, action):
        await self._busy("steps")
        return await super().step(action)


async def play(q, seen, *, delay_s=1.0, **limits):
    runtime = Runtime(FakeEndpoint(lambda _: "heads"), limits=Limits(**limits))
    guidance = Guidance(q, beta=1.0, draws=2, timeout_s=30.0)
    return await runtime.rollout(lambda: Watched(seen, delay_s), TASK, guidance=guidance)


def reasons(trajectory):
    return [turn.decision.fallback for turn in trajectory.turns]


def test_all_who_ask_at_once_get_the_same_snapshot_and_the_environment_is_asked_once():
    async def q(point, candidates):
        first, *others = await asyncio.gather(*(point.snapshot() for _ in range(5)))
        assert all(one is first for one in [*others, await point.snapshot()])
        return [0.0] * len(candidates)

    seen: dict[str, int] = {}
    trajectory = run_virtual(play(q, seen))
    assert reasons(trajectory) == ["", ""]
    assert seen == {"most": 1, "snapshots": 2, "steps": 2}


def test_what_a_value_function_leaves_running_cannot_reach_the_environment_any_more():
    told: list[str] = []
    left: list[asyncio.Task[None]] = []

    async def late(point, wait_s):
        await asyncio.sleep(wait_s)
        try:
            await point.snapshot()
        except EnvError as error:
            told.append(str(error).partition(":")[0])

    async def q(point, candidates):
        left.extend(asyncio.create_task(late(point, wait_s)) for wait_s in (0.0, 0.5))
        await asyncio.sleep(0.1)  # one is in the middle of it, the other has not begun
        return [0.0] * len(candidates)

    async def both():
        trajectory = await play(q, seen)
        await asyncio.gather(*left)
        return trajectory

    seen: dict[str, int] = {}
    trajectory = run_virtual(both())
    assert reasons(trajectory) == ["", ""]
    assert trajectory.end.is_terminal
    assert seen["most"] == 1
    assert sorted(told) == sorted(
        2
        * [
            "snapshot must be there before the decision is made",
            "snapshot must be asked for while the decision is being made",
        ]
    )


def test_a_snapshot_that_hangs_costs_the_guidance_and_is_left_alone_before_the_step():
    async def q(point, candidates):
        await point.snapshot()

    class Hanging(Watched):
        async def snapshot(self):
            await self._busy("snapshots")
            await asyncio.sleep(3600)
            raise AssertionError

    seen: dict[str, int] = {}

    async def hang():
        runtime = Runtime(FakeEndpoint(lambda _: "heads"), limits=Limits(tool_timeout_s=5.0))
        guidance = Guidance(q, beta=1.0, draws=2, timeout_s=30.0)
        return await runtime.rollout(lambda: Hanging(seen), TASK, guidance=guidance)

    trajectory = run_virtual(hang())
    assert trajectory.end in (End.success, End.failure)
    assert all("env.snapshot must finish within 5 s" in why for why in reasons(trajectory))
    assert seen["most"] == 1


@pytest.mark.parametrize("how", ["alone", "gathered"])
def test_an_episode_cancelled_while_a_snapshot_is_taken_leaves_nothing_behind(how):
    async def q(point, candidates):
        if how == "alone":
            await point.snapshot()
        else:
            await asyncio.gather(*(point.snapshot() for _ in candidates))
        return [0.0] * len(candidates)

    class Ticking(Watched):
        async def _busy(self, what):
            for _ in range(3):
                await asyncio.sleep(0)

    async def episode():
        runtime = Runtime(FakeEndpoint(lambda _: "heads"))
        await runtime.rollout(lambda: Ticking({}), TASK, guidance=Guidance(q, beta=1.0, draws=2))

    assert cancel_at_every_tick(episode, lambda tick: None) > 10
