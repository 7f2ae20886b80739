"""What a gateway holds for each session that has come to it, until the session is sealed."""

import asyncio
from collections.abc import Iterator

from turngate.runtime.deadline import Alarm
from turngate.runtime.gateway.config import GatewayConfig
from turngate.runtime.gateway.exchange import Exchanges
from turngate.runtime.lru import LRU
from turngate.runtime.openai_api.refusals import RequestError
from turngate.runtime.session import Session

__all__ = ["Guest", "Guests"]

_RESPONSES_KEPT = 256
"""Per session, for `previous_response_id`: more than the turns of nearly all episodes."""


class Guest:
    """One session at the door."""

    def __init__(self, session: Session, config: GatewayConfig) -> None:
        self.session = session
        self.exchanges = Exchanges(keep=config.kept_replies)
        self.responses: LRU[list[object]] = LRU(_RESPONSES_KEPT)
        """Chats that the responses API has answered, by the id of the answer."""
        self.is_self_opened = False
        """Whether its key has opened it."""
        self.idle: Alarm | None = None
        """Ends it when no request comes."""

    def __repr__(self) -> str:
        return f"<Guest {self.session.id}, {self.exchanges!r}>"


class Guests:
    """All sessions at the door, and the tasks that work for them."""

    # Changed by of() and by sessions that end: _guests. Changed by add() and by tasks that end: tasks, in_flight.

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._guests: dict[str, Guest] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        """Work for replies under way."""
        self.in_flight = 0
        """Requests to the server that these make at once."""

    def __repr__(self) -> str:
        return f"<Guests {len(self._guests)}, {self.in_flight} requests under way>"

    def __len__(self) -> int:
        return len(self._guests)

    def __iter__(self) -> Iterator[Guest]:
        return iter(list(self._guests.values()))

    def of(self, session: Session) -> Guest:
        """Return what is held for a session; it goes when the session is sealed."""
        guest = self._guests.get(session.key)
        if guest is None or guest.session is not session:
            guest = self._guests[session.key] = Guest(session, self._config)
            session.when_sealed(self._forget)
        return guest

    def add(self, task: asyncio.Task[None], requests: int) -> None:
        """Count a task, with the requests to the server that it makes at once, until it is done."""
        self.tasks.add(task)
        self.in_flight += requests

        def done(_: asyncio.Task[None]) -> None:
            self.tasks.discard(task)
            self.in_flight -= requests

        task.add_done_callback(done)

    def _forget(self, session: Session) -> None:
        guest = self._guests.get(session.key)
        if guest is not None and guest.session is session:
            del self._guests[session.key]
            sealed = RequestError("session is sealed: its episode is over", status=409, code="session_sealed")
            guest.exchanges.close(sealed)

    async def aclose(self) -> None:
        """Cancel everything under way, and wait for it."""
        closed = RequestError("the gateway was closed", status=503, kind="server_error", code="gateway_closed")
        for guest in self:
            guest.exchanges.close(closed)
        self._guests.clear()
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
