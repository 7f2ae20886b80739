"""The hot client: completions from an OpenAI-compatible server, recorded exactly, at little CPU."""

import asyncio
import email.utils
import time
from collections.abc import Sequence
from random import Random
from types import TracebackType
from typing import Protocol, Self, cast

import msgspec

from turngate.envs.base import ToolSpec
from turngate.runtime.dialect import Dialect
from turngate.runtime.errors import (
    ConfigError,
    ContextOverflow,
    EndpointError,
    EndpointRefused,
    EndpointTimeout,
    MalformedReply,
)
from turngate.runtime.transport import HttpTransport, Reply, Transport
from turngate.runtime.types import Completion, Message, Sampling
from turngate.runtime.weights import WeightPublisher
from turngate.runtime.wire import (
    ChatReply,
    ChatRequest,
    TextReply,
    TextRequest,
    chat_completion,
    check_logprobs,
    decode_reply,
    error_message,
    text_completion,
    wire_messages,
    wire_tools,
)

__all__ = ["ChatEndpoint", "Endpoint", "EndpointStatistics"]

_RETRIED_STATUSES = frozenset({408, 409, 425, 429})
"""What a later attempt may cure, beside every 5xx."""
_FIRST_DELAY_S = 0.25
_MAX_DELAY_S = 8.0
"""Backoff doubles from the first delay up to the maximum: about 15 s over six retries, enough for a restart."""
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

_encode = msgspec.json.Encoder().encode


class ChatEndpoint(Protocol):
    """Where completions come from: a server, or a fake."""

    policy_version: int
    """The newest published version; set by whoever publishes weights."""

    @property
    def publisher(self) -> WeightPublisher | None:
        """How new weights reach it, when it can take any."""
        ...

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        seed: int | None = None,
        tools: Sequence[ToolSpec] = (),
        timeout_s: float = ...,
    ) -> Completion:
        """Sample one completion. Raises EndpointError, or one of its kinds, after the retries that could help."""
        ...

    async def aclose(self) -> None:
        """Release the connections."""
        ...


class EndpointStatistics(msgspec.Struct, frozen=True):
    """What an endpoint has done so far."""

    in_flight: int
    completed: int
    retries: int
    refused: int
    timeouts: int
    malformed: int
    failed: int
    """Requests given up after connection errors or server errors."""
    prompt_tokens: int
    completion_tokens: int
    """As the server counts them in its usage."""
    latency_mean_s: float


class Endpoint:
    """An OpenAI-compatible inference server.

        async with Endpoint("http://127.0.0.1:8000/v1", model="policy") as endpoint:
            completion = await endpoint.complete(messages, Sampling(max_tokens=64))

    Usable from several event loops. Connects on first use.
    """

    # Changed by requests: the counters. Changed by the publishing side: policy_version.

    def __init__(
        self,
        url: str,
        *,
        model: str,
        api_key: str | None = None,
        dialect: Dialect = Dialect(),  # noqa: B008 - frozen
        max_retries: int = 6,
        policy_version: int = 0,
        publisher: WeightPublisher | None = None,
        transport: Transport | None = None,
        random: Random | None = None,
    ) -> None:
        """Prepare to talk to the server at `url`, the part before /chat/completions.

        Args: dialect: what the server knows beyond the OpenAI API, token ids above all; `OPENAI` for servers that
                refuse unknown fields. Without ids rollouts can be evaluated, not trained on. `connect` finds it out.
            max_retries: attempts after the first, for connection errors, 408, 409, 425, 429 and 5xx.
            publisher: how new weights reach the server.
            transport: replaces HTTP, for tests. random: draws the jitter of retries.
        Raises: ConfigError: the URL or a limit cannot work.
        """
        if max_retries < 0:
            raise ConfigError(f"max_retries must be 0 or more: got {max_retries}")
        self.url = url.rstrip("/")
        self.model = model
        self.policy_version = policy_version
        self.publisher = publisher
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._transport = transport if transport is not None else HttpTransport(self.url, headers=headers)
        self.dialect = dialect
        self._max_retries = max_retries
        self._random = random or Random()
        self._in_flight = self._completed = self._retries = 0
        self._refused = self._timeouts = self._malformed = self._failed = 0
        self._prompt_tokens = self._completion_tokens = 0
        self._latency_s = 0.0

    def __repr__(self) -> str:
        return (
            f"<Endpoint {self.model} at {self.url}, version {self.policy_version}, "
            f"{self._in_flight} in flight, {self._completed} completed, {self._retries} retries>"
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        await self._transport.aclose()

    def statistics(self) -> EndpointStatistics:
        """Return the counts as they are now."""
        return EndpointStatistics(
            in_flight=self._in_flight,
            completed=self._completed,
            retries=self._retries,
            refused=self._refused,
            timeouts=self._timeouts,
            malformed=self._malformed,
            failed=self._failed,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            latency_mean_s=self._latency_s / self._completed if self._completed else 0.0,
        )

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        seed: int | None = None,
        tools: Sequence[ToolSpec] = (),
        timeout_s: float = 600.0,
    ) -> Completion:
        """Sample one completion for a conversation. Cancelled: the connection is closed, so the server can stop.

        Raises: EndpointTimeout: no answer within `timeout_s`, retries included. EndpointRefused: the server said no;
            ContextOverflow when because of the prompt's length. MalformedReply: the answer contradicts itself.
            EndpointError: all retries failed.
        """
        request = ChatRequest(
            model=self.model,
            messages=wire_messages(messages),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            logprobs=self.dialect.logprobs,
            top_logprobs=self.dialect.top_logprobs,
            top_k=self._top_k(sampling),
            return_token_ids=self.dialect.asks_ids or None,
            return_tokens_as_token_ids=self.dialect.token_id_strings or None,
            seed=seed if self.dialect.seed else None,
            stop=sampling.stop,
            tools=wire_tools(tools) if tools else (),
        )
        sent = self.policy_version
        body = await self._request("/chat/completions", _encode(request), timeout_s)
        try:
            reply = cast(ChatReply, decode_reply(body))
            completion = chat_completion(reply, sent, self.policy_version, self._newest_version())
        except MalformedReply as error:
            raise self._malformed_reply(error, "/chat/completions") from error
        self._count_tokens(reply)
        return completion

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        *,
        seed: int | None = None,
        timeout_s: float = 600.0,
    ) -> Completion:
        """Continue a prompt given as token ids. Raises as `complete` does."""
        sent = self.policy_version
        reply = await self._complete_text(prompt_token_ids, sampling, seed=seed, echo=False, timeout_s=timeout_s)
        try:
            completion = text_completion(reply, prompt_token_ids, sent, self.policy_version, self._newest_version())
        except MalformedReply as error:
            raise self._malformed_reply(error, "/completions") from error
        self._count_tokens(reply)
        return completion

    async def score(self, token_ids: Sequence[int], *, timeout_s: float = 600.0) -> list[float]:
        """Return the log-probability of each token given those before it; 0 for the first, which has no context.

        Raises as `complete` does; MalformedReply also when the server cannot echo log-probs.
        """
        reply = await self._complete_text(token_ids, Sampling(), seed=None, echo=True, timeout_s=timeout_s)
        found = reply.choices[0].logprobs if reply.choices else None
        logprobs = (found.token_logprobs if found is not None else None) or []
        try:
            if len(logprobs) < len(token_ids):
                raise MalformedReply(
                    f"echoed log-probs must cover the prompt: expected {len(token_ids)}, got {len(logprobs)} "
                    "(choices[0].logprobs.token_logprobs); the server may not support echo with log-probs"
                )
            scored = logprobs[1 : len(token_ids)]
            if scored:
                check_logprobs(scored, "choices[0].logprobs.token_logprobs")
        except MalformedReply as error:
            raise self._malformed_reply(error, "/completions") from error
        return [0.0, *cast(list[float], scored)] if token_ids else []

    async def _complete_text(
        self, prompt: Sequence[int], sampling: Sampling, *, seed: int | None, echo: bool, timeout_s: float
    ) -> TextReply:
        request = TextRequest(
            model=self.model,
            prompt=prompt,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=0 if echo else sampling.max_tokens,  # a text to score needs no continuation
            logprobs=self.dialect.top_logprobs or 1,
            top_k=self._top_k(sampling),
            return_token_ids=self.dialect.asks_ids or None,
            return_tokens_as_token_ids=self.dialect.token_id_strings or None,
            seed=seed if self.dialect.seed else None,
            stop=sampling.stop,
            echo=echo,
        )
        body = await self._request("/completions", _encode(request), timeout_s)
        try:
            return cast(TextReply, decode_reply(body, text=True))
        except MalformedReply as error:
            raise self._malformed_reply(error, "/completions") from error

    def _newest_version(self) -> int | None:
        """Return the newest version that a server can serve; None while nobody has told us any."""
        if self.policy_version == 0 and self.publisher is None:
            return None
        return self.policy_version + 1  # served already while its publication is still being confirmed

    def _count_tokens(self, reply: ChatReply | TextReply) -> None:
        if reply.usage is not None:
            self._prompt_tokens += reply.usage.prompt_tokens
            self._completion_tokens += reply.usage.completion_tokens

    def _top_k(self, sampling: Sampling) -> int | None:
        if self.dialect.top_k:
            return sampling.top_k  # 0 too: a server's default may come from the model's own settings
        if sampling.top_k:
            raise ConfigError(f"top_k needs a server that knows it: got {sampling.top_k} with Dialect(top_k=False)")
        return None

    def _malformed_reply(self, error: MalformedReply, path: str) -> MalformedReply:
        self._malformed += 1
        return MalformedReply(f"{error} (POST {self.url}{path})")

    async def _request(self, path: str, body: bytes, timeout_s: float) -> bytes:
        """Post, retrying what a retry may cure, and return the body of the first success."""
        now = asyncio.get_running_loop().time
        started = now()
        deadline = started + timeout_s
        attempt = 0
        self._in_flight += 1
        try:
            while True:
                try:
                    reply = await self._transport.post(path, body, timeout_s=deadline - now())
                except TimeoutError as error:
                    self._timeouts += 1
                    raise EndpointTimeout(
                        f"reply must arrive within {timeout_s:g} s: got none (POST {self.url}{path}, "
                        f"{attempt} retries); check the server, or raise the request timeout"
                    ) from error
                except ConnectionError as error:
                    problem, wanted_s = str(error), 0.0
                else:
                    if reply.status == 200:
                        self._completed += 1
                        self._latency_s += now() - started
                        return reply.body
                    problem, wanted_s = self._refuse_or_retry(reply, path)
                delay_s = max(self._backoff_s(attempt), wanted_s)
                if attempt >= self._max_retries or now() + delay_s >= deadline:
                    self._failed += 1
                    raise EndpointError(
                        f"server must answer: got {problem} (POST {self.url}{path}, {attempt} retries in "
                        f"{now() - started:.1f} s); check that it is up"
                    )
                attempt += 1
                self._retries += 1
                await asyncio.sleep(delay_s)
        finally:
            self._in_flight -= 1

    def _refuse_or_retry(self, reply: Reply, path: str) -> tuple[str, float]:
        """Return (problem, seconds the server wants us to wait) for a reply worth retrying; raise for any other."""
        message = error_message(reply.body)
        if reply.status in _RETRIED_STATUSES or reply.status >= 500:
            return f"status {reply.status}: {message}", _retry_after_s(reply)
        self._refused += 1
        kind: type[EndpointRefused] = EndpointRefused
        if any(sign in message.lower() for sign in _OVERFLOW_SIGNS):
            kind = ContextOverflow
        raise kind(
            f"request must be acceptable to the server: got status {reply.status}: {message} (POST {self.url}{path})"
        )

    def _backoff_s(self, attempt: int) -> float:
        # Half of it jittered: enough to part the clients of a server that comes back, never a wait of nothing.
        return min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0**attempt) * (0.5 + 0.5 * self._random.random())


def _retry_after_s(reply: Reply) -> float:
    """Return what Retry-After asks for, in seconds or as an HTTP date; 0 when absent or unreadable."""
    value = reply.headers.get("Retry-After")
    if not value:
        return 0.0
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0
