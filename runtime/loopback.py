"""The gateway inside this process: one per event loop, opened on first use, closed with the runtime or the loop."""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = ["Loopback", "OpenGateway"]

_BACKLOG = 4096
"""Agents that may connect before the gateway accepts the first: a batch of episodes starts all at once."""
_log = logging.getLogger("turngate.gateway")

OpenGateway: TypeAlias = Callable[[socket.socket], AbstractAsyncContextManager[object]]
"""Serves sessions on a listening socket, within a context."""


class Loopback:
    """A `Door` that leads to the sessions of one runtime. Usable from several event loops."""

    # Changed on first use in a loop, and when an entrance closes: _entrances.

    def __init__(self, open_gateway: OpenGateway, *, request_timeout_s: float) -> None:
        """Open nothing yet. Args: request_timeout_s: what clients wait for an answer, connecting included."""
        self._open_gateway, self._request_timeout_s = open_gateway, request_timeout_s
        self._entrances: list[_Entrance] = []

    def __repr__(self) -> str:
        return f"<Loopback {', '.join(each.base_url for each in self._entrances) or 'closed'}>"

    @property
    def base_url(self) -> str:
        """The URL to give to SDKs in the running event loop."""
        return self._entrance().base_url

    def client(self, key: str) -> "AsyncOpenAI":
        """Return a client for the session with this key. All clients of a loop share one pool of connections."""
        return self._entrance().client().with_options(api_key=key)

    async def aclose(self) -> None:
        """Close the gateway of the running loop; it opens again on next use."""
        loop = asyncio.get_running_loop()
        for entrance in [each for each in self._entrances if each.loop is loop]:
            await entrance.aclose()

    def _entrance(self) -> "_Entrance":
        loop = asyncio.get_running_loop()
        for entrance in self._entrances:
            if entrance.loop is loop:
                return entrance
        # In place: entrances remove themselves from this very list.
        self._entrances[:] = [each for each in self._entrances if not each.loop.is_closed()]
        entrance = _Entrance(self._open_gateway, self._request_timeout_s, self._entrances.remove)
        self._entrances.append(entrance)
        return entrance


class _Entrance:
    """A socket that takes connections at once, and a task that serves it until its loop ends."""

    def __init__(
        self, open_gateway: OpenGateway, request_timeout_s: float, forget: "Callable[[_Entrance], None]"
    ) -> None:
        self._open_gateway, self._request_timeout_s, self._forget = open_gateway, request_timeout_s, forget
        self.loop = asyncio.get_running_loop()
        # Bound here and now: whoever asks for the URL cannot wait, and what connects early waits in the backlog.
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        self._socket.setblocking(False)
        self.base_url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        self._client: AsyncOpenAI | None = None
        self._serving = self.loop.create_task(self._serve(), name=f"gateway at {self.base_url}")
        self._serving.add_done_callback(
            self._close
        )  # not in the task: cancelled before its first step, it does nothing

    def client(self) -> "AsyncOpenAI":
        """Return the client that those of all sessions are copies of: making one costs 30 ms."""
        if self._client is None:
            from openai import AsyncOpenAI, DefaultAsyncHttpxClient  # late: costs a second

            # No proxy lies on the way to this process, whatever the environment says.
            http = DefaultAsyncHttpxClient(trust_env=False)
            timeout_s = self._request_timeout_s
            self._client = AsyncOpenAI(base_url=self.base_url, api_key="none", http_client=http, timeout=timeout_s)
        return self._client

    async def aclose(self) -> None:
        """Stop serving, and wait until that is done."""
        self._serving.cancel()
        await asyncio.wait({self._serving})

    async def _serve(self) -> None:
        try:
            async with self._open_gateway(self._socket):
                try:
                    await self.loop.create_future()
                finally:
                    if self._client is not None:  # first, or the gateway would wait for its idle connections
                        await self._client.close()
        except Exception:
            # A recorded boundary: nobody waits for this task. Agents see their connections refused.
            _log.exception("the gateway for session.openai at %s failed", self.base_url)

    def _close(self, _: "asyncio.Task[None]") -> None:
        self._socket.close()
        self._forget(self)
