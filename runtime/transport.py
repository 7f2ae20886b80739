"""How requests reach a server: one method, and its implementation on aiohttp."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol, TypeVar

import aiohttp
from yarl import URL

from turngate.runtime.deadline import Deadline
from turngate.runtime.errors import ConfigError, MalformedReply
from turngate.runtime.urls import shown_url

__all__ = ["HttpTransport", "OpenReply", "Reply", "Transport", "raise_file_limit"]

_T = TypeVar("_T")

_MAX_ERROR_BYTES = 64 * 1024
"""Of a reply that is no success; the rest is cut off, as its start says what is wrong."""


class Reply(NamedTuple):
    """An HTTP reply, whole; one with an error status may be cut."""

    status: int
    headers: Mapping[str, str]
    """Case-insensitive."""
    body: bytes


class OpenReply(Protocol):
    """An HTTP reply of which the body may still come."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Case-insensitive."""
        ...

    @property
    def body(self) -> bytes:
        """With an error status the body, maybe cut, and nothing is left to read; else empty."""
        ...

    async def read(self, *, timeout_s: float) -> bytes:
        """Return the next bytes of the body as they came, empty at its end. Cancelled: `close` it.

        Raises: ConnectionError: the body broke off. TimeoutError: nothing came within `timeout_s`.
        """
        ...

    def close(self) -> None:
        """Let go of the connection, which closes it unless the body was read to its end. May be called twice."""
        ...


class Transport(Protocol):
    """Carries requests to one server."""

    async def post(self, path: str, body: bytes, *, timeout_s: float) -> Reply:
        """Send JSON and return the whole reply, whatever its status. Cancelled: the connection is closed.

        Raises: ConnectionError: no whole reply arrived. TimeoutError: none within `timeout_s`.
        """
        ...

    async def open(self, path: str, body: bytes, *, timeout_s: float) -> OpenReply:
        """Send JSON and return the reply as soon as its status is known; `close` it. Raises as `post` does."""
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


class HttpTransport:
    """Connections to one server on aiohttp, as many as there are requests under way.

    Sessions belong to an event loop; each loop that posts gets its own, closed by `aclose` or when its loop shuts
    down its asynchronous generators, as `asyncio.run` does.
    """

    # Changed by post() and aclose(): _sessions, _urls.

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        keepalive_s: float = 4.0,
        max_body_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        """Prepare to post below `url`; connects to nothing yet.

        Args: keepalive_s: how long an idle connection is kept. Must stay below the server's own limit (5 s in
            uvicorn), or requests meet connections that are just being closed. max_body_bytes: the longest reply that
            is read; a broken server must not fill our memory.
        Raises: ConfigError: `url` is not an http(s) URL.
        """
        base = URL(url.rstrip("/"))
        if base.scheme not in ("http", "https") or not base.host:
            raise ConfigError(
                f"url must be http(s)://host[:port]/path: got {shown_url(url)!r}; e.g. http://127.0.0.1:8000/v1"
            )
        self._base = str(base)
        # Identity: compressed replies would cost both sides CPU on a fast network.
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **(headers or {})}
        self._keepalive_s = keepalive_s
        self._max_body_bytes = max_body_bytes
        self._urls: dict[str, URL] = {}
        self._sessions: dict[asyncio.AbstractEventLoop, _Sessions] = {}
        raise_file_limit()

    def __repr__(self) -> str:
        return f"<HttpTransport {shown_url(self._base)}>"

    async def post(self, path: str, body: bytes, *, timeout_s: float) -> Reply:
        """Send JSON and return the whole reply.

        A pooled connection that the server has closed dies before the first byte of the reply; that costs one
        immediate retry on a connection of its own. aiohttp itself never retries a POST.

        Raises: ConnectionError, TimeoutError: as the protocol says. MalformedReply: it is longer than any can be.
        """
        return await self._send(path, lambda session, url: _post(session, url, body, self._max_body_bytes), timeout_s)

    async def open(self, path: str, body: bytes, *, timeout_s: float) -> OpenReply:
        """Send JSON and return the reply once its status is known; a stale connection is retried as in `post`."""
        return await self._send(path, lambda session, url: _open(session, url, body, self._max_body_bytes), timeout_s)

    async def _send(
        self, path: str, send: "Callable[[aiohttp.ClientSession, URL], Awaitable[_T]]", timeout_s: float
    ) -> "_T":
        loop = asyncio.get_running_loop()
        sessions = self._sessions.get(loop) or await self._open(loop)
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(self._base + path)
        with Deadline() as deadline:
            deadline.set(loop.time() + timeout_s, "request")
            try:
                try:
                    return await send(sessions.pooled, url)
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                    if isinstance(error, aiohttp.ClientConnectorError):
                        raise  # nothing was reused: the server is not there
                    return await send(sessions.single_use(), url)
            except (aiohttp.ClientError, OSError) as error:
                raise ConnectionError(f"{type(error).__name__}: {error}") from error

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        sessions = self._sessions.pop(asyncio.get_running_loop(), None)
        if sessions is not None:
            await sessions.lifetime.aclose()

    async def _open(self, loop: asyncio.AbstractEventLoop) -> "_Sessions":
        for other in [known for known in self._sessions if known.is_closed()]:
            del self._sessions[other]
        sessions = _Sessions(self._headers, self._keepalive_s)
        self._sessions[loop] = sessions
        # The first step makes the loop know the generator, so that it closes it when it shuts down.
        await anext(sessions.lifetime)
        return sessions


class _Sessions:
    """The aiohttp sessions of one event loop."""

    def __init__(self, headers: Mapping[str, str], keepalive_s: float) -> None:
        self._headers = headers
        self.pooled = self._session(aiohttp.TCPConnector(limit=0, keepalive_timeout=keepalive_s))
        self._single_use: aiohttp.ClientSession | None = None
        self.lifetime: AsyncGenerator[None] = self._live()

    def single_use(self) -> aiohttp.ClientSession:
        """Return the session that makes a fresh connection for every request."""
        if self._single_use is None:
            self._single_use = self._session(aiohttp.TCPConnector(limit=0, force_close=True))
        return self._single_use

    def _session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            # Our own deadline bounds a request as a whole; aiohttp's timers would be a second, dearer one.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        )

    async def _live(self) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            await self.pooled.close()
            if self._single_use is not None:
                await self._single_use.close()


async def _post(session: aiohttp.ClientSession, url: URL, body: bytes, max_bytes: int) -> Reply:
    # Redirects are not followed: a POST would come back as a GET.
    response = await session.post(url, data=body, allow_redirects=False)
    limit = max_bytes if response.status == 200 else _MAX_ERROR_BYTES
    length = response.content_length
    if length is not None and length <= limit and "Content-Encoding" not in response.headers:
        found = await response.read()  # releases the connection, or closes it when it fails
    else:
        found = await _read_bounded(response, limit)
    return Reply(response.status, response.headers, found)


async def _open(session: aiohttp.ClientSession, url: URL, body: bytes, max_bytes: int) -> OpenReply:
    response = await session.post(url, data=body, allow_redirects=False)
    if response.status == 200:
        return _Streaming(response, max_bytes)
    return _Failed(response.status, response.headers, await _read_bounded(response, _MAX_ERROR_BYTES))


class _Failed(NamedTuple):
    """A reply that is no success, read already."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    async def read(self, *, timeout_s: float) -> bytes:
        return b""

    def close(self) -> None:
        pass


class _Streaming:
    """A reply that is being read."""

    body = b""

    def __init__(self, response: aiohttp.ClientResponse, max_bytes: int) -> None:
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self._response = response
        self._left = self._max_bytes = max_bytes

    def __repr__(self) -> str:
        return f"<_Streaming {self._max_bytes - self._left} bytes read>"

    async def read(self, *, timeout_s: float) -> bytes:
        with Deadline() as deadline:
            deadline.set(asyncio.get_running_loop().time() + timeout_s, "stream")
            try:
                chunk = await self._response.content.readany()
            except (aiohttp.ClientError, OSError) as error:
                raise ConnectionError(f"{type(error).__name__}: {error}") from error
        self._left -= len(chunk)
        if self._left < 0:
            raise MalformedReply(
                f"streamed reply must have at most {self._max_bytes} bytes: got more, and read no further"
            )
        return chunk

    def close(self) -> None:
        self._response.close()  # a connection whose reply was read to the end went back to the pool before


async def _read_bounded(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Read a reply that does not say how long it is, or says too much."""
    body = bytearray()
    try:
        while len(body) <= limit:
            chunk = await response.content.readany()
            if not chunk:
                response.release()
                return bytes(body)
            body += chunk
    except BaseException:
        response.close()
        raise
    response.close()  # with the rest unread, the connection cannot be used again
    if response.status == 200:
        raise MalformedReply(
            f"reply must have at most {limit} bytes: got more, and read no further (POST {response.url}); it starts "
            f"with {bytes(body[:80])!r}"
        )
    return bytes(body[:limit])


def raise_file_limit() -> None:
    """Raise this process's soft limit of open files to the hard one; every live request needs a socket.

    The usual soft limit of 1,024 fails thousands of rollouts at once. Does nothing where limits are unknown.
    """
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):
            pass  # some systems report a hard limit they do not grant; the soft one then has to do
