"""Questions to a server that may answer anything: a few at most, each with a deadline, every answer a value."""

import asyncio
import re
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import msgspec

from turngate.runtime.error_bodies import error_message
from turngate.runtime.errors import ConfigError
from turngate.runtime.json_ids import DECODE_ERRORS
from turngate.runtime.urls import credentials, scrub, shown_url

__all__ = [
    "MAX_REQUESTS",
    "Answer",
    "Asker",
    "as_ids",
    "as_number",
    "as_text",
    "at",
    "decoded",
    "shown",
    "together",
]

MAX_REQUESTS = 25
"""Of one probe: it is for looking at servers that others use at the same time."""
_MAX_TIMEOUTS = 3
"""After so many a server that accepts connections and says nothing is not asked again."""
_MAX_BODY_BYTES = 4 * 1024 * 1024
"""Schemas of servers with many routes take a megabyte."""
_PASSING = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses that say nothing about what a server can do."""
_SHOWN_CHARS = 160
_SECRETS = re.compile(r"\b(sk|key|hf)[-_][\w-]{8,}", re.IGNORECASE)

T = TypeVar("T")


def shown(value: object, limit: int = _SHOWN_CHARS) -> str:
    """Return a server's words as one line that a terminal can be given; no control characters, no keys."""
    text = " ".join(str(value).split())
    text = "".join(c if c.isprintable() else "?" for c in text)
    text = _SECRETS.sub("***", text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def at(value: object, *path: str | int) -> Any:
    """Return what a decoded JSON value holds at `path`; None where it is shaped otherwise."""
    for step in path:
        if isinstance(step, str) and isinstance(value, dict):
            value = value.get(step)
        elif isinstance(step, int) and isinstance(value, list) and step < len(value):
            value = value[step]
        else:
            return None
    return value


def decoded(found: bytes | str) -> object:
    """Return what JSON holds, None for anything that is none."""
    try:
        return msgspec.json.decode(found)
    except (*DECODE_ERRORS, UnicodeEncodeError):
        return None


def as_text(value: object) -> str:
    """Return a text, empty for anything else."""
    return value if isinstance(value, str) else ""


def as_number(value: object) -> float | None:
    """Return a number that is not NaN, None for anything else; booleans are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        return None
    return float(value)


def as_ids(value: object) -> list[int]:
    """Return a list of token ids, empty for anything else."""
    if not isinstance(value, list):
        return []
    ids = [entry for entry in value if isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry < 2**31]
    return ids if len(ids) == len(value) else []


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one question, if anything did."""

    status: int = 0
    """0: no reply, `problem` says why."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: object = None
    """Decoded JSON; None when it was none."""
    text: str = ""
    problem: str = ""
    """Why it is not a success with a JSON object, in a few words; empty when it is."""
    events: tuple[str, ...] = ()
    """Data of the server-sent events, for streams."""

    @property
    def ok(self) -> bool:
        """Whether it is a success with a JSON object, or a stream of events."""
        return not self.problem

    @property
    def was_refused(self) -> bool:
        """Whether the server said no, or broke over it; not when it is overloaded or not there."""
        return self.status >= 400 and self.status not in _PASSING

    def at(self, *path: str | int) -> Any:
        """Return what the body holds at `path`; None where it is shaped otherwise."""
        return at(self.body, *path)


_NOT_ASKED = Answer(problem=f"not asked: a probe makes {MAX_REQUESTS} requests at most")
_GIVEN_UP = Answer(problem=f"not asked: {_MAX_TIMEOUTS} requests before it went unanswered")


class Asker:
    """Asks one server. Never raises for what the server does; leaving the block closes its connections."""

    # Changed by requests: requests, timeouts, connected.

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        """Prepare to ask below `url`, which usually ends in /v1.

        Raises: ConfigError: `url` is not an http(s) URL, or says who we are beside the key, or the deadline is not
            positive.
        """
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"url must be http(s)://host[:port]/path: got {shown_url(url)!r}; e.g. http://127.0.0.1:8000/v1"
            )
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s must be positive: got {timeout_s}")
        self._headers, self._secrets = credentials(url, api_key)
        self.url = shown_url(url)
        """As shown: without a name and password."""
        self._base = url.rstrip("/")
        self._timeout_s = timeout_s
        self.requests = 0
        self.timeouts = 0
        self.connected = False
        """Whether any reply came, of whatever kind."""

    def __repr__(self) -> str:
        return f"<Asker {self.url}, {self.requests} requests, {self.timeouts} timeouts>"

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers={"Accept-Encoding": "identity", **self._headers},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # a few bytes may unpack to gigabytes
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def get(self, path: str, *, of_root: bool = False) -> Answer:
        """Get `path` below the URL, or below its root without /v1."""
        return await self._ask("GET", (self._base.removesuffix("/v1") if of_root else self._base) + path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Post JSON to `path` below the URL."""
        return await self._ask("POST", self._base + path, msgspec.json.encode(body))

    async def _ask(self, method: str, url: str, body: bytes | None) -> Answer:
        if self.requests >= MAX_REQUESTS:
            return _NOT_ASKED
        if self.timeouts >= _MAX_TIMEOUTS:
            return _GIVEN_UP
        self.requests += 1
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            async with asyncio.timeout(self._timeout_s):
                # Redirects are not followed: what is asked about is this server.
                async with self._session.request(
                    method, url, data=body, headers=headers, allow_redirects=False
                ) as reply:
                    self.connected = True
                    found = await _read(reply)
                    return self._answer(reply.status, reply.headers, found)
        except TimeoutError:
            self.timeouts += 1
            return Answer(problem=f"no answer within {self._timeout_s:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: a reply that is no HTTP
            return Answer(problem=self._shown(f"no whole reply: {type(error).__name__}: {error}"))

    def _answer(self, status: int, headers: Mapping[str, str], found: bytes) -> Answer:
        text = found.decode(errors="replace")
        if status != 200:
            return Answer(
                status, headers, decoded(found), text, self._shown(f"status {status}: {error_message(found)}")
            )
        if headers.get("Content-Type", "").startswith("text/event-stream"):
            return Answer(status, headers, None, text, events=_events(text))
        value = decoded(found)
        problem = "" if isinstance(value, dict) else self._shown(f"not a JSON object: {text[:60]!r}")
        return Answer(status, headers, value, text, problem)

    def _shown(self, text: str) -> str:
        return shown(scrub(text, self._secrets))  # some servers repeat the key that they refuse


async def together(*asked: Awaitable[T]) -> list[T]:
    """Return the results in order; a cancellation, or a bug in one, cancels the others."""

    async def run(one: Awaitable[T]) -> T:
        return await one

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(one)) for one in asked]
    return [task.result() for task in tasks]


async def _read(reply: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    while len(body) <= _MAX_BODY_BYTES:
        chunk = await reply.content.readany()
        if not chunk:
            return bytes(body)
        body += chunk
    reply.close()
    raise ValueError(f"a body of more than {_MAX_BODY_BYTES} bytes")


def _events(text: str) -> tuple[str, ...]:
    """Return the data of server-sent events; events end at empty lines."""
    found: list[str] = []
    for block in text.replace("\r\n", "\n").split("\n\n"):
        data = [line.removeprefix("data:").removeprefix(" ") for line in block.split("\n") if line.startswith("data:")]
        if data:
            found.append("\n".join(data))
    return tuple(found)
