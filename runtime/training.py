"""The asynchronous training loop: rollouts fill a tank, the learner empties it, weights flow back in flight."""

from collections.abc import Sequence
from pathlib import Path

import anyio

from turngate.envs.base import Task
from turngate.runtime.agent import AgentOrEnv, check_agent_run
from turngate.runtime.capabilities import check_trainable
from turngate.runtime.errors import ConfigError, check_kind
from turngate.runtime.group_branching import Branching
from turngate.runtime.injection import Injection
from turngate.runtime.learner import Learner, check_learner
from turngate.runtime.restarts import Restarts, check_restarts
from turngate.runtime.run import Run, TrainConfig, TrainReport, open_run
from turngate.runtime.run_folder import RunFolder
from turngate.runtime.runtime import Runtime
from turngate.runtime.scheduler import Collection
from turngate.runtime.sigterm import exit_on_sigterm
from turngate.runtime.staleness import LatePolicy, StalenessLimit
from turngate.runtime.unwrap import single_errors
from turngate.runtime.weights import WeightPublisher
from turngate.runtime.worker import WorkerMode

__all__ = ["train"]


async def train(
    runtime: Runtime,
    env: AgentOrEnv,
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
    stop_timeout_s: float = 120.0,
    restarts: Restarts | None = None,
    injection: Injection | None = None,
    branching: Branching | None = None,
    resume: bool = False,
    seed: int = 0,
) -> TrainReport:
    """Train until `updates` policy updates are done and return what happened.

    Rollouts, learner and weight transfer overlap as far as `max_staleness` lets them; 0 is exactly synchronous. Weights
    go to `publisher`, by default the endpoint's own. Cancelling (Ctrl-C) waits for an update in progress, at most
    `stop_timeout_s`, and writes a checkpoint; SIGTERM does so, too, and exits with status 143. `resume=True` goes on
    from the newest checkpoint; rollouts that were unfinished are counted as dropped, and run again.

    Args: collection: how failures are refilled; replaces `group_size`.
        restarts: start some groups from states reached through mistakes; the environment must be a SnapshotEnv.
        injection: let something else act in the policy's place now and then, in groups from task starts.
        branching: value the turns of every group by playing on from them; the environment must be a SnapshotEnv.
    Raises: ConfigError: what was asked for cannot work. LearnerError, PublishError, EndpointError, EnvError: the part
        named failed for good; the newest checkpoint is kept.
    """
    publisher = publisher or runtime.endpoint.publisher
    if publisher is None:
        raise ConfigError(
            "training needs a weight publisher: the endpoint has none; pass publisher=..., as VLLMPublisher for vLLM "
            "or FolderPublisher for a server that loads files itself"
        )
    check_trainable(runtime.endpoint, runtime.sampling)
    check_kind("restarts", restarts, Restarts)
    check_kind("injection", injection, Injection)
    check_kind("branching", branching, Branching)
    scores = (*runtime.scorers.names, *(branching.scores if branching is not None else ()))
    check_learner(learner, runtime.sampling, max_staleness, scores, runtime.guidance)
    if branching is not None:
        branching.check_learner(learner)
    check_restarts(restarts, runtime.scorers.names)
    check_agent_run(env, restarts=restarts, injection=injection, branching=branching)
    config = TrainConfig(
        updates=updates,
        groups_per_batch=groups_per_batch,
        staleness=StalenessLimit(max_staleness=max_staleness, late=late),
        collection=collection or Collection(group_size=group_size, min_group=min(2, group_size)),
        worker=worker,
        checkpoint_every=checkpoint_every,
        keep_trajectories_every=keep_trajectories_every,
        stop_timeout_s=stop_timeout_s,
        seed=seed,
    )
    folder = RunFolder(Path(run_dir), resume=resume)
    with exit_on_sigterm():
        opened = open_run(
            runtime,
            env,
            tasks,
            learner,
            publisher,
            folder,
            config,
            restarts=restarts,
            injection=injection,
            branching=branching,
            resume=resume,
        )
        async with opened as run:
            with single_errors():
                await _loop(run, config)
    return run.report()


async def _loop(run: Run, config: TrainConfig) -> None:
    """Run the two pumps: rollouts fill the buffer, the learner empties it."""
    async with anyio.create_task_group() as tg:
        tg.start_soon(run.collector.run)
        while run.update < config.updates:
            # 1. Wait until the buffer holds a batch that is young enough.
            batch = await run.take()
            # 2. Learn from it, off the event loop.
            report = await run.learn(batch)
            # 3. Send the new weights to the server while rollouts go on, then open the gate.
            await run.publish()
            # 4. Tell everyone, and make it durable from time to time.
            await run.record(batch, report, keep=run.update % config.keep_trajectories_every == 0)
            if run.update % config.checkpoint_every == 0 or run.update == config.updates:
                await run.checkpoint()
        tg.cancel_scope.cancel()
