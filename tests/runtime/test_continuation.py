"""Single continuations: slots, the ledger, bootstraps, and what is left when they are cut off."""

import asyncio
import itertools
import math

import anyio
import pytest

from turngate.envs.base import Action, Task
from turngate.envs.fakes import CoinFlipEnv
from turngate.runtime import Agent, Limits, Runtime
from turngate.runtime.branch_budget import BranchLedger, BranchLimits
from turngate.runtime.branch_outcomes import branch_outcomes
from turngate.runtime.branching import branch, branch_point, play_on, return_of
from turngate.runtime.continuation import Player, side_by_side
from turngate.runtime.errors import ConfigError, ToolError
from turngate.runtime.guidance import Guidance
from turngate.runtime.monte_carlo_q import MonteCarloQ
from turngate.runtime.testing import FakeEndpoint, run_virtual

TASK = Task("coin")


def coins():
    return CoinFlipEnv(9)


def runtime_of(*, latency_s=0.0, **limits):
    endpoint = FakeEndpoint(lambda messages: "heads", latency_s=latency_s)
    return Runtime(endpoint, limits=Limits(**{"max_turns": 3} | limits))


async def start(runtime, turn=0):
    trajectory = await runtime.rollout(coins, TASK, seed=3, keep_snapshots=True)
    return branch_point(trajectory, turn)


def worth(bootstrap, **limits):
    """Return what a continuation that a limit cut short is worth, and what it was paid."""

    async def play():
        runtime = runtime_of(**limits)
        point = await start(runtime)
        player = Player(runtime, coins, ledger=BranchLedger(), slots=runtime.slots, gamma=0.5, bootstrap=bootstrap)
        played = await player.play(point, None, seed=1)
        assert played.end.is_truncation
        found = await player.worth(played)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left
        return found, return_of(played, gamma=0.5)

    return run_virtual(play())


def test_a_bootstrap_is_discounted_by_the_turns_before_it():
    async def eight(trajectory):
        return 8

    found, paid = worth(eight)
    assert found == paid + 8 / 2**3


@pytest.mark.parametrize(
    ("answer", "why"),
    [(math.nan, "finite number: got nan"), (-math.inf, "finite"), ("high", "a number: got 'high'"), (None, "a number")],
)
def test_a_bootstrap_that_is_no_number_is_refused_by_name(answer, why):
    async def bootstrap(trajectory):
        return answer

    with pytest.raises(ToolError, match=f"the bootstrap must return .*{why}"):
        worth(bootstrap)


@pytest.mark.parametrize("error", [RuntimeError("no critic"), asyncio.CancelledError(), SystemExit(1)])
def test_whatever_a_bootstrap_raises_is_an_error_and_never_a_silence(error):
    async def bootstrap(trajectory):
        raise error

    with pytest.raises(ToolError, match="the bootstrap must not raise"):
        worth(bootstrap)


def test_a_bootstrap_that_swallows_its_cancellation_is_left_behind():
    async def bootstrap(trajectory):
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass

    with pytest.raises(TimeoutError, match="bootstrap"):
        worth(bootstrap, turn_timeout_s=5.0)


def test_what_a_cancelled_continuation_has_used_is_counted():
    async def play():
        runtime, ledger = runtime_of(latency_s=1.0), BranchLedger()
        point = await start(runtime)
        player = Player(runtime, coins, ledger=ledger, slots=runtime.slots)
        with anyio.move_on_after(2.5):
            await player.play(point, None, seed=1)
        return ledger, runtime.slots.held

    ledger, held = run_virtual(play())
    # Two of its three turns; of the reply that never came nobody knows the tokens.
    assert (ledger.rollouts, ledger.model_turns, ledger.model_tokens, ledger.env_steps, held) == (1, 2, 12, 2, 0)


def test_decisions_that_run_out_of_time_run_into_the_cap_on_tokens_all_the_same():
    async def play():
        runtime = runtime_of(latency_s=1.0, max_turns=8)
        q = MonteCarloQ(runtime, coins, continuations=1, ledger=BranchLedger(BranchLimits(model_tokens=24)))
        guidance = Guidance(q, beta=1.0, draws=2, timeout_s=2.5)
        trajectory = await runtime.rollout(coins, TASK, seed=1, guidance=guidance)
        return [turn.decision.fallback for turn in trajectory.turns], q.ledger

    why, ledger = run_virtual(play())
    assert why[:2] == ["timeout"] * 2
    assert "every candidate must have" in why[-1]
    assert 24 <= ledger.model_tokens <= 36


def test_a_hard_cap_on_rollouts_is_met_exactly_however_many_ask_at_once():
    async def play(cap):
        runtime, ledger = runtime_of(), BranchLedger(BranchLimits(rollouts=cap))
        trajectory = await runtime.rollout(coins, TASK, seed=3, keep_snapshots=True)
        some = [branch(runtime, coins, trajectory, continuations=5, ledger=ledger, seed=seed) for seed in range(8)]
        found = [of for one in await asyncio.gather(*some) for of in one.q.values()]
        assert sum(len(of.trajectories) for of in found) == ledger.rollouts
        assert sum(of.refused for of in found) == 8 * 3 * 5 - ledger.rollouts
        assert all(of.failed == 0 for of in found)
        return ledger.rollouts

    assert [run_virtual(play(cap)) for cap in (0, 1, 59, 119, 120, 121)] == [0, 1, 59, 119, 120, 120]


def test_an_agent_with_a_loop_of_its_own_is_refused():
    async def solve(session, task):
        return 0.0

    async def play():
        runtime, agent = runtime_of(), Agent(solve)
        trajectory = await runtime.rollout(coins, TASK, seed=3, keep_snapshots=True)
        with pytest.raises(ConfigError, match="restarts must go with an environment"):
            await play_on(runtime, agent, branch_point(trajectory, 0), Action("heads"), seed=1)
        with pytest.raises(ConfigError, match="branching must go with an environment"):
            await branch(runtime, agent, trajectory)
        with pytest.raises(ConfigError, match="branching must go with an environment"):
            await branch_outcomes(runtime, agent, trajectory, outcomes=1, continuations=2)
        with pytest.raises(ConfigError, match="branching must go with an environment"):
            MonteCarloQ(runtime, agent)
        with pytest.raises(ConfigError, match="environment must be a class"):
            await branch(runtime, coins(), trajectory)

    run_virtual(play())


def test_parts_of_another_kind_are_refused_by_name():
    async def play():
        runtime = runtime_of()
        trajectory = await runtime.rollout(coins, TASK, seed=3, keep_snapshots=True)
        with pytest.raises(ConfigError, match=r"runtime must be a Runtime .*: got .*FakeEndpoint.*; an endpoint goes"):
            await branch(runtime.endpoint, coins, trajectory)
        with pytest.raises(ConfigError, match="runtime must be a Runtime"):
            await branch_outcomes(runtime.endpoint, coins, trajectory)
        with pytest.raises(ConfigError, match="runtime must be a Runtime"):
            await play_on(runtime.endpoint, coins, branch_point(trajectory, 0), None, seed=1)
        with pytest.raises(ConfigError, match="runtime must be a Runtime"):
            MonteCarloQ(runtime.endpoint, coins)
        with pytest.raises(ConfigError, match=r"ledger must be BranchLedger\(...\) or None: got BranchLimits\("):
            await branch(runtime, coins, trajectory, ledger=BranchLimits(rollouts=3))
        with pytest.raises(ConfigError, match=r"slots must be Slots\(...\) or None: got 4"):
            await branch(runtime, coins, trajectory, slots=4)
        with pytest.raises(ConfigError, match=r"stop must be SequentialStop\(...\) or None: got 0.1"):
            await branch(runtime, coins, trajectory, stop=0.1)

    run_virtual(play())


def test_items_run_side_by_side_and_never_more_than_allowed():
    running, most, done = 0, 0, []

    async def run(item):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(1.0)
        running -= 1
        done.append(item)

    async def play():
        await side_by_side(range(10), run, at_once=3)
        return asyncio.get_running_loop().time()

    assert run_virtual(play()) == 4.0
    assert (most, sorted(done)) == (3, list(range(10)))


def test_the_first_error_ends_the_others_and_comes_by_itself():
    done = []

    async def run(item):
        await asyncio.sleep(0.5 if item == 2 else 1.0)
        if item == 2:
            raise ValueError(f"item {item}")
        done.append(item)

    async def play():
        with pytest.raises(ValueError, match="item 2"):
            await side_by_side(itertools.count(), run, at_once=2)
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert not run_virtual(play())
    assert done == [0, 1]


def test_a_cancellation_that_nobody_asked_for_costs_one_item():
    done = []

    async def run(item):
        if item == 1:
            raise asyncio.CancelledError
        done.append(item)

    run_virtual(side_by_side(range(4), run, at_once=1))
    assert done == [0, 2, 3]
