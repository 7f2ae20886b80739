"""What a branch starts from, and what its continuations count: history, age, discounts, bootstraps, stops."""

import asyncio
from typing import Any

import msgspec
import pytest

from turngate.envs.base import Action, End, Observation, Step, Task
from turngate.envs.fakes import CoinFlipEnv, EchoEnv
from turngate.runtime import Limits, Runtime
from turngate.runtime.allocation import SequentialStop
from turngate.runtime.branch_budget import BranchLedger, BranchLimits
from turngate.runtime.branching import Branches, branch, branch_point, play_on, return_of, turn_surprisal
from turngate.runtime.events import RolloutFinished
from turngate.runtime.monte_carlo import Estimate
from turngate.runtime.slots import Slots
from turngate.runtime.testing import FakeEndpoint, run_virtual
from turngate.runtime.types import Trajectory

TASK = Task("steps")


class PaidEnv(CoinFlipEnv):
    """Pays 1, 2, 4 and so on by turn, whatever is said, and ends after `flips` turns."""

    async def step(self, action: Action) -> Step:
        self.flipped.append(action.text)
        taken = len(self.flipped)
        return Step(Observation("on"), {"pay": 2.0 ** (taken - 1)}, End.success if taken == self.flips else None)


def runtime_of(**limits: Any) -> Runtime:
    return Runtime(FakeEndpoint(lambda messages: f"say {len(messages)}"), limits=Limits(**{"max_turns": 20} | limits))


def explore(env: Any, *, limits: dict[str, Any] | None = None, **options: Any) -> Branches:
    async def play() -> Branches:
        runtime = runtime_of(**limits or {})
        trajectory = await runtime.rollout(env, TASK, seed=3, keep_snapshots=True)
        return await branch(runtime, env, trajectory, **options)

    return run_virtual(play())


def test_a_branch_of_a_branch_starts_behind_the_whole_history() -> None:
    async def play() -> None:
        runtime = runtime_of()
        trajectory = await runtime.rollout(lambda: PaidEnv(4), TASK, seed=3, keep_snapshots=True)
        point = branch_point(trajectory, 1)
        second = await play_on(runtime, lambda: PaidEnv(4), point, None, seed=5, keep_snapshots=True)
        again = branch_point(second, second.turns[1].index)
        assert [m.content for m in again.messages] == [m.content for m in trajectory.messages[: len(again.messages)]]
        assert sum(message.role == "assistant" for message in again.messages) == 2
        last = await play_on(runtime, lambda: PaidEnv(4), again, None, seed=6)
        assert [turn.reward for turn in last.turns] == [4.0, 8.0]

    run_virtual(play())


def test_a_point_is_as_old_as_the_oldest_policy_that_led_there_and_took_the_action() -> None:
    async def play() -> None:
        runtime = runtime_of()
        trajectory = await runtime.rollout(lambda: PaidEnv(3), TASK, seed=3, keep_snapshots=True)
        versions = (6, 7, 5)
        aged = msgspec.structs.replace(
            trajectory,
            turns=tuple(
                msgspec.structs.replace(turn, version_sent=version)
                for turn, version in zip(trajectory.turns, versions, strict=True)
            ),
        )
        assert [branch_point(aged, turn).restarted_from.policy_version for turn in range(3)] == [6, 6, 5]

    run_virtual(play())


def test_returns_are_discounted_per_turn_from_the_branch_on() -> None:
    found = explore(lambda: PaidEnv(3), gamma=0.5, continuations=2, estimands=["Q", "V"])
    for side in (found.q, found.v):
        assert {turn: one.estimate.mean for turn, one in side.items()} == {0: 3.0, 1: 4.0, 2: 4.0}
    assert return_of(found.trajectory) == 7.0
    assert return_of(found.trajectory, gamma=0.5) == 3.0


def test_vine_advantages_discount_what_follows_and_count_what_a_limit_left() -> None:
    found = explore(lambda: PaidEnv(3), gamma=0.5, continuations=1, estimands=["V"])
    assert found.vine_advantages(gamma=0.5) == [0.0, 0.0, 0.0]
    assert found.vine_advantages() == [2.0, 2.0, 0.0]
    assert found.vine_advantages(gamma=0.5, last_value=10.0) == [0.0, 0.0, 5.0]


def test_b5_5_only_what_was_cut_short_is_bootstrapped_discounted_by_the_turns_until_there() -> None:
    async def ten(trajectory: Trajectory) -> float:
        return 10.0

    ended = explore(lambda: PaidEnv(2), continuations=2, bootstrap=ten)
    assert (ended.q[0].estimate.mean, ended.q[0].estimate.truncated) == (3.0, 0)
    cut = explore(lambda: PaidEnv(9), limits={"max_turns": 2}, continuations=2, bootstrap=ten, gamma=0.5)
    assert {turn: one.estimate.mean for turn, one in cut.q.items()} == {0: 1 + 0.5 * 2 + 0.25 * 10, 1: 2 + 0.5 * 10}
    assert [one.estimate.truncated for one in cut.q.values()] == [2, 2]


def test_continuations_after_a_stop_go_on_one_by_one_with_new_luck() -> None:
    counts: list[int] = []

    class AtSix(SequentialStop, frozen=True):
        def is_enough(self, so_far: Estimate) -> bool:
            counts.append(so_far.count)
            return so_far.count >= 6

    found = explore(lambda: PaidEnv(1), turns=[0], continuations=64, stop=AtSix(at_least=3))
    assert counts == [3, 4, 5, 6]
    assert len({one.seed for one in found.q[0].trajectories}) == 6
    capped = explore(lambda: PaidEnv(1), turns=[0], continuations=2, stop=AtSix(at_least=3))
    assert capped.q[0].estimate.count == 2


def test_a_cap_that_is_reached_refuses_what_is_left_once() -> None:
    stop = SequentialStop(half_width=1e-9, at_least=2)
    ledger = BranchLedger(BranchLimits(rollouts=3))
    found = explore(lambda: PaidEnv(1), turns=[0], continuations=16, stop=stop, ledger=ledger)
    assert (found.q[0].estimate.count, found.q[0].refused, ledger.refused) == (3, 1, 1)
    assert found.q[0].failed == 0  # what was refused has not failed


def test_branches_run_in_the_slots_they_are_given() -> None:
    async def play() -> tuple[int, int]:
        endpoint = FakeEndpoint(lambda messages: "go", latency_s=1.0)
        runtime = Runtime(endpoint, limits=Limits(max_turns=20), max_concurrent=8)
        trajectory = await runtime.rollout(lambda: PaidEnv(1), TASK, seed=3, keep_snapshots=True)
        slots = Slots(2)
        task = asyncio.ensure_future(
            branch(runtime, lambda: PaidEnv(1), trajectory, continuations=6, estimands=["V"], slots=slots)
        )
        await asyncio.sleep(0.5)
        held = slots.held, runtime.slots.held
        await task
        return held

    assert run_virtual(play()) == (2, 0)


def test_branches_are_named_after_what_they_come_from_and_in_order() -> None:
    found = explore(lambda: PaidEnv(2), turns=[1, 0], continuations=3)
    assert list(found.q) == [0, 1]
    origin = found.trajectory.id
    ids = [one.id for branches in found.q.values() for one in branches.trajectories]
    assert len(set(ids)) == 6
    for turn, branches in found.q.items():
        assert all(one.id.startswith(f"branch.{origin}.{turn}.") for one in branches.trajectories)
        assert {one.group_id for one in branches.trajectories} == {f"branch.{origin}.{turn}"}


def test_an_advantage_of_returns_that_are_no_rates_has_no_interval() -> None:
    found = explore(lambda: PaidEnv(2), continuations=2, estimands=["Q", "V"])
    with pytest.raises(ValueError, match="returns must be 0 or 1 for an interval"):
        found.advantage(0)


def test_what_breaks_while_branching_is_told_as_itself() -> None:
    class Broken(SequentialStop, frozen=True):
        def is_enough(self, so_far: Estimate) -> bool:
            raise ZeroDivisionError("the stop broke")

    with pytest.raises(ZeroDivisionError, match="the stop broke"):
        explore(lambda: PaidEnv(2), continuations=8, stop=Broken())


def test_a_turn_without_tokens_has_no_surprisal() -> None:
    async def play() -> Trajectory:
        return await runtime_of().rollout(lambda: EchoEnv(2), TASK, seed=3)

    trajectory = run_virtual(play())
    first, second = turn_surprisal(trajectory)
    silent = msgspec.structs.replace(trajectory.turns[0], length=0)
    trajectory = msgspec.structs.replace(trajectory, turns=(silent, trajectory.turns[1]))
    assert turn_surprisal(trajectory) == pytest.approx([float("nan"), second], nan_ok=True)
    assert first > 0


def test_continuations_are_told_in_their_order_whichever_ends_first() -> None:
    def seeds(*latencies: float) -> list[int]:
        async def play() -> list[int]:
            waits = iter([0.0, *latencies])
            endpoint = FakeEndpoint(lambda messages: "go", latency_s=lambda: next(waits))
            runtime = Runtime(endpoint, limits=Limits(max_turns=20))
            trajectory = await runtime.rollout(lambda: PaidEnv(1), TASK, seed=3, keep_snapshots=True)
            found = await branch(runtime, lambda: PaidEnv(1), trajectory, continuations=3, estimands=["V"])
            return [one.seed for one in found.v[0].trajectories]

        return run_virtual(play())

    assert seeds(3.0, 2.0, 1.0) == seeds(1.0, 2.0, 3.0)


def test_whoever_listens_hears_of_branches_too() -> None:
    heard: list[str] = []

    async def play() -> tuple[str, ...]:
        runtime = runtime_of()
        runtime.events.subscribe(RolloutFinished, lambda event: heard.append(event.trajectory.id))
        trajectory = await runtime.rollout(lambda: PaidEnv(1), TASK, seed=3, keep_snapshots=True)
        found = await branch(runtime, lambda: PaidEnv(1), trajectory, continuations=2)
        return trajectory.id, *(one.id for one in found.q[0].trajectories)

    assert heard == list(run_virtual(play()))
