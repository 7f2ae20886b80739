"""The parts of one training run, wired together, and the steps that its loop takes."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from turngate.envs.base import Task
from turngate.runtime.agent import Agent, AgentOrEnv
from turngate.runtime.buffer import Buffer
from turngate.runtime.conversation import token_mode_of
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.events import UpdateFinished, WeightsPublished
from turngate.runtime.files import write_atomically
from turngate.runtime.garbage import rare_collections
from turngate.runtime.gauges import RunGauges
from turngate.runtime.group_branching import Branching, GroupBrancher
from turngate.runtime.injection import Injection
from turngate.runtime.learner import Learner
from turngate.runtime.ledger import Ledger, LedgerTotals
from turngate.runtime.metrics import LoopLagMeter, MetricsWriter
from turngate.runtime.restarts import Restarts, RestartStore
from turngate.runtime.run_folder import Progress, RunFolder
from turngate.runtime.runtime import Runtime
from turngate.runtime.scheduler import Collection, Collector, TaskStream
from turngate.runtime.staleness import StalenessLimit
from turngate.runtime.types import Batch, UpdateReport
from turngate.runtime.weights import WeightPublisher, hand_over, move_endpoint
from turngate.runtime.worker import LearnerWorker, WorkerMode, start_learner

__all__ = ["Run", "TrainConfig", "TrainReport", "open_run"]

_FLUSH_LINES = 64  # a crash may cost these last lines of events.jsonl; metrics.jsonl is written row by row
_STALE_BATCHES = 4  # what a critic is given of discarded experience at most, in batches; a pause must not pile it up
_RESTARTS = "restarts.msgpack"  # in a checkpoint, beside the learner's own files
_log = logging.getLogger("turngate.run")


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a run goes; written to config.json."""

    updates: int
    groups_per_batch: int
    staleness: StalenessLimit
    collection: Collection
    worker: WorkerMode = "process"
    checkpoint_every: int = 25
    keep_trajectories_every: int = 25
    """Updates between two checkpoints, and between two batches whose trajectories are written out."""
    stop_timeout_s: float = 120.0
    """What a run that is cut short may spend on its last checkpoint, an update in progress included."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("updates", "groups_per_batch", "checkpoint_every", "keep_trajectories_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more: got {getattr(self, name)}")


class TrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished run did."""

    updates: int
    policy_version: int
    ledger: LedgerTotals
    seconds: float
    history: tuple[dict[str, Any], ...]
    """One row of metrics per update, as in metrics.jsonl."""
    run_dir: str


@asynccontextmanager
async def open_run(
    runtime: Runtime,
    env: AgentOrEnv,
    tasks: Sequence[Task],
    learner: Learner,
    publisher: WeightPublisher,
    folder: RunFolder,
    config: TrainConfig,
    *,
    restarts: Restarts | None = None,
    injection: Injection | None = None,
    branching: Branching | None = None,
    resume: bool,
) -> AsyncGenerator["Run"]:
    """Start the parts, from the newest checkpoint when resuming; save one more checkpoint when the run is cut short."""
    checkpoint, progress = _start(folder, learner, resume=resume)
    served = max(runtime.endpoint.policy_version, await publisher.served_version())
    version = _first_version(progress, served)
    described = _describe(runtime, env, tasks, learner, config)
    extras = {"restarts": repr(restarts), "injection": repr(injection), "branching": repr(branching)}
    folder.write_json("config.json", described | extras)
    async with start_learner(learner, mode=config.worker) as worker, LoopLagMeter() as loop_lag:
        await worker.load(checkpoint)
        gauges = RunGauges(runtime.slots, loop_lag, is_mistake=restarts.finds_mistake if restarts is not None else None)
        run = Run(runtime, folder, publisher, worker, gauges, progress, version)
        run.learner_kind = type(learner).__qualname__
        if restarts is not None:
            run.restarts = RestartStore(restarts)
            if checkpoint is not None and (saved := checkpoint / _RESTARTS).exists():
                run.restarts.load_bytes(saved.read_bytes(), tasks)
        run.history += folder.rewind_metrics(progress.update)
        version = await run.publish_first()
        stream = TaskStream(tasks, config.seed, position=progress.task_position, requeued=progress.requeued)
        buffer = Buffer(
            groups_per_batch=config.groups_per_batch,
            limit=config.staleness,
            policy_version=version,
            next_order=progress.next_order,
            last_version=version + config.updates - progress.update,
            on_stale=lambda group: run.collector.drop_stale(group),
            keep_stale=_STALE_BATCHES * config.groups_per_batch if getattr(learner, "wants_stale", False) else 0,
        )
        if branching is not None and not isinstance(env, Agent):
            run.brancher = GroupBrancher(branching, runtime, env, seed=config.seed)
        collector = Collector(
            runtime,
            env,
            stream,
            buffer=buffer,
            ledger=run.ledger,
            config=config.collection,
            seed=config.seed,
            last_contexts=getattr(learner, "needs_last_context", False),
            restarts=run.restarts,
            injection=injection,
            brancher=run.brancher,
        )
        run.connect(buffer, stream, collector)
        if checkpoint is None:
            await run.checkpoint()  # so that whatever happens next, the run can be resumed
        try:
            with (
                rare_collections(),
                gauges.hearing(runtime.events),
                MetricsWriter(folder.path / "events.jsonl", runtime.events, flush_every=_FLUSH_LINES) as events,
            ):
                events.write("run_started", {"update": progress.update, "policy_version": version})
                yield run
        except BaseException as error:
            if not isinstance(error, LearnerError):
                await _save_last(run, error, config.stop_timeout_s)
            raise


def _start(folder: RunFolder, learner: Learner, *, resume: bool) -> tuple[Path | None, Progress]:
    """Return the checkpoint to start from, None for a new run, and where it stands."""
    if not resume:
        return None, Progress()
    checkpoint = folder.latest_checkpoint()
    if checkpoint is None:
        raise ConfigError(f"resume needs a checkpoint: none is complete in {folder.checkpoints}; start without resume")
    wrote, kind = checkpoint[1].learner, type(learner).__qualname__
    if wrote not in ("", kind):
        raise ConfigError(
            f"resume must go on with the learner that wrote the checkpoint: expected {wrote}, got {kind} "
            f"({folder.checkpoints}); start another run folder from its model to change learners"
        )
    return checkpoint


async def _save_last(run: "Run", error: BaseException, timeout_s: float) -> None:
    """Write a checkpoint although the run is being cancelled or has failed, and say what happens and how it went."""
    # Warnings, since those reach people who never configured logging: silence looks like a hang and invites kill -9.
    doing = "waiting for the update in progress" if run.is_learning else "writing a checkpoint"
    again = " again" if isinstance(error, asyncio.CancelledError) else ""
    _log.warning(f"stopping: {doing}, up to {timeout_s:g} s; interrupt{again} to give it up")
    why = f"it was not done after {timeout_s:g} s"
    with anyio.CancelScope(shield=True), anyio.move_on_after(timeout_s):
        try:
            path = await run.checkpoint()
            _log.warning(f"checkpoint {path} written; go on with resume=True")
            return
        except (LearnerError, OSError) as failure:
            why = str(failure)
    note = f"the last checkpoint could not be written: {why}; resume goes on from the one before"
    _log.warning(note)
    error.add_note(note)


class Run:
    """One training run: its parts, and the steps that `train` takes with them."""

    # State beside the parts' own.
    update: int  # updates whose weights are published
    _version_base: int  # policy version when this process started
    _update_base: int  # updates done before this process started
    _batch: Batch | None  # taken from the buffer, not yet known to be trained on
    _unrecorded: tuple[Batch, UpdateReport] | None  # trained on, without its row of metrics yet
    history: list[dict[str, Any]]
    restarts: RestartStore | None
    brancher: GroupBrancher | None

    def __init__(
        self,
        runtime: Runtime,
        folder: RunFolder,
        publisher: WeightPublisher,
        worker: LearnerWorker,
        gauges: RunGauges,
        progress: Progress,
        version: int,
    ) -> None:
        self.runtime, self.folder, self.publisher, self.worker = runtime, folder, publisher, worker
        self.update = self._update_base = progress.update
        self._version_base = version
        self.ledger = Ledger(progress.ledger)
        self._batch = self._unrecorded = None
        self.history = []
        self.restarts = self.brancher = None
        self.learner_kind = ""
        self.gauges = gauges
        self.started_s = time.monotonic()

    def __repr__(self) -> str:
        return f"<Run update {self.update}, {self.ledger!r}, {self.buffer!r}>"

    def connect(self, buffer: Buffer, tasks: TaskStream, collector: Collector) -> None:
        """Add the collecting side, which needs the run's ledger."""
        self.buffer, self.tasks, self.collector = buffer, tasks, collector

    @property
    def is_learning(self) -> bool:
        """Whether the learner is, as far as is known, in the middle of an update."""
        return self._batch is not None

    @property
    def policy_version(self) -> int:
        """The newest published version."""
        return self._version_base + self.update - self._update_base

    async def take(self) -> Batch:
        """Wait for the next batch."""
        with self.gauges.waiting():
            batch = await self.buffer.take()
        self._batch = batch
        if (hear := self.runtime.events.batch_taken) is not None:
            hear(self.gauges.batch_taken(batch))
        return batch

    async def learn(self, batch: Batch) -> UpdateReport:
        """Take one policy update on it."""
        with self.gauges.learning():
            report = await self.worker.update(self.collector.with_continuations(batch))
        self._settle(batch)
        self._unrecorded = batch, report
        return report

    async def publish_first(self) -> int:
        """Make sure that the server answers like the learner, and return the version that it then serves.

        Version 0 is what both were started with. A server that can be asked, and answers otherwise, is given the
        learner's weights as version 1.
        """
        if self._version_base == 0:
            if (is_serving := getattr(self.publisher, "is_serving", None)) is None:
                return 0
            await self.worker.save_weights(path := self._weights_path(0))
            if await is_serving(path):
                path.unlink()
                return 0
            _log.warning(f"{self.publisher!r} does not answer like the learner's model: its weights become version 1")
            self._version_base = 1
        await self._put_into_service(self._version_base)
        return self._version_base

    async def publish(self) -> None:
        """Publish the learner's weights as the next version; the gate opens only once they serve."""
        version = self.policy_version + 1
        await self._put_into_service(version)
        self.update += 1
        self.buffer.advance(version)

    async def _put_into_service(self, version: int) -> None:
        path = self._weights_path(version)
        with self.gauges.publishing():
            await self.worker.save_weights(path)
            await hand_over(self.publisher, path, version)
        path.unlink(missing_ok=True)
        move_endpoint(self.runtime.endpoint, self.publisher, version)
        if (hear := self.runtime.events.weights_published) is not None:
            hear(WeightsPublished(version, self.gauges.publishing_s))

    def _weights_path(self, version: int) -> Path:
        path = self.folder.path / "weights" / f"{version:06d}.safetensors"
        path.parent.mkdir(exist_ok=True)
        return path

    async def record(self, batch: Batch, report: UpdateReport, *, keep: bool) -> None:
        """Write and announce the update's metrics; `keep` writes its trajectories too."""
        row = self._write_row(batch, report, self.update)
        if keep:
            trajectories = [t for g in batch.groups for t in g.trajectories]
            await anyio.to_thread.run_sync(
                self.folder.write_trajectories, f"update-{self.update:06d}", trajectories, abandon_on_cancel=True
            )
        if (hear := self.runtime.events.update_finished) is not None:
            hear(UpdateFinished(self.policy_version, row, self.gauges.learning_s))

    async def checkpoint(self) -> Path:
        """Save the learner and the run's progress, and return the folder; an update that finished unseen counts."""
        partial = self.folder.begin_checkpoint()
        await self.worker.save(partial)
        if self.restarts is not None:
            write_atomically(partial / _RESTARTS, self.restarts.to_bytes())
        update = self._update_base + self.worker.updates
        if self._batch is not None and update > self.update:
            self._unrecorded = self._batch, self.worker.report or UpdateReport({})
            self._settle(self._batch)
        if self._unrecorded is not None:
            try:
                self._write_row(*self._unrecorded, update)
            except OSError as error:  # a row is worth less than the updates that the checkpoint holds
                _log.warning(f"the metrics of update {update} could not be written: {error}")
        return self.folder.commit_checkpoint(
            partial,
            Progress(
                update=update,
                policy_version=self._version_base + self.worker.updates,
                ledger=self.ledger.totals(),
                task_position=self.tasks.position,
                requeued=self.collector.unfinished() + self.tasks.waiting(),
                next_order=self.buffer.next_order,
                learner=self.learner_kind,
            ),
        )

    def report(self) -> TrainReport:
        """Close the accounts and write report.json."""
        with suppress(OSError):
            (self.folder.path / "weights").rmdir()
        self.ledger.drop(list(self.ledger.live), "run_ended")
        self.ledger.check()
        report = TrainReport(
            updates=self.update,
            policy_version=self.policy_version,
            ledger=self.ledger.totals(),
            seconds=time.monotonic() - self.started_s,
            history=tuple(self.history),
            run_dir=str(self.folder.path),
        )
        self.folder.write_json("report.json", report)
        return report

    def _write_row(self, batch: Batch, report: UpdateReport, update: int) -> dict[str, Any]:
        row = self.gauges.row(batch, self.buffer, self.ledger)
        version = self._version_base + update - self._update_base
        row = {"update": update, "policy_version": version, **row}
        if self.restarts is not None:
            row |= self.restarts.metrics()
        if self.brancher is not None:
            row |= self.brancher.metrics()
        for name, value in report.metrics.items():
            while name in row:  # ours are what resuming and plots read, and the learner's must not be lost
                name = f"learner_{name}"
            row[name] = value
        self.history.append(row)
        self.folder.append_metrics(row)
        self._unrecorded = None
        return row

    def _settle(self, batch: Batch) -> None:
        self.ledger.train([t.id for g in batch.groups for t in g.trajectories])
        self.collector.consumed(batch.groups)
        self._batch = None


def _first_version(progress: Progress, served: int) -> int:
    """Return the policy version to start from; a server that is past the checkpoint keeps counting, never goes back."""
    is_untouched = served == 0 and progress.update == 0
    return progress.policy_version if is_untouched or progress.policy_version > served else served + 1


def _describe(
    runtime: Runtime, env: AgentOrEnv, tasks: Sequence[Task], learner: Learner, config: TrainConfig
) -> dict[str, Any]:
    return {
        "train": config,
        "learner": repr(learner),
        "env": getattr(env, "__qualname__", repr(env)),
        "tasks": len(tasks),
        "endpoint": repr(runtime.endpoint),
        "token_mode": token_mode_of(runtime.endpoint),
        "capabilities": getattr(runtime.endpoint, "capabilities", None),
        "limits": runtime.limits,
        "sampling": runtime.sampling,
        "context": repr(runtime.context),
        "guidance": repr(runtime.guidance),
        "max_concurrent": runtime.slots.total,
    }
