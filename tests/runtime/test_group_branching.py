"""Finished groups whose turns are valued before they are trained on."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from turngate.envs.base import Action, End, Observation, Step, Task
from turngate.envs.fakes import CoinFlipEnv, EchoEnv
from turngate.runtime import Agent, Limits, Runtime, Session
from turngate.runtime.agent import check_agent_run
from turngate.runtime.allocation import highest
from turngate.runtime.branch_budget import BranchLimits
from turngate.runtime.branching import branch, turn_surprisal
from turngate.runtime.buffer import Buffer
from turngate.runtime.errors import ConfigError
from turngate.runtime.group_branching import (
    MC_Q,
    MC_VALUE,
    Branching,
    GroupBrancher,
    continuation_groups,
    continuations_of,
    with_branch_values,
)
from turngate.runtime.ledger import Ledger
from turngate.runtime.scheduler import Collection, Collector, TaskStream
from turngate.runtime.staleness import StalenessLimit
from turngate.runtime.testing import FakeEndpoint, run_virtual
from turngate.runtime.types import Group, Message, Trajectory

TASK = Task("coin")


def heads(messages: Sequence[Message]) -> str:
    return "heads"


class Breaking(CoinFlipEnv):
    """Cannot go back to any state."""

    async def restore(self, snapshot: Any, seed: int) -> None:
        raise RuntimeError("no way back")


class First(CoinFlipEnv):
    """What the first action was decides."""

    async def step(self, action: Action) -> Step:
        self.flipped.append(action.text)
        if len(self.flipped) < self.flips:
            return Step(Observation("noted"))
        right = self.flipped[0] == "heads"
        return Step(Observation("done"), {"outcome": float(right)}, End.success if right else End.failure)


def runtime_of(endpoint: FakeEndpoint, **settings: Any) -> Runtime:
    return Runtime(endpoint, limits=Limits(max_turns=20), **settings)


async def group_of(runtime: Runtime, env: Any, members: int = 2) -> Group:
    trajectories = [
        await runtime.rollout(
            env, TASK, seed=n, env_seed=7, trajectory_id=f"g0.{n}", group_id="g0", member=n, keep_snapshots=True
        )
        for n in range(members)
    ]
    return Group(id="g0", task=TASK, order=0, trajectories=tuple(trajectories))


def value(env: Any, endpoint: FakeEndpoint, **options: Any) -> tuple[Group, tuple[Group, ...], GroupBrancher]:
    async def play() -> tuple[Group, tuple[Group, ...], GroupBrancher]:
        runtime = runtime_of(endpoint)
        brancher = GroupBrancher(Branching(**options), runtime, env, seed=1)
        group, more = await brancher.value(await group_of(runtime, env))
        assert (runtime.slots.held, runtime.slots.waiting) == (0, 0)
        return group, more, brancher

    return run_virtual(play())


def test_every_turn_is_valued_and_states_that_members_share_are_valued_once() -> None:
    group, more, brancher = value(lambda: CoinFlipEnv(3), FakeEndpoint(heads), continuations=4)
    one, two = group.trajectories
    for trajectory in (one, two):
        assert all(0 <= turn.scores[MC_VALUE] <= 3 for turn in trajectory.turns)
        assert all(MC_Q not in turn.scores and turn.snapshot is None for turn in trajectory.turns)
    # One environment, one thing to say: the members' histories are the same throughout.
    assert [t.scores for t in one.turns] == [t.scores for t in two.turns]
    assert brancher.ledger.rollouts == 3 * 4
    assert more == ()
    assert brancher.metrics()["branch_rollouts"] == 12
    assert brancher.metrics()["branch_truncated_fraction"] == 0


def test_members_that_part_have_values_of_their_own() -> None:
    endpoint = FakeEndpoint(["heads", "a", "b", "tails", "c", "d", *["tails"] * 60])
    group, _, brancher = value(lambda: First(3), endpoint, continuations=2, estimands=("V", "Q"))
    one, two = group.trajectories
    assert (one.end, two.end) == (End.success, End.failure)
    assert one.turns[0].scores[MC_VALUE] == two.turns[0].scores[MC_VALUE] == 0.0  # shared; from now on it says tails
    assert [turn.scores.get(MC_VALUE) for turn in one.turns[1:]] == [1.0, 1.0]
    assert [turn.scores.get(MC_VALUE) for turn in two.turns[1:]] == [0.0, 0.0]
    assert [turn.scores[MC_Q] for turn in one.turns] == [1.0, 1.0, 1.0]
    assert [turn.scores[MC_Q] for turn in two.turns] == [0.0, 0.0, 0.0]
    assert brancher.ledger.rollouts == 2 * (1 + 2 + 2) + 2 * 6  # V once at the shared start; Q of every action


def test_a_gate_says_which_turns() -> None:
    def gate(trajectory: Trajectory) -> list[int]:
        return highest(turn_surprisal(trajectory), share=0.3)

    group, *_ = value(lambda: CoinFlipEnv(3), FakeEndpoint(heads), continuations=2, turns=gate)
    assert [len(t.turns) for t in group.trajectories] == [3, 3]
    assert [sum(MC_VALUE in turn.scores for turn in t.turns) for t in group.trajectories] == [1, 1]


def test_branches_that_fail_cost_their_values_and_nothing_else() -> None:
    group, more, brancher = value(lambda: Breaking(2), FakeEndpoint(heads), continuations=3, train_on=True)
    assert [t.end.is_failure for t in group.trajectories] == [False, False]
    assert all(not turn.scores for t in group.trajectories for turn in t.turns)
    assert brancher.metrics()["branch_failed"] == 6
    assert more == ()


def test_limits_stop_branches_and_not_the_group() -> None:
    limits = BranchLimits(rollouts=5)
    group, _, brancher = value(lambda: CoinFlipEnv(3), FakeEndpoint(heads), continuations=4, limits=limits)
    assert brancher.ledger.rollouts == 5
    assert brancher.metrics()["branch_refused"] == 7
    assert sum(MC_VALUE in turn.scores for turn in group.trajectories[0].turns) == 2


def test_continuations_are_groups_by_state_with_only_their_own_turns_to_train() -> None:
    group, more, _ = value(lambda: CoinFlipEnv(2), FakeEndpoint(heads), continuations=3, train_on=True)
    assert [g.id for g in more] == ["g0.0.V0", "g0.0.V1"]
    for extra, turn in zip(more, (0, 1), strict=True):
        assert len(extra.trajectories) == 3
        assert extra.restarted_from is not None
        assert (extra.restarted_from.origin, extra.restarted_from.turn) == ("g0.0", turn)
        assert len({t.seed for t in extra.trajectories}) == 3
        for t in extra.trajectories:
            assert len(t.turns) == 2 - turn
            assert sum(sum(s.policy_mask) for s in t.segments) == t.policy_tokens == 6 * len(t.turns)
    assert not {t.id for g in more for t in g.trajectories} & {t.id for t in group.trajectories}


def test_values_and_continuations_of_branches_made_by_hand() -> None:
    async def play() -> None:
        runtime = runtime_of(FakeEndpoint(heads))
        trajectory = (await group_of(runtime, lambda: CoinFlipEnv(2), 1)).trajectories[0]
        found = await branch(
            runtime, lambda: CoinFlipEnv(2), trajectory, turns=[1], continuations=4, estimands=["Q", "V"]
        )
        valued = with_branch_values(found)
        assert valued.turns[0] == trajectory.turns[0]
        assert valued.turns[1].scores == {MC_VALUE: found.v[1].estimate.mean, MC_Q: found.q[1].estimate.mean}
        assert len(continuations_of(found)) == 8
        assert [len(g.trajectories) for g in continuation_groups(found)] == [4, 4]
        # After the recorded action nothing is left to do: such a continuation has no token of the policy.
        assert all(t.policy_tokens == 0 for t in continuation_groups(found)[0].trajectories)

    run_virtual(play())


@pytest.mark.parametrize("bad", [{"continuations": 0}, {"estimands": ()}, {"estimands": ("A",)}])
def test_settings_that_cannot_work_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Branching(**bad)


def test_its_metrics_are_the_documented_ones() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    section = page.partition("\n## Branches\n")[2].partition("\n## ")[0]
    brancher = GroupBrancher(Branching(), runtime_of(FakeEndpoint(heads)), CoinFlipEnv, seed=1)
    assert set(re.findall(r"`(branch_\w+)`", section)) == brancher.metrics().keys()


def test_an_agent_that_runs_its_own_loop_cannot_be_branched_from() -> None:
    async def solve(session: Session, task: Task) -> float:
        return 0.0

    with pytest.raises(ConfigError, match="branching must go with an environment"):
        check_agent_run(Agent(solve), branching=Branching())
    check_agent_run(Agent(solve), branching=None)
    check_agent_run(CoinFlipEnv, branching=Branching())


# --- inside the collector


class Lab:
    """A collector with a branching of its own, over an environment of luck."""

    def __init__(self, env: Any = lambda: CoinFlipEnv(2), *, max_concurrent: int = 4, **options: Any) -> None:
        self.runtime = runtime_of(FakeEndpoint(heads), max_concurrent=max_concurrent)
        self.brancher = GroupBrancher(Branching(**{"continuations": 3} | options), self.runtime, env, seed=1)
        self.buffer, self.ledger = Buffer(groups_per_batch=2, limit=StalenessLimit()), Ledger()
        self.collector = Collector(
            self.runtime,
            env,
            TaskStream([Task(str(n)) for n in range(4)], seed=1),
            buffer=self.buffer,
            ledger=self.ledger,
            config=Collection(group_size=2),
            seed=1,
            brancher=self.brancher,
        )


def test_the_buffer_gets_groups_with_values_and_the_learner_their_continuations() -> None:
    async def play() -> None:
        lab = Lab(train_on=True)
        collecting = asyncio.ensure_future(lab.collector.run())
        batch = await lab.buffer.take()
        assert all(MC_VALUE in turn.scores for g in batch.groups for t in g.trajectories for turn in t.turns)
        extended = lab.collector.with_continuations(batch)
        more = extended.groups[len(batch.groups) :]
        assert extended.groups[: len(batch.groups)] == batch.groups
        assert {g.order for g in more} == {g.order for g in batch.groups}
        assert all(g.restarted_from is not None for g in more)
        lab.ledger.train([t.id for g in batch.groups for t in g.trajectories])  # continuations are in other accounts
        lab.collector.consumed(batch.groups)
        assert lab.collector.with_continuations(batch) == batch
        collecting.cancel()
        await asyncio.wait({collecting})
        assert (lab.runtime.slots.held, lab.runtime.slots.waiting) == (0, 0)

    run_virtual(play())


def test_groups_with_broken_branches_are_trained_on_all_the_same() -> None:
    async def play() -> None:
        lab = Lab(lambda: Breaking(2), max_concurrent=1)
        collecting = asyncio.ensure_future(lab.collector.run())
        batch = await lab.buffer.take()
        assert len(batch.groups) == 2
        assert lab.brancher.metrics()["branch_failed"] > 0
        collecting.cancel()
        await asyncio.wait({collecting})

    run_virtual(play())


def test_cancelled_while_it_branches_a_group_is_dropped_and_nothing_leaks() -> None:
    async def run(ticks: int) -> bool:
        lab = Lab()
        collecting = asyncio.ensure_future(lab.collector.run())
        for _ in range(ticks):
            await asyncio.sleep(0)
        branched = lab.brancher.ledger.rollouts
        collecting.cancel()
        await asyncio.wait({collecting})
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left
        assert (lab.runtime.slots.held, lab.runtime.slots.waiting) == (0, 0)
        assert lab.buffer.statistics().running == 0
        assert lab.brancher.ledger.snapshot_bytes == 0
        lab.ledger.check()
        return branched > 12

    ticks = 1
    while not run_virtual(run(ticks)):
        ticks += 3
    assert ticks > 20


def test_an_environment_without_snapshots_is_refused_by_name() -> None:
    async def play() -> None:
        with pytest.raises(ExceptionGroup) as raised:
            await Lab(lambda: EchoEnv(2)).collector.run()
        assert "EchoEnv has not both" in str(leaf(raised.value))

    run_virtual(play())


def leaf(error: BaseException) -> BaseException:
    return leaf(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
