"""No luck is used twice: seeds of continuations, candidates, turns, episodes and decisions; and who else has a say."""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

from turngate.envs.base import Snapshot, Task
from turngate.envs.fakes import CoinFlipEnv
from turngate.runtime import Limits, Runtime
from turngate.runtime.branch_outcomes import branch_outcomes
from turngate.runtime.branching import branch
from turngate.runtime.group_branching import Branching, GroupBrancher
from turngate.runtime.guidance import DecisionPoint, Guidance
from turngate.runtime.monte_carlo_q import MonteCarloQ
from turngate.runtime.testing import FakeEndpoint, run_virtual
from turngate.runtime.types import Completion, Group, Trajectory

TASK = Task("coin")


class Lab:
    """A runtime that remembers every seed of its sampler, and every seed that an environment was restored with."""

    def __init__(self, *, flips: int = 3, latency_s: float = 0.0, **settings: Any) -> None:
        answers = itertools.cycle(["heads", "tails"])
        self.endpoint = FakeEndpoint(lambda messages: next(answers), latency_s=latency_s)
        self.runtime = Runtime(self.endpoint, limits=Limits(max_turns=20), **settings)
        self.restored: list[int] = []
        self.restored_s: list[float] = []
        self._flips = flips

    def env(self) -> CoinFlipEnv:
        restored, restored_s = self.restored, self.restored_s

        class Told(CoinFlipEnv):
            async def restore(self, snapshot: Snapshot, seed: int) -> None:
                restored.append(seed)
                restored_s.append(asyncio.get_running_loop().time())
                await super().restore(snapshot, seed)

        return Told(self._flips)

    async def record(self, seed: int) -> Trajectory:
        return await self.runtime.rollout(self.env, TASK, seed=seed, keep_snapshots=True)

    @property
    def sampled(self) -> list[int | None]:
        return [call.seed for call in self.endpoint.calls]


def assert_all_different(seeds: Sequence[int | None], *, at_least: int) -> None:
    assert len(seeds) >= at_least
    assert len(set(seeds)) == len(seeds)


def test_p14_b5_2_live_values_share_no_seed_between_continuations_candidates_and_decisions() -> None:
    """modelscope/ms-swift#7858, verl#5179, SkyRL#1015, AReaL#1524."""

    async def play() -> Lab:
        lab = Lab()
        q = MonteCarloQ(lab.runtime, lab.env, continuations=3)
        await lab.runtime.rollout(lab.env, TASK, seed=1, guidance=Guidance(q, beta=1.0, draws=2))
        return lab

    lab = run_virtual(play())
    # Three decisions with two draws and two candidates each, three continuations of every candidate.
    assert_all_different(lab.restored, at_least=18)
    assert_all_different(lab.sampled, at_least=6 + 6 * (2 + 1))


def test_p14_b5_3_turns_and_episodes_have_luck_of_their_own() -> None:
    """weipu-zhang/STORM#8, ManiSkill#1215: what is reseeded alike again and again is one episode many times."""

    async def play() -> Lab:
        lab = Lab()
        episodes = [await lab.record(seed) for seed in (3, 4)]
        for trajectory in episodes:
            await branch(lab.runtime, lab.env, trajectory, continuations=2, estimands=["Q", "V"])
            await branch_outcomes(lab.runtime, lab.env, trajectory, outcomes=2, continuations=2)
        return lab

    lab = run_virtual(play())
    assert_all_different(lab.restored, at_least=2 * 3 * (2 + 2 + 2))
    assert_all_different(lab.sampled, at_least=2 * (3 + 6 + 12))


def test_groups_are_branched_with_luck_from_the_runs_own_seed() -> None:
    def seeds(seed: int) -> list[int]:
        async def play() -> list[int]:
            lab = Lab()
            trajectory = await lab.record(3)
            brancher = GroupBrancher(Branching(continuations=2), lab.runtime, lab.env, seed=seed)
            await brancher.value(Group(id="g0", task=TASK, order=0, trajectories=(trajectory,)))
            return lab.restored

        return run_virtual(play())

    assert seeds(1) == seeds(1)
    assert not set(seeds(1)) & set(seeds(2))


def test_branches_are_the_base_policys_and_nobody_judges_them() -> None:
    asked: list[int] = []
    judged: list[str] = []

    async def q(point: DecisionPoint, candidates: Sequence[Completion]) -> list[float]:
        asked.append(point.turn)
        return [0.0] * len(candidates)

    async def scorer(trajectory: Trajectory) -> list[float]:
        judged.append(trajectory.id)
        return [0.0] * len(trajectory.turns)

    async def play() -> Trajectory:
        lab = Lab(guidance=Guidance(q, beta=1.0, draws=2), scorers={"judge": scorer})
        trajectory = await lab.record(3)
        found = await branch(lab.runtime, lab.env, trajectory, continuations=2, estimands=["Q", "V"])
        await branch_outcomes(lab.runtime, lab.env, trajectory, outcomes=2, continuations=2)
        taken = [turn for one in found.v[0].trajectories for turn in one.turns]
        assert [turn.decision for turn in taken] == [None] * len(taken)
        return trajectory

    trajectory = run_virtual(play())
    assert (asked, judged) == ([0, 1, 2], [trajectory.id])


def test_a_runtime_guided_by_its_own_branches_does_not_branch_from_branches() -> None:
    async def play() -> tuple[int, int]:
        lab = Lab()
        q = MonteCarloQ(lab.runtime, lab.env, continuations=2)
        lab.runtime.guidance = Guidance(q, beta=1.0, draws=2)
        await lab.runtime.rollout(lab.env, TASK, seed=1)
        return q.ledger.rollouts, lab.runtime.guidance.statistics().guided

    assert run_virtual(play()) == (3 * 2 * 2, 3)


def test_outcomes_wait_behind_the_main_rollouts() -> None:
    async def play() -> tuple[list[float], list[float]]:
        lab = Lab(flips=1, latency_s=1.0, max_concurrent=1)
        trajectory = await lab.record(3)
        ended: list[float] = []
        runtime = lab.runtime

        async def main(index: int) -> None:
            async with runtime.slots.hold(priority=index):
                await runtime.rollout(lambda: CoinFlipEnv(1), TASK, seed=index)
                ended.append(asyncio.get_running_loop().time())

        async with runtime.slots.hold():
            options: dict[str, Any] = {"outcomes": 3, "continuations": 1}
            branches = asyncio.ensure_future(branch_outcomes(runtime, lab.env, trajectory, **options))
            mains = asyncio.gather(*(main(index) for index in range(2)))
            await asyncio.sleep(0.5)
        await asyncio.gather(mains, branches)
        return ended, lab.restored_s

    # The slot went to the main rollouts first, a second each, though the branches had asked before.
    assert run_virtual(play()) == ([2.5, 3.5], [3.5, 3.5, 3.5])
