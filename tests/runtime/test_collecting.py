import asyncio

import anyio
import pytest

from turngate.envs.base import Action, End, Observation, Step, Task
from turngate.runtime import Limits, Runtime, Sampling
from turngate.runtime.agent import Agent
from turngate.runtime.collecting import collect, planned_ids
from turngate.runtime.errors import ConfigError, EndpointError, EnvError
from turngate.runtime.testing import FakeEndpoint
from turngate.runtime.transcript import read_trajectories

TASKS = [Task(name, f"say {name}") for name in ("a", "b", "c")]


class Say:
    """One turn: success for the word of the task, or for luck that comes from the seed."""

    seeds: list[tuple[str, int]] = []  # noqa: RUF012

    async def reset(self, task: Task, seed: int) -> Observation:
        self.word = task.id
        self.seeds.append((task.id, seed))
        return Observation(task.prompt)

    async def step(self, action: Action) -> Step:
        right = action.text == self.word
        return Step(Observation("done"), {"outcome": float(right)}, End.success if right else End.failure)

    async def aclose(self) -> None: ...


def runtime(script=lambda messages: messages[-1].content[-1], **options):
    return Runtime(FakeEndpoint(script, latency_s=1e-3), **options)


async def test_every_task_is_played_as_often_as_asked_and_lies_in_the_file(tmp_path):
    Say.seeds.clear()
    played = runtime(max_concurrent=2)
    found = await collect(played, Say, TASKS, tmp_path / "out.jsonl", samples=2)
    trajectories = list(read_trajectories(tmp_path / "out.jsonl"))
    assert sorted(t.id for t in trajectories) == ["a.0", "a.1", "b.0", "b.1", "c.0", "c.1"]
    assert (found.successes, found.scored, found.pass_at) == (6, 6, {1: 1.0, 2: 1.0})
    assert found.completion_tokens == sum(t.policy_tokens for t in trajectories) > 0
    assert len(set(Say.seeds)) == 3  # samples of a task meet the same environment
    assert len({t.seed for t in trajectories}) == 6  # and have luck of their own
    assert played.endpoint.most_in_flight == 2
    assert played.slots.held == 0


async def test_episodes_in_the_file_are_not_played_again(tmp_path):
    path = tmp_path / "out.jsonl"
    await collect(runtime(), Say, TASKS[:3], path)
    again = runtime()
    found = await collect(again, Say, TASKS, path, samples=2)  # more samples go on from fewer
    assert len(again.endpoint.calls) == 3
    assert found.episodes == 6
    fewer = await collect(again, Say, TASKS, path, samples=1)
    assert (len(again.endpoint.calls), fewer.episodes) == (3, 3)


async def test_a_stopped_collection_goes_on_to_the_same_episodes(tmp_path):
    whole = tmp_path / "whole.jsonl"
    await collect(runtime(max_concurrent=1), Say, TASKS, whole, samples=4)
    path = tmp_path / "out.jsonl"
    for stop_after in (1, 5):
        done = asyncio.Event()

        def hear(trajectory, number, total, done=done, stop_after=stop_after):
            if number >= stop_after:
                done.set()

        task = asyncio.create_task(collect(runtime(max_concurrent=2), Say, TASKS, path, samples=4, on_episode=hear))
        await done.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with path.open("ab") as file:
            file.write(b'{"id": "half')
    found = await collect(runtime(), Say, TASKS, path, samples=4)
    assert found.episodes == 12

    def told(file):
        return {t.id: (t.seed, t.end, t.messages) for t in read_trajectories(file)}

    assert told(path) == told(whole)


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"tasks": TASKS[:2]},
        {"sampling": Sampling(temperature=0.5)},
        {"limits": Limits(max_turns=3)},
        {"described": {"prompt": "v2"}},
    ],
    ids=str,
)
async def test_episodes_that_are_not_alike_do_not_share_a_file(tmp_path, other):
    await collect(runtime(), Say, TASKS, tmp_path / "out.jsonl")
    for_runtime = {name: other.pop(name) for name in ("sampling", "limits") if name in other}
    with pytest.raises(ConfigError, match="must be alike"):
        await collect(runtime(**for_runtime), Say, other.pop("tasks", TASKS), tmp_path / "out.jsonl", **other)


async def test_failures_are_counted_apart_and_played_again_when_asked(tmp_path):
    answers = iter([EndpointError("down"), "b", "c"])
    first = await collect(runtime(lambda messages: next(answers), max_concurrent=1), Say, TASKS, tmp_path / "out.jsonl")
    assert (first.failed, first.scored, first.first_error) == (1, 2, "EndpointError: down (trajectory a.0, turn 0)")
    again = runtime()
    found = await collect(again, Say, TASKS, tmp_path / "out.jsonl", retry_failed=True)
    assert (len(again.endpoint.calls), found.failed, found.successes) == (1, 0, 3)


@pytest.mark.parametrize(("error", "kind"), [(EndpointError("down"), EndpointError), (EnvError("bug"), EnvError)])
async def test_a_dead_server_or_a_broken_environment_ends_the_collection(tmp_path, error, kind):
    class Broken(Say):
        async def step(self, action: Action) -> Step:
            raise error

    dead = runtime(lambda messages: error if kind is EndpointError else "x", max_concurrent=4)
    with pytest.raises(kind, match="retry-failed"):
        await collect(dead, Broken, TASKS, tmp_path / "out.jsonl", samples=50, give_up_after=5)
    assert 5 <= len(list(read_trajectories(tmp_path / "out.jsonl"))) < 12
    assert dead.slots.held == 0


@pytest.mark.parametrize("how", ["raises it", "cancels its task"])
async def test_a_cancellation_that_comes_from_inside_an_episode_costs_that_episode_alone(tmp_path, how):
    playing = set(asyncio.all_tasks())

    class Stray(Say):
        async def step(self, action: Action) -> Step:
            if self.word == "b" and how == "raises it":
                raise asyncio.CancelledError
            if self.word == "b":
                for task in asyncio.all_tasks() - playing:
                    task.cancel()
                await asyncio.sleep(0)
            return await super().step(action)

    found = await collect(runtime(max_concurrent=1), Stray, TASKS, tmp_path / "out.jsonl")
    assert (found.episodes, found.failed, found.successes) == (3, 1, 2)


async def test_an_episode_that_another_one_cancels_is_recorded_and_the_rest_is_played(tmp_path):
    playing = set(asyncio.all_tasks())
    asked, tasks = asyncio.Event(), [*TASKS, Task("d", "say d")]

    async def answer(messages):
        if messages[-1].content == "say a":
            asked.set()
            await asyncio.Event().wait()
        return messages[-1].content[-1]

    class Vandal(Say):
        async def step(self, action: Action) -> Step:
            if self.word == "b":
                await asked.wait()
                for task in asyncio.all_tasks() - playing:
                    task.cancel()
                await asyncio.sleep(0)
            return await super().step(action)

    found = await collect(runtime(answer, max_concurrent=2), Vandal, tasks, tmp_path / "out.jsonl")
    errors = {t.task.id: t.error for t in read_trajectories(tmp_path / "out.jsonl")}
    assert "cancelled by something that runs inside" in errors["a"]
    assert (found.episodes, found.failed, found.successes) == (4, 2, 2)


async def test_a_scope_that_is_cancelled_ends_the_collection(tmp_path):
    waiting = asyncio.Event()

    class Slow(Say):
        async def step(self, action: Action) -> Step:
            waiting.set()
            await asyncio.Event().wait()
            raise AssertionError

    played = runtime(max_concurrent=2)
    async with anyio.create_task_group() as tg:
        tg.start_soon(collect, played, Slow, TASKS, tmp_path / "out.jsonl")
        await waiting.wait()
        tg.cancel_scope.cancel()
    assert played.slots.held == 0
    assert (tmp_path / "out.jsonl").read_bytes() == b""


async def test_agents_with_loops_of_their_own_are_collected_as_environments_are(tmp_path):
    async def agent(session, task):
        reply = await session.chat([{"role": "user", "content": task.prompt}])
        return float(reply.text == task.id)

    found = await collect(runtime(), Agent(agent), TASKS, tmp_path / "out.jsonl")
    assert (found.successes, found.scored) == (3, 3)


async def test_nothing_to_play_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="tasks"):
        await collect(runtime(), Say, [], tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match="samples"):
        await collect(runtime(), Say, TASKS, tmp_path / "out.jsonl", samples=0)


def test_a_task_that_is_there_twice_is_played_twice_as_often():
    assert planned_ids([Task("a"), Task("a")], 2) == ["a.0", "a.1", "a.2", "a.3"]
