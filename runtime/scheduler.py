"""Many episodes at once: groups of rollouts flow into the buffer as fast as its gate allows."""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import anyio
import msgspec

from turngate.envs.base import End, Task
from turngate.runtime.agent import AgentOrEnv
from turngate.runtime.buffer import Buffer
from turngate.runtime.errors import ConfigError, EndpointError, EnvError, ToolError
from turngate.runtime.events import GroupDropped, GroupFinished
from turngate.runtime.group_branching import GroupBrancher
from turngate.runtime.injection import Injection
from turngate.runtime.ledger import Ledger
from turngate.runtime.restarts import RestartPoint, RestartStore
from turngate.runtime.runtime import Runtime
from turngate.runtime.seeds import derive_seed
from turngate.runtime.types import Batch, Group, Trajectory

__all__ = ["Collection", "Collector", "TaskStream"]

_log = logging.getLogger("turngate.run")
_RECENT = 256
_MANY_FAILED = 0.25
"""Share of the last _RECENT rollouts whose failure is worth a warning: members are run again, so a run goes on with
what happens to come through."""

_FAILURE_ERRORS: dict[End, type[EnvError | ToolError | EndpointError]] = {
    End.env_error: EnvError,
    End.tool_error: ToolError,
    End.endpoint_error: EndpointError,
}


class Collection(msgspec.Struct, frozen=True, kw_only=True):
    """How groups are collected."""

    group_size: int = 8
    min_group: int = 2
    """Members that must have come through for a group to count."""
    refills: int = 2
    """How often a member that failed (never one that merely scored badly) is run again."""
    requeues: int = 3
    """How often a task whose group came to nothing is run again."""
    failure_limit: int = 64
    """Failed rollouts in a row, over all groups, that stop the run: the machinery is broken, not unlucky."""
    group_failure_limit: int = 32
    """Groups in a row that came to nothing and stop the run, although now and then a rollout came through."""
    share_env_seed: bool = True
    """All members of a group meet the same environment: the same start and the same luck. Turn it off where the start
    depends on the task alone and members should each have luck of their own."""

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ConfigError(f"group_size must be 1 or more: got {self.group_size}")
        if self.refills < 0 or self.requeues < 0 or self.failure_limit < 1 or self.group_failure_limit < 1:
            raise ConfigError(
                "refills and requeues must be 0 or more, failure_limit and group_failure_limit 1 or more: "
                f"got {self.refills}, {self.requeues}, {self.failure_limit}, {self.group_failure_limit}"
            )
        if not 1 <= self.min_group <= self.group_size:
            raise ConfigError(f"min_group must be between 1 and group_size {self.group_size}: got {self.min_group}")


class TaskStream:
    """Endless tasks: shuffled epochs that depend on the seed and the position alone, requeued tasks first."""

    def __init__(self, tasks: Sequence[Task], seed: int, *, position: int = 0, requeued: Sequence[str] = ()) -> None:
        """Start at `position`, the number of tasks drawn from the epochs before."""
        if not tasks:
            raise ConfigError("tasks must not be empty: training needs at least one")
        self._by_id = {task.id: task for task in tasks}
        if len(self._by_id) != len(tasks):
            raise ConfigError(f"task ids must be unique: {len(tasks)} tasks have {len(self._by_id)} ids")
        self._tasks, self._seed = tasks, seed
        self.position = position
        self._requeued = deque(self._by_id[task_id] for task_id in requeued if task_id in self._by_id)
        self._epoch, self._order = -1, list[int]()

    def __repr__(self) -> str:
        return f"<TaskStream at {self.position} of {len(self._tasks)}, {len(self._requeued)} requeued>"

    def next(self) -> Task:
        """Return the next task."""
        if self._requeued:
            return self._requeued.popleft()
        epoch, index = divmod(self.position, len(self._tasks))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._tasks)))
            Random(derive_seed(self._seed, "task order", epoch)).shuffle(self._order)
        self.position += 1
        return self._tasks[self._order[index]]

    def waiting(self) -> tuple[str, ...]:
        """Return the ids of requeued tasks that were not drawn again yet."""
        return tuple(task.id for task in self._requeued)

    def requeue(self, task: Task) -> None:
        """Put a task back; it goes before the next epoch's."""
        self._requeued.append(task)


class _Job(NamedTuple):
    """One group to run."""

    order: int
    task: Task
    start: RestartPoint | None
    """None for the task's start."""

    @property
    def group_id(self) -> str:
        return f"g{self.order}"


class Collector:
    """Keeps the buffer supplied: submits groups through its gate and runs their members in the runtime's slots."""

    # State.
    started_groups: dict[int, Task]  # by order: groups from task starts submitted and not yet consumed, for requeueing
    _failures: int  # failed rollouts since the last one that came through
    _recent: deque[bool]  # whether each of the last rollouts failed, since the last warning
    _group_failures: int  # groups that came to nothing since the last one that was admitted
    _last_failure: tuple[type[EnvError | ToolError | EndpointError], str]  # of a rollout
    _has_trainable: bool  # whether any rollout could be trained on so far
    _requeue_counts: dict[str, int]  # by task id: groups of it that came to nothing
    _continuations: dict[int, tuple[Group, ...]]  # by order: groups to train on beside those in the buffer

    def __init__(
        self,
        runtime: Runtime,
        env: AgentOrEnv,
        tasks: TaskStream,
        *,
        buffer: Buffer,
        ledger: Ledger,
        config: Collection,
        seed: int,
        last_contexts: bool = False,
        restarts: RestartStore | None = None,
        injection: Injection | None = None,
        brancher: GroupBrancher | None = None,
    ) -> None:
        """Wire the parts; `run` does the work. `last_contexts` is for every rollout, as in `run_rollout`.

        Args: restarts: states that some groups start from; fed by the others.
            injection: acts in some turns of groups from task starts; those from a kept state are left alone.
            brancher: values the turns of every group before the buffer has it.
        """
        self._last_contexts, self._restarts, self._injection = last_contexts, restarts, injection
        self._brancher, self._continuations = brancher, {}
        self._runtime, self._env, self._tasks = runtime, env, tasks
        self._buffer, self._ledger, self._config, self._seed = buffer, ledger, config, seed
        self.started_groups = {}
        self._failures = self._group_failures = 0
        self._recent = deque(maxlen=_RECENT)
        self._last_failure = EnvError, "none of its rollouts came to an end"
        self._has_trainable = False
        self._requeue_counts = {}

    def __repr__(self) -> str:
        return f"<Collector {len(self.started_groups)} groups live, {self._failures} failures in a row>"

    async def run(self) -> None:
        """Collect until cancelled. A failing rollout harms no other; a broken machinery or a bug raises."""
        async with anyio.create_task_group() as tg:
            while True:
                await self._buffer.wait_capacity()
                tg.start_soon(self._run_group, self._next_job(self._buffer.submit()))
                # A new version opens the gate for a whole batch at once: started in one go, its first requests would
                # hold the event loop for tens of milliseconds.
                await asyncio.sleep(0)

    def drop_stale(self, group: Group) -> None:
        """Count a group that the buffer discarded as too old, and run its task again."""
        self._ledger.drop([t.id for t in group.trajectories], "stale")
        self._continuations.pop(group.order, None)
        staleness = self._buffer.policy_version - group.version_range()[0]
        is_restart = group.restarted_from is not None
        self._give_up(group.order, group.task, "stale", group.trajectories, staleness, requeue=not is_restart)

    def unfinished(self) -> tuple[str, ...]:
        """Return the task ids of groups that were submitted and not yet trained on, oldest first."""
        return tuple(task.id for _, task in sorted(self.started_groups.items()))

    def consumed(self, groups: Sequence[Group]) -> None:
        """Forget groups that the learner has trained on."""
        for group in groups:
            self._continuations.pop(group.order, None)
            if group.restarted_from is None:
                self.started_groups.pop(group.order, None)
                self._requeue_counts.pop(group.task.id, None)

    def with_continuations(self, batch: Batch) -> Batch:
        """Return the batch with the continuations of its groups, which are younger than these, if they are to train."""
        more = [extra for group in batch.groups for extra in self._continuations.get(group.order, ())]
        return msgspec.structs.replace(batch, groups=(*batch.groups, *more)) if more else batch

    def _next_job(self, order: int) -> _Job:
        """Return what a submitted group runs: a kept state, or the start of the stream's next task."""
        start: RestartPoint | None = None
        if self._restarts is not None:
            random = Random(derive_seed(self._seed, "restart", order))
            start = self._restarts.draw(self._buffer.policy_version, random)
        if start is not None:
            return _Job(order, start.task, start)
        self.started_groups[order] = task = self._tasks.next()
        return _Job(order, task, None)

    def _learn_restarts(self, group: Group, start: RestartPoint | None) -> None:
        if self._restarts is None:
            return
        if start is None:
            self._restarts.harvest(group)
        else:
            self._restarts.report(start, group.trajectories)

    async def _run_group(self, job: _Job) -> None:
        order, task, start = job
        members: list[Trajectory] = []
        stored = False
        try:
            async with anyio.create_task_group() as tg:
                for member in range(self._config.group_size):
                    tg.start_soon(self._run_member, job, member, members)
            members.sort(key=lambda t: t.member)
            ids = [t.id for t in members]
            if len(members) < self._config.min_group:
                self._ledger.drop(ids, "group_incomplete")
                lost, members = members, []  # dropped once, whatever the next lines raise
                self._give_up(order, task, "group_incomplete", lost, requeue=start is None)
                if start is not None and self._restarts is not None:
                    self._restarts.discard(start)  # it may be one that cannot be restored
                self._count_group_failure(job.group_id)
                return
            group = Group(id=job.group_id, task=task, order=order, trajectories=tuple(members))
            self._learn_restarts(group, start)
            if self._brancher is not None:  # its rollouts have given their slots back
                group, self._continuations[order] = await self._brancher.value(group)
            self._ledger.admit(ids)
            self._group_failures = 0
            stored = True
            kept = self._buffer.put(group)
            if kept and (hear := self._runtime.events.group_finished) is not None:
                hear(GroupFinished(group))
        except BaseException:
            if not stored:
                self._ledger.drop([t.id for t in members], "cancelled")
            raise
        finally:
            if not stored:
                self._continuations.pop(order, None)
                self._buffer.withdraw(order)

    async def _run_member(self, job: _Job, member: int, members: list[Trajectory]) -> None:
        for attempt in range(1 + self._config.refills):
            trajectory_id = f"{job.group_id}.{member}" + (f".{attempt}" if attempt else "")
            trajectory = await self._run_one(job, member, trajectory_id)
            if trajectory is not None:
                members.append(trajectory)
                return

    async def _run_one(self, job: _Job, member: int, trajectory_id: str) -> Trajectory | None:
        group_id, is_root = job.group_id, job.start is None
        self._ledger.draw(trajectory_id)
        try:
            async with self._runtime.slots.hold(job.order):
                self._ledger.start(trajectory_id)
                trajectory = await self._runtime.rollout(
                    self._env,
                    job.task,
                    seed=derive_seed(self._seed, "rollout", trajectory_id),
                    env_seed=derive_seed(self._seed, "env", group_id) if self._config.share_env_seed else None,
                    group_id=group_id,
                    member=member,
                    trajectory_id=trajectory_id,
                    keep_snapshots=self._brancher is not None or (self._restarts is not None and is_root),
                    last_contexts=self._last_contexts,
                    start=job.start,
                    injection=self._injection if is_root else None,
                )
            reason = self._unusable(trajectory)
        except BaseException:
            self._ledger.drop([trajectory_id], "cancelled")
            raise
        self._recent.append(bool(reason))
        if reason:
            self._ledger.drop([trajectory_id], reason)
            self._count_failure(trajectory, reason)
            return None
        self._failures = 0
        self._has_trainable = True
        self._ledger.finish(trajectory_id)
        return trajectory

    def _unusable(self, trajectory: Trajectory) -> str:
        """Return why a rollout says nothing about the policy; empty when it does.

        Raises: ConfigError: the first rollouts cannot be trained on, so none of this server's can.
        """
        if trajectory.end.is_failure:
            return trajectory.end.value
        if trajectory.trainable:
            return "" if trajectory.policy_tokens else "empty"
        if not self._has_trainable:
            raise ConfigError(
                f"training needs token ids and log-probs from the server: {trajectory.untrainable_because} "
                f"(trajectory {trajectory.id}); use a server that returns both, or only evaluate and collect"
            )
        return "untrainable"

    def _count_failure(self, trajectory: Trajectory, reason: str) -> None:
        why = trajectory.error or trajectory.untrainable_because or "no token was generated"
        kind = _FAILURE_ERRORS.get(trajectory.end, EnvError)
        what = f"{reason}: {why}" + ("" if trajectory.id in why else f" (trajectory {trajectory.id})")
        self._last_failure = kind, what
        self._failures += 1
        if self._failures == self._config.failure_limit:  # once: the others are only its witnesses
            raise kind(
                f"{self._failures} rollouts failed in a row, the last with {what}; fix the cause, or raise "
                "failure_limit if this is expected"
            )

        failed = sum(self._recent)
        if len(self._recent) == _RECENT and failed > _MANY_FAILED * _RECENT:
            self._recent.clear()
            _log.warning(
                f"{failed} of the last {_RECENT} rollouts failed, the last with {what}; what comes through is a biased "
                "sample of what the policy does"
            )

    def _count_group_failure(self, group_id: str) -> None:
        self._group_failures += 1
        if self._group_failures == self._config.group_failure_limit:
            kind, what = self._last_failure
            raise kind(
                f"{self._group_failures} groups in a row came to nothing for want of {self._config.min_group} members, "
                f"the last {group_id}; the last rollout failed with {what}; fix the cause, lower min_group, or raise "
                "refills or group_failure_limit"
            )

    def _give_up(
        self,
        order: int,
        task: Task,
        reason: str,
        members: Sequence[Trajectory],
        staleness: int = 0,
        *,
        requeue: bool,
    ) -> None:
        """Tell of a group that came to nothing; its task is run again, unless it started from a kept state."""
        if requeue:
            self.started_groups.pop(order, None)
            count = self._requeue_counts.get(task.id, 0) + 1
            self._requeue_counts[task.id] = count
            if count <= self._config.requeues:
                self._tasks.requeue(task)
        if (hear := self._runtime.events.group_dropped) is not None:
            tokens = sum(t.policy_tokens for t in members)
            hear(GroupDropped(f"g{order}", task.id, reason, len(members), tokens, staleness))
