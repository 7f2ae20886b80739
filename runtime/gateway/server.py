"""The gateway: an OpenAI-compatible door through which agents of any kind reach the model, each to its own session."""

import asyncio
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from types import TracebackType
from typing import Any, Self, TypeAlias

import msgspec
from aiohttp import web

from turngate.envs.base import End
from turngate.runtime.deadline import Deadline, DeadlineExceeded
from turngate.runtime.endpoint import ChatEndpoint
from turngate.runtime.errors import ConfigError, SessionError, SessionLimit, SessionSealed
from turngate.runtime.gateway.admission import Admission
from turngate.runtime.gateway.config import GatewayConfig
from turngate.runtime.gateway.delivery import deliver
from turngate.runtime.gateway.exchange import Exchange, Work
from turngate.runtime.gateway.guests import Guest, Guests
from turngate.runtime.gateway.keys import GUIDED
from turngate.runtime.gateway.session_routes import SessionRoutes
from turngate.runtime.gateway.steering import GUIDANCE_HEADER, Steering
from turngate.runtime.gateway.works import Works
from turngate.runtime.guidance import Guidance
from turngate.runtime.openai_api.refusals import (
    JSON_HEADERS,
    RequestError,
    error_body,
    nested_too_deep,
    refusal_headers,
)
from turngate.runtime.runtime import Runtime
from turngate.runtime.session_table import SessionTable
from turngate.runtime.transport import raise_file_limit

__all__ = ["Gateway", "GatewayStatistics"]

_Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
_MakeWork: TypeAlias = Callable[[Guest, bytes, str, str], Work]

_BACKLOG = 4096
"""Thousands of agents may connect at once; the usual 128 drops their SYNs, and each waits a second or more."""
_LINGER_S = 1.0
"""How long the rest of a refused body is read, so that the client sees why before its connection is closed."""
_CLIENT_GONE = 499
"""Counted, and written to nobody."""
_PREFIX = "/s/{key}"
"""Before every path, for agents whose key cannot be chosen."""
_log = logging.getLogger("turngate.gateway")


class GatewayStatistics(msgspec.Struct, frozen=True):
    """What a gateway has done so far, and what it holds."""

    sessions: int
    """Open sessions that have come to it."""
    in_flight: int
    """Requests to the upstream under way."""
    requests: dict[str, int]
    """Answered, by path and status."""


class Gateway:
    """Serves sessions over the OpenAI API while its `async with` block runs, on the running event loop.

    async with Gateway(SessionTable(endpoint)) as gateway:
        session = gateway.sessions.create(task)
        ...  # give an agent gateway.url and session.key
    """

    # State.
    url: str  # the part before /chat/completions; known after entry
    _requests: "Counter[tuple[str, int]]"  # answered, by path and status
    _runner: web.AppRunner | None

    def __init__(
        self,
        sessions: SessionTable | Runtime | ChatEndpoint,
        config: GatewayConfig | None = None,
        *,
        listener: socket.socket | None = None,
        guidance: Guidance | None = None,
    ) -> None:
        """Prepare to serve the sessions of a table, of a runtime, or of a table made for this endpoint.

        Args: listener: a socket that listens already, used instead of the config's address; its owner closes it.
            guidance: what the model `base@guided` stands for; by default that of the sessions, if they have any.
        """
        if isinstance(sessions, Runtime):
            sessions = sessions.sessions
        self.sessions = sessions if isinstance(sessions, SessionTable) else SessionTable(sessions)
        self.config = config or GatewayConfig()
        self.admin_key = self.config.admin_key or secrets.token_urlsafe(24)
        """Opens sessions over HTTP; see `GatewayConfig`."""
        self.url = ""
        self._listener = listener
        self._guests = Guests(self.config)
        steering = Steering(self.sessions.endpoint, guidance or self.sessions.guidance, self.config)
        self._works = Works(self.sessions.endpoint, steering, timeout_s=self.config.request_timeout_s)
        self._admission = Admission(self.sessions, self._guests, self.config, self.admin_key)
        self._requests = Counter()
        self._runner = None

    def __repr__(self) -> str:
        return f"<Gateway {self.url or 'closed'}, {self._guests!r}>"

    def statistics(self) -> GatewayStatistics:
        """Return the counts as they are now."""
        return GatewayStatistics(
            sessions=len(self._guests),
            in_flight=self._guests.in_flight,
            requests={f"{path} {status}": count for (path, status), count in sorted(self._requests.items())},
        )

    async def __aenter__(self) -> Self:
        """Listen. Raises: ConfigError: it cannot."""
        runner = self._runner = web.AppRunner(
            self._application(),
            access_log=None,
            handler_cancellation=True,  # a client that hangs up leaves its exchange
            keepalive_timeout=self.config.keep_alive_s,  # for the head of the first request too
            lingering_time=_LINGER_S,
            shutdown_timeout=1.0,
        )
        raise_file_limit()
        try:
            await runner.setup()
            listener = self._listener or self._listen()
            await web.SockSite(runner, listener, backlog=_BACKLOG).start()
        except BaseException:
            await self.aclose()
            raise
        host, port = runner.addresses[0][:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        self._routes_of_sessions.url = self.url
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def seal_sessions(self) -> int:
        """Seal the sessions that have come to it, and return how many there were; for owners who end all at once.

        Those with a request under way did not end by themselves: they are cancelled, and none to learn from.
        """
        guests = list(self._guests)
        for guest in guests:
            if guest.exchanges.attached:
                guest.session.seal(End.cancelled, "the gateway was closed while it was asked for a reply")
            else:
                guest.session.seal()
        return len(guests)

    async def aclose(self) -> None:
        """Stop: requests under way are cancelled, and those that wait for them are told. Sessions stay open."""
        try:
            await self._guests.aclose()  # first, so that those who wait are answered before their connections go
        finally:
            if self._runner is not None:
                await self._runner.cleanup()
            await self._guests.aclose()  # of what came in the meantime

    def _listen(self) -> socket.socket:
        config = self.config
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        try:
            return socket.create_server((config.host, config.port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(f"the gateway must be able to listen: {error}; choose another host or port") from error

    def _application(self) -> web.Application:
        app = web.Application(client_max_size=self.config.max_body_bytes)
        for path, make in (
            ("/v1/chat/completions", self._works.chat),
            ("/v1/completions", self._works.text),
            ("/v1/responses", self._works.responses),
        ):
            handler = self._guarded(path, self._generating(make))
            app.router.add_post(path, handler)
            app.router.add_post(_PREFIX + path, handler)
        models = self._guarded("/v1/models", self._models)
        for path in ("/v1/models", "/v1/models/{model:.+}"):
            app.router.add_get(path, models)
            app.router.add_get(_PREFIX + path, models)
        app.router.add_get("/health", self._guarded("/health", self._health))
        self._routes_of_sessions = SessionRoutes(self._admission, self._body)
        for method, path, answer in self._routes_of_sessions.all():
            app.router.add_route(method, path, self._guarded(path, answer))
        app.router.add_route("*", "/{path:.*}", self._guarded("other", self._unknown))
        return app

    # The door: every request passes here.

    def _guarded(self, path: str, handler: _Handler) -> _Handler:
        async def answer(http: web.Request) -> web.StreamResponse:
            try:
                reply = await handler(http)
            except RequestError as error:
                reply = _refuse(error)
            except SessionError as error:
                reply = _refuse(_closed(error))
            except web.HTTPRequestEntityTooLarge:
                reply = _refuse(self._too_large())
            except RecursionError:  # decoded, but too deep for what is done with it
                reply = _refuse(nested_too_deep())
            except ConnectionError:  # the client is gone; raised further, each would be a traceback in the log
                if http.transport is not None:
                    http.transport.abort()
                reply = web.Response(status=_CLIENT_GONE)
            except Exception:  # the boundary: a bug costs one request, not the gateway, and is told
                _log.exception("a request failed")
                reply = _refuse(RequestError("the gateway has a bug; see its log", status=500, kind="server_error"))
            self._requests[path, reply.status] += 1
            return reply

        return answer

    def _generating(self, make: _MakeWork) -> _Handler:
        async def answer(http: web.Request) -> web.StreamResponse:
            guest, role = self._admission.guest_of(http)
            body = await self._body(http)
            name = http.headers.get("Idempotency-Key", "")
            steer = ",".join(http.headers.getall(GUIDANCE_HEADER, ()))  # as HTTP reads a header that comes twice
            hashed = blake2b(body, digest_size=16, key=role.encode()[:64])
            hashed.update(steer.encode(errors="replace"))
            digest = hashed.hexdigest()
            key = name or f"{http.path} {digest}"
            try:
                exchange = self._exchange(http, guest, key, digest, lambda: make(guest, body, role, steer))
            except SessionLimit:
                await self._works.look_ahead(guest.session, http.path, body)
                raise
            try:
                return await deliver(http, exchange, write_timeout_s=self.config.write_timeout_s)
            except RequestError:
                guest.exchanges.refused(key)
                raise
            finally:
                guest.exchanges.leave(exchange)
                self._admission.seen(guest)

        return answer

    def _exchange(self, http: web.Request, guest: Guest, key: str, digest: str, make: Callable[[], Work]) -> Exchange:
        """Return the exchange of a request, attached to: an earlier one, or one that begins now."""
        exchanges = guest.exchanges
        is_named = bool(http.headers.get("Idempotency-Key"))
        is_retry = http.headers.get("x-stainless-retry-count", "0") != "0"
        try:
            exchange = exchanges.find(key, is_named=is_named, is_retry=is_retry)
            if exchange is None:
                work = make()
                self._admission.check_room(guest, work.requests)
                exchange = exchanges.start(key, digest, work, self._guests.add)
        except (RequestError, SessionError):
            exchanges.refused(key)
            raise
        if exchange.digest != digest:
            raise RequestError(
                "Idempotency-Key must name one request: got another body than before", param="Idempotency-Key"
            )
        exchange.attached += 1
        return exchange

    async def _body(self, http: web.Request) -> bytes:
        """Return the body of a JSON request. Raises: RequestError: 408, 413 or 415."""
        # A web page can make a browser post plain text to loopback, but not JSON.
        if http.content_type != "application/json":
            raise RequestError(f"requests must be posted as application/json: got {http.content_type}", status=415)
        if http.content_length is not None and http.content_length > self.config.max_body_bytes:
            raise self._too_large()
        try:
            with Deadline() as deadline:
                deadline.set(asyncio.get_running_loop().time() + self.config.body_timeout_s, "body")
                return await http.read()
        except DeadlineExceeded:
            raise RequestError(
                f"the body must arrive within {self.config.body_timeout_s:g} s: it did not", status=408
            ) from None

    def _too_large(self) -> RequestError:
        limit = self.config.max_body_bytes
        return RequestError(f"the body must hold at most {limit} bytes", status=413, code="body_too_large")

    async def _unknown(self, http: web.Request) -> web.StreamResponse:
        path = http.match_info["path"]
        for resource in list(http.app.router.resources())[:-1]:  # the last is this one
            _, allowed = await resource.resolve(http)
            if allowed:
                raise RequestError(f"/{path} must be called with {min(allowed)}: got {http.method}", status=405)
        raise RequestError(f"unknown path: {http.method} /{path}", status=404, code="not_found")

    # What the gateway says about itself.

    async def _models(self, http: web.Request) -> web.StreamResponse:
        self._admission.check_known(http)
        name = getattr(self.sessions.endpoint, "model", "policy")
        names = [name, f"{name}@{GUIDED}"] if self._works.steering.guidance is not None else [name]
        cards = {each: {"id": each, "object": "model", "created": 0, "owned_by": "turngate"} for each in names}
        asked = http.match_info.get("model")
        if asked is None:
            return _json({"object": "list", "data": list(cards.values())})
        if asked not in cards:
            known = " or ".join(map(repr, names))
            raise RequestError(
                f"model must be {known}: got {asked!r:.80}", status=404, param="model", code="model_not_found"
            )
        return _json(cards[asked])

    async def _health(self, http: web.Request) -> web.StreamResponse:
        return _json({"status": "ok", "in_flight": self._guests.in_flight})


def _json(told: dict[str, Any], *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(told), status=status, headers=JSON_HEADERS)


def _refuse(error: RequestError) -> web.Response:
    reply = web.Response(body=error_body(error), status=error.status, headers=refusal_headers(error))
    if error.status in (408, 413):
        reply.force_close()  # what is left of the body would be read as the next request
    return reply


def _closed(error: SessionError) -> RequestError:
    code = "session_limit" if isinstance(error, SessionLimit) else "session_sealed"
    return RequestError(str(error), status=409, code=code if isinstance(error, (SessionLimit, SessionSealed)) else None)
