"""Replay as a substitute for snapshots: sound where the environment says so, checked, and refused elsewhere."""

import asyncio
import functools
import itertools
import random
from typing import Any

import msgspec
import pytest

from turngate.envs import Action, End, Observation, Snapshot, Step, Task
from turngate.envs.fakes import CoinFlipEnv, EchoEnv
from turngate.envs.replay import replayed
from turngate.envs.testing import SnapshotEnvConformance
from turngate.runtime import Limits, Runtime
from turngate.runtime.branch_budget import BranchLedger, branching_cost
from turngate.runtime.branching import branch
from turngate.runtime.testing import FakeEndpoint, run_virtual


class Maze:
    """A number to reach; the start depends on the seed, steps on nothing else."""

    deterministic_step = True

    def __init__(self):
        self.closed = 0

    async def reset(self, task, seed):
        self.at = random.Random(seed).randrange(3)
        return Observation(f"at {self.at}")

    async def step(self, action):
        if action.text not in ("up", "down"):
            return Step(Observation("up or down"), valid=False)
        self.at += 1 if action.text == "up" else -1
        end = End.success if self.at >= 4 else None
        return Step(Observation(f"at {self.at}"), {"outcome": 1.0} if end else {}, end)

    async def aclose(self):
        self.closed += 1


class Coins:
    """Coins of which only the future's luck can be drawn anew."""

    def __init__(self, flips=3):
        self.flips, self.seen = flips, 0

    async def reset(self, task, seed):
        self.rng, self.seen = random.Random(f"coin {seed}"), 0
        return Observation("Heads or tails?")

    def reseed(self, seed: int) -> Any:
        self.rng = random.Random(f"coin {seed}")

    async def step(self, action):
        if action.text not in ("heads", "tails"):
            return Step(Observation("Say heads or tails."), valid=False)
        coin, self.seen = self.rng.choice(("heads", "tails")), self.seen + 1
        end = None if self.seen < self.flips else End.success if coin == action.text else End.failure
        return Step(Observation(coin), {"luck": float(coin == action.text)}, end, state={"unordered": {coin, "edge"}})

    async def aclose(self):
        pass


make_maze = replayed(Maze)
make_coins = replayed(Coins)


class TestReplayedMazeConforms(SnapshotEnvConformance):
    factory_path = f"{__name__}:make_maze"

    def make_env(self):
        return make_maze()

    def make_task(self):
        return Task("maze")

    def make_actions(self):
        return [Action(text) for text in ("up", "down", "jump", "up", "up", "up", "up", "up")]


class PlainCoins(Coins):
    async def step(self, action):
        step = await super().step(action)
        return Step(step.observation, step.rewards, step.end, step.valid)  # a set in `state` is no JSON


make_plain_coins = replayed(PlainCoins)


class TestReplayedCoinsConform(SnapshotEnvConformance):
    stochastic = True
    factory_path = f"{__name__}:make_plain_coins"

    def make_env(self):
        return make_plain_coins()

    def make_task(self):
        return Task("coins")

    def make_actions(self):
        return [Action("heads")] * 3


def suite_for(factory, *, is_stochastic):
    class Suite(TestReplayedCoinsConform):
        stochastic = is_stochastic

        def make_env(self):
            return replayed(factory)()

    return Suite()


async def played(env, *texts, seed=1):
    await env.reset(Task("t"), seed)
    return [await env.step(Action(text)) for text in texts]


def test_an_environment_that_replays_its_luck_fails_the_kit():
    class Stuck(PlainCoins):
        def reseed(self, seed):
            pass  # goes on with the luck of the reset

    with pytest.raises(AssertionError):
        suite_for(
            Stuck, is_stochastic=True
        ).test_branches_see_independent_luck_exactly_when_the_environment_is_stochastic()


def test_luck_declared_away_fails_the_kit():
    class Liar(PlainCoins):
        deterministic_step = True

    with pytest.raises(AssertionError):
        suite_for(
            Liar, is_stochastic=True
        ).test_branches_see_independent_luck_exactly_when_the_environment_is_stochastic()


def test_an_environment_that_declares_nothing_is_refused():
    with pytest.raises(
        TypeError, match=r"needs deterministic_step = True or a method reseed\(seed\): .*EchoEnv has nei"
    ):
        replayed(EchoEnv)()
    assert replayed(EchoEnv, deterministic_step=True)().deterministic_step


async def test_an_environment_that_is_not_reproducible_is_told_by_the_answer_that_differs():
    counter = itertools.count()

    class Counting(EchoEnv):
        deterministic_step = True

        async def step(self, action):
            step = await super().step(action)
            return Step(Observation(str(next(counter)))) if action.text == "count" else step

    env = replayed(Counting)()
    await played(env, "a", "count", "b")
    snapshot = await env.snapshot()
    with pytest.raises(RuntimeError, match=r"answer to action 2 of 3 must be the recorded one.*not reproducible"):
        await env.restore(snapshot, 5)
    with pytest.raises(RuntimeError, match="call reset first"):
        await env.step(Action("c"))  # it is nowhere


async def test_a_first_observation_that_differs_is_told():
    class Unseeded(Maze):
        starts = itertools.count()

        async def reset(self, task, seed):
            return Observation(f"start {next(self.starts)}")

    env = replayed(Unseeded)()
    await played(env)
    with pytest.raises(RuntimeError, match="the first observation must be the recorded one"):
        await env.restore(await env.snapshot(), 5)


def test_the_task_of_a_branch_is_the_episodes_whatever_json_would_make_of_it():
    class Keyed(Maze):
        async def reset(self, task, seed):
            assert task.data == {"start": (2, 3), "key": b"x", "by number": {7: "seven"}}
            return await super().reset(task, seed)

    async def play():
        runtime = Runtime(FakeEndpoint(lambda messages: "up"), limits=Limits(max_turns=9))
        task = Task("maze", data={"start": (2, 3), "key": b"x", "by number": {7: "seven"}})
        trajectory = await runtime.rollout(replayed(Keyed), task, keep_snapshots=True)
        return await branch(runtime, replayed(Keyed), trajectory, continuations=2)

    assert all(of.estimate.count == 2 for of in run_virtual(play()).q.values())


async def test_a_snapshot_of_another_task_is_restored_with_that_task():
    class Named(Maze):
        async def reset(self, task, seed):
            await super().reset(task, seed)
            return Observation(task.prompt)

    env, other = replayed(Named)(), replayed(Named)()
    await env.reset(Task("a", "first"), 1)
    await other.reset(Task("b", "second"), 1)
    await other.restore(await env.snapshot(), 0)
    assert await other.snapshot() == await env.snapshot()


async def test_a_branch_of_a_branch_replays_each_stretch_under_its_own_luck():
    env = make_coins()
    await played(env, "heads")
    await env.restore(await env.snapshot(), 7)
    second = await env.step(Action("heads"))
    snapshot = await env.snapshot()
    thirds = set()
    for seed in range(30):
        other = make_coins()
        await other.restore(snapshot, seed)  # replays the second coin as it fell under seed 7, or it would raise
        third = await other.step(Action("heads"))
        assert third.end is not None
        thirds.add(third.observation.text)
    assert second.end is None
    assert thirds == {"heads", "tails"}


async def test_equal_histories_of_an_environment_without_luck_are_equal_snapshots():
    env, other = make_maze(), make_maze()
    await played(env, "up", "down")
    await played(other, "up")
    await other.restore(await other.snapshot(), 9)
    await other.step(Action("down"))
    assert await other.snapshot() == await env.snapshot()


async def test_restoring_makes_a_fresh_environment_and_closes_the_used_one():
    made = []

    def make():
        made.append(Maze())
        return made[-1]

    env = replayed(make, deterministic_step=True)()
    await played(env, "up")
    snapshot = await env.snapshot()
    await env.restore(snapshot, 0)
    assert [one.closed for one in made] == [1, 0]
    await env.aclose()
    assert [one.closed for one in made] == [1, 1]
    with pytest.raises(RuntimeError, match="call reset first"):
        await env.snapshot()
    unused = replayed(make)()
    await unused.restore(snapshot, 0)
    assert (len(made), unused.env) == (3, made[2])


async def test_after_a_cancelled_step_there_is_no_state_to_save():
    class Slow(Maze):
        async def step(self, action):
            if action.text == "slow":
                await asyncio.sleep(3600)
            return await super().step(action)

    env = replayed(Slow)()
    await played(env, "up")
    step = asyncio.ensure_future(env.step(Action("slow")))
    await asyncio.sleep(0)
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)
    with pytest.raises(RuntimeError, match="between two steps"):
        await env.snapshot()


async def test_texts_that_are_no_unicode_are_replayed():
    env = replayed(EchoEnv, deterministic_step=True)()
    await played(env, "\ud800", "\x00")
    snapshot = await env.snapshot()
    await env.restore(snapshot, 3)
    assert await env.snapshot() == snapshot
    with pytest.raises(ValueError, match=r"must be of kind 'turngate\.replay:turngate\.envs\.fakes\.EchoEnv': got 'x'"):
        await env.restore(Snapshot("x", snapshot.data), 0)


async def test_luck_may_be_drawn_anew_by_a_coroutine():
    class Later(Coins):
        def reseed(self, seed):
            return self.draw_later(seed)

        async def draw_later(self, seed):
            await asyncio.sleep(0)
            self.rng = random.Random(seed)

    env = replayed(functools.partial(Later, flips=1))()
    await played(env)
    snapshot, ends = await env.snapshot(), set()
    for seed in range(30):
        await env.restore(snapshot, seed)
        ends.add((await env.step(Action("heads"))).end)
    assert ends == {End.success, End.failure}


def test_branching_replayed_episodes_costs_the_replays_that_the_formula_says():
    steps = itertools.count()

    class Counted(CoinFlipEnv):
        async def step(self, action):
            next(steps)
            return await super().step(action)

        def reseed(self, seed):
            self._rng = random.Random(seed)

    factory, ledger = replayed(lambda: Counted(6)), BranchLedger()

    async def play():
        runtime = Runtime(FakeEndpoint(lambda messages: "heads"), limits=Limits(max_turns=20))
        trajectory = await runtime.rollout(factory, Task("coin"), seed=3, keep_snapshots=True)
        before = next(steps)
        return before, await branch(runtime, factory, trajectory, continuations=4, ledger=ledger)

    before, found = run_virtual(play())
    cost = branching_cost(6, 4, "Q")
    assert [branches.failed for branches in found.q.values()] == [0] * 6
    assert ledger.env_steps == cost.env_steps
    assert next(steps) - before - 1 == cost.env_steps + cost.replay_steps_without_snapshots


async def test_a_replay_that_is_paid_otherwise_is_told_and_what_is_for_people_may_differ():
    count = itertools.count()

    class Drifts(Maze):
        def __init__(self, pay, state):
            super().__init__()
            self.pay, self.shown = pay, state

        async def step(self, action):
            step = await super().step(action)
            return msgspec.structs.replace(step, rewards={"pay": self.pay()}, state={"at": self.shown()})

    paid = replayed(lambda: Drifts(lambda: float(next(count)), lambda: 0), deterministic_step=True)()
    await played(paid, "up")
    with pytest.raises(RuntimeError, match="the answer to action 1 of 1 must be the recorded one"):
        await paid.restore(await paid.snapshot(), 0)
    shown = replayed(lambda: Drifts(lambda: 0.5, lambda: next(count)), deterministic_step=True)()
    await played(shown, "up")
    snapshot = await shown.snapshot()
    await shown.restore(snapshot, 0)
    assert await shown.snapshot() == snapshot


async def test_after_a_restore_that_failed_the_next_one_begins_with_a_fresh_environment():
    made = []

    class Once(Maze):
        async def step(self, action):
            if self.breaks:
                raise ConnectionError("gone")
            return await super().step(action)

    def make():
        made.append(Once())
        made[-1].breaks = len(made) == 2
        return made[-1]

    source = replayed(make, deterministic_step=True)()
    await played(source, "up")
    snapshot = await source.snapshot()
    env = replayed(make, deterministic_step=True)()
    with pytest.raises(ConnectionError):
        await env.restore(snapshot, 0)
    with pytest.raises(RuntimeError, match="no episode is running"):
        await env.snapshot()
    await env.restore(snapshot, 0)
    assert [one.closed for one in made] == [0, 1, 0]
    assert await env.snapshot() == snapshot


async def test_after_a_reset_that_failed_there_is_no_state_to_save():
    class Fails(Maze):
        async def reset(self, task, seed):
            if seed == 2:
                raise ConnectionError("gone")
            return await super().reset(task, seed)

    env = replayed(Fails, deterministic_step=True)()
    await env.reset(Task("maze"), 1)
    with pytest.raises(ConnectionError):
        await env.reset(Task("maze"), 2)
    with pytest.raises(RuntimeError, match="no episode is running"):
        await env.snapshot()
