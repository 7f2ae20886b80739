"""Monte Carlo values by branching from snapshots."""

import asyncio
import contextlib
import itertools
import math
from random import Random
from typing import Any

import msgspec
import pytest

from turngate.envs.base import Action, End, Observation, Step, Task
from turngate.envs.fakes import CoinFlipEnv
from turngate.runtime import Limits, Runtime
from turngate.runtime.allocation import SequentialStop
from turngate.runtime.branch_budget import BranchLedger, BranchLimits, branching_cost
from turngate.runtime.branching import branch, branch_point, play_on, turn_surprisal
from turngate.runtime.errors import ConfigError
from turngate.runtime.guidance import Guidance
from turngate.runtime.monte_carlo_q import MonteCarloQ
from turngate.runtime.testing import FakeEndpoint, cancel_at_every_tick, run_virtual

TASK = Task("coin")


class SureCoinEnv(CoinFlipEnv):
    """The coin is always heads: what is guessed decides."""

    async def step(self, action):
        step = await super().step(action)
        if step.end is None:
            return step
        right = action.text == "heads"
        return Step(step.observation, {"outcome": float(right)}, End.success if right else End.failure)


class WrittenEnv(CoinFlipEnv):
    """What the first action was decides, and is part of the state."""

    async def step(self, action):
        self.flipped.append(action.text)
        if len(self.flipped) < self.flips:
            return Step(Observation("noted"))
        right = self.flipped[0] == "heads"
        return Step(Observation("done"), {"outcome": float(right)}, End.success if right else End.failure)


def says(*texts):
    """An endpoint that says one thing, or different things by turn of the history."""

    def answer(messages):
        taken = sum(message.role == "assistant" for message in messages)
        return texts[min(taken, len(texts) - 1)]

    return FakeEndpoint(answer)


def runtime_of(endpoint, **settings):
    return Runtime(endpoint, limits=settings.pop("limits", Limits(max_turns=20)), **settings)


async def record(runtime, env, seed=3):
    trajectory = await runtime.rollout(env, TASK, seed=seed, keep_snapshots=True)
    assert not trajectory.end.is_failure, trajectory.error
    return trajectory


def explore(env, endpoint, *, settings=None, **options):
    async def play():
        runtime = runtime_of(endpoint, **(settings or {}))
        trajectory = await record(runtime, env)
        found = await branch(runtime, env, trajectory, **options)
        assert (runtime.slots.held, runtime.slots.waiting) == (0, 0)
        return found

    return run_virtual(play())


def test_eight_continuations_at_twenty_turns_cost_exactly_what_the_formula_says():
    for estimand in ("Q", "V"):
        ledger = BranchLedger()
        found = explore(lambda: CoinFlipEnv(20), says("heads"), estimands=[estimand], continuations=8, ledger=ledger)
        cost = branching_cost(20, 8, estimand)
        assert (ledger.rollouts, ledger.model_turns, ledger.env_steps) == (160, cost.model_turns, cost.env_steps)
        assert ledger.model_tokens == cost.model_turns * 6  # "heads" and the end
        assert ledger.snapshot_bytes == 0 < ledger.most_snapshot_bytes
        assert len(found.q if estimand == "Q" else found.v) == 20


def test_p14_continuations_have_independent_luck_and_the_mean_is_the_coins():
    found = explore(lambda: CoinFlipEnv(1), says("heads"), estimands=["Q", "V"], continuations=400)
    q, v = found.q[0].estimate, found.v[0].estimate
    assert q.mean == pytest.approx(0.5, abs=0.1)
    assert 0 < (q.successes or 0) < 400
    ends = {kind: [t.end for t in branches.trajectories] for kind, branches in (("q", found.q[0]), ("v", found.v[0]))}
    assert ends["q"] != ends["v"]
    low, high = v.wilson()
    assert low < 0.5 < high


def test_b5_1_an_action_that_is_tried_again_meets_new_luck():
    """eleurent/rl-agents#43: a copied environment replays one outcome."""
    found = explore(lambda: CoinFlipEnv(2), says("heads"), continuations=40, turns=[1])
    assert {t.end for t in found.q[1].trajectories} == {End.success, End.failure}


def test_p14_b5_2_no_two_continuations_share_the_samplers_seed():
    """modelscope/ms-swift#7858, verl#5179, SkyRL#1015, AReaL#1524."""
    endpoint = says("heads")
    explore(lambda: CoinFlipEnv(3), endpoint, continuations=8, estimands=["Q", "V"])
    seeds = [call.seed for call in endpoint.calls]
    assert len(set(seeds)) == len(seeds)


def test_b5_3_the_same_seed_branches_the_same_way_and_another_one_differently():
    def outcomes(seed):
        found = explore(lambda: CoinFlipEnv(2), says("heads"), continuations=20, seed=seed)
        return [t.end for b in found.q.values() for t in b.trajectories]

    assert outcomes(1) == outcomes(1)
    assert outcomes(1) != outcomes(2)


def test_q_takes_the_recorded_action_and_v_lets_the_policy_choose():
    async def play():
        tails = runtime_of(says("tails"))
        trajectory = await record(tails, lambda: SureCoinEnv(1))
        heads = runtime_of(says("heads"))
        return await branch(heads, lambda: SureCoinEnv(1), trajectory, estimands=["Q", "V"], continuations=4)

    found = run_virtual(play())
    assert (found.q[0].estimate.mean, found.v[0].estimate.mean) == (0.0, 1.0)
    value, (_, high) = found.advantage(0)
    assert value == -1.0
    assert high < 0
    assert [turn.injected for turn in found.q[0].trajectories[0].turns] == [True]


def test_continuations_start_behind_the_recorded_history():
    endpoint = says("heads", "tails", "tails")
    found = explore(lambda: WrittenEnv(3), endpoint, continuations=2, turns=[1], estimands=["Q", "V"])
    for branches in (found.q[1], found.v[1]):
        assert branches.estimate.mean == 1.0
        for trajectory in branches.trajectories:
            said = [m.content for m in trajectory.messages if m.role == "assistant"]
            assert said == ["heads", "tails", "tails"]
            assert trajectory.restarted_from.turn == 1
            assert trajectory.restarted_from.reason == "branch"


def test_b5_5_truncated_continuations_are_reported_or_bootstrapped_never_failures():
    settings = {"limits": Limits(max_turns=2)}
    found = explore(lambda: CoinFlipEnv(9), says("heads"), settings=settings, turns=[0], continuations=4)
    assert found.q[0].estimate.truncated_fraction == 1.0

    async def half(trajectory):
        return 0.5

    bootstrapped = explore(
        lambda: CoinFlipEnv(9), says("heads"), settings=settings, turns=[0], continuations=4, bootstrap=half
    )
    paid = [sum(t.reward for t in one.turns) for one in bootstrapped.q[0].trajectories]
    assert bootstrapped.q[0].estimate.mean == pytest.approx(sum(paid) / 4 + 0.5)


def test_tokens_before_a_branch_count_towards_the_episodes_limit():
    settings = {"limits": Limits(max_turns=20, max_policy_tokens=24)}  # four times "heads" and its end
    found = explore(lambda: CoinFlipEnv(9), says("heads"), settings=settings, estimands=["V"], continuations=2)
    assert [len(b.trajectories[0].turns) for b in found.v.values()] == [4, 3, 2, 1]


def test_a_recorded_action_counts_the_tokens_that_it_was_sampled_with():
    settings = {"limits": Limits(max_turns=20, max_policy_tokens=20)}  # three times "heads" and its end, and "he"
    found = explore(lambda: CoinFlipEnv(9), says("heads"), settings=settings, continuations=2)
    assert [turn.length for turn in found.trajectory.turns] == [6, 6, 6, 2]
    for t, branches in found.q.items():
        for one in branches.trajectories:
            assert [turn.length for turn in one.turns] == [
                0,
                *(turn.length for turn in found.trajectory.turns[t + 1 :]),
            ]
            assert one.end is found.trajectory.end is End.token_limit


def test_tokens_count_in_branches_of_branches():
    async def play():
        runtime = runtime_of(says("heads"), limits=Limits(max_turns=20, max_policy_tokens=24))
        trajectory = await record(runtime, lambda: CoinFlipEnv(9))
        point = branch_point(trajectory, 1, with_action=True)
        action = Action(trajectory.turns[1].text)
        one = await play_on(runtime, lambda: CoinFlipEnv(9), point, action, seed=1, keep_snapshots=True)
        again = await branch(runtime, lambda: CoinFlipEnv(9), one, turns=[2], estimands=["V"], continuations=1)
        return len(one.turns), len(again.v[2].trajectories[0].turns)

    assert run_virtual(play()) == (3, 1)


def test_a_bootstrap_that_never_answers_ends_the_branches_and_leaves_nothing():
    async def never(trajectory):
        await asyncio.Event().wait()

    async def play():
        runtime = runtime_of(says("heads"), limits=Limits(max_turns=2, turn_timeout_s=7.0))
        trajectory = await record(runtime, lambda: CoinFlipEnv(9))
        with pytest.raises(TimeoutError):
            await branch(runtime, lambda: CoinFlipEnv(9), trajectory, continuations=4, bootstrap=never)
        return runtime.slots.held, asyncio.get_running_loop().time()

    held, now = run_virtual(play())
    assert (held, now) == (0, 7.0)


def test_a_hard_cap_stops_new_branches_and_says_how_many():
    ledger = BranchLedger(BranchLimits(rollouts=10))
    found = explore(lambda: CoinFlipEnv(3), says("heads"), continuations=8, ledger=ledger)
    assert ledger.rollouts == 10
    assert sum(len(b.trajectories) for b in found.q.values()) == 10
    assert sum(b.refused for b in found.q.values()) == 14


def test_snapshots_beyond_the_cap_are_not_held():
    ledger = BranchLedger(BranchLimits(snapshot_bytes=1))
    found = explore(lambda: CoinFlipEnv(2), says("heads"), continuations=4, ledger=ledger)
    assert (ledger.rollouts, [b.refused for b in found.q.values()]) == (0, [4, 4])
    assert math.isnan(found.q[0].estimate.mean)


def test_sampling_stops_once_it_is_precise_enough():
    stop = SequentialStop(half_width=0.3, at_least=4)
    found = explore(lambda: SureCoinEnv(1), says("heads"), continuations=64, stop=stop)
    assert len(found.q[0].trajectories) < 10
    assert found.q[0].estimate.mean == 1.0


def test_failing_branches_are_counted_and_harm_nothing():
    class Breaks(CoinFlipEnv):
        async def restore(self, snapshot, seed):
            await super().restore(snapshot, seed)
            if seed % 2:
                raise RuntimeError("cannot restore")

    found = explore(lambda: Breaks(1), says("heads"), continuations=40)
    branches = found.q[0]
    assert 0 < branches.failed < 40
    assert branches.estimate.count == 40 - branches.failed


def test_branches_wait_behind_the_main_rollouts():
    async def play():
        endpoint = FakeEndpoint(lambda messages: "heads", latency_s=1.0)
        runtime = runtime_of(endpoint, max_concurrent=1)
        trajectory = await record(runtime, lambda: CoinFlipEnv(1))
        ended = []

        async def main(index):
            async with runtime.slots.hold(priority=index):
                await runtime.rollout(lambda: CoinFlipEnv(1), TASK, seed=index)
                ended.append(asyncio.get_running_loop().time())

        options = {"continuations": 4, "estimands": ["V"]}
        branches = asyncio.ensure_future(branch(runtime, lambda: CoinFlipEnv(1), trajectory, **options))
        await asyncio.sleep(0.5)
        await asyncio.gather(*(main(index) for index in range(3)))
        found = await branches
        return ended, sorted(t.ended_s for t in found.v[0].trajectories)

    mains, branches = run_virtual(play())
    # One branch had begun before the main rollouts came; the others waited for all of them.
    assert (mains, branches) == ([3.0, 4.0, 5.0], [2.0, 6.0, 7.0, 8.0])


def test_cancelled_at_every_moment_branches_leave_no_slot_and_no_environment():
    state: dict[str, Any] = {}

    async def play():
        state["made"] = made = []
        state["ledger"] = BranchLedger()

        def env():
            made.append(CoinFlipEnv(2))
            return made[-1]

        state["runtime"] = runtime = runtime_of(says("heads"), max_concurrent=2)
        trajectory = await record(runtime, env)
        await branch(runtime, env, trajectory, continuations=3, estimands=["Q", "V"], ledger=state["ledger"])

    def check(tick):
        slots = state["runtime"].slots
        assert (slots.held, slots.waiting) == (0, 0), tick
        assert all(env.closed == 1 for env in state["made"]), tick
        assert state["ledger"].snapshot_bytes == 0

    assert cancel_at_every_tick(play, check) > 20


def test_a_killed_branch_costs_its_estimate_and_no_main_rollout():
    async def play():
        runtime = runtime_of(FakeEndpoint(lambda messages: "heads", latency_s=1.0), max_concurrent=8)
        trajectory = await record(runtime, lambda: CoinFlipEnv(2))
        task = asyncio.ensure_future(branch(runtime, lambda: CoinFlipEnv(2), trajectory, continuations=4))
        mains = [asyncio.ensure_future(runtime.rollout(lambda: CoinFlipEnv(2), TASK, seed=s)) for s in range(4)]
        await asyncio.sleep(0.5)
        task.cancel()
        done = await asyncio.gather(*mains)
        return [t.end.is_terminal for t in done], runtime.slots.held

    assert run_virtual(play()) == ([True] * 4, 0)


def test_episodes_without_snapshots_and_turns_that_do_not_exist_are_refused():
    async def play(**options):
        runtime = runtime_of(says("heads"))
        trajectory = await runtime.rollout(lambda: CoinFlipEnv(2), TASK, **options)
        return trajectory

    trajectory = run_virtual(play())
    with pytest.raises(ConfigError, match=r"branching needs a snapshot before every turn: got none .*keep_snapshots"):
        branch_point(trajectory, 0)
    with pytest.raises(ConfigError, match="turns must be among the episode's: got 7"):
        branch_point(trajectory, 7)


def test_surprisal_points_at_the_turns_where_the_policy_hesitated():
    async def play():
        runtime = runtime_of(says("heads", "tails"))
        return await runtime.rollout(lambda: CoinFlipEnv(2), TASK)

    trajectory = run_virtual(play())
    expected = [
        -sum(trajectory.segments[0].logprob_values()[t.start : t.start + t.length]) / t.length for t in trajectory.turns
    ]
    assert turn_surprisal(trajectory) == pytest.approx(expected)


def test_turns_and_estimands_named_twice_count_once_and_unknown_ones_are_refused():
    ledger = BranchLedger()
    found = explore(
        lambda: CoinFlipEnv(3), says("heads"), turns=[1, 0, 1], estimands=["V", "V"], continuations=2, ledger=ledger
    )
    assert (list(found.v), found.q, ledger.rollouts) == ([0, 1], {}, 4)
    for bad, why in (
        ({"estimands": ["A"]}, "estimands must be Q, V or both: got .'A'."),
        ({"estimands": []}, "estimands must be Q, V or both"),
        ({"continuations": 0}, "continuations must be 1 or more: got 0"),
        ({"turns": [0, -1]}, "turns must be among the episode's: got -1"),
        ({"turns": 1}, "turns must be indices of turns, or None for all: got 1"),
    ):
        ledger = BranchLedger()
        with pytest.raises(ConfigError, match=why):
            explore(lambda: CoinFlipEnv(3), says("heads"), ledger=ledger, **bad)
        assert ledger.rollouts == 0


def test_an_episode_without_its_messages_is_refused_before_anything_runs():
    async def play():
        return await record(runtime_of(says("heads")), lambda: CoinFlipEnv(2))

    bare = msgspec.structs.replace(run_virtual(play()), messages=())
    with pytest.raises(ConfigError, match=r"needs the episode's messages: expected 2 of the assistant, got 0"):
        branch_point(bare, 0)


def test_continuations_that_a_stray_cancellation_ended_have_failed_and_no_other_has():
    calls = itertools.count()

    def answer(messages):
        return asyncio.CancelledError() if next(calls) % 5 == 3 else "heads"

    found = explore(lambda: CoinFlipEnv(2), FakeEndpoint(answer), continuations=10, estimands=["V"])
    for branches in found.v.values():
        assert branches.failed > 0 == branches.refused
        assert branches.failed + branches.estimate.count == 10


class Unkind(CoinFlipEnv):
    """Once `trouble` is there, each method may raise, hang, cancel itself or its task, or refuse to be cancelled."""

    trouble: Random | None = None

    async def _meet(self, name):
        if self.trouble is None or self.trouble.random() > 0.25:
            return
        kind = self.trouble.choice(("raise", "exit", "own", "task", "hang", "swallow"))
        if kind in ("raise", "exit", "own"):
            raise {"raise": RuntimeError(name), "exit": SystemExit(3), "own": asyncio.CancelledError()}[kind]
        if kind == "task":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        elif kind == "hang":
            await asyncio.Event().wait()
        else:
            for _ in range(9):
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(1.0)

    async def reset(self, task, seed):
        await self._meet("reset")
        return await super().reset(task, seed)

    async def step(self, action):
        await self._meet("step")
        return await super().step(action)

    async def snapshot(self):
        await self._meet("snapshot")
        return await super().snapshot()

    async def restore(self, snapshot, seed):
        await self._meet("restore")
        await super().restore(snapshot, seed)

    async def aclose(self):
        await super().aclose()
        await self._meet("aclose")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("when_s", [0.01, 0.7, 2.5, 7.0, math.inf])
def test_environments_that_do_everything_wrong_leak_nothing_and_spare_the_others(seed, when_s):
    limits = Limits(max_turns=5, tool_timeout_s=2.0, turn_timeout_s=4.0, rollout_timeout_s=20.0, close_timeout_s=3.0)

    async def play():
        made, ledger, trouble = [], BranchLedger(), Random(seed)

        def env():
            made.append(Unkind(2))
            return made[-1]

        runtime = runtime_of(FakeEndpoint(lambda messages: "heads", latency_s=0.01), limits=limits, max_concurrent=4)
        trajectory = await record(runtime, env)
        q = MonteCarloQ(runtime, env, continuations=2, ledger=ledger, max_concurrent=3)
        guidance = Guidance(q, beta=1.0, draws=2, timeout_s=6.0, grace_s=2.0)
        Unkind.trouble = trouble
        hostile = [
            asyncio.ensure_future(branch(runtime, env, trajectory, continuations=3, ledger=ledger)),
            asyncio.ensure_future(runtime.rollout(lambda: CoinFlipEnv(3), TASK, seed=1, guidance=guidance)),
        ]
        mains = [asyncio.ensure_future(runtime.rollout(lambda: CoinFlipEnv(2), TASK, seed=s)) for s in (4, 5)]
        await asyncio.wait(hostile, timeout=None if when_s == math.inf else when_s)
        for task in hostile:
            task.cancel()
        await asyncio.wait(hostile)
        assert all(task.cancelled() or task.exception() is None for task in hostile)
        kind = [(t.end, [turn.observation for turn in t.turns]) for t in await asyncio.gather(*mains)]
        await asyncio.sleep(30.0)  # what was left behind ends by itself
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert (runtime.slots.held, runtime.slots.waiting, q._player.slots.held, ledger.snapshot_bytes) == (0, 0, 0, 0)
        assert all(one.closed == 1 for one in made)
        return kind

    async def plain():
        runtime = runtime_of(says("heads"))
        return [await runtime.rollout(lambda: CoinFlipEnv(2), TASK, seed=s) for s in (4, 5)]

    try:
        kind = run_virtual(play())
    finally:
        Unkind.trouble = None
    assert kind == [(t.end, [turn.observation for turn in t.turns]) for t in run_virtual(plain())]


def test_branches_read_as_one_line_and_say_what_was_not_estimated() -> None:
    async def play():
        runtime = Runtime(says("heads"), limits=Limits(max_turns=9))
        trajectory = await runtime.rollout(lambda: SureCoinEnv(1), TASK, keep_snapshots=True, trajectory_id="one")
        return await branch(runtime, lambda: SureCoinEnv(1), trajectory, continuations=4)

    found = run_virtual(play())
    assert repr(found) == "<Branches of one: Q of 1 turns, V of 0>"
    assert repr(found.q[0]) == "<Q of turn 0: 1.000 ± 0.000 over 4>"
    lost = msgspec.structs.replace(found.q[0], failed=1, refused=2)
    assert repr(lost).endswith("over 4, 3 failed or refused>")
    with pytest.raises(KeyError, match=r"V must have been estimated: turn 0 is not among \[\]; branch with its turn"):
        found.advantage(0)
    with pytest.raises(KeyError, match=r"Q must have been estimated: turn 7 is not among \[0\]"):
        found.advantage(7)
    with pytest.raises(KeyError, match="V must have been estimated"):
        found.vine_advantages()
