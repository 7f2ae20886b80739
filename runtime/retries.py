"""Requests to one server, repeated where that can help: the part of the hot client that knows no chats."""

import asyncio
import email.utils
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import TypeVar

from turngate.runtime.error_bodies import error_message
from turngate.runtime.errors import ConfigError, ContextOverflow, EndpointError, EndpointRefused, EndpointTimeout
from turngate.runtime.transport import HttpTransport, OpenReply, Reply, Transport
from turngate.runtime.urls import credentials, scrub, shown_url

__all__ = ["RetryingClient"]

_RETRIED_STATUSES = frozenset({408, 409, 425, 429})
"""What a later attempt may cure, beside every 5xx."""
_FIRST_DELAY_S = 0.25
_MAX_DELAY_S = 8.0
"""Backoff doubles from the first delay up to the maximum: about 15 s over six retries, enough for a restart."""
_LONGEST_WAIT_S = 86_400.0
"""What a server may ask us to wait at most: a day stands for all that no request waits for."""
_OVERFLOW_SIGNS = (
    "context_length_exceeded",
    "context length",
    "context window",
    "context size",
    "maximum context",
    "maximum model length",
    "prompt is too long",
    "input is too long",
)
"""How OpenAI, vLLM, SGLang, llama.cpp and the embedded engine word the refusal of a prompt that is too long."""

R = TypeVar("R", Reply, OpenReply)


class RetryingClient:
    """Posts to one server and waits out what passes: lost connections, 408, 409, 425, 429 and 5xx."""

    # State: the counters, changed by requests.

    def __init__(
        self, url: str, *, api_key: str | None, transport: Transport | None, max_retries: int, random: Random
    ) -> None:
        """Prepare to post below `url`. Args: transport: replaces HTTP.

        Raises: ConfigError: the URL cannot work, or says who we are beside the key; `max_retries` is negative.
        """
        if max_retries < 0:
            raise ConfigError(f"max_retries must be 0 or more: got {max_retries}")
        headers, self.secrets = credentials(url, api_key)
        """What must not be shown to others: the key, or what the URL says of who we are."""
        self.transport = transport if transport is not None else HttpTransport(url, headers=headers)
        self.url = shown_url(url)
        """Where the server is; a name and password in the URL given are used, and never shown."""
        self._max_retries = max_retries
        self._random = random
        self.in_flight = self.completed = self.retries = 0
        self.refused = self.timeouts = self.failed = 0
        self.latency_s = 0.0
        """Seconds until the reply, or the start of a streamed one, summed over the completed."""

    def __repr__(self) -> str:
        return f"{self.in_flight} in flight, {self.completed} completed, {self.retries} retries"

    async def request(self, path: str, body: bytes, timeout_s: float) -> bytes:
        """Return the body of the first success. Cancelled: the connection is closed, so that the server can stop.

        Raises: EndpointTimeout, EndpointRefused, ContextOverflow, EndpointError: as `Endpoint.complete` says.
        """
        reply = await self._retrying(lambda left_s: self.transport.post(path, body, timeout_s=left_s), path, timeout_s)
        return reply.body

    @asynccontextmanager
    async def stream(self, path: str, body: bytes, timeout_s: float) -> AsyncGenerator[AsyncIterator[bytes]]:
        """Post a JSON body and give the reply's bytes as they come; retries end with the first of them.

        Leaving the block closes the connection, unless the reply was read to its end, so that the server can stop.
        Raises as `request` does, from the iterator too.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + timeout_s
        reply = await self._retrying(lambda left_s: self.transport.open(path, body, timeout_s=left_s), path, timeout_s)
        self.in_flight += 1

        async def read() -> AsyncGenerator[bytes]:
            try:
                while piece := await reply.read(timeout_s=deadline - now()):
                    yield piece
            except TimeoutError as error:
                self.timeouts += 1
                raise EndpointTimeout(
                    f"streamed reply must end within {timeout_s:g} s: it did not (POST {self.url}{path}); "
                    "check the server, or raise the request timeout"
                ) from error
            except ConnectionError as error:
                self.failed += 1
                raise EndpointError(f"streamed reply must come whole: {error} (POST {self.url}{path})") from error

        pieces = read()
        try:
            yield pieces
        finally:
            self.in_flight -= 1
            reply.close()
            await pieces.aclose()

    async def _retrying(self, send: "Callable[[float], Awaitable[R]]", path: str, timeout_s: float) -> "R":
        """Return the first success of `send`, which is given the seconds left."""
        now = asyncio.get_running_loop().time
        started = now()
        deadline = started + timeout_s
        attempt = 0
        self.in_flight += 1
        try:
            while True:
                try:
                    reply = await send(deadline - now())
                except TimeoutError as error:
                    self.timeouts += 1
                    raise EndpointTimeout(
                        f"reply must arrive within {timeout_s:.4g} s: got none (POST {self.url}{path}, "
                        f"{attempt} retries); check the server, or raise the request timeout"
                    ) from error
                except ConnectionError as error:
                    problem, status, told, wanted_s = str(error), 0, "", 0.0
                else:
                    if reply.status == 200:
                        self.completed += 1
                        self.latency_s += now() - started
                        return reply
                    told, wanted_s = self._refuse_or_retry(reply, path)
                    status, problem = reply.status, f"status {reply.status}: {told}"
                delay_s = max(self._backoff_s(attempt), wanted_s)
                if attempt >= self._max_retries or now() + delay_s >= deadline:
                    self.failed += 1
                    raise EndpointError(
                        f"server must answer: got {problem} (POST {self.url}{path}, {attempt} retries in "
                        f"{now() - started:.1f} s); check that it is up",
                        status=status,
                        told=told,
                        retry_after_s=wanted_s,
                    )
                attempt += 1
                self.retries += 1
                await asyncio.sleep(delay_s)
        finally:
            self.in_flight -= 1

    def _refuse_or_retry(self, reply: Reply | OpenReply, path: str) -> tuple[str, float]:
        """Return (what it says, seconds it wants us to wait) for a reply worth retrying; raise for any other."""
        message = scrub(error_message(reply.body), self.secrets)
        if reply.status in _RETRIED_STATUSES or reply.status >= 500:
            return message, _retry_after_s(reply)
        self.refused += 1
        kind: type[EndpointRefused] = EndpointRefused
        if any(sign in message.lower() for sign in _OVERFLOW_SIGNS):
            kind = ContextOverflow
        raise kind(
            f"request must be acceptable to the server: got status {reply.status}: {message} (POST {self.url}{path})",
            status=reply.status,
            told=message,
        )

    def _backoff_s(self, attempt: int) -> float:
        # Half of it jittered: enough to part the clients of a server that comes back, never a wait of nothing.
        return min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0**attempt) * (0.5 + 0.5 * self._random.random())


def _retry_after_s(reply: Reply | OpenReply) -> float:
    """Return what Retry-After asks for, in seconds or as an HTTP date; 0 when absent or unreadable, a day at most."""
    value = reply.headers.get("Retry-After")
    if not value:
        return 0.0
    try:
        wanted_s = float(value)
    except ValueError:
        try:
            wanted_s = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return min(max(0.0, wanted_s), _LONGEST_WAIT_S)  # told on by gateways, whose clients take no infinity
