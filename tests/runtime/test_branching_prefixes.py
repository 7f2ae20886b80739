"""Branches on the embedded engine: what they share is computed once. Tokens are counted, not seconds."""

import pytest

from turngate.envs import Action, Observation, Snapshot, Step, Task
from turngate.runtime import Limits, Runtime, Sampling
from turngate.runtime.branching import branch
from turngate.runtime.engine import Engine
from turngate.runtime.engine.model import ModelConfig, PolicyModel
from turngate.runtime.engine.tokenizer import Tokenizer

TASK = Task("corridor", "Walk along the corridor until its end, and say at every door what is written there.")
DOOR = "There is another door, and on it is written: the way is long and you are not there yet."
SAMPLING = Sampling(max_tokens=8)


class Corridor:
    """Says the same at every door, for ever."""

    kind = "test.corridor"

    async def reset(self, task: Task, seed: int) -> Observation:
        return Observation(task.prompt)

    async def step(self, action: Action) -> Step:
        return Step(Observation(DOOR))

    async def snapshot(self) -> Snapshot:
        return Snapshot(self.kind, b"")

    async def restore(self, snapshot: Snapshot, seed: int) -> None:
        pass

    async def aclose(self) -> None:
        pass


@pytest.fixture(scope="module")
def policy() -> tuple[PolicyModel, Tokenizer]:
    tokenizer = Tokenizer.train([TASK.prompt, DOOR])
    return PolicyModel(ModelConfig(vocab_size=len(tokenizer), width=32, layers=1, head_dim=8, mlp_width=32)), tokenizer


def engine_of(policy: tuple[PolicyModel, Tokenizer], **settings: int) -> Engine:
    return Engine.start(*policy, mode="thread", seed=1, **settings)


async def play(engine: Engine, turns: int):
    runtime = Runtime(engine.endpoint, limits=Limits(max_turns=turns), sampling=SAMPLING)
    return runtime, await runtime.rollout(Corridor, TASK, seed=5, keep_snapshots=True)


async def computed(engine: Engine) -> tuple[float, float]:
    """Return (prompt tokens asked for, prompt tokens computed)."""
    seen = await engine.statistics()
    return seen["prompt_tokens"], seen["prompt_tokens"] - seen["cached_tokens"]


async def test_k_branches_from_one_context_compute_it_once(policy):
    async with engine_of(policy) as engine:
        _, trajectory = await play(engine, 4)
    context = trajectory.turns[3].start  # all that the fourth turn's model call reads
    assert context > 100
    async with engine_of(policy) as engine:  # one that has never seen the episode
        runtime = Runtime(engine.endpoint, limits=Limits(max_turns=4), sampling=SAMPLING)
        found = await branch(runtime, Corridor, trajectory, turns=[3], continuations=8, estimands=["V"])
        asked, new = await computed(engine)
    prompts = {len(one.segments[0].ids()) - one.policy_tokens for one in found.v[3].trajectories}
    (prompt,) = prompts
    assert (asked, new) == (8 * prompt, prompt)


async def test_branches_of_an_episode_on_the_engine_that_played_it_compute_only_what_is_new(policy):
    async with engine_of(policy) as engine:
        runtime, trajectory = await play(engine, 4)
        asked_before, new_before = await computed(engine)
        await branch(runtime, Corridor, trajectory, turns=[3], continuations=8, estimands=["V"])
        asked, new = await computed(engine)
    assert asked - asked_before > 8 * 100
    # Not even the context, if its sampled tokens are what the server makes of their text; else it is computed once.
    assert new - new_before <= (asked - asked_before) / 8


async def test_without_the_cache_every_branch_pays_for_the_whole_context(policy):
    async with engine_of(policy, max_cached_tokens=0) as engine:
        runtime, trajectory = await play(engine, 4)
        before = await computed(engine)
        await branch(runtime, Corridor, trajectory, turns=[3], continuations=8, estimands=["V"])
        after = await computed(engine)
    assert after[0] - before[0] == after[1] - before[1] > 8 * 100


async def test_continuations_pay_for_their_own_turns_only(policy):
    """Q of the first turn: the shared start once, then each branch what it says and hears."""
    async with engine_of(policy) as engine:
        runtime, trajectory = await play(engine, 5)
        asked_before, new_before = await computed(engine)
        found = await branch(runtime, Corridor, trajectory, turns=[0], continuations=6)
        asked, new = await computed(engine)
    branches = found.q[0].trajectories
    start = min(one.turns[1].start for one in branches)
    own = sum(len(one.segments[-1]) - start for one in branches)
    assert new - new_before <= start + own
    assert asked - asked_before > 2 * (start + own)
