"""The asynchronous training loop: rollouts fill a tank, the learner empties it, weights flow back in flight."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec

from turngate.envs.base import EnvFactory, Task
from turngate.runtime.buffer import Buffer
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.events import UpdateFinished, WeightsPublished
from turngate.runtime.gauges import RunGauges
from turngate.runtime.learner import Learner
from turngate.runtime.ledger import Ledger, LedgerTotals
from turngate.runtime.run_folder import Progress, RunFolder
from turngate.runtime.runtime import Runtime
from turngate.runtime.scheduler import Collection, Collector, TaskStream
from turngate.runtime.staleness import LatePolicy, StalenessLimit
from turngate.runtime.types import Batch, UpdateReport
from turngate.runtime.unwrap import single_errors
from turngate.runtime.weights import WeightPublisher
from turngate.runtime.worker import LearnerWorker, WorkerMode, start_learner

__all__ = ["TrainReport", "train"]

_STOP_S = 20.0  # what a cancelled run may spend on its last checkpoint: an update in progress and two file writes


class TrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished run did."""

    updates: int
    policy_version: int
    ledger: LedgerTotals
    seconds: float
    history: tuple[dict[str, Any], ...]
    """One row of metrics per update, as in metrics.jsonl."""
    run_dir: str


async def train(
    runtime: Runtime,
    env: EnvFactory,
    tasks: Sequence[Task],
    *,
    learner: Learner,
    updates: int,
    run_dir: str | Path,
    group_size: int = 8,
    groups_per_batch: int = 16,
    max_staleness: int = 2,
    late: LatePolicy = "wait",
    collection: Collection | None = None,
    publisher: WeightPublisher | None = None,
    worker: WorkerMode = "process",
    checkpoint_every: int = 25,
    keep_trajectories_every: int = 25,
    resume: bool = False,
    seed: int = 0,
) -> TrainReport:
    """Train until `updates` policy updates are done and return what happened.

    Rollouts, learner and weight transfer overlap as far as `max_staleness` lets them; 0 is exactly synchronous. Weights
    go to `publisher`, by default the endpoint's own. Cancelling (Ctrl-C) waits for an update in progress, writes a
    checkpoint and leaves a run that `resume=True` continues; unfinished rollouts are counted as dropped and run again.

    Raises: ConfigError: what was asked for cannot work. LearnerError, PublishError, EndpointError, EnvError: the part
        named failed for good; the newest checkpoint is kept.
    """
    publisher = publisher or runtime.endpoint.publisher
    if publisher is None:
        raise ConfigError("training needs a weight publisher: the endpoint has none; pass publisher=...")
    collection = collection or Collection(group_size=group_size)
    folder = RunFolder(Path(run_dir), resume=resume)
    async with _open_run(
        runtime,
        env,
        tasks,
        folder,
        publisher,
        learner,
        worker,
        collection=collection,
        limit=StalenessLimit(max_staleness=max_staleness, late=late),
        groups_per_batch=groups_per_batch,
        updates=updates,
        resume=resume,
        seed=seed,
    ) as run:
        with single_errors():
            async with anyio.create_task_group() as tg:
                tg.start_soon(run.collector.run)  # the first pump
                while run.update < updates:  # the second pump
                    # 1. Wait until the tank holds a batch that is young enough.
                    batch = await run.take()
                    # 2. Learn from it, off the event loop.
                    report = await run.learn(batch)
                    # 3. Send the new weights to the server while rollouts go on, then open the gate.
                    await run.publish()
                    # 4. Tell everyone, and make it durable from time to time.
                    run.record(batch, report, keep=run.update % keep_trajectories_every == 0)
                    if run.update % checkpoint_every == 0 or run.update == updates:
                        await run.checkpoint()
                tg.cancel_scope.cancel()
    return run.report()


@asynccontextmanager
async def _open_run(
    runtime: Runtime,
    env: EnvFactory,
    tasks: Sequence[Task],
    folder: RunFolder,
    publisher: WeightPublisher,
    learner: Learner,
    worker: WorkerMode,
    *,
    collection: Collection,
    limit: StalenessLimit,
    groups_per_batch: int,
    updates: int,
    resume: bool,
    seed: int,
) -> AsyncIterator["_Run"]:
    """Start the parts, from a checkpoint when resuming; save one more checkpoint when the run is cut short."""
    checkpoint = folder.latest_checkpoint() if resume else None
    if resume and checkpoint is None:
        raise ConfigError(f"resume needs a checkpoint: none is complete in {folder.checkpoints}; start without resume")
    progress = checkpoint[1] if checkpoint else Progress()
    served = runtime.endpoint.policy_version
    # A server that is past the checkpoint keeps counting: versions never go back.
    version = progress.policy_version if progress.policy_version > served or not (served or checkpoint) else served + 1
    async with start_learner(learner, mode=worker) as learner_worker:
        await learner_worker.load(checkpoint[0] if checkpoint else None)
        run = _Run(runtime, folder, publisher, learner_worker, progress, version)
        if version > 0:
            await run.publish(version)
        stream = TaskStream(tasks, seed, position=progress.task_position, requeued=progress.requeued)
        buffer = Buffer(
            groups_per_batch=groups_per_batch,
            limit=limit,
            policy_version=version,
            next_order=progress.next_order,
            last_version=version + updates - progress.update,
            on_stale=lambda group: run.collector.drop_stale(group),
        )
        collector = Collector(runtime, env, stream, buffer=buffer, ledger=run.ledger, config=collection, seed=seed)
        run.connect(buffer, stream, collector)
        try:
            yield run
        except BaseException as error:
            if not isinstance(error, LearnerError):
                with anyio.CancelScope(shield=True), anyio.move_on_after(_STOP_S), suppress(LearnerError):
                    await run.checkpoint()
            raise


class _Run:
    """The parts of one training run and the steps of its loop."""

    # State beside the parts' own.
    update: int  # updates whose weights are published
    _version_base: int  # policy version when this process started
    _update_base: int  # updates done before this process started
    _batch: Batch | None  # taken from the buffer, not yet known to be trained on
    history: list[dict[str, Any]]

    def __init__(
        self,
        runtime: Runtime,
        folder: RunFolder,
        publisher: WeightPublisher,
        worker: LearnerWorker,
        progress: Progress,
        version: int,
    ) -> None:
        self.runtime, self.folder, self.publisher, self.worker = runtime, folder, publisher, worker
        self.update = self._update_base = progress.update
        self._version_base = version
        self.ledger = Ledger(progress.ledger)
        self._batch = None
        self.history = []
        self.gauges = RunGauges(runtime.slots)
        self.started_s = time.monotonic()

    def connect(self, buffer: Buffer, tasks: TaskStream, collector: Collector) -> None:
        self.buffer, self.tasks, self.collector = buffer, tasks, collector

    @property
    def policy_version(self) -> int:
        return self._version_base + self.update - self._update_base

    async def take(self) -> Batch:
        with self.gauges.waiting():
            batch = await self.buffer.take()
        self._batch = batch
        if (hear := self.runtime.events.batch_taken) is not None:
            hear(self.gauges.batch_taken(batch))
        return batch

    async def learn(self, batch: Batch) -> UpdateReport:
        with self.gauges.learning():
            report = await self.worker.update(batch)
        self._settle(batch)
        return report

    async def publish(self, version: int | None = None) -> None:
        """Publish the learner's weights as the next version; the gate opens only once they serve."""
        starting = version is not None
        version = self.policy_version + 1 if version is None else version
        path = self.folder.path / "weights" / f"{version:06d}.safetensors"
        path.parent.mkdir(exist_ok=True)
        with self.gauges.publishing():
            await self.worker.save_weights(path)
            await self.publisher.publish(path, version)
        path.unlink(missing_ok=True)
        self.runtime.endpoint.policy_version = version
        if not starting:
            self.update += 1
            self.buffer.advance(version)
        if (hear := self.runtime.events.weights_published) is not None:
            hear(WeightsPublished(version, self.gauges.publishing_s))

    def record(self, batch: Batch, report: UpdateReport, *, keep: bool) -> None:
        row = self.gauges.row(batch, self.buffer, self.ledger)
        row = {"update": self.update, "policy_version": self.policy_version, **row, **report.metrics}
        self.history.append(row)
        self.folder.append_metrics(row)
        if keep:
            self.folder.write_trajectories(
                f"update-{self.update:06d}", [t for g in batch.groups for t in g.trajectories]
            )
        if (hear := self.runtime.events.update_finished) is not None:
            hear(UpdateFinished(self.policy_version, row, self.gauges.learning_s))

    async def checkpoint(self) -> None:
        """Save the learner and the run's progress; an update that finished unseen counts."""
        partial = self.folder.begin_checkpoint(self.update)
        await self.worker.save(partial)
        update = self._update_base + self.worker.updates
        if self._batch is not None and update > self.update:
            self._settle(self._batch)
        self.folder.commit_checkpoint(
            partial,
            Progress(
                update=update,
                policy_version=self._version_base + self.worker.updates,
                ledger=self.ledger.totals(),
                task_position=self.tasks.position,
                requeued=tuple(task.id for _, task in sorted(self.collector.started_groups.items())),
                next_order=self.buffer.next_order,
            ),
        )

    def report(self) -> TrainReport:
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

    def _settle(self, batch: Batch) -> None:
        self.ledger.train([t.id for g in batch.groups for t in g.trajectories])
        self.collector.consumed(batch.groups)
        self._batch = None
