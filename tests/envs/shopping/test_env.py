"""The shop as an environment: conformance, latency, and what cancellation leaves behind."""

import asyncio
import functools

import pytest

from turngate.envs.base import Action, End
from turngate.envs.latency import HeavyTail, compute_latency_s
from turngate.envs.shopping import Shop, ShoppingEnv, ShoppingToolEnv, running_example
from turngate.envs.testing import SnapshotEnvConformance

WALK = [
    'search["hiking backpack"]',
    'click["item_1"]',
    "back",
    'search["red hiking backpack"]',
    'select["red"]',
    'click["item_3"]',
    'select["green"]',
    'select["red"]',
    'buy["item_3"]',
]


class TestConformance(SnapshotEnvConformance):
    stochastic = True

    def make_env(self):
        return ShoppingEnv()

    def make_task(self):
        return running_example()

    def make_actions(self):
        return [Action(text) for text in WALK]


async def test_an_episode_is_the_shops():
    env, shop = ShoppingEnv(), Shop(running_example(), 6)
    observation = await env.reset(running_example(), 6)
    assert observation.text == "Find a red hiking backpack under $80, rated at least four stars."
    assert (observation.system, observation.tools) == ("", ())
    steps = [await env.step(Action(text)) for text in WALK]
    assert steps == [shop.act(text) for text in WALK]
    assert steps[-1].end is End.success


async def test_instructions_name_every_action():
    observation = await ShoppingEnv(instructions=True).reset(running_example(), 0)
    assert all(verb in observation.system for verb in ("search[", "click[", "select[", "back", "buy["))


async def test_each_step_waits_its_latency_and_reset_does_not():
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    env = ShoppingEnv(latency_s=0.5, sleep=sleep)
    await env.reset(running_example(), 0)
    assert waits == []
    for text in WALK[:3]:
        await env.step(Action(text))
    assert waits == [0.5, 0.5, 0.5]


async def test_heavy_tailed_latency_follows_from_seed_and_step():
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    tail = HeavyTail(mean_s=0.05)
    for seed in (1, 2, 1):
        env = ShoppingEnv(latency_s=tail, sleep=sleep)
        await env.reset(running_example(), seed)
        for text in WALK[:2]:
            await env.step(Action(text))
    assert waits == [compute_latency_s(tail, seed, step) for seed in (1, 2, 1) for step in (0, 1)]
    assert waits[:2] == waits[4:] != waits[2:4]


async def test_a_step_cancelled_while_waiting_leaves_the_shop_as_it_was():
    env = ShoppingEnv(latency_s=3600.0)
    await env.reset(running_example(), 0)
    before = await env.snapshot()
    step = asyncio.ensure_future(env.step(Action(WALK[0])))
    await asyncio.sleep(0)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert await env.snapshot() == before


@pytest.mark.parametrize("make", [ShoppingEnv, ShoppingToolEnv])
async def test_stepping_before_reset_or_after_aclose_is_the_callers_bug(make):
    env = make()
    with pytest.raises(RuntimeError, match="call reset first"):
        await env.step(Action("back"))
    await env.reset(running_example(), 0)
    await env.aclose()
    with pytest.raises(RuntimeError, match="call reset first"):
        await env.snapshot()


def test_a_partial_of_the_class_is_a_factory():
    assert isinstance(functools.partial(ShoppingEnv, latency_s=HeavyTail(mean_s=0.05))(), ShoppingEnv)
