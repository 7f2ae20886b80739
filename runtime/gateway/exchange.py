"""One request of an agent and its reply, however many connections come for it: the reason why a retry is no new turn.

The request to the server runs in a task that belongs to the session. An agent that hangs up and comes again, as SDKs
do after a timeout or a lost connection, finds the same exchange, and the turn is recorded when the reply was delivered
in whole for the first time. What nobody comes for is dropped when the session ends.
"""

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from turngate.runtime.gateway.sse import event_piece
from turngate.runtime.openai_api.refusals import JSON_HEADERS, RequestError, error_body

__all__ = ["Exchange", "Exchanges", "Work"]


_log = logging.getLogger("turngate.gateway")


class Work(NamedTuple):
    """What answers one request of an agent."""

    answer: "Callable[[Exchange], Awaitable[None]]"
    """Writes the reply into its exchange."""
    requests: int = 1
    """Requests to the server that it makes at once."""


class Exchange:
    """A reply on its way: pieces that came from the server, for whoever is attached."""

    # Changed by the work: pieces, headers, is_streamed, is_done, problem, on_delivered. Changed by the door: attached,
    # is_delivered.

    def __init__(self, key: str, digest: str, requests: int = 1) -> None:
        self.key, self.digest = key, digest
        self.requests = requests
        """Of the work to the server, at once."""
        self.pieces: list[bytes] = []
        self.headers: Mapping[str, str] = JSON_HEADERS
        self.is_streamed = self.is_done = False
        self.problem: RequestError | None = None
        """Why the request failed; when pieces came before, they were the start of a stream."""
        self.on_delivered: Callable[[], object] | None = None
        """Records the turn."""
        self.failure_piece: Callable[[RequestError], bytes] = _failure_piece
        """How a failure ends a stream."""
        self.attached = 0
        """Connections that wait for the reply."""
        self.is_delivered = False
        self.task: asyncio.Task[None] | None = None
        self._waiting: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        state = "delivered" if self.is_delivered else "done" if self.is_done else "under way"
        return f"<Exchange {state}, {len(self.pieces)} pieces, {self.attached} attached>"

    # The work's side.

    def stream(self, headers: Mapping[str, str]) -> None:
        """Say that the reply comes in pieces."""
        self.is_streamed, self.headers = True, headers

    def write(self, piece: bytes) -> None:
        """Add a piece of the reply."""
        self.pieces.append(piece)
        self._wake()

    def finish(self, piece: bytes, on_delivered: Callable[[], object] | None) -> None:
        """Add the last piece; `on_delivered` is called once, when somebody has got them all."""
        self.pieces.append(piece)
        self.on_delivered = on_delivered
        self.is_done = True
        self._wake()

    def fail(self, problem: RequestError) -> None:
        """End the reply where it stands."""
        self.problem = problem
        self.is_done = True
        self._wake()

    # The door's side.

    async def progress(self, seen: int) -> None:
        """Wait until there are more pieces than `seen`, or the end."""
        while len(self.pieces) <= seen and not self.is_done:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)

    def delivered(self) -> None:
        """Record the turn, unless it was delivered before."""
        if not self.is_delivered:
            self.is_delivered = True
            if self.on_delivered is not None:
                self.on_delivered()
                self.on_delivered = None  # holds what was asked with

    def _wake(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()


def _failure_piece(problem: RequestError) -> bytes:
    return event_piece(error_body(problem))


class Exchanges:
    """The exchanges of one session: those under way, those nobody came for, and the last ones delivered."""

    # State.
    _pending: "OrderedDict[Exchange, None]"  # not delivered, oldest first
    _delivered: "OrderedDict[Exchange, None]"  # for replays, oldest first
    _refused: "Counter[str]"  # by key: refusals told, each of which a client may answer with a retry

    def __init__(self, *, keep: int) -> None:
        """Args: keep: delivered replies at most, and abandoned ones."""
        self._keep = keep
        self._pending, self._delivered, self._refused = OrderedDict(), OrderedDict(), Counter()

    def __repr__(self) -> str:
        return f"<Exchanges {len(self._pending)} pending, {len(self._delivered)} delivered>"

    @property
    def attached(self) -> int:
        """Connections that wait for a reply."""
        return sum(exchange.attached for exchange in self._pending)

    @property
    def open(self) -> int:
        """Requests to the server under way, and connections that wait for a reply where these are more."""
        return sum(max(one.attached, 0 if one.is_done else one.requests) for one in self._pending)

    def find(self, key: str, *, is_named: bool, is_retry: bool) -> Exchange | None:
        """Return the exchange that a request belongs to; None when it is a turn of its own.

        Args: key: what the request asks, or the name it gave itself. is_named: it gave itself a name, which stands for
            one turn for ever. is_retry: the client says that it has asked before. Without either, a request that looks
            like another one goes with it only when nobody waits for that one any more.
        """
        pending = [exchange for exchange in self._pending if exchange.key == key]
        for exchange in pending:
            if not exchange.attached:
                if exchange.problem is None:
                    return exchange
                del self._pending[exchange]  # it failed while nobody waited for it
        if self._refused[key]:
            self._refused[key] -= 1  # it was told no, and asks anew
            return None
        if not (is_named or is_retry):
            return None
        waited_for = [exchange for exchange in pending if exchange in self._pending]
        if waited_for:
            return waited_for[-1]
        return next((exchange for exchange in reversed(self._delivered) if exchange.key == key), None)

    def start(
        self,
        key: str,
        digest: str,
        work: Work,
        count: Callable[["asyncio.Task[None]", int], None],
    ) -> Exchange:
        """Begin an exchange: `work` writes the reply into it, in a task of its own.

        Args: digest: tells requests apart that give themselves the same name. count: is given the task, and the
            requests to the server that it makes at once; it keeps the task until it is done.
        """
        exchange = Exchange(key, digest, work.requests)
        self._pending[exchange] = None
        self._drop_abandoned()
        task = exchange.task = asyncio.create_task(_run(work, exchange), name="turngate gateway exchange")
        count(task, work.requests)
        return exchange

    def leave(self, exchange: Exchange) -> None:
        """Let a connection go, after `delivered` or before."""
        exchange.attached -= 1
        if exchange.is_delivered:
            if self._pending.pop(exchange, exchange) is None:
                self._delivered[exchange] = None
                while len(self._delivered) > self._keep:
                    self._delivered.popitem(last=False)
        elif exchange.problem is not None:
            self._pending.pop(exchange, None)  # whoever asks again asks anew

    def refused(self, key: str) -> None:
        """Remember that a request was told no: its retry is not one of a twin's."""
        if len(self._refused) > 16 * self._keep:
            self._refused.clear()
        self._refused[key] += 1

    def close(self, why: RequestError) -> None:
        """Cancel what is under way and forget everything; those attached are told why."""
        pending, self._pending = self._pending, OrderedDict()
        self._delivered.clear()
        self._refused.clear()
        for exchange in pending:
            _cancel(exchange, why)

    def _drop_abandoned(self) -> None:
        abandoned = [exchange for exchange in self._pending if not exchange.attached]
        for exchange in abandoned[: -self._keep - 1]:
            del self._pending[exchange]
            _cancel(exchange, RequestError("too many requests that nobody waits for", status=429))


def _cancel(exchange: Exchange, why: RequestError) -> None:
    if exchange.task is not None:
        exchange.task.cancel()
    if not exchange.is_done:
        exchange.fail(why)


async def _run(work: Work, exchange: Exchange) -> None:
    try:
        await work.answer(exchange)
    except RequestError as problem:
        exchange.fail(problem)
    except Exception:  # the boundary: a bug costs one request, not the gateway, and whoever waits is told
        _log.exception("a request failed")
        exchange.fail(RequestError("the gateway has a bug; see its log", status=500, kind="server_error"))
    finally:
        if not exchange.is_done:
            exchange.fail(RequestError("the request was cancelled", status=503, kind="server_error"))
