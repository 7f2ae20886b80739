"""Runs a learner off the event loop: in a process of its own, or in a thread.

The worker answers one request at a time, in order. Requests and replies cross the process boundary as msgpack; the only
pickle is the learner object itself, sent once by the parent to the child it spawned.
"""

import atexit
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import traceback
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import anyio
import anyio.to_thread
import msgspec

from turngate.envs.base import Task
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.learner import Learner
from turngate.runtime.types import Batch, Trajectory, UpdateReport

__all__ = ["LearnerWorker", "WorkerMode", "start_learner"]

WorkerMode: TypeAlias = Literal["process", "thread"]

# Torch on one thread each keeps engine and learner out of each other's way on small machines; with two threads on two
# busy cores it ran 2-4 times slower.
_CHILD_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
_WAITING_CALLS = 4  # threads: one call at work, and one or two after a cancellation
_ADVICE = {
    True: "if it never started, guard the script's entry by `if __name__ == '__main__':`, since the process imports it",
    False: "resume from the last checkpoint",
}
_SWITCH_INTERVAL_S = 0.0005  # at the default 5 ms, two compute threads starve each other


class _Update(msgspec.Struct, tag="update"):
    batch: Batch


class _SaveWeights(msgspec.Struct, tag="save_weights"):
    path: str


class _Load(msgspec.Struct, tag="load"):
    folder: str | None


class _Save(msgspec.Struct, tag="save"):
    folder: str


_Request: TypeAlias = _Load | _Update | _SaveWeights | _Save


class _Reply(msgspec.Struct):
    updates: int
    """Updates completed since the worker started, this request included."""
    report: UpdateReport | None = None
    """Of the last of them; None when there is none, or it could not be read."""
    error: str | None = None


class _Channel(Protocol):
    async def call(self, request: _Request) -> _Reply: ...


class LearnerWorker:
    """A learner behind coroutines. Use one coroutine at a time; cancelling a call lets the work finish unseen."""

    # State.
    updates: int  # updates the learner has completed, as far as its replies have told
    report: UpdateReport | None  # of the last of them, also when the call for it was cancelled

    def __init__(self, channel: _Channel) -> None:
        """Wrap a started channel; `start_learner` makes one."""
        self._channel = channel
        self.updates = 0
        self.report = None

    async def load(self, folder: Path | None) -> None:
        """Get the learner ready, from a checkpoint folder or from its configured start."""
        await self._call(_Load(None if folder is None else str(folder)))

    async def update(self, batch: Batch) -> UpdateReport:
        """Take one update and return its report."""
        reply = await self._call(_Update(batch))
        assert reply.report is not None, "a reply to an update without error holds its report"
        return reply.report

    async def save_weights(self, path: Path) -> None:
        """Write the policy's weights to a safetensors file."""
        await self._call(_SaveWeights(str(path)))

    async def save(self, folder: Path) -> None:
        """Write a checkpoint of the learner; waits for an update in progress."""
        await self._call(_Save(str(folder)))

    async def _call(self, request: _Request) -> _Reply:
        reply = await self._channel.call(request)
        self.updates, self.report = reply.updates, reply.report
        if reply.error is not None:
            raise LearnerError(reply.error)
        return reply


@asynccontextmanager
async def start_learner(learner: Learner, *, mode: WorkerMode = "process") -> AsyncGenerator[LearnerWorker]:
    """Run `learner` in its own process (spawn) or thread until the block ends; leaving it stops the process at once."""
    if mode == "process":
        channel = _ProcessChannel(learner)
        try:
            yield LearnerWorker(channel)
        finally:
            channel.close()
    elif mode == "thread":
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        try:
            yield LearnerWorker(_ThreadChannel(learner))
        finally:
            sys.setswitchinterval(before)
    else:
        raise ConfigError(f"worker must be 'process' or 'thread': got {mode!r}")


class _Host:
    """Executes requests on the learner, wherever it lives; errors become replies with the traceback."""

    def __init__(self, learner: Learner) -> None:
        self._learner, self._updates = learner, 0
        self._report: UpdateReport | None = None

    def handle(self, request: _Request) -> _Reply:
        try:
            match request:
                case _Load(folder):
                    self._learner.load(None if folder is None else Path(folder))
                case _Update(batch):
                    report = self._learner.update(batch)
                    self._updates, self._report = self._updates + 1, None
                    self._report = _plain(report)
                case _SaveWeights(path):
                    self._learner.save_weights(Path(path))
                case _Save(folder):
                    self._learner.save(Path(folder))
        except Exception as error:  # the boundary: user learners raise anything, and the caller must see it
            told = "".join(traceback.format_exception(error)).rstrip()
            error_text = f"learner failed in {type(request).__name__[1:]}: {error}\n{told}"
            return _Reply(self._updates, self._report, error_text)
        return _Reply(self._updates, self._report)


def _plain(report: object) -> UpdateReport:
    """Return the report with metrics that msgpack and JSON can hold: learners also return NumPy numbers and tensors."""
    if not isinstance(report, UpdateReport):
        raise LearnerError(f"update must return an UpdateReport: got {report!r}; see the Learner protocol")
    metrics: dict[str, float] = {}
    for name, value in report.metrics.items():
        try:
            metrics[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise LearnerError(f"metrics must be numbers: got {value!r} for {name!r}; return one float each") from error
    return UpdateReport(metrics)


class _ThreadChannel:
    def __init__(self, learner: Learner) -> None:
        self._host = _Host(learner)
        self._turn = threading.Lock()
        self._limiter = anyio.CapacityLimiter(_WAITING_CALLS)

    async def call(self, request: _Request) -> _Reply:
        return await anyio.to_thread.run_sync(self._handle, request, limiter=self._limiter, abandon_on_cancel=True)

    def _handle(self, request: _Request) -> _Reply:
        with self._turn:
            return self._host.handle(request)


class _ProcessChannel:
    def __init__(self, learner: Learner) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, learner), name="turngate-learner", daemon=True)
        added = {key: value for key, value in _CHILD_ENVIRONMENT.items() if key not in os.environ}
        os.environ.update(added)
        try:
            self._process.start()
        except (AttributeError, TypeError) as error:
            raise LearnerError(
                f"the learner must be picklable before load(): {error}; build models and optimizers in load(), "
                "define the class at module level, or pass worker='thread'"
            ) from error
        finally:
            for key in added:
                del os.environ[key]
        theirs.close()
        # For a script that ends without closing us: multiprocessing would send SIGTERM, which the child leaves to us,
        # and wait for ever.
        atexit.register(self._process.kill)
        self._turn = threading.Lock()
        self._limiter = anyio.CapacityLimiter(_WAITING_CALLS)

    async def call(self, request: _Request) -> _Reply:
        return await anyio.to_thread.run_sync(self._exchange, request, limiter=self._limiter, abandon_on_cancel=True)

    def _exchange(self, request: _Request) -> _Reply:
        if isinstance(request, _Update):
            request = _Update(_lean(request.batch))
        try:
            with self._turn:  # a cancelled call still waits here for its reply; the next one must not read it
                self._connection.send_bytes(msgspec.msgpack.encode(request))
                return msgspec.msgpack.decode(self._connection.recv_bytes(), type=_Reply)
        except (EOFError, OSError) as error:
            self._process.join(timeout=5)
            raise LearnerError(
                f"the learner process died (exit code {self._process.exitcode}) during {type(request).__name__[1:]}; "
                f"its last words are on stderr; {_ADVICE[isinstance(request, _Load)]}"
            ) from error

    def close(self) -> None:
        # First, since it wakes a thread that may still be waiting for a reply.
        self._process.kill()
        self._process.join()
        atexit.unregister(self._process.kill)
        self._connection.close()


def _lean(batch: Batch) -> Batch:
    """Return the batch without what only people and environments read; it may be large, or not plain data at all."""

    def lean(trajectory: Trajectory) -> Trajectory:
        turns = tuple(msgspec.structs.replace(turn, state=None, snapshot=None) for turn in trajectory.turns)
        return msgspec.structs.replace(trajectory, task=bare(trajectory.task), turns=turns, messages=())

    def bare(task: Task) -> Task:
        return Task(task.id, task.prompt)

    groups = (
        msgspec.structs.replace(g, task=bare(g.task), trajectories=tuple(map(lean, g.trajectories)))
        for g in batch.groups
    )
    return msgspec.structs.replace(batch, groups=tuple(groups))


def _serve(connection: Connection, learner: Learner) -> None:
    """Run in the child until the parent hangs up, or dies."""
    # Ctrl-C goes to the whole group, and service managers send SIGTERM to all: the parent decides what to save. SIGTERM
    # is handled rather than ignored, which processes that the learner starts would inherit.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    threading.Thread(target=_end_with_parent, name="turngate-parent-watch", daemon=True).start()
    host = _Host(learner)
    while True:
        try:
            request = msgspec.msgpack.decode(connection.recv_bytes(), type=_Request)
        except (EOFError, OSError):
            return
        reply = host.handle(request)
        try:
            connection.send_bytes(msgspec.msgpack.encode(reply))
        except (BrokenPipeError, OSError):
            return


def _end_with_parent() -> None:
    """End this process when its parent is gone: a long update would go on for nobody, and keep its memory."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "the learner process is started by multiprocessing"
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
