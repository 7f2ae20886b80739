"""All sessions of one process: found by their keys, and ended by their deadlines when their owners forget them."""

import asyncio
import math
import secrets
import weakref
from typing import Literal

import msgspec

from turngate.envs.base import End, Task
from turngate.runtime.deadline import Alarm
from turngate.runtime.door import Door
from turngate.runtime.endpoint import ChatEndpoint
from turngate.runtime.errors import ConfigError, SessionSealed
from turngate.runtime.events import Events
from turngate.runtime.guidance import Guidance
from turngate.runtime.limits import Limits
from turngate.runtime.lru import LRU
from turngate.runtime.session import Session
from turngate.runtime.types import Sampling

__all__ = ["SessionStatistics", "SessionTable"]

_KEY_BYTES = 24
_SEALED_KEPT = 4096
"""Keys remembered after their session: an agent that goes on too long is told that its episode is over."""


class SessionStatistics(msgspec.Struct, frozen=True):
    """What a table has done so far."""

    open: int
    created: int
    sealed: int
    timed_out: int
    """Sealed by their deadline."""
    orphaned: int
    """Open when their event loop was closed."""


class SessionTable:
    """Makes sessions with one endpoint and finds them by key. Usable from several event loops, one after the other."""

    # Changed by create() and by sessions that end: all of it.
    _sessions: dict[str, Session]  # open ones by key
    _alarms: dict[str, Alarm]  # of the open ones, by key
    _loop: "weakref.ref[asyncio.AbstractEventLoop] | None"  # in which the newest was made
    _ended: LRU[str]  # ids of sessions sealed lately, by key

    def __init__(
        self,
        endpoint: ChatEndpoint,
        *,
        limits: Limits | None = None,
        sampling: Sampling | None = None,
        events: Events | None = None,
        door: Door | None = None,
        guidance: Guidance | None = None,
    ) -> None:
        """Args: sampling: pins how replies are drawn, whatever agents ask for; None leaves it to them. door: where
        agents that speak HTTP find the sessions. guidance: chooses every reply of sessions that are not told otherwise.
        """
        self.endpoint, self.sampling, self.door, self.guidance = endpoint, sampling, door, guidance
        self.limits, self.events = limits or Limits(), events or Events()
        self._sessions, self._alarms, self._loop = {}, {}, None
        self._ended = LRU(_SEALED_KEPT)
        self._created = self._timed_out = self._orphaned = 0

    def __repr__(self) -> str:
        return f"<SessionTable {len(self._sessions)} open, {self._created} created>"

    def __len__(self) -> int:
        return len(self._sessions)

    def create(
        self,
        task: Task | None = None,
        *,
        id: str = "",
        key: str = "",
        seed: int = 0,
        env_seed: int | None = None,
        group_id: str = "",
        member: int = 0,
        limits: Limits | None = None,
        sampling: Sampling | None = None,
        timeout_s: float | None = None,
        last_contexts: bool = False,
        guidance: Guidance | Literal["table"] | None = "table",
    ) -> Session:
        """Open a session in the running event loop; whoever makes it seals it, its deadline does so otherwise.

        Args: id: of its trajectory. key: what its requests carry; random when empty. seed: root of its streams.
            env_seed: the luck of what is around the model, to share it between members of a group; the agent reads it.
            limits, sampling: instead of the table's own.
            timeout_s: until the deadline; `Limits.rollout_timeout_s` when None, never when infinite.
            last_contexts: when a limit of turns or tokens refuses a `chat`, learn its ids nevertheless.
            guidance: chooses its replies; `table` stands for the table's own, None for none.
        Raises: ConfigError: the key is in use.
        """
        loop = asyncio.get_running_loop()
        if self._loop is None or self._loop() is not loop:
            self._drop_orphans()
            self._loop = weakref.ref(loop)
        key = key or secrets.token_urlsafe(_KEY_BYTES)
        if key in self._sessions:
            raise ConfigError(f"session key must be new: a session with it is open ({self._sessions[key].id})")
        self._created += 1
        id = id or f"session-{self._created}"
        session = Session(
            self.endpoint,
            task or Task(id),
            id=id,
            key=key,
            limits=limits or self.limits,
            sampling=sampling or self.sampling,
            seed=seed,
            env_seed=env_seed,
            group_id=group_id,
            member=member,
            events=self.events,
            last_contexts=last_contexts,
            door=self.door,
            guidance=self.guidance if guidance == "table" else guidance,
            on_sealed=self._forget,
        )
        self._sessions[key] = session
        timeout_s = session.limits.rollout_timeout_s if timeout_s is None else timeout_s
        if timeout_s < math.inf:
            self._alarms[key] = Alarm(loop.time() + timeout_s, lambda: self._time_out(session, timeout_s))
        return session

    def find(self, key: str) -> Session | None:
        """Return the open session with this key; None when there never was one. Raises SessionSealed: it is over."""
        session = self._sessions.get(key)
        if session is None and (id := self._ended.get(key)) is not None:
            raise SessionSealed(f"requests must come before the session is sealed: its episode is over (session {id})")
        return session

    def statistics(self) -> SessionStatistics:
        """Return the counts as they are now."""
        self._drop_orphans()
        return SessionStatistics(
            open=len(self._sessions),
            created=self._created,
            sealed=self._created - len(self._sessions),
            timed_out=self._timed_out,
            orphaned=self._orphaned,
        )

    def _time_out(self, session: Session, timeout_s: float) -> None:
        self._timed_out += 1
        session.seal(End.timeout, f"session must end within {timeout_s:g} s: it did not (session {session.id})")

    def _forget(self, session: Session) -> None:
        self._sessions.pop(session.key, None)
        self._ended.put(session.key, session.id)
        if (alarm := self._alarms.pop(session.key, None)) is not None:
            alarm.close()

    def _drop_orphans(self) -> None:
        """Seal the sessions whose event loop is closed: no deadline can."""
        for session in [each for each in self._sessions.values() if each.is_orphan]:
            self._orphaned += 1
            session.seal(End.cancelled, "its event loop was closed")
