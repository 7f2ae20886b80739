"""The kit accepts a good environment and catches each kind of bad one."""

import asyncio
import pickle
import random

import pytest

from turngate.envs.base import Action, End, Observation, Snapshot, Step, Task
from turngate.envs.replay import ReplayedEnv
from turngate.envs.testing import CoinFlipEnv, EchoEnv, SnapshotEnvConformance

HEADS = [Action("heads")] * 3


class TestCoinFlipConforms(SnapshotEnvConformance):
    stochastic = True

    def make_env(self):
        return CoinFlipEnv()

    def make_task(self):
        return Task("coin")

    def make_actions(self):
        return HEADS


def suite_for(env_class, *, is_stochastic=True):
    class Suite(SnapshotEnvConformance):
        stochastic = is_stochastic

        def make_env(self):
            return env_class()

        def make_task(self):
            return Task("coin")

        def make_actions(self):
            return HEADS

    return Suite()


def is_caught(test):
    """Whether the test fails at least once in eight: wrong coins agree with right ones by chance."""
    for _ in range(8):
        try:
            test()
        except AssertionError:
            return True
    return False


def test_a_private_random_source_without_seed_is_caught():
    class Env(CoinFlipEnv):
        async def reset(self, task, seed):
            return await super().reset(task, random.getrandbits(64))

    assert is_caught(suite_for(Env).test_equal_seeds_give_equal_episodes)


def test_a_snapshot_that_carries_its_luck_is_caught():
    class Env(CoinFlipEnv):
        async def restore(self, snapshot, seed):
            await super().restore(snapshot, 7)

    with pytest.raises(AssertionError):
        suite_for(Env).test_branches_see_independent_luck_exactly_when_the_environment_is_stochastic()


def test_a_snapshot_that_holds_the_state_of_its_random_source_is_caught():
    """eleurent/rl-agents#43: every branch of a copied environment replays one future."""

    class Env(CoinFlipEnv):
        async def snapshot(self):
            return Snapshot(self.kind, pickle.dumps((self.flips, self.flipped, self._rng)))

        async def restore(self, snapshot, seed):
            if snapshot.kind != self.kind:
                raise ValueError(snapshot.kind)
            self.flips, self.flipped, self._rng = pickle.loads(snapshot.data)

    with pytest.raises(AssertionError):
        suite_for(Env).test_branches_see_independent_luck_exactly_when_the_environment_is_stochastic()


def test_a_restored_branch_that_shares_its_state_with_the_saved_episode_is_caught():
    kept = {}

    class Env(CoinFlipEnv):
        async def snapshot(self):
            kept[str(len(self.flipped))] = self.flipped
            return Snapshot(self.kind, str(len(self.flipped)).encode())

        async def restore(self, snapshot, seed):
            self.flipped, self._rng = kept[snapshot.data.decode()], random.Random(seed)

    with pytest.raises(AssertionError):
        suite_for(Env).test_restoring_does_not_disturb_the_environment_that_saved()


def test_an_environment_that_restores_only_when_fresh_is_caught():
    class Env(CoinFlipEnv):
        async def restore(self, snapshot, seed):
            before = self.flipped
            await super().restore(snapshot, seed)
            self.flipped = before + self.flipped

    suite = suite_for(Env)
    suite.test_a_restored_environment_is_in_the_saved_state()
    with pytest.raises(AssertionError):
        suite.test_an_environment_in_use_returns_to_a_snapshot_as_a_fresh_one_does()


def test_a_branch_that_cannot_be_saved_is_caught():
    class Env(CoinFlipEnv):
        is_branch = False

        async def snapshot(self):
            saved = await super().snapshot()
            return Snapshot(self.kind, saved.data + b" " * self.is_branch)

        async def step(self, action):
            self.is_branch |= self.is_restored
            return await super().step(action)

        is_restored = False

        async def restore(self, snapshot, seed):
            await super().restore(snapshot, seed)
            self.is_restored, self.is_branch = True, False

    with pytest.raises(AssertionError):
        suite_for(Env).test_branches_have_snapshots_like_any_episode()


def test_luck_in_an_environment_that_declares_none_is_caught():
    with pytest.raises(AssertionError, match="future changed; a test of an environment with luck says stochastic = T"):
        suite_for(
            CoinFlipEnv, is_stochastic=False
        ).test_branches_see_independent_luck_exactly_when_the_environment_is_stochastic()


def test_what_is_missing_is_named():
    with pytest.raises(AssertionError, match=r"EchoEnv must have snapshot\(\) and restore\(snapshot, seed\)"):
        suite_for(EchoEnv).test_it_is_a_snapshot_environment()
    nameless = suite_for(lambda: ReplayedEnv(EchoEnv, deterministic_step=True))
    with pytest.raises(AssertionError, match="ReplayedEnv must make the environment in another process; factory_path"):
        nameless.test_snapshots_survive_the_process()


def test_a_snapshot_that_forgets_state_is_caught():
    class Env(CoinFlipEnv):
        async def restore(self, snapshot, seed):
            await super().restore(snapshot, seed)
            self.flipped = []

    with pytest.raises(AssertionError):
        suite_for(Env).test_a_restored_environment_is_in_the_saved_state()


def test_a_snapshot_that_disturbs_the_episode_is_caught():
    class Env(CoinFlipEnv):
        async def snapshot(self):
            self.flipped.append("tails")
            return await super().snapshot()

    with pytest.raises(AssertionError):
        suite_for(Env).test_taking_snapshots_changes_nothing()


def test_a_snapshot_accepted_by_another_kind_is_caught():
    class Env(CoinFlipEnv):
        async def restore(self, snapshot, seed):
            await super().restore(Snapshot(self.kind, snapshot.data), seed)

    with pytest.raises(AssertionError, match="another kind"):
        suite_for(Env).test_a_snapshot_of_another_kind_is_refused()


class HashingEnv(CoinFlipEnv):
    """Its luck depends on the process's hash seed."""

    async def restore(self, snapshot, seed):
        await super().restore(snapshot, hash(f"seed {seed}"))


def test_luck_that_depends_on_the_process_is_caught():
    suite = suite_for(HashingEnv)
    type(suite).factory_path = f"{HashingEnv.__module__}:HashingEnv"
    assert is_caught(suite.test_snapshots_survive_the_process)


class BadStepEnv(CoinFlipEnv):
    """Returns one unlawful step."""

    bad = Step(Observation())

    async def step(self, action):
        return self.bad


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_rewards_that_are_not_finite_are_caught(reward):
    class Env(BadStepEnv):
        bad = Step(Observation(), {"outcome": reward})

    with pytest.raises(AssertionError):
        suite_for(Env).test_rewards_are_named_and_finite()


@pytest.mark.parametrize("end", [End.endpoint_error, End.env_error])
def test_a_claimed_failure_is_caught(end):
    class Env(BadStepEnv):
        bad = Step(Observation(), end=end)

    with pytest.raises(AssertionError):
        suite_for(Env).test_an_environment_never_claims_that_the_machinery_failed()


def test_accepting_nonsense_is_caught():
    with pytest.raises(AssertionError, match="valid must be False"):
        suite_for(BadStepEnv).test_an_invalid_action_is_answered()


def test_raising_on_nonsense_is_caught():
    class Env(CoinFlipEnv):
        async def step(self, action):
            return {"heads": await super().step(action)}[action.text]

    with pytest.raises(KeyError):
        suite_for(Env).test_no_text_raises()


def test_state_shared_between_environments_is_caught():
    class Env(CoinFlipEnv):
        shared = random.Random(0)

        async def reset(self, task, seed):
            observation = await super().reset(task, seed)
            self.shared.seed(seed)
            self._rng = self.shared
            return observation

        async def step(self, action):
            await asyncio.sleep(0)
            return await super().step(action)

    suite = suite_for(Env)
    suite.test_equal_seeds_give_equal_episodes()
    with pytest.raises(AssertionError):
        suite.test_two_environments_do_not_disturb_each_other()


def test_a_hanging_environment_meets_the_deadline():
    class Env(CoinFlipEnv):
        async def step(self, action):
            await asyncio.Event().wait()
            return await super().step(action)

    suite = suite_for(Env)
    type(suite).deadline_s = 0.01
    with pytest.raises(TimeoutError):
        suite.test_rewards_are_named_and_finite()
