"""Runs a learner off the event loop: in a process of its own, or in a thread.

The worker answers one request at a time, in order. Requests and replies cross the process boundary as msgpack; the only
pickle is the learner object itself, sent once by the parent to the child it spawned.
"""

import asyncio
import atexit
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import msgspec

from turngate.envs.base import Task
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.learner import Learner, lean_trajectory
from turngate.runtime.types import Batch, Group, UpdateReport

__all__ = ["LearnerWorker", "WorkerMode", "start_learner"]

WorkerMode: TypeAlias = Literal["process", "thread"]

# Torch on one thread each keeps engine and learner out of each other's way on small machines; with two threads on two
# busy cores it ran 2-4 times slower.
_CHILD_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
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

    def close(self) -> None: ...


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
    if mode not in ("process", "thread"):
        raise ConfigError(f"worker must be 'process' or 'thread': got {mode!r}")
    channel: _Channel = _ProcessChannel(learner) if mode == "process" else _ThreadChannel(learner)
    try:
        yield LearnerWorker(channel)
    finally:
        channel.close()


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


class _Caller:
    """Makes blocking calls for coroutines, one after another, on a thread of its own.

    The thread is there before the first call and is a daemon: a pool starts threads in the middle of calls, where a
    second Ctrl-C leaves one behind that the interpreter waits for at its exit, as it does for one at work.
    """

    def __init__(self, function: Callable[[_Request], _Reply]) -> None:
        self._function = function
        self._requests: queue.SimpleQueue[tuple[_Request, asyncio.Future[_Reply]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="turngate-learner-calls", daemon=True).start()

    async def call(self, request: _Request) -> _Reply:
        """Return the reply. Cancelled: the call is made unseen, or not at all if its turn had not come."""
        future: asyncio.Future[_Reply] = asyncio.get_running_loop().create_future()
        self._requests.put((request, future))
        return await future

    def close(self) -> None:
        """Let the thread end after the calls it was given."""
        self._requests.put(None)

    def _run(self) -> None:
        while (item := self._requests.get()) is not None:
            request, future = item
            if future.cancelled():
                continue
            outcome: _Reply | BaseException
            try:
                outcome = self._function(request)
            except BaseException as error:  # the boundary: whatever it is, it belongs to the caller
                outcome = error
            with suppress(RuntimeError):  # the loop is closed: nobody is left to hear it
                future.get_loop().call_soon_threadsafe(_settle, future, outcome)


def _settle(future: "asyncio.Future[_Reply]", outcome: _Reply | BaseException) -> None:
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


class _ThreadChannel:
    def __init__(self, learner: Learner) -> None:
        self._switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        host = _Host(learner)
        # A learner must see in tests what it will see in training, and the copy is not for the event loop.
        self._caller = _Caller(lambda request: host.handle(_leaner(request)))
        self.call = self._caller.call

    def close(self) -> None:
        self._caller.close()
        sys.setswitchinterval(self._switch_interval_s)


class _ProcessChannel:
    def __init__(self, learner: Learner) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, learner), name="turngate-learner", daemon=True)
        added = {key: value for key, value in _CHILD_ENVIRONMENT.items() if key not in os.environ}
        os.environ.update(added)
        try:
            self._process.start()
        except (AttributeError, TypeError, ValueError, RecursionError, pickle.PicklingError) as error:
            raise LearnerError(
                f"the learner must be picklable before load(): {error}; build models and optimizers in load(), "
                "define its class, and functions it is given, at module level, or pass worker='thread'"
            ) from error
        finally:
            for key in added:
                del os.environ[key]
        theirs.close()
        # For a script that ends without closing us: multiprocessing would send SIGTERM, which the child leaves to us,
        # and wait for ever.
        atexit.register(self._process.kill)
        self._caller = _Caller(self._exchange)
        self.call = self._caller.call

    def _exchange(self, request: _Request) -> _Reply:
        request = _leaner(request)
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(request))
            # Waited for although the caller may have been cancelled: the next call must not read this reply.
            return msgspec.msgpack.decode(self._connection.recv_bytes(), type=_Reply)
        except (EOFError, OSError) as error:
            self._process.join(timeout=5)
            raise LearnerError(
                f"the learner process died (exit code {self._process.exitcode}) during {type(request).__name__[1:]}; "
                f"its last words are on stderr; {_ADVICE[isinstance(request, _Load)]}"
            ) from error

    def close(self) -> None:
        self._caller.close()
        self._process.kill()  # which wakes a thread that may still be waiting for a reply
        self._process.join()
        atexit.unregister(self._process.kill)
        self._connection.close()


def _leaner(request: _Request) -> _Request:
    return _Update(_lean(request.batch)) if isinstance(request, _Update) else request


def _lean(batch: Batch) -> Batch:
    """Return the batch without what only people and environments read; it may be large, or not plain data at all."""

    def thin(groups: tuple[Group, ...]) -> tuple[Group, ...]:
        return tuple(
            msgspec.structs.replace(
                g, task=Task(g.task.id, g.task.prompt), trajectories=tuple(map(lean_trajectory, g.trajectories))
            )
            for g in groups
        )

    return msgspec.structs.replace(batch, groups=thin(batch.groups), stale=thin(batch.stale))


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
