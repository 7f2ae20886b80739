"""The control routes of a server, one attempt at a time."""

from collections.abc import Mapping
from typing import Any, TypeVar

import aiohttp
import msgspec

from turngate.runtime.error_bodies import error_message
from turngate.runtime.errors import ConfigError, PublishError, PublishRefused
from turngate.runtime.json_ids import DECODE_ERRORS
from turngate.runtime.urls import credentials, scrub, shown_url

__all__ = ["Admin", "AdminError", "AdminRefused"]

T = TypeVar("T")


class AdminError(PublishError):
    """A control route did not do what it was asked to; another attempt may."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        """Say what failed; `status` is 0 when no reply came."""
        super().__init__(message)
        self.status = status


class AdminRefused(AdminError, PublishRefused):
    """The server said no (4xx), or is not the server we took it for."""


class Admin:
    """Control routes below the root of one server; a connection per call, as calls are rare."""

    def __init__(self, url: str, *, api_key: str | None) -> None:
        """Prepare to call below `url`; a /v1 at its end is left out.

        Raises: ConfigError: it is no URL, or says who we are beside the key.
        """
        self._root = url.rstrip("/").removesuffix("/v1")
        if not self._root.startswith(("http://", "https://")):
            raise ConfigError(f"url must be http(s)://host[:port]: got {shown_url(url)!r}; e.g. http://127.0.0.1:8000")
        self.credentials = f"{self._root}/v1", api_key
        """The URL of the API with all that it says, and the key: for asking the same server."""
        self.url = shown_url(self._root)
        self._headers, self._secrets = credentials(url, api_key)

    def __repr__(self) -> str:
        return f"<Admin {self.url}>"

    async def post(self, path: str, body: Any = None, *, params: Mapping[str, str] | None = None) -> bytes:
        """Post JSON and return the body of the 200. Has no deadline of its own.

        Cancelled: the server may still do it. Raises: AdminError: no reply, or 5xx. AdminRefused: any other status.
        """
        return await self._call("POST", path, body, params)

    async def get(self, path: str, *, params: Mapping[str, str] | None = None) -> bytes:
        """Return the body of a GET. Raises as `post` does."""
        return await self._call("GET", path, None, params)

    def decode(self, body: bytes, kind: type[T], path: str) -> T:
        """Decode a reply. Raises: AdminRefused: it is another kind of server that answers there."""
        try:
            return msgspec.json.decode(body, type=kind)
        except DECODE_ERRORS as error:
            raise AdminRefused(f"{self.url}{path} must answer as documented: {error}; got {body[:80]!r}") from error

    async def _call(self, method: str, path: str, body: Any, params: Mapping[str, str] | None) -> bytes:
        where = f"{method} {self.url}{path}"
        try:
            async with (
                # The caller's deadline bounds the call: loading large weights takes as long as it takes.
                aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(total=None)) as session,
                # A proxy may redirect; weights must not be "published" to a login page.
                session.request(method, self._root + path, json=body, params=params, allow_redirects=False) as reply,
            ):
                told, status = await reply.read(), reply.status
        except (aiohttp.ClientError, OSError) as error:
            raise AdminError(f"{where} must answer: got {type(error).__name__}: {error}") from error
        if status == 200:
            return told
        kind = AdminError if status >= 500 else AdminRefused
        raise kind(
            f"{where} must succeed: got status {status}: {scrub(error_message(told), self._secrets)}", status=status
        )
