import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from turngate.envs.base import End, Task
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.testing.learner import CountingLearner, ReportingLearner
from turngate.runtime.types import Batch, Group, Trajectory, Turn, UpdateReport
from turngate.runtime.worker import WorkerMode, start_learner

EMPTY = Batch(groups=(), policy_version=0)
MODES: list[WorkerMode] = ["process", "thread"]


@pytest.mark.parametrize("mode", MODES)
async def test_a_worker_updates_saves_and_resumes(mode: WorkerMode, tmp_path: Path) -> None:
    async with start_learner(CountingLearner(), mode=mode) as worker:
        await worker.load(None)
        assert (await worker.update(EMPTY)).metrics["count"] == 1
        assert (await worker.update(EMPTY)).metrics["count"] == 2
        await worker.save_weights(tmp_path / "weights")
        await worker.save(tmp_path)
        assert worker.updates == 2
    assert (tmp_path / "weights").read_text() == "2"
    async with start_learner(CountingLearner(), mode=mode) as worker:
        await worker.load(tmp_path)
        assert (await worker.update(EMPTY)).metrics["count"] == 3
        assert worker.updates == 1


@pytest.mark.parametrize("mode", MODES)
async def test_an_error_in_the_learner_arrives_with_its_traceback(mode: WorkerMode) -> None:
    async with start_learner(CountingLearner(fail_at=0), mode=mode) as worker:
        await worker.load(None)
        with pytest.raises(LearnerError, match=r"learner failed in Update: told to fail[\s\S]*learner.py"):
            await worker.update(EMPTY)


@pytest.mark.parametrize("mode", MODES)
async def test_metrics_arrive_as_floats_whatever_numbers_the_learner_returns(mode: WorkerMode) -> None:
    metrics = {"numpy": np.float32(0.5), "tensor": torch.tensor(2.0), "int": 3}
    async with start_learner(ReportingLearner(UpdateReport(cast(dict[str, float], metrics))), mode=mode) as worker:
        report = await worker.update(EMPTY)
    assert report.metrics == {"numpy": 0.5, "tensor": 2.0, "int": 3.0}
    assert {type(value) for value in report.metrics.values()} == {float}


@pytest.mark.parametrize("mode", MODES)
async def test_a_metric_that_is_no_number_is_named_and_the_learner_goes_on(mode: WorkerMode, tmp_path: Path) -> None:
    metrics = {"loss": torch.zeros(2)}
    async with start_learner(ReportingLearner(UpdateReport(cast(dict[str, float], metrics))), mode=mode) as worker:
        await worker.load(None)
        with pytest.raises(LearnerError, match=r"metrics must be numbers: got tensor.* for 'loss'"):
            await worker.update(EMPTY)
        assert worker.updates == 1  # the update itself took place
        await worker.save_weights(tmp_path / "weights")


async def test_an_update_without_a_report_is_an_error() -> None:
    async with start_learner(ReportingLearner(None), mode="thread") as worker:
        with pytest.raises(LearnerError, match="must return an UpdateReport: got None"):
            await worker.update(EMPTY)


async def test_a_process_that_dies_is_reported_with_its_exit_code() -> None:
    async with start_learner(CountingLearner(die_at=1)) as worker:
        await worker.load(None)
        await worker.update(EMPTY)
        with pytest.raises(LearnerError, match=r"exit code 7\) during Update"):
            await worker.update(EMPTY)


@pytest.mark.parametrize("mode", MODES)
async def test_after_a_cancelled_update_the_next_call_gets_its_own_reply(mode: WorkerMode, tmp_path: Path) -> None:
    async with start_learner(CountingLearner(update_s=0.2), mode=mode) as worker:
        await worker.load(None)
        update = asyncio.create_task(worker.update(EMPTY))
        await asyncio.sleep(0.05)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        await worker.save(tmp_path)
        assert worker.updates == 1  # the cancelled update finished, and is known to have
        assert worker.report is not None
        assert worker.report.metrics["count"] == 1  # and what it reported, too
    assert (tmp_path / "count").read_text() == "1"


async def test_a_report_that_could_not_be_read_is_not_taken_for_the_last_one() -> None:
    learner = ReportingLearner(UpdateReport({"loss": 1.0}))
    async with start_learner(learner, mode="thread") as worker:
        await worker.update(EMPTY)
        learner.report = None
        with pytest.raises(LearnerError, match="must return an UpdateReport"):
            await worker.update(EMPTY)
        assert (worker.updates, worker.report) == (2, None)


async def test_a_learner_process_leaves_sigterm_to_its_parent(tmp_path: Path) -> None:
    """Service managers send it to every process at once."""
    async with start_learner(CountingLearner(update_s=0.3)) as worker:
        await worker.load(None)
        update = asyncio.create_task(worker.update(EMPTY))
        await asyncio.sleep(0.05)
        os.kill(worker._channel._process.pid, signal.SIGTERM)
        assert (await update).metrics["count"] == 1


SCRIPT = """
    import asyncio, os
    from turngate.runtime.testing.learner import CountingLearner, ReportingLearner
    from turngate.runtime.types import Batch
    from turngate.runtime.worker import LearnerWorker, _ProcessChannel

    async def main():
        global worker
        worker = LearnerWorker(_ProcessChannel(CountingLearner(update_s=600)))
        await worker.load(None)
        print("loaded", flush=True)
        {then}

    asyncio.run(main())
"""


async def _end_of_script(then: str, *, kill: bool) -> int | None:
    """Run the script above and return its exit code once nobody holds its output any more: its learner is gone, too."""
    script = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(SCRIPT).format(then=then), stdout=subprocess.PIPE, start_new_session=True
    )
    assert script.stdout is not None
    try:
        assert await asyncio.wait_for(script.stdout.readline(), 60) == b"loaded\n"
        await asyncio.sleep(0.1 if kill else 0)  # the update has begun, or what is tested is the easier case
        if kill:
            script.kill()
        await asyncio.wait_for(script.communicate(), 30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
    return script.returncode


async def test_a_learner_process_ends_with_its_killed_parent_although_an_update_is_under_way() -> None:
    assert await _end_of_script("await worker.update(Batch(groups=(), policy_version=0))", kill=True) == -signal.SIGKILL


async def test_a_script_that_leaves_its_worker_open_ends() -> None:
    assert await _end_of_script("pass", kill=False) == 0


class Unwilling:
    """Refuses to be pickled, in words of its own."""

    def __reduce__(self) -> str:
        raise ValueError("not me")


at_module_level: Callable[[], int] = lambda: 0


@pytest.mark.parametrize("what", [at_module_level, lambda: 0, Unwilling(), threading.Lock()])
async def test_an_unpicklable_learner_is_refused_with_advice(what: object) -> None:
    learner = CountingLearner()
    learner.given = what
    with pytest.raises(LearnerError, match="picklable before load"):
        async with start_learner(learner):
            pass


@pytest.mark.parametrize("mode", MODES)
async def test_no_thread_is_started_in_the_middle_of_a_call(mode: WorkerMode, tmp_path: Path) -> None:
    """Thread.start waits; a Ctrl-C that ends this wait leaves a thread that the interpreter waits for at its exit."""
    async with start_learner(CountingLearner(update_s=0.2), mode=mode) as worker:
        await worker.load(None)
        before = threading.active_count()
        update, save = asyncio.create_task(worker.update(EMPTY)), asyncio.create_task(worker.save(tmp_path))
        await asyncio.sleep(0.05)
        assert threading.active_count() == before
        await asyncio.gather(update, save)


class LeavingLearner(CountingLearner):
    """Ends the script, as some libraries do when they find no GPU."""

    def update(self, batch: Batch) -> UpdateReport:
        sys.exit(3)


async def test_a_learner_that_exits_in_its_thread_does_not_hang_its_caller() -> None:
    async with start_learner(LeavingLearner(), mode="thread") as worker:
        await worker.load(None)
        with pytest.raises(SystemExit):
            await worker.update(EMPTY)


@pytest.mark.parametrize("mode", MODES)
async def test_a_call_that_was_cancelled_before_its_turn_is_not_made(mode: WorkerMode, tmp_path: Path) -> None:
    async with start_learner(CountingLearner(update_s=0.2), mode=mode) as worker:
        await worker.load(None)
        calls = [asyncio.create_task(worker.update(EMPTY)) for _ in range(3)]
        await asyncio.sleep(0.05)
        calls[1].cancel()
        reports = await asyncio.gather(*calls, return_exceptions=True)
        assert [r.metrics["count"] for r in reports if isinstance(r, UpdateReport)] == [1, 2]


async def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="'process' or 'thread': got 'fiber'"):
        async with start_learner(CountingLearner(), mode="fiber"):
            pass


class ContextLearner(CountingLearner):
    """Reports how many bytes of last contexts it was given, in groups and in stale ones."""

    def update(self, batch: Batch) -> UpdateReport:
        super().update(batch)
        found = {
            name: float(sum(len(t.last_context) for g in groups for t in g.trajectories))
            for name, groups in (("groups", batch.groups), ("stale", batch.stale))
        }
        states = [turn.state for group in batch.groups for t in group.trajectories for turn in t.turns]
        return UpdateReport(found | {"states": float(sum(state is not None for state in states))})


@pytest.mark.parametrize("mode", MODES)
async def test_a_learner_is_sent_last_contexts_and_stale_groups_without_what_only_people_read(mode: WorkerMode) -> None:
    turn = Turn(index=0, segment=0, start=0, length=0, text="a", state={"no plain data": object()})
    trajectory = Trajectory(id="a", task=Task("t"), end=End.turn_limit, turns=(turn,), last_context=bytes(8))
    group = Group(id="g", task=Task("t", data={"neither": object()}), order=0, trajectories=(trajectory,) * 2)
    async with start_learner(ContextLearner(), mode=mode) as worker:
        await worker.load(None)
        report = await worker.update(Batch(groups=(group,), policy_version=0, stale=(group, group)))
    assert report.metrics == {"groups": 16.0, "stale": 32.0, "states": 0.0}
