"""Sessions over HTTP, for agents and harnesses in other languages: open one, reward it, end it, read it."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import msgspec
from aiohttp import web

from turngate.envs.base import End, Task
from turngate.runtime.errors import ConfigError, EnvError
from turngate.runtime.gateway.admission import Admission, random_seed
from turngate.runtime.gateway.keys import is_same_key
from turngate.runtime.limits import Limits
from turngate.runtime.lru import LRU
from turngate.runtime.openai_api.refusals import JSON_HEADERS, RequestError, decode_json
from turngate.runtime.session import Session
from turngate.runtime.transcript import trajectory_json
from turngate.runtime.types import Sampling, Trajectory

__all__ = ["SessionRoutes"]

_Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _NewSession(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/sessions."""

    task: str | Task = ""
    """A whole task, or its words."""
    id: str = ""
    seed: int | None = None
    """A random one when None."""
    group_id: str = ""
    member: int = 0
    sampling: Sampling | None = None
    limits: Limits | None = None
    timeout_s: float | None = None


class _Reward(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/sessions/{key}/reward."""

    value: float
    name: str = "outcome"
    turn: int = -1


class _Ending(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/sessions/{key}/end."""

    end: End | None = None
    error: str = ""


_NEW = msgspec.json.Decoder(_NewSession)
_REWARD = msgspec.json.Decoder(_Reward)
_ENDING = msgspec.json.Decoder(_Ending)


class SessionRoutes:
    """The routes below /v1/sessions."""

    # Changed by sessions that end: _sealed. Set when the gateway listens: url.

    def __init__(self, admission: Admission, read_body: Callable[[web.Request], Awaitable[bytes]]) -> None:
        self._admission, self._read_body = admission, read_body
        self._sealed: LRU[Trajectory] = LRU(admission.config.kept_trajectories)
        self.url = ""

    def all(self) -> list[tuple[str, str, _Handler]]:
        """Return method, path and handler of each route."""
        one = "/v1/sessions/{key}"
        return [
            ("POST", "/v1/sessions", self._create),
            ("GET", one, self._show),
            ("POST", f"{one}/reward", self._reward),
            ("POST", f"{one}/end", self._end),
            ("GET", f"{one}/trajectory", self._trajectory),
        ]

    async def _create(self, http: web.Request) -> web.StreamResponse:
        self._admission.check_admin(http)
        asked = decode_json(_NEW, await self._read_body(http))
        task = Task(asked.id or "session", asked.task) if isinstance(asked.task, str) else asked.task
        try:
            session = self._admission.sessions.create(
                task,
                id=asked.id,
                seed=random_seed() if asked.seed is None else asked.seed,
                group_id=asked.group_id,
                member=asked.member,
                sampling=asked.sampling,
                limits=asked.limits,
                timeout_s=asked.timeout_s,
            )
        except ConfigError as error:
            raise RequestError(str(error)) from None
        session.when_sealed(lambda sealed: self._sealed.put(sealed.key, sealed.trajectory))
        base = self.url.removesuffix("/v1")
        urls = {"base_url": self.url, "session_url": f"{base}/s/{session.key}/v1"}
        return _json({"id": session.id, "key": session.key, **urls})

    async def _show(self, http: web.Request) -> web.StreamResponse:
        key = self._key(http)
        trajectory = self._sealed.get(key)
        return _json(_summary(trajectory) if trajectory is not None else _state(self._open(key)))

    async def _reward(self, http: web.Request) -> web.StreamResponse:
        session = self._open(self._key(http))
        asked = decode_json(_REWARD, await self._read_body(http))
        try:
            session.add_reward(asked.name, asked.value, asked.turn)
        except EnvError as error:
            raise RequestError(str(error), param="turn" if "turn" in str(error) else "value") from None
        return _json(_state(session))

    async def _end(self, http: web.Request) -> web.StreamResponse:
        key = self._key(http)
        asked = decode_json(_ENDING, await self._read_body(http))
        trajectory = self._sealed.get(key)
        if trajectory is None:
            trajectory = self._open(key).seal(asked.end, asked.error)
        return _json(_summary(trajectory))

    async def _trajectory(self, http: web.Request) -> web.StreamResponse:
        key = self._key(http)
        trajectory = self._sealed.get(key)
        if trajectory is None:
            session = self._open(key)
            raise RequestError(f"session must be ended before it is read: it is open ({session.id})", status=409)
        return web.Response(body=trajectory_json(trajectory), headers=JSON_HEADERS)

    def _key(self, http: web.Request) -> str:
        """Return the key in the path, of those who may touch the session. Raises: RequestError: 401."""
        key = http.match_info["key"]
        if not self._admission.config.agents_may_reward:
            self._admission.check_admin(http)
        return key

    def _open(self, key: str) -> Session:
        session = self._admission.sessions.find(key)
        if session is None or not is_same_key(session.key, key):
            raise RequestError("unknown session: no such key", status=404, code="session_not_found")
        return session


def _state(session: Session) -> dict[str, Any]:
    return {"id": session.id, "state": session.state, "turns": session.turns}


def _summary(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "id": trajectory.id,
        "state": "sealed",
        "turns": len(trajectory.turns),
        "end": trajectory.end.value,
        "error": trajectory.error,
        "reward": trajectory.reward,
        "outcome": trajectory.outcome,
        "trainable": trajectory.trainable,
        "untrainable_because": trajectory.untrainable_because,
    }


def _json(told: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(told), headers=JSON_HEADERS)
