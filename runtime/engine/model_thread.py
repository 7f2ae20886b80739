"""The thread that owns the model: it alone touches the batcher, and sleeps when there is nothing to do.

    event loop                                    model thread
    submit, cancel, call  --- SimpleQueue --->    commands, then one batcher step, and again
    sinks                 <-- one call_soon_threadsafe per step ---

The queue's blocking `get` is the wake-up: nothing polls. Outcomes of a whole step cross back together, because
waking the loop costs more than handling an outcome.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from turngate.runtime.engine.batcher import Batcher
from turngate.runtime.engine.request import Finished, Progress, Rejection, Request
from turngate.runtime.errors import EndpointError, TurngateError

__all__ = ["ModelThread", "Outcome", "Sink"]

T = TypeVar("T")
Outcome: TypeAlias = Progress | Finished | Rejection | EndpointError
"""What a submitted request leads to: Progress while it streams, then exactly one of the others."""
Sink: TypeAlias = Callable[[Outcome], None]
"""Called on the event loop."""

_Command: TypeAlias = tuple[str, Any, Any]
_STOP_TIMEOUT_S = 5.0


class ModelThread:
    """Runs a batcher in a thread for coroutines of one event loop."""

    # State, event loop side.
    _sinks: dict[int, Sink]  # by ticket: our number of a request, known before the batcher has seen it
    failure: str  # why the thread is dead; empty while it is well

    # State, model thread side.
    _sequences: dict[int, int]  # ticket -> sequence id of the batcher
    _tickets: dict[int, int]  # the other way round

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._sinks = {}
        self._sequences = {}
        self._tickets = {}
        self._next_ticket = 0
        self._calls: set[asyncio.Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="turngate-model", daemon=True)
        self._is_broken = asyncio.Event()
        self.failure = ""

    def __repr__(self) -> str:
        return f"<ModelThread {len(self._sinks)} open{', failed' if self.failure else ''}>"

    @property
    def open(self) -> int:
        """Requests submitted and not yet finished."""
        return len(self._sinks)

    def start(self) -> None:
        """Start the thread; outcomes go to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Stop after the step in progress and fail what is open. Cancelled: the thread still ends."""
        self._fail("the engine is stopping")
        self._commands.put(("stop", None, None))
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _STOP_TIMEOUT_S)

    def submit(self, request: Request, sink: Sink) -> int:
        """Hand a request over and return its ticket; `sink` hears what becomes of it.

        Raises: EndpointError: the thread is dead.
        """
        self._check_alive()
        self._next_ticket += 1
        ticket = self._next_ticket
        self._sinks[ticket] = sink
        self._commands.put(("submit", ticket, request))
        return ticket

    def cancel(self, ticket: int) -> None:
        """Drop a request, wherever it is; its sink hears nothing more. Unknown tickets are fine."""
        if self._sinks.pop(ticket, None) is not None:
            self._commands.put(("cancel", ticket, None))

    async def call(self, function: Callable[[Batcher], T]) -> T:
        """Run `function` on the batcher between two steps and return its result.

        Cancelled: the function may still run. Raises: EndpointError: the thread is dead, or died of the function.
        TurngateError: the function refused; the thread lives on.
        """
        self._check_alive()
        future: asyncio.Future[T] = self._loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._commands.put(("call", function, future))
        return await future

    async def failed(self) -> str:
        """Wait until the thread died of an error and return which; waits for ever when it is stopped instead."""
        await self._is_broken.wait()
        return self.failure

    def _check_alive(self) -> None:
        if self.failure:
            raise EndpointError(self.failure)

    # Event loop side: what the thread reports.

    def _deliver(self, outcomes: list[tuple[int, Outcome]]) -> None:
        for ticket, outcome in outcomes:
            is_last = not isinstance(outcome, Progress)
            sink = self._sinks.pop(ticket, None) if is_last else self._sinks.get(ticket)
            if sink is not None:
                sink(outcome)

    def _break(self, why: str) -> None:
        self._fail(why)
        self._is_broken.set()

    def _fail(self, why: str) -> None:
        """Fail everything open, and everything that comes."""
        if not self.failure:
            self.failure = why
        error = EndpointError(self.failure)
        for ticket in list(self._sinks):
            self._deliver([(ticket, error)])
        for future in list(self._calls):
            if not future.done():
                future.set_exception(error)

    # Model thread side.

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._batcher.has_work:
                    self._report(self._name(self._batcher.step()))
        except Exception as error:  # the boundary: a broken engine must say so rather than hang its clients
            logging.getLogger(__name__).exception("the model thread died")
            self._post(self._break, f"the engine failed: {type(error).__name__}: {error}; restart it")

    def _take_commands(self) -> bool:
        """Handle all waiting commands, or wait for one when there is nothing else to do; False: stop."""
        rejected: list[tuple[int, Outcome]] = []
        while True:
            try:
                # A rejection must be told before going to sleep.
                kind, subject, detail = self._commands.get(block=not (self._batcher.has_work or rejected))
            except queue.Empty:
                break
            if kind == "submit":
                answer = self._batcher.submit(detail)
                if isinstance(answer, Rejection):
                    rejected.append((subject, answer))
                else:
                    self._sequences[subject], self._tickets[answer] = answer, subject
            elif kind == "cancel":
                sequence = self._sequences.pop(subject, None)
                if sequence is not None:
                    del self._tickets[sequence]
                    self._batcher.cancel(sequence)
            elif kind == "call":
                self._call(subject, detail)
            else:
                return False
        self._report(rejected)
        return True

    def _call(self, function: Callable[[Batcher], Any], future: "asyncio.Future[Any]") -> None:
        try:
            result = function(self._batcher)
        except TurngateError as error:  # a refusal belongs to the caller; anything else is a bug and breaks the engine
            self._post(_set_exception, future, error)
        else:
            self._post(_set_result, future, result)

    def _name(self, reports: list[Progress | Finished]) -> list[tuple[int, Outcome]]:
        """Replace the batcher's ids by tickets and forget what finished."""
        outcomes: list[tuple[int, Outcome]] = []
        for report in reports:
            if isinstance(report, Finished):
                ticket = self._tickets.pop(report.id)
                del self._sequences[ticket]
            else:
                ticket = self._tickets[report.id]
            outcomes.append((ticket, report))
        return outcomes

    def _report(self, outcomes: list[tuple[int, Outcome]]) -> None:
        if outcomes:
            self._post(self._deliver, outcomes)

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear it
            self._loop.call_soon_threadsafe(callback, *args)


def _set_result(future: "asyncio.Future[Any]", result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: "asyncio.Future[Any]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
