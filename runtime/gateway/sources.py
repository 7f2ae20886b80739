"""Where a reply comes from: a server that renders the chat, or our own renderer and a server that is given ids.

Both give the bytes of an OpenAI-compatible reply, whole or in chunks, and the completions that the record is made of.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple, Protocol

import msgspec

from turngate.runtime.endpoint import Endpoint
from turngate.runtime.errors import MalformedReply
from turngate.runtime.gateway.collected import ChatChunk, CollectedChat, CollectedText, TextChunk
from turngate.runtime.gateway.sse import DONE, event_data
from turngate.runtime.gateway.upstream import arrival
from turngate.runtime.resending import resend_aborted
from turngate.runtime.types import Completion
from turngate.runtime.wire import ChatReply, TextReply, Usage, decode_reply
from turngate.runtime.wire_replies import choice_completion, prompt_ids

__all__ = ["Chunk", "ServerSource", "Source", "Whole"]


class Whole(NamedTuple):
    """A reply in one piece."""

    body: bytes
    completions: list[Completion]


class Chunk(NamedTuple):
    """One event of a streamed reply."""

    data: bytes
    decoded: ChatChunk | TextChunk


class Source(Protocol):
    """Gives one reply, in one of two ways."""

    async def whole(self) -> Whole:
        """Return the reply in one piece. Raises: EndpointError: there is none."""
        ...

    def chunks(self) -> AsyncGenerator[Chunk]:
        """Yield the reply as it comes, without the last event. Raises: EndpointError: it does not come whole."""
        ...

    def completions(self) -> list[Completion]:
        """Return what the chunks have added up to. Raises: MalformedReply: they do not."""
        ...


class ServerSource:
    """A server's own reply to a request that was edited a little."""

    def __init__(
        self,
        endpoint: Endpoint,
        make_body: Callable[[], bytes],
        *,
        choices: int,
        timeout_s: float,
        is_text: bool = False,
        prompt: Sequence[int] = (),
    ) -> None:
        """Args: make_body: called for each attempt, as the model's name goes with the version that answers to it.
        choices: expected. is_text: of /completions, not of a chat. prompt: the ids that are asked with, where it is
        ids: servers that spell ids out do not repeat them.
        """
        self._prompt = prompt
        self._endpoint, self._make_body, self._timeout_s = endpoint, make_body, timeout_s
        self._path = "/completions" if is_text else "/chat/completions"
        self._is_text = is_text
        self._choices = choices
        self._collected = CollectedText(choices) if is_text else CollectedChat(choices)
        self._sent = endpoint.serving_version

    async def whole(self) -> Whole:
        """Ask, and return the reply; one that the server gave up is asked for again."""
        return await resend_aborted(self._ask, self._timeout_s)

    async def _ask(self, timeout_s: float) -> Whole:
        self._sent = self._endpoint.serving_version
        body = await self._endpoint.request(self._path, self._make_body(), timeout_s=timeout_s)
        reply = decode_reply(body, text=self._is_text)
        if len(reply.choices) < 1:
            raise MalformedReply("choices must hold one completion: expected 1, got 0 (choices)")
        self._endpoint.count_tokens(reply.usage)
        return Whole(body, self._completions_of(reply))

    async def chunks(self) -> AsyncGenerator[Chunk]:
        """Ask, and yield the events of the reply."""
        self._sent = self._endpoint.serving_version
        async with self._endpoint.stream(self._path, self._make_body(), timeout_s=self._timeout_s) as pieces:
            async with aclosing(event_data(pieces)) as events:
                async for data in events:
                    if data == DONE:
                        break
                    yield Chunk(data, self._collected.add(data))

    def completions(self) -> list[Completion]:
        """Return the choices of the stream, whose tokens are counted by their ids: usage comes only when asked for."""
        completions = self._with_prompts(self._collected.completions(arrival(self._endpoint, self._sent)))
        generated = sum(len(completion.token_ids) for completion in completions)
        self._endpoint.count_tokens(Usage(len(completions[0].prompt_token_ids), generated))
        return completions

    def _completions_of(self, reply: ChatReply | TextReply) -> list[Completion]:
        sent, received, newest = msgspec.structs.astuple(arrival(self._endpoint, self._sent))
        shared = prompt_ids(reply.prompt_token_ids)
        return self._with_prompts(
            [
                choice_completion(choice, prompt_ids(choice.prompt_token_ids) or shared, sent, received, newest)
                for choice in reply.choices
            ]
        )

    def _with_prompts(self, completions: list[Completion]) -> list[Completion]:
        if not self._prompt:
            return completions
        return [
            one if one.prompt_token_ids else msgspec.structs.replace(one, prompt_token_ids=self._prompt)
            for one in completions
        ]
