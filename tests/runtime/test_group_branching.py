"""Finished groups whose turns are valued before they are trained on."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from turngate.envs.base import Action, End, Observation, Step, Task
from turngate.envs.fakes import CoinFlipEnv, EchoEnv
from turngate.runtime import Agent, Limits, Runtime, Session
from turngate.runtime.agent import check_agent_run
from turngate.runtime.allocation import SequentialStop, highest
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
from turngate.runtime.injection import Injection
from turngate.runtime.ledger import Ledger
from turngate.runtime.monte_carlo import Estimate
from turngate.runtime.scheduler import Collection, Collector, TaskStream
from turngate.runtime.staleness import StalenessLimit
from turngate.runtime.testing import FakeEndpoint, run_virtual
from turngate.runtime.testing.learner import CountingLearner
from turngate.runtime.types import Completion, Group, Message, Trajectory

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
        # After the recorded action nothing is left to do: such continuations have no token of the policy.
        assert [g.id for g in continuation_groups(found)] == ["g0.0.V1"]
        assert len(continuation_groups(found)[0].trajectories) == 4

    run_virtual(play())


def test_continuations_without_ids_estimate_and_do_not_train() -> None:
    """A reply that lacks log-probs now and then must not reach a learner, which would refuse the whole batch."""

    class Forgetful(FakeEndpoint):
        async def complete(self, *args: Any, **options: Any) -> Completion:
            found = await super().complete(*args, **options)
            return found if len(self.calls) % 4 else msgspec.structs.replace(found, logprobs=())

    async def play() -> None:
        endpoint = Forgetful(heads)
        runtime = runtime_of(endpoint)
        trajectory = (await group_of(runtime, lambda: CoinFlipEnv(1), 1)).trajectories[0]
        found = await branch(runtime, lambda: CoinFlipEnv(1), trajectory, continuations=8, estimands=["V"])
        assert found.v[0].estimate.count == 8
        assert sum(not one.trainable for one in found.v[0].trajectories) == 2
        (group,) = continuation_groups(found)
        assert len(group.trajectories) == 6
        assert all(one.trainable for one in group.trajectories)

    run_virtual(play())


def test_a_gate_that_names_a_turn_twice_pays_for_it_once() -> None:
    _, _, brancher = value(
        lambda: CoinFlipEnv(3), FakeEndpoint(heads), continuations=2, turns=lambda t: [1, 1], estimands=("Q", "Q")
    )
    assert brancher.ledger.rollouts == 2 * 2


@pytest.mark.parametrize(
    "bad",
    [
        {"continuations": 0},
        {"estimands": ()},
        {"estimands": ("A",)},
        {"limits": 5},
        {"stop": 0.1},
        {"turns": [0, 1]},
    ],
)
def test_settings_that_cannot_work_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(bad))} must be .*: got"):
        Branching(**bad)


def test_continuations_that_see_other_ids_than_their_episode_are_counted() -> None:
    class Dated(FakeEndpoint):
        async def complete(self, messages: Sequence[Message], *args: Any, **options: Any) -> Completion:
            today = Message("system", f"It is day {len(self.calls)}.")
            return await super().complete([today, *messages], *args, **options)

    _, _, brancher = value(lambda: CoinFlipEnv(1), Dated(heads), continuations=3)
    assert brancher.metrics()["branch_other_context"] == 3
    _, _, brancher = value(lambda: CoinFlipEnv(1), FakeEndpoint(heads), continuations=3)
    assert brancher.metrics()["branch_other_context"] == 0


def test_continuations_train_no_learner_that_reads_scores_which_they_lack() -> None:
    class ReadsValues(CountingLearner):
        needs_scores = (MC_VALUE, "progress")

    with pytest.raises(ConfigError, match=r"train_on must go with .* reads mc_value, progress"):
        Branching(train_on=True).check_learner(ReadsValues())
    Branching(train_on=True).check_learner(CountingLearner())
    Branching().check_learner(ReadsValues())


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


# --- what a value is of, and what is counted


async def one_of(runtime: Runtime, env: Any, **options: Any) -> Trajectory:
    return await runtime.rollout(env, TASK, seed=0, keep_snapshots=True, **options)


class Secret(CoinFlipEnv):
    """Says nothing of its coins, which its luck has tossed before the first action."""

    async def reset(self, task: Task, seed: int) -> Observation:
        await super().reset(task, seed)
        self.flipped = [self._rng.choice(("heads", "tails"))]
        return Observation("guess")

    async def step(self, action: Action) -> Step:
        right = self.flipped[0] == "heads"
        return Step(Observation(""), {"outcome": float(right)}, End.success if right else End.failure)


class Deaf(CoinFlipEnv):
    """Hears nothing, and is in one state before the last turn whatever was said."""

    async def step(self, action: Action) -> Step:
        self.flipped.append("x")
        if len(self.flipped) < 2:
            return Step(Observation("on"))
        right = action.text == "heads"
        return Step(Observation("end"), {"outcome": float(right)}, End.success if right else End.failure)


def test_equal_histories_over_different_states_are_valued_apart() -> None:
    async def play() -> Group:
        runtime = runtime_of(FakeEndpoint(heads))
        members = [
            await one_of(runtime, lambda: Secret(1), env_seed=seed, trajectory_id=f"g0.{seed}") for seed in range(8)
        ]
        assert {t.end for t in members} == {End.success, End.failure}
        group = Group(id="g0", task=TASK, order=0, trajectories=tuple(members))
        brancher = GroupBrancher(Branching(continuations=2), runtime, lambda: Secret(1), seed=1)
        return (await brancher.value(group))[0]

    for trajectory in run_virtual(play()).trajectories:
        assert trajectory.turns[0].scores[MC_VALUE] == float(trajectory.end is End.success)


def test_one_state_after_different_histories_is_valued_apart() -> None:
    def same_again(messages: Sequence[Message]) -> str:
        said = [message.content for message in messages if message.role == "assistant"]
        return said[0] if said else next(first)

    first = iter(["heads", "tails", *["heads"] * 20])

    async def play() -> Group:
        runtime = runtime_of(FakeEndpoint(same_again))
        group = await group_of(runtime, lambda: Deaf(2))
        brancher = GroupBrancher(Branching(continuations=2), runtime, lambda: Deaf(2), seed=1)
        return (await brancher.value(group))[0]

    one, two = run_virtual(play()).trajectories
    assert (one.turns[1].scores[MC_VALUE], two.turns[1].scores[MC_VALUE]) == (1.0, 0.0)


def test_values_stand_beside_the_scores_that_a_turn_has() -> None:
    async def play() -> None:
        runtime = runtime_of(FakeEndpoint(heads))
        trajectory = await one_of(runtime, lambda: CoinFlipEnv(1))
        judged = msgspec.structs.replace(
            trajectory, turns=tuple(msgspec.structs.replace(t, scores={"judge": 0.5}) for t in trajectory.turns)
        )
        found = await branch(runtime, lambda: CoinFlipEnv(1), judged, continuations=2)
        assert with_branch_values(found).turns[0].scores == {"judge": 0.5, MC_Q: found.q[0].estimate.mean}

    run_virtual(play())


def test_what_the_policy_did_not_say_has_no_value_unless_asked_for() -> None:
    async def act(shown: Sequence[Message], seed: int) -> str:
        return "tails"

    async def play(**options: Any) -> list[list[str]]:
        runtime = runtime_of(FakeEndpoint(heads))
        injected = await one_of(runtime, lambda: CoinFlipEnv(2), injection=Injection(1.0, act, max_per_episode=1))
        group = Group(id="g0", task=TASK, order=0, trajectories=(injected,))
        brancher = GroupBrancher(Branching(continuations=2, **options), runtime, lambda: CoinFlipEnv(2), seed=1)
        return [list(turn.scores) for turn in (await brancher.value(group))[0].trajectories[0].turns]

    assert run_virtual(play()) == [[], [MC_VALUE]]
    assert run_virtual(play(turns=lambda trajectory: [0])) == [[MC_VALUE], []]


def test_a_stop_ends_the_sampling_of_a_group_too() -> None:
    stop = SequentialStop(half_width=0.5, at_least=2)
    _, _, brancher = value(lambda: First(1), FakeEndpoint(heads), continuations=64, stop=stop)
    assert brancher.ledger.rollouts < 10


def test_what_breaks_while_a_group_branches_is_told_as_itself() -> None:
    class Broken(SequentialStop, frozen=True):
        def is_enough(self, so_far: Estimate) -> bool:
            raise ZeroDivisionError("the stop broke")

    with pytest.raises(ZeroDivisionError, match="the stop broke"):
        value(lambda: First(1), FakeEndpoint(heads), continuations=8, stop=Broken())


def test_metrics_count_steps_failures_and_what_was_cut_short() -> None:
    class Fails(CoinFlipEnv):
        """Cannot go back with every second luck; never ends."""

        async def restore(self, snapshot: Any, seed: int) -> None:
            await super().restore(snapshot, seed)
            if seed % 2:
                raise RuntimeError("no way back")

    async def play() -> GroupBrancher:
        runtime = Runtime(FakeEndpoint(heads), limits=Limits(max_turns=2))
        brancher = GroupBrancher(Branching(continuations=12, estimands=("Q",)), runtime, lambda: Fails(9), seed=1)
        trajectory = await one_of(runtime, lambda: CoinFlipEnv(9))
        await brancher.value(Group(id="g0", task=TASK, order=0, trajectories=(trajectory,)))
        return brancher

    brancher = run_virtual(play())
    told, ledger = brancher.metrics(), brancher.ledger
    assert 0 < told["branch_failed"] < told["branch_rollouts"] == 24
    assert told["branch_truncated_fraction"] == 1.0  # of those that say anything
    assert told["branch_env_steps"] == ledger.env_steps > ledger.model_turns


def test_failed_continuations_and_groups_of_one_do_not_train() -> None:
    class Once(CoinFlipEnv):
        """Can be gone back to a single time."""

        async def restore(self, snapshot: Any, seed: int) -> None:
            await super().restore(snapshot, seed)
            times.append(seed)
            if len(times) > 1:
                raise RuntimeError("no way back")

    times: list[int] = []

    async def play() -> None:
        runtime = runtime_of(FakeEndpoint(heads))
        trajectory = await one_of(runtime, lambda: CoinFlipEnv(1))
        found = await branch(runtime, lambda: Once(1), trajectory, continuations=3, estimands=["V"])
        assert (len(found.v[0].trajectories), found.v[0].failed) == (3, 2)
        assert [one.end.is_failure for one in continuations_of(found)] == [False]
        assert continuation_groups(found) == []

    run_virtual(play())


def test_the_names_of_scores_are_those_of_what_is_estimated() -> None:
    assert Branching().scores == (MC_VALUE,)
    assert Branching(estimands=("Q", "V")).scores == (MC_Q, MC_VALUE)


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


class Unreliable(CoinFlipEnv):
    """Breaks, hangs or lies about every other time that somebody goes back to a state."""

    async def restore(self, snapshot: Any, seed: int) -> None:
        await super().restore(snapshot, seed)
        if seed % 4 == 1:
            raise RuntimeError("no way back")
        if seed % 4 == 2:
            self.flipped = ["never"] * 7
        if seed % 4 == 3:
            await asyncio.Event().wait()


def test_rollouts_are_the_same_to_the_byte_whatever_their_branches_do() -> None:
    def bare(trajectory: Trajectory) -> Trajectory:
        turns = tuple(
            msgspec.structs.replace(turn, scores={}, snapshot=None, model_s=0.0, env_s=0.0) for turn in trajectory.turns
        )
        return msgspec.structs.replace(trajectory, turns=turns, started_s=0.0, ended_s=0.0)

    async def play(is_branched: bool) -> tuple[dict[str, Trajectory], GroupBrancher]:
        lab = Lab(lambda: Unreliable(2), estimands=("V", "Q"), train_on=True)
        if not is_branched:
            lab.collector._brancher = None
        collecting = asyncio.ensure_future(lab.collector.run())
        batch = await lab.buffer.take()
        collecting.cancel()
        await asyncio.wait({collecting})
        assert (lab.runtime.slots.held, lab.runtime.slots.waiting) == (0, 0)
        return {t.id: bare(t) for group in batch.groups for t in group.trajectories}, lab.brancher

    (branched, brancher), (plain, _) = run_virtual(play(True)), run_virtual(play(False))
    assert branched == plain
    assert len(plain) == 4
    assert brancher.metrics()["branch_failed"] > 0
    assert brancher.ledger.snapshot_bytes == 0
