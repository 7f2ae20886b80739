"""Who is let in: keys become sessions, and limits become statuses."""

import asyncio
import secrets

from aiohttp import web

from turngate.envs.base import Task
from turngate.runtime.deadline import Alarm
from turngate.runtime.errors import SessionSealed
from turngate.runtime.gateway.config import GatewayConfig
from turngate.runtime.gateway.guests import Guest, Guests
from turngate.runtime.gateway.keys import Claim, bearer, check_role, claim_of, is_name, is_same_key
from turngate.runtime.openai_api.refusals import RequestError
from turngate.runtime.session import Session
from turngate.runtime.session_table import SessionTable

__all__ = ["Admission", "random_seed"]

_RETRY_AFTER_S = 1
_SEED_BITS = 53
"""What every language's JSON reads exactly."""


def random_seed() -> int:
    """Return the seed of a session that nobody has given one: with equal seeds, equal requests get equal replies."""
    return secrets.randbits(_SEED_BITS)


class Admission:
    """Finds the session of a request, or opens it, or refuses."""

    # Changed by requests: _opened.

    def __init__(self, sessions: SessionTable, guests: Guests, config: GatewayConfig, admin_key: str) -> None:
        self.sessions, self.guests, self.config, self._admin_key = sessions, guests, config, admin_key
        self._opened = 0

    def guest_of(self, http: web.Request) -> tuple[Guest, str]:
        """Return what is held for the session that a request belongs to, and the role it names.

        Raises: RequestError: 401. SessionSealed: the session is over.
        """
        claim = claim_of(http)
        session, role = self._session_of(claim)
        return self.guests.of(session), claim.role or role

    def check_known(self, http: web.Request) -> None:
        """Require the key of a session, or the admin key. Raises: RequestError: 401."""
        if not self.is_admin(http) and not self._would_open(claim_of(http).key):
            self._session_of(claim_of(http))

    def is_admin(self, http: web.Request) -> bool:
        """Whether a request carries the admin key."""
        return is_same_key(bearer(http), self._admin_key)

    def check_admin(self, http: web.Request) -> None:
        """Require the admin key. Raises: RequestError: 401."""
        if not self.is_admin(http):
            raise RequestError("this needs the gateway's admin key: Authorization: Bearer KEY", status=401)

    def check_room(self, guest: Guest, requests: int = 1) -> None:
        """Require room for one more request, which makes so many to the server at once.

        Raises: RequestError: 400, 429, 503. SessionSealed, SessionLimit.
        """
        limit = self.config.max_open_per_session
        if requests > min(limit, self.config.max_open):
            raise RequestError(
                f"a request must not need more than {min(limit, self.config.max_open)} from the server at once: got "
                f"{requests}, the choices of all prompts times their draws",
                param="n",
            )
        publisher = getattr(self.sessions.endpoint, "publisher", None)
        if getattr(publisher, "is_switching", False) and getattr(publisher, "in_flight", "") == "restarts":
            raise _later("the upstream takes new weights and cannot answer meanwhile; try again", 503)
        if self.guests.in_flight + requests > self.config.max_open:
            raise _later(f"the gateway must not have more than {self.config.max_open} requests open", 429)
        if guest.exchanges.open + requests > limit:
            raise _later(f"a session must not have more than {limit} requests open", 429)
        guest.session.admit(others=guest.exchanges.attached)

    def seen(self, guest: Guest) -> None:
        """Begin the time after which an idle session that was opened by its key ends."""
        if guest.idle is not None:
            guest.idle.close()
            guest.idle = None
        if guest.is_self_opened and guest.session.state == "open":
            when_s = asyncio.get_running_loop().time() + self.config.idle_timeout_s
            guest.idle = Alarm(when_s, lambda: self._idle(guest))

    def _idle(self, guest: Guest) -> None:
        guest.idle = None
        if guest.exchanges.attached:
            return  # it is waiting for us; `seen` is called when it has its reply
        guest.session.seal()

    def _session_of(self, claim: Claim) -> tuple[Session, str]:
        key, role = claim.key, ""
        if not key and self._would_open(key):
            key = "anonymous"
        session = self._find(key)
        if session is None and ":" in key:
            key, _, role = key.rpartition(":")
            session = self._find(key)
        if session is None and self._would_open(key):
            session = self._open(key)
        if session is None:
            raise RequestError(
                "the request must carry the key of a session: as Authorization: Bearer KEY, in the path /s/KEY/v1/..., "
                "or as x-turngate-session",
                status=401,
                code="invalid_api_key",
            )
        return session, check_role(role, "the key's suffix")

    def _find(self, key: str) -> Session | None:
        try:
            session = self.sessions.find(key) if key else None
        except SessionSealed:
            if self._would_open(key):
                return None  # an agent that comes back after its session went idle begins a new one
            raise
        return session if session is not None and is_same_key(key, session.key) else None

    def _would_open(self, key: str) -> bool:
        """Whether a key that no session has may open one."""
        if not self.config.sessions_by_key:
            return False
        if self.config.admin_key is None:
            return True
        # Compared in whole and as a prefix, both times over the admin key's own length.
        head, dot, name = key[: len(self._admin_key)], key[len(self._admin_key) :][:1], key[len(self._admin_key) + 1 :]
        return is_same_key(head, self._admin_key) and (dot == "" or (dot == "." and name != ""))

    def _open(self, key: str) -> Session:
        if len(self.sessions) >= self.config.max_sessions:
            raise _later(f"the gateway must not have more than {self.config.max_sessions} sessions open", 429)
        self._opened += 1
        # A key without a name behind it may be a secret of the agent's owner, which no record should have.
        name = key[len(self._admin_key) + 1 :] if self.config.admin_key is not None else ""
        id = f"{name}.{self._opened}" if is_name(name) else f"agent-{self._opened}"
        session = self.sessions.create(Task(name if is_name(name) else id), id=id, key=key, seed=random_seed())
        guest = self.guests.of(session)
        guest.is_self_opened = True
        session.when_sealed(lambda _: guest.idle.close() if guest.idle is not None else None)
        self.seen(guest)
        return session


def _later(message: str, status: int) -> RequestError:
    kind = "rate_limit_error" if status == 429 else "server_error"
    return RequestError(message, status=status, kind=kind, code="overloaded", retry_after_s=_RETRY_AFTER_S)
