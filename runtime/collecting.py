"""Episodes without a trainer: N of them against a server, each in a file as soon as it ends."""

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import anyio
import msgspec

from turngate.envs.base import End, Task
from turngate.runtime.agent import AgentOrEnv
from turngate.runtime.conversation import token_mode_of
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.episode_file import EpisodeFile
from turngate.runtime.episode_summary import EpisodeRow, EpisodeSummary, Prices, summarise_rows
from turngate.runtime.errors import ConfigError, EndpointError, EnvError
from turngate.runtime.runtime import Runtime
from turngate.runtime.seeds import derive_seed
from turngate.runtime.strays import played_apart
from turngate.runtime.types import Trajectory
from turngate.runtime.unwrap import single_errors

__all__ = ["collect", "planned_ids"]

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class _Planned(msgspec.Struct, frozen=True):
    id: str
    task: Task
    seed: int
    env_seed: int


async def collect(
    runtime: Runtime,
    env: AgentOrEnv,
    tasks: Sequence[Task],
    path: str | Path,
    *,
    samples: int = 1,
    seed: int = 0,
    prices: Prices = Prices(),  # noqa: B008 - frozen
    described: Mapping[str, Any] | None = None,
    retry_failed: bool = False,
    give_up_after: int = 32,
    on_episode: Callable[[Trajectory, int, int], object] | None = None,
) -> EpisodeSummary:
    """Play `samples` episodes of every task and return what came of them; each is in `path` as soon as it ends.

    Run it again to go on: episodes that are in the file are not played again, a half-written last line is. Samples of
    one task share the environment's seed and differ in the sampler's. Cancelled: the file holds whole episodes, and no
    slot stays taken; episodes under way are lost.

    Args: described: what else makes episodes comparable; a file collected with anything else is refused, but for more
            `samples`. prices: of tokens, for the summary.
        retry_failed: play episodes again that the machinery failed.
        give_up_after: failures in a row, with nothing else in between, that end the collection.
        on_episode: told each new episode, with how many are in the file and how many will be.
    Raises: ConfigError: what was asked for cannot work, or the file belongs to something else. RecordError: an episode
        cannot be written. EndpointError, EnvError: too many episodes in a row failed.
    """
    plan = _plan(tasks, samples, seed)
    config = {
        "env": _name_of(env),
        "tasks": _digest(tasks),
        "seed": seed,
        "model": getattr(runtime.endpoint, "model", ""),
        "token_mode": token_mode_of(runtime.endpoint),
        "sampling": runtime.sampling,
        "limits": runtime.limits,
        "context": _name_of(runtime.context),
        **(described or {}),
    }
    ids = {planned.id for planned in plan}
    with EpisodeFile(Path(path), config, retry_failed=retry_failed) as file:
        collector = _Collector(runtime, env, file, give_up_after, on_episode, len(plan), ids)
        try:
            await collector.run([planned for planned in plan if planned.id not in file.rows])
        finally:
            collector.count_tokens()
        rows = [row for row in file.rows.values() if row.id in ids]
        prompt, completion = file.prompt_tokens, file.completion_tokens
    completion = completion or sum(row.policy_tokens for row in rows)
    return summarise_rows(
        rows, samples=_most_samples(rows), prompt_tokens=prompt, completion_tokens=completion, prices=prices
    )


def planned_ids(tasks: Sequence[Task], samples: int) -> list[str]:
    """Return the ids of the episodes that `collect` plays, in their order."""
    return [planned.id for planned in _plan(tasks, samples, 0)]


class _Collector:
    """Plays planned episodes, as many at a time as the runtime has slots."""

    # Changed by run(): _in_a_row, _counted.

    def __init__(
        self,
        runtime: Runtime,
        env: AgentOrEnv,
        file: EpisodeFile,
        give_up_after: int,
        on_episode: Callable[[Trajectory, int, int], object] | None,
        total: int,
        ids: set[str],
    ) -> None:
        self._runtime, self._env, self._file = runtime, env, file
        self._give_up_after, self._on_episode = give_up_after, on_episode
        self._total, self._ids = total, ids
        self._done = sum(id in ids for id in file.rows)
        self._in_a_row = 0
        self._counted = _tokens(runtime)

    def count_tokens(self) -> None:
        """Tell the file what was asked and sampled since it was told last, lost episodes included."""
        before, self._counted = self._counted, _tokens(self._runtime)
        self._file.count_tokens(self._counted[0] - before[0], self._counted[1] - before[1])

    async def run(self, plan: Sequence[_Planned]) -> None:
        queue = iter(enumerate(plan))

        async def work() -> None:
            for index, planned in queue:
                async with self._runtime.slots.hold(priority=index):
                    trajectory = await self._play(planned)
                self._keep(trajectory)

        with single_errors():
            async with anyio.create_task_group() as tg:
                for _ in range(min(self._runtime.slots.total, len(plan))):
                    tg.start_soon(work)
                    await asyncio.sleep(0)  # let each send its request before the next: no burst on the event loop

    async def _play(self, planned: _Planned) -> Trajectory:
        rollout = self._runtime.rollout(
            self._env,
            planned.task,
            seed=planned.seed,
            env_seed=planned.env_seed,
            trajectory_id=planned.id,
            group_id=planned.task.id,
        )
        return await played_apart(rollout, trajectory_id=planned.id, task=planned.task, seed=planned.seed)

    def _keep(self, trajectory: Trajectory) -> None:
        self.count_tokens()
        row = self._file.append(trajectory)
        self._done += 1
        if self._on_episode is not None:
            self._on_episode(trajectory, self._done, self._total)
        self._in_a_row = self._in_a_row + 1 if row.end.is_failure else 0
        if self._in_a_row >= self._give_up_after:
            raise self._too_many(row)

    def _too_many(self, row: EpisodeRow) -> EndpointError | EnvError:
        kind = EndpointError if row.end is End.endpoint_error else EnvError
        return kind(
            f"episodes must not all fail: got {self._in_a_row} failures in a row, the last one {row.end.value}: "
            f"{row.error} ({self._file.path}); play them again with retry_failed=True, or --retry-failed"
        )


def _plan(tasks: Sequence[Task], samples: int, seed: int) -> list[_Planned]:
    if samples < 1:
        raise ConfigError(f"samples must be 1 or more: got {samples}")
    if not tasks:
        raise ConfigError("tasks must hold at least one: got none")
    plan: list[_Planned] = []
    numbers: Counter[str] = Counter()  # a task that is there twice is played twice as often
    for _ in range(samples):
        for task in tasks:
            number = numbers[task.id]
            numbers[task.id] += 1
            luck = derive_seed(seed, "collect", task.id, number)
            plan.append(_Planned(f"{task.id}.{number}", task, luck, derive_seed(seed, "collect env", task.id)))
    return plan


def _most_samples(rows: Sequence[EpisodeRow]) -> int:
    return max(Counter(row.task_id for row in rows).values(), default=1)


def _tokens(runtime: Runtime) -> tuple[int, int]:
    if not isinstance(runtime.endpoint, Endpoint):
        return 0, 0
    found = runtime.endpoint.statistics()
    return found.prompt_tokens, found.completion_tokens


def _digest(tasks: Sequence[Task]) -> str:
    """Return a name for these very tasks."""
    digest = blake2b(digest_size=8)
    for task in tasks:
        digest.update(msgspec.json.encode(task, enc_hook=str) + b"\n")
    return f"{len(tasks)} tasks, {digest.hexdigest()}"


def _name_of(value: object) -> str:
    """Return how a user would call it: the same in every process."""
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else _ADDRESS.sub("", repr(value))
