"""The hot client: completions from an OpenAI-compatible server, recorded exactly, at little CPU."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from random import Random
from types import TracebackType
from typing import Protocol, Self, cast

import msgspec

from turngate.envs.base import ToolSpec
from turngate.runtime.capabilities import Capabilities
from turngate.runtime.conversation import Conversation
from turngate.runtime.dialect import Dialect
from turngate.runtime.errors import ConfigError, MalformedReply
from turngate.runtime.json_ids import JsonIds
from turngate.runtime.rendering import Renderer
from turngate.runtime.resending import resend_aborted
from turngate.runtime.retries import RetryingClient
from turngate.runtime.token_conversation import TokenConversation
from turngate.runtime.transport import Transport
from turngate.runtime.types import Completion, Message, Sampling
from turngate.runtime.urls import scrub
from turngate.runtime.weights import WeightPublisher
from turngate.runtime.wire import (
    ChatReply,
    ChatRequest,
    TextReply,
    TextRequest,
    Usage,
    decode_reply,
    wire_messages,
    wire_tools,
)
from turngate.runtime.wire_guidance import asked_guidance, with_guided_tokens
from turngate.runtime.wire_replies import chat_completion, check_logprobs, text_completion

__all__ = ["ChatEndpoint", "Endpoint", "EndpointStatistics"]

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
        renderer: Renderer | None = None,
        max_retries: int = 6,
        policy_version: int = 0,
        publisher: WeightPublisher | None = None,
        capabilities: Capabilities | None = None,
        transport: Transport | None = None,
        random: Random | None = None,
    ) -> None:
        """Prepare to talk to the server at `url`, the part before /chat/completions.

        Args: dialect: what the server knows beyond the OpenAI API, token ids above all; `OPENAI` for servers that
                refuse unknown fields. Without ids rollouts can be evaluated, not trained on. `connect` finds it out.
            renderer: the model's chat format; it comes with token_mode='tokens', where chats are rendered here.
            max_retries: attempts after the first, for connection errors, 408, 409, 425, 429 and 5xx.
            publisher: how new weights reach the server.
            capabilities: what a probe found; kept with the run, and asked before training.
            transport: replaces HTTP, for tests. random: draws the jitter of retries.
        Raises: ConfigError: the URL or a limit cannot work, or there is no renderer where one is needed.
        """
        if (renderer is not None) != (dialect.token_mode == "tokens"):
            given = "none" if renderer is None else repr(renderer)
            raise ConfigError(
                f"a renderer and token_mode='tokens' must come together: got renderer {given} with "
                f"token_mode={dialect.token_mode!r} (Endpoint)"
            )
        self.model = model
        self.policy_version = policy_version
        self.publisher = publisher
        self.capabilities = capabilities
        self.credentials = url, api_key
        """The URL as given, and the key: for probing the same server."""
        self._client = RetryingClient(
            url, api_key=api_key, transport=transport, max_retries=max_retries, random=random or Random()
        )
        self.url, self.secrets = self._client.url, self._client.secrets
        """Where the server is, without a name and password; and what must not be shown to others."""
        self.dialect = dialect
        self.renderer = renderer
        self._malformed = 0
        self._prompt_tokens = self._completion_tokens = 0

    def __repr__(self) -> str:
        return f"<Endpoint {self.model} at {self.url}, version {self.policy_version}, {self._client!r}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        await self._client.transport.aclose()

    def statistics(self) -> EndpointStatistics:
        """Return the counts as they are now."""
        client = self._client
        return EndpointStatistics(
            in_flight=client.in_flight,
            completed=client.completed,
            retries=client.retries,
            refused=client.refused,
            timeouts=client.timeouts,
            malformed=self._malformed,
            failed=client.failed,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            latency_mean_s=client.latency_s / client.completed if client.completed else 0.0,
        )

    def conversation(self) -> Conversation:
        """Return a chat that remembers the ids of what it has asked; the endpoint itself where the server renders."""
        return self if self.renderer is None else TokenConversation(self.renderer, self.generate)

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
        if self.renderer is not None:
            # A chat of one request: what was sampled earlier in these messages is known to `conversation()` alone.
            return await self.conversation().complete(messages, sampling, seed=seed, tools=tools, timeout_s=timeout_s)
        return await resend_aborted(
            # A body of its own for each attempt: which weights answer to its model's name goes with the version.
            lambda left_s: self._complete_chat(self._chat_body(messages, sampling, seed, tools), sampling, left_s),
            timeout_s,
        )

    def _chat_body(
        self, messages: Sequence[Message], sampling: Sampling, seed: int | None, tools: Sequence[ToolSpec]
    ) -> bytes:
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
            guidance=asked_guidance(sampling, self.dialect),
        )
        return _encode(request)

    async def _complete_chat(self, body: bytes, sampling: Sampling, timeout_s: float) -> Completion:
        sent = self.serving_version
        told = await self._client.request("/chat/completions", body, timeout_s)
        try:
            reply = cast(ChatReply, decode_reply(told))
            completion = chat_completion(reply, sent, self.serving_version, self.newest_version())
            completion = with_guided_tokens(completion, reply, sampling)
        except MalformedReply as error:
            raise self._malformed_reply(error, "/chat/completions") from error
        self.count_tokens(reply.usage)
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
        return await resend_aborted(lambda left_s: self._generate(prompt_token_ids, sampling, seed, left_s), timeout_s)

    async def _generate(
        self, prompt_token_ids: Sequence[int], sampling: Sampling, seed: int | None, timeout_s: float
    ) -> Completion:
        sent = self.serving_version
        reply = await self._complete_text(prompt_token_ids, sampling, seed=seed, echo=False, timeout_s=timeout_s)
        try:
            completion = text_completion(reply, prompt_token_ids, sent, self.serving_version, self.newest_version())
            completion = with_guided_tokens(completion, reply, sampling)
        except MalformedReply as error:
            raise self._malformed_reply(error, "/completions") from error
        self.count_tokens(reply.usage)
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
        body = self.text_body(prompt, sampling, seed=seed, echo=echo)
        told = await self._client.request("/completions", body, timeout_s)
        try:
            return cast(TextReply, decode_reply(told, text=True))
        except MalformedReply as error:
            raise self._malformed_reply(error, "/completions") from error

    def text_body(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        seed: int | None = None,
        echo: bool = False,
        stream: bool = False,
    ) -> bytes:
        """Return the body by which `generate` asks, for `request` and `stream`. Raises: ConfigError: as it does."""
        request = TextRequest(
            model=self.model,
            # What is JSON already is sent as it is.
            prompt=msgspec.Raw(prompt.text) if type(prompt) is JsonIds else prompt,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=0 if echo else sampling.max_tokens,  # a text to score needs no continuation
            logprobs=self.dialect.top_logprobs or 1,
            top_k=self._top_k(sampling),
            return_token_ids=self.dialect.asks_ids or None,
            return_tokens_as_token_ids=self.dialect.token_id_strings or None,
            seed=seed if self.dialect.seed else None,
            stop=sampling.stop,
            stop_token_ids=self.renderer.stop_token_ids if self.renderer and self.dialect.stop_token_ids else (),
            echo=echo,
            stream=stream,
            guidance=asked_guidance(sampling, self.dialect),
        )
        return _encode(request)

    @property
    def serving_version(self) -> int:
        """The version that answers now, as far as it is known: already the next one while its publisher checks it."""
        checked: int | None = getattr(self.publisher, "serving_version", None)
        return self.policy_version if checked is None else max(checked, self.policy_version)

    def newest_version(self) -> int | None:
        """Return the newest version that a server can serve; None while nobody has told us any."""
        if self.policy_version == 0 and self.publisher is None:
            return None
        return self.policy_version + 1  # served already while its publication is still being confirmed

    def count_tokens(self, usage: Usage | None) -> None:
        """Count the tokens of a reply whose request did not go through `complete`."""
        if usage is not None:
            self._prompt_tokens += usage.prompt_tokens
            self._completion_tokens += usage.completion_tokens

    def _top_k(self, sampling: Sampling) -> int | None:
        if self.dialect.top_k:
            return sampling.top_k  # 0 too: a server's default may come from the model's own settings
        if sampling.top_k:
            raise ConfigError(f"top_k needs a server that knows it: got {sampling.top_k} with Dialect(top_k=False)")
        return None

    def _malformed_reply(self, error: MalformedReply, path: str) -> MalformedReply:
        self._malformed += 1
        # It may hold the start of the reply, and the reply what was sent.
        return type(error)(scrub(f"{error} (POST {self.url}{path})", self.secrets))

    async def request(self, path: str, body: bytes, *, timeout_s: float = 600.0) -> bytes:
        """Post a JSON body below the URL and return the reply's, after the retries that could help.

        For what has no method of its own; nothing is added to the body. Raises as `complete` does.
        """
        return await self._client.request(path, body, timeout_s)

    def stream(
        self, path: str, body: bytes, *, timeout_s: float = 600.0
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Post a JSON body below the URL; the block is given the reply's bytes as they come.

        Leaving the block closes the connection, unless the reply was read to its end, so that the server can stop.
        Raises as `complete` does, from the iterator too.
        """
        return self._client.stream(path, body, timeout_s)
