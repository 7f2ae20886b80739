"""Several outcomes of an action, several continuations of each."""

import math
from random import Random
from typing import Any

import pytest

from turngate.envs.base import End, Observation, Step, Task
from turngate.envs.fakes import CoinFlipEnv
from turngate.runtime import Limits, Runtime
from turngate.runtime.branch_budget import BranchLedger, BranchLimits
from turngate.runtime.branch_outcomes import branch_outcomes
from turngate.runtime.branching import branch
from turngate.runtime.errors import ConfigError
from turngate.runtime.monte_carlo import two_level_variance
from turngate.runtime.slots import Slots
from turngate.runtime.testing import FakeEndpoint, cancel_at_every_tick, run_virtual

TASK = Task("coin")


class Weather(CoinFlipEnv):
    """The first step draws the weather, which most of the luck of the second depends on."""

    async def step(self, action):
        if not self.flipped:
            self.flipped.append(self._rng.choice(("fair", "foul")))
            return Step(Observation("off"), {"start": 0.25})
        chance = 0.9 if self.flipped[0] == "fair" else 0.1
        good = self._rng.random() < chance
        self.flipped.append("end")
        return Step(Observation("end"), {"outcome": float(good)}, End.success if good else End.failure)


class Certain(CoinFlipEnv):
    deterministic_step = True

    async def step(self, action):
        self.flipped.append("x")
        end = End.success if len(self.flipped) == 3 else None
        return Step(Observation("on"), {"outcome": 1.0} if end else {}, end)


def explore(env, *, settings=None, **options):
    async def play():
        limits = (settings or {}).get("limits", Limits(max_turns=20))
        runtime = Runtime(FakeEndpoint(lambda messages: "heads"), limits=limits)
        trajectory = await runtime.rollout(env, TASK, seed=3, keep_snapshots=True)
        found = await branch_outcomes(runtime, env, trajectory, **options)
        assert (runtime.slots.held, runtime.slots.waiting) == (0, 0)
        return found

    return run_virtual(play())


def test_the_variance_splits_into_the_outcomes_luck_and_all_luck_after_it():
    found = explore(Weather, turns=[0], outcomes=300, continuations=4)[0]
    assert found.split.mean == pytest.approx(0.25 + 0.5, abs=0.06)
    assert found.split.between == pytest.approx(0.16, abs=0.03)
    assert found.split.within == pytest.approx(0.09, abs=0.02)
    expected = math.sqrt(two_level_variance(0.16, 0.09, 300, 4))
    assert found.split.standard_error == pytest.approx(expected, rel=0.15)
    best = found.split.best_continuations(outcome_cost=4.0, continuation_cost=1.0)
    assert best == pytest.approx(math.sqrt(4 * 0.09 / 0.16), rel=0.25)


def test_continuations_go_on_from_one_outcome_and_outcomes_differ():
    found = explore(Weather, turns=[0], outcomes=20, continuations=3)[0]
    first_states = [some[0].turns[1].snapshot for some in found.trajectories]
    assert len({snapshot.data for snapshot in first_states}) == 2
    for some in found.trajectories:
        assert [len(one.turns) for one in some] == [2, 1, 1]
        assert [turn.injected for turn in some[0].turns] == [True, False]
        assert all(one.messages[: len(some[0].messages) - 2] == some[0].messages[:-2] for one in some[1:])
    ends = {tuple(one.end for one in some) for some in found.trajectories}
    assert len(ends) > 2


def test_the_action_is_executed_once_per_outcome_and_the_ledger_counts_it():
    ledger = BranchLedger()
    explore(Weather, turns=[0], outcomes=5, continuations=4, ledger=ledger)
    assert (ledger.rollouts, ledger.model_turns, ledger.env_steps) == (20, 20, 25)
    assert (ledger.snapshot_bytes, ledger.most_snapshot_bytes > 0) == (0, True)


def test_the_mean_agrees_with_that_of_branches_that_execute_every_time():
    async def play():
        runtime = Runtime(FakeEndpoint(lambda messages: "heads"), limits=Limits(max_turns=20))
        trajectory = await runtime.rollout(Weather, TASK, seed=3, keep_snapshots=True)
        options = {"turns": [0], "continuations": 600}
        return (await branch(runtime, Weather, trajectory, **options)).q[0].estimate

    plain = run_virtual(play())
    split = explore(Weather, turns=[0], outcomes=300, continuations=2)[0].split
    assert split.mean == pytest.approx(plain.mean, abs=3 * math.hypot(plain.standard_error, split.standard_error))


def test_an_outcome_that_ends_the_episode_is_not_continued():
    ledger = BranchLedger()
    found = explore(lambda: CoinFlipEnv(1), outcomes=40, continuations=3, ledger=ledger)[0]
    assert ledger.rollouts == 40
    assert found.split.within == 0.0
    assert found.split.between == pytest.approx(0.25, abs=0.05)


def test_one_outcome_is_shared_only_where_steps_have_no_luck():
    found = explore(Certain, outcomes=1, continuations=3)
    assert [branches.split.mean for branches in found.values()] == [1.0] * 3
    with pytest.raises(ConfigError, match="one outcome may be shared only where steps have no luck"):
        explore(Weather, outcomes=1, continuations=2)
    assert explore(Weather, outcomes=1, continuations=1)[0].split.outcomes == 1
    with pytest.raises(ConfigError, match="must be 1 or more: got 0 and 2"):
        explore(Weather, outcomes=0, continuations=2)


def test_returns_are_discounted_from_the_action_on_and_truncations_bootstrapped():
    async def half(trajectory):
        return 0.5

    settings = {"limits": Limits(max_turns=2)}
    options = {"turns": [0], "outcomes": 2, "continuations": 2, "gamma": 0.5, "settings": settings}
    found = explore(lambda: Weather(9), **options)[0]
    assert found.truncated == 0
    assert found.split.mean in {0.25 + 0.5 * good / 4 for good in range(5)}
    cut = explore(Certain, **options, bootstrap=half)[0]
    assert (cut.truncated, cut.split.mean) == (4, 0.25 * 0.5)


def test_a_cap_and_failures_are_counted_and_harm_nothing():
    found = explore(Weather, turns=[0], outcomes=4, continuations=4, ledger=BranchLedger(BranchLimits(rollouts=6)))[0]
    assert (sum(map(len, found.trajectories)), found.refused) == (6, 10)

    class Breaks(Weather):
        async def restore(self, snapshot, seed):
            await super().restore(snapshot, seed)
            if Random(seed).random() < 0.3:
                raise RuntimeError("cannot restore")

    broken = explore(Breaks, turns=[0], outcomes=20, continuations=3)[0]
    assert broken.failed > 0
    assert broken.split.continuations == sum(map(len, broken.trajectories)) - broken.failed
    tiny = BranchLedger(BranchLimits(snapshot_bytes=1))
    unheld = explore(Weather, turns=[0], outcomes=2, continuations=3, ledger=tiny)
    assert (unheld[0].split.continuations, unheld[0].refused) == (2, 4)


def test_the_same_seed_branches_the_same_way_and_another_one_differently():
    def ends(seed):
        found = explore(Weather, turns=[0], outcomes=6, continuations=3, seed=seed)[0]
        return [one.end for some in found.trajectories for one in some]

    assert ends(1) == ends(1)
    assert ends(1) != ends(2)


def test_cancelled_at_every_moment_nothing_is_left():
    state: dict[str, Any] = {}

    async def play():
        state["made"] = made = []
        state["ledger"] = ledger = BranchLedger()

        def env():
            made.append(Weather())
            return made[-1]

        endpoint = FakeEndpoint(lambda messages: "heads")
        state["runtime"] = runtime = Runtime(endpoint, limits=Limits(max_turns=20), max_concurrent=2)
        trajectory = await runtime.rollout(env, TASK, seed=3, keep_snapshots=True)
        await branch_outcomes(runtime, env, trajectory, turns=[0], outcomes=2, continuations=2, ledger=ledger)

    def check(tick):
        slots = state["runtime"].slots
        assert (slots.held, slots.waiting, state["ledger"].snapshot_bytes) == (0, 0, 0), tick
        assert all(one.closed == 1 for one in state["made"]), tick

    assert cancel_at_every_tick(play, check) > 12


def test_tokens_before_the_action_count_in_all_its_continuations():
    settings = {"limits": Limits(max_turns=20, max_policy_tokens=24)}  # four times "heads" and its end
    found = explore(lambda: CoinFlipEnv(9), settings=settings, turns=[2], outcomes=2, continuations=2)[2]
    # Two of the four turns were said before, and the action is the third.
    assert [[len(one.turns) for one in some] for some in found.trajectories] == [[2, 1], [2, 1]]


def test_an_outcome_that_is_refused_takes_its_continuations_along():
    ledger = BranchLedger(BranchLimits(rollouts=1))
    found = explore(Weather, turns=[0], outcomes=2, continuations=3, ledger=ledger)[0]
    assert (sum(map(len, found.trajectories)), found.refused) == (1, 5)


def test_an_outcome_that_a_limit_cut_short_at_once_is_not_final():
    found = explore(Weather, settings={"limits": Limits(max_turns=1)}, turns=[0], outcomes=3, continuations=2)[0]
    assert (found.truncated, found.split.continuations, found.split.mean) == (3, 3, 0.25)
    assert math.isnan(found.split.within)


def test_what_is_asked_whether_it_has_luck_says_so_in_earnest_and_is_closed():
    made = []

    def env():
        made.append(Certain())
        return made[-1]

    explore(env, outcomes=1, continuations=2)
    assert len(made) > 2
    assert [one.closed for one in made] == [1] * len(made)

    class Perhaps(CoinFlipEnv):
        deterministic_step = "sometimes"

    with pytest.raises(ConfigError, match="one outcome may be shared only where steps have no luck"):
        explore(Perhaps, outcomes=1, continuations=2)


def test_outcomes_run_in_the_slots_they_are_given_and_keep_the_one_state_that_counts():
    async def play():
        runtime = Runtime(FakeEndpoint(lambda messages: "heads"), limits=Limits(max_turns=20))
        trajectory = await runtime.rollout(lambda: CoinFlipEnv(4), TASK, seed=3, keep_snapshots=True)
        slots, held = Slots(2), []

        class Watched(CoinFlipEnv):
            async def step(self, action):
                held.append((slots.held, runtime.slots.held))
                return await super().step(action)

        options = {"turns": [0], "outcomes": 3, "continuations": 2, "slots": slots}
        found = await branch_outcomes(runtime, lambda: Watched(4), trajectory, **options)
        return held, found[0].trajectories

    held, trajectories = run_virtual(play())
    assert set(held) == {(2, 0), (1, 0)}
    assert [turn.snapshot is not None for turn in trajectories[0][0].turns] == [False, True, False, False]
