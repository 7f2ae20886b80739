"""The fakes do what they say."""

import asyncio

import pytest

from turngate.envs.base import Action, End, Task
from turngate.envs.testing import CoinFlipEnv, EchoEnv, HangingEnv, RaisingEnv

TASK = Task("fake", "Go.")


async def test_echo_answers_and_ends_in_success():
    env = EchoEnv(turns=2)
    assert (await env.reset(TASK, 0)).text == "Go."
    first, last = await env.step(Action("a")), await env.step(Action("b"))
    assert (first.observation.text, first.end, first.reward) == ("a", None, 0.0)
    assert (last.observation.text, last.end, last.reward) == ("b", End.success, 1.0)
    await env.aclose()
    assert env.closed == 1


async def test_coins_are_fair_and_the_last_guess_is_graded():
    outcomes = []
    for seed in range(400):
        env = CoinFlipEnv(flips=1)
        await env.reset(TASK, seed)
        step = await env.step(Action("heads"))
        assert step.end is (End.success if step.rewards["outcome"] else End.failure)
        outcomes.append(step.rewards["outcome"])
    assert 150 < sum(outcomes) < 250


@pytest.mark.parametrize("at", ["reset", 0, 1, "aclose"])
async def test_the_raising_env_raises_where_told_and_nowhere_else(at):
    env, reached = RaisingEnv(at=at, turns=2), list[str | int]()
    with pytest.raises(RuntimeError, match="broke"):
        await _play(env, reached)
    assert reached == {"reset": [], 0: ["reset"], 1: ["reset", 0], "aclose": ["reset", 0, 1]}[at]


async def test_the_raising_env_raises_what_it_is_given():
    with pytest.raises(ZeroDivisionError):
        await RaisingEnv(at="reset", error=ZeroDivisionError()).reset(TASK, 0)


@pytest.mark.parametrize("at", ["reset", 0, 1, "aclose"])
async def test_the_hanging_env_hangs_until_cancelled(at):
    reached: list[str | int] = []
    playing = asyncio.ensure_future(_play(HangingEnv(at=at, turns=2), reached))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not playing.done()
    assert len(reached) == {"reset": 0, 0: 1, 1: 2, "aclose": 3}[at]
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


async def _play(env, reached):
    await env.reset(TASK, 0)
    reached.append("reset")
    for n in range(2):
        await env.step(Action("x"))
        reached.append(n)
    await env.aclose()
