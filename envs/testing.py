"""A conformance kit that any environment can run, and the fakes of `fakes`.

    class TestMyEnv(SnapshotEnvConformance):
        stochastic = True

        def make_env(self): return MyEnv()
        def make_task(self): return Task(id="1", data={...})
        def make_actions(self): return [Action("look"), Action("open door")]

The tests are plain functions that run their own event loop: they need pytest but none of its plugins.
"""

import asyncio
import base64
import json
import math
import subprocess
import sys
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec

from turngate.envs.base import Action, Env, Observation, Snapshot, SnapshotEnv, Step, Task
from turngate.envs.fakes import CoinFlipEnv, EchoEnv, HangingEnv, RaisingEnv

__all__ = ["CoinFlipEnv", "EchoEnv", "EnvConformance", "HangingEnv", "RaisingEnv", "SnapshotEnvConformance"]

_T = TypeVar("_T")
_SEED = 20_251


class EnvConformance:
    """What every environment owes the runtime. Inherit, and say how to make the environment, a task, and actions."""

    invalid_action: ClassVar[Action | None] = Action("\x00 certainly no action \u2620")
    """An action the environment cannot make sense of; None when it makes sense of everything."""
    deadline_s: ClassVar[float] = 60.0
    """Far above what any test needs; only a hanging environment meets it."""

    def make_env(self) -> Env:
        """Return a fresh environment."""
        raise NotImplementedError("make_env must be overridden: return a fresh environment")

    def make_task(self) -> Task:
        """Return the task to play."""
        raise NotImplementedError("make_task must be overridden: return a task of the environment")

    def make_actions(self) -> Sequence[Action]:
        """Return actions for one episode of the task, in order; the more of the environment they visit, the better."""
        raise NotImplementedError("make_actions must be overridden: return actions of one episode")

    def test_reset_and_steps_have_the_promised_types(self) -> None:
        observation, steps = self._run(self._play(_SEED))
        assert isinstance(observation, Observation)
        assert steps, "make_actions must return at least one action"
        assert all(isinstance(step, Step) for step in steps)

    def test_rewards_are_named_and_finite(self) -> None:
        for step in self._run(self._play(_SEED))[1]:
            assert all(isinstance(name, str) and name for name in step.rewards), step.rewards
            assert all(math.isfinite(value) for value in step.rewards.values()), step.rewards

    def test_an_environment_never_claims_that_the_machinery_failed(self) -> None:
        """Failures are exceptions; an environment ends an episode by its own rules or cuts it short."""
        for step in self._run(self._play(_SEED))[1]:
            assert step.end is None or not step.end.is_failure, step.end

    def test_an_invalid_action_is_answered(self) -> None:
        invalid = self.invalid_action
        if invalid is not None:
            step = self._run(self._play(_SEED, [invalid]))[1][0]
            assert not step.valid, f"step.valid must be False for {invalid}: got {step}"

    def test_no_text_raises(self) -> None:
        hostile = ["", " ", "\n", "a" * 100_000, '{"a": [1]}', "[" * 1000, '"', "\\", "\ud800", "\u202e%s%n", "💥" * 50]
        for text in hostile:
            self._run(self._play(_SEED, [Action(text)]))

    def test_equal_seeds_give_equal_episodes(self) -> None:
        assert self._run(self._play(_SEED)) == self._run(self._play(_SEED))

    def test_a_task_survives_json(self) -> None:
        task = self.make_task()
        copy = msgspec.json.decode(msgspec.json.encode(task), type=Task)
        assert copy == task
        assert self._run(self._play(_SEED, task=copy)) == self._run(self._play(_SEED))

    def test_steps_and_observations_can_be_written_as_json(self) -> None:
        observation, steps = self._run(self._play(_SEED))
        msgspec.json.encode((observation, steps))

    def test_two_environments_do_not_disturb_each_other(self) -> None:
        """Thousands of episodes run interleaved in one process."""

        async def interleaved() -> list[tuple[Observation, list[Step]]]:
            return list(await asyncio.gather(*(self._play(seed) for seed in (_SEED, _SEED + 1, _SEED))))

        first, _, last = self._run(interleaved())
        assert first == last == self._run(self._play(_SEED))

    def test_aclose_works_before_reset_and_after_a_cancelled_step(self) -> None:
        async def close_at_once() -> None:
            await self.make_env().aclose()

        async def close_after_cancellation() -> None:
            env = self.make_env()
            await env.reset(self.make_task(), _SEED)
            step = asyncio.ensure_future(env.step(self.make_actions()[0]))
            await asyncio.sleep(0)
            step.cancel()
            await asyncio.gather(step, return_exceptions=True)
            await env.aclose()

        self._run(close_at_once())
        self._run(close_after_cancellation())

    async def _play(
        self, seed: int, actions: Sequence[Action] | None = None, task: Task | None = None
    ) -> tuple[Observation, list[Step]]:
        env = self.make_env()
        try:
            observation = await env.reset(task or self.make_task(), seed)
            return observation, await _continue(env, self.make_actions() if actions is None else actions)
        finally:
            await env.aclose()

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run(_with_deadline(coroutine, self.deadline_s))


class SnapshotEnvConformance(EnvConformance):
    """What an environment with snapshots owes besides: exact, independent, lasting."""

    stochastic: ClassVar[bool] = False
    """Whether luck plays a part in the episode of `make_actions`; branches must then differ."""
    branches: ClassVar[int] = 64
    """Branches among which at least one must differ from the others; raise it where luck shows rarely."""
    factory_path: ClassVar[str] = ""
    """`module:callable` that another process can import to make the environment; by default the class itself."""

    def test_it_is_a_snapshot_environment(self) -> None:
        env = self.make_env()
        assert isinstance(env, SnapshotEnv), f"{type(env).__name__} must have snapshot() and restore(snapshot, seed)"

    def test_taking_snapshots_changes_nothing(self) -> None:
        observation, steps, _ = self._run(self._play_with_snapshots())
        assert (observation, steps) == self._run(self._play(_SEED))

    def test_a_restored_environment_is_in_the_saved_state(self) -> None:
        for snapshot in self._run(self._play_with_snapshots())[2]:
            assert self._run(self._resave(snapshot)) == snapshot

    def test_equal_seeds_give_equal_futures_from_every_snapshot(self) -> None:
        for index, snapshot in enumerate(self._run(self._play_with_snapshots())[2]):
            futures = [self._run(self._branch(snapshot, _SEED + 1, index)) for _ in range(2)]
            assert futures[0] == futures[1], f"snapshot {index}"

    def test_branches_see_independent_luck_exactly_when_the_environment_is_stochastic(self) -> None:
        _, steps, snapshots = self._run(self._play_with_snapshots())
        differing = False
        for index, snapshot in enumerate(snapshots):
            futures = [self._run(self._branch(snapshot, seed, index)) for seed in range(self.branches)]
            differing |= any(future != futures[0] for future in futures)
            if not self.stochastic:
                assert all(future == steps[index:] for future in futures), (
                    f"snapshot {index}: the future changed; a test of an environment with luck says stochastic = True"
                )
        assert differing == self.stochastic, (
            f"{self.branches} branches from every snapshot must not all be equal: luck must come from the seed of "
            "restore; a test of an environment without luck says stochastic = False"
        )

    def test_restoring_does_not_disturb_the_environment_that_saved(self) -> None:
        async def play() -> list[Step]:
            env, steps = self.make_env(), list[Step]()
            assert isinstance(env, SnapshotEnv)
            await env.reset(self.make_task(), _SEED)
            for index, action in enumerate(self.make_actions()):
                await self._branch(await env.snapshot(), _SEED + 1, index)
                steps.append(await env.step(action))
                if steps[-1].end is not None:
                    break
            await env.aclose()
            return steps

        assert self._run(play()) == self._run(self._play(_SEED))[1]

    def test_an_environment_in_use_returns_to_a_snapshot_as_a_fresh_one_does(self) -> None:
        """Rollouts reset an environment before they restore it."""
        snapshots = self._run(self._play_with_snapshots())[2]
        index = len(snapshots) // 2

        async def play() -> tuple[Snapshot, list[Step]]:
            env = self.make_env()
            assert isinstance(env, SnapshotEnv)
            await env.reset(self.make_task(), _SEED + 2)
            await _continue(env, self.make_actions())
            await env.restore(snapshots[index], _SEED + 1)
            again = await env.snapshot()
            steps = await _continue(env, self.make_actions()[index:])
            await env.aclose()
            return again, steps

        fresh = self._run(self._branch(snapshots[index], _SEED + 1, index))
        assert self._run(play()) == (snapshots[index], fresh)

    def test_branches_have_snapshots_like_any_episode(self) -> None:
        """A search branches from branches; what was reached under fresh luck is saved as it is."""
        first = self._run(self._play_with_snapshots())[2][0]

        async def play() -> tuple[Snapshot, int]:
            env = self.make_env()
            assert isinstance(env, SnapshotEnv)
            await env.restore(first, _SEED + 1)
            steps = await _continue(env, self.make_actions()[:-1])
            snapshot = await env.snapshot()
            await env.aclose()
            return snapshot, len(steps)

        snapshot, taken = self._run(play())
        assert self._run(play())[0] == snapshot
        assert self._run(self._resave(snapshot)) == snapshot
        futures = [self._run(self._branch(snapshot, _SEED + 3, taken)) for _ in range(2)]
        assert futures[0] == futures[1]

    def test_a_snapshot_of_another_kind_is_refused(self) -> None:
        snapshot = Snapshot("somebody.else", self._run(self._play_with_snapshots())[2][0].data)

        async def resave() -> Any:
            return (await asyncio.gather(self._resave(snapshot), return_exceptions=True))[0]

        answer = self._run(resave())
        assert isinstance(answer, Exception), f"restore must refuse a snapshot of another kind: it gave {answer}"

    def test_snapshots_survive_the_process(self) -> None:
        """Another process, with other hash seeds, restores the middle snapshot and sees the same future."""
        snapshots = self._run(self._play_with_snapshots())[2]
        index = len(snapshots) // 2
        here = self._run(self._branch(snapshots[index], _SEED, index))
        cls = type(self.make_env())
        request = {
            "factory": self.factory_path or f"{cls.__module__}:{cls.__qualname__}",
            "path": [entry for entry in sys.path if entry],
            "kind": snapshots[index].kind,
            "data": base64.b64encode(snapshots[index].data).decode(),
            "seed": _SEED,
            "actions": msgspec.to_builtins(self.make_actions()[index:]),
        }
        child = subprocess.run(
            [sys.executable, "-c", _CHILD], input=json.dumps(request), capture_output=True, text=True, timeout=120
        )
        assert child.returncode == 0, (
            f"{request['factory']} must make the environment in another process; factory_path = 'module:callable' of "
            f"the test names something else:\n{child.stderr}"
        )
        assert msgspec.json.decode(child.stdout, type=list[Step]) == here

    async def _play_with_snapshots(self) -> tuple[Observation, list[Step], list[Snapshot]]:
        env = self.make_env()
        assert isinstance(env, SnapshotEnv)
        observation = await env.reset(self.make_task(), _SEED)
        steps, snapshots = list[Step](), list[Snapshot]()
        for action in self.make_actions():
            snapshots.append(await env.snapshot())
            steps.append(await env.step(action))
            if steps[-1].end is not None:
                break
        await env.aclose()
        return observation, steps, snapshots

    async def _branch(self, snapshot: Snapshot, seed: int, index: int) -> list[Step]:
        return await _restore_and_continue(self.make_env(), snapshot, seed, self.make_actions()[index:])

    async def _resave(self, snapshot: Snapshot) -> Snapshot:
        env = self.make_env()
        assert isinstance(env, SnapshotEnv)
        try:
            await env.restore(snapshot, _SEED)
            return await env.snapshot()
        finally:
            await env.aclose()


async def _with_deadline(awaitable: Awaitable[_T], deadline_s: float) -> _T:
    return await asyncio.wait_for(awaitable, deadline_s)


async def _continue(env: Env, actions: Sequence[Action]) -> list[Step]:
    steps: list[Step] = []
    for action in actions:
        steps.append(await env.step(action))
        if steps[-1].end is not None:
            break
    return steps


async def _restore_and_continue(env: Env, snapshot: Snapshot, seed: int, actions: Sequence[Action]) -> list[Step]:
    assert isinstance(env, SnapshotEnv)
    try:
        await env.restore(snapshot, seed)
        return await _continue(env, actions)
    finally:
        await env.aclose()


_CHILD = """
import asyncio, base64, importlib, json, sys
request = json.load(sys.stdin)
sys.path[:0] = [entry for entry in request["path"] if entry not in sys.path]
import msgspec
from turngate.envs.base import Action, Snapshot
from turngate.envs.testing import _restore_and_continue
module, _, name = request["factory"].partition(":")
factory = importlib.import_module(module)
for part in name.split("."):
    factory = getattr(factory, part)
snapshot = Snapshot(request["kind"], base64.b64decode(request["data"]))
actions = msgspec.convert(request["actions"], list[Action])
steps = asyncio.run(_restore_and_continue(factory(), snapshot, request["seed"], actions))
sys.stdout.write(msgspec.json.encode(steps).decode())
"""
