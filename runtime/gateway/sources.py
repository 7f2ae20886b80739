"""Where a reply comes from: a server that renders the chat, or our own renderer and a server that is given ids.

Both give the bytes of an OpenAI-compatible reply, whole or in chunks, and the completions that the record is made of.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol, cast

import msgspec

from turngate.envs.base import ToolSpec
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.errors import MalformedReply
from turngate.runtime.gateway.asks import ChatAsk, Fields
from turngate.runtime.gateway.collected import ChatChunk, CollectedChat, CollectedText, TextChunk
from turngate.runtime.gateway.drawing import Drawing
from turngate.runtime.gateway.rendered import Envelope, chunk_bodies, reply_body
from turngate.runtime.gateway.sse import DONE, event_data
from turngate.runtime.gateway.upstream import arrival
from turngate.runtime.openai_api.neutral import NEUTRAL, NEUTRAL_CHAT, refuse_unsupported
from turngate.runtime.openai_api.refusals import RequestError, decode_json
from turngate.runtime.resending import resend_aborted
from turngate.runtime.seeds import derive_seed
from turngate.runtime.session import Session
from turngate.runtime.types import Completion, Message
from turngate.runtime.unwrap import single_errors
from turngate.runtime.wire import (
    ChatReply,
    TextReply,
    chat_choice_completion,
    decode_reply,
    prompt_ids,
    text_choice_completion,
)

__all__ = ["Chunk", "RenderedSource", "ServerSource", "Source", "Whole", "offered_tools"]


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

    def chunks(self) -> AsyncIterator[Chunk]:
        """Yield the reply as it comes, without the last event. Raises: EndpointError: it does not come whole."""
        ...

    def completions(self) -> list[Completion]:
        """Return what the chunks have added up to. Raises: MalformedReply: they do not."""
        ...


class ServerSource:
    """A server's own reply to a request that was edited a little."""

    def __init__(
        self, endpoint: Endpoint, path: str, body: bytes, *, choices: int, timeout_s: float, is_text: bool = False
    ) -> None:
        """Args: choices: expected. is_text: of /completions, not of a chat."""
        self._endpoint, self._path, self._body, self._timeout_s = endpoint, path, body, timeout_s
        self._is_text = is_text
        self._choices = choices
        self._collected = CollectedText(choices) if is_text else CollectedChat(choices)
        self._sent = endpoint.policy_version

    async def whole(self) -> Whole:
        """Ask, and return the reply; one that the server gave up is asked for again."""
        return await resend_aborted(self._ask, self._timeout_s)

    async def _ask(self, timeout_s: float) -> Whole:
        self._sent = self._endpoint.policy_version
        body = await self._endpoint.request(self._path, self._body, timeout_s=timeout_s)
        reply = decode_reply(body, text=self._is_text)
        if len(reply.choices) < 1:
            raise MalformedReply("choices must hold one completion: expected 1, got 0 (choices)")
        return Whole(body, self._completions_of(reply))

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Ask, and yield the events of the reply."""
        self._sent = self._endpoint.policy_version
        async with self._endpoint.stream(self._path, self._body, timeout_s=self._timeout_s) as pieces:
            async for data in event_data(pieces):
                if data == DONE:
                    break
                yield Chunk(data, self._collected.add(data))

    def completions(self) -> list[Completion]:
        """Return the choices of the stream."""
        return self._collected.completions(arrival(self._endpoint, self._sent))

    def _completions_of(self, reply: ChatReply | TextReply) -> list[Completion]:
        sent, received, newest = msgspec.structs.astuple(arrival(self._endpoint, self._sent))
        shared = prompt_ids(reply.prompt_token_ids)
        if not self._is_text:
            choices = cast(ChatReply, reply).choices
            return [chat_choice_completion(choice, shared, sent, received, newest) for choice in choices]
        return [
            text_choice_completion(choice, prompt_ids(choice.prompt_token_ids) or shared, sent, received, newest)
            for choice in cast(TextReply, reply).choices
        ]


class RenderedSource:
    """What was sampled after a prompt of ids that our renderer made, written as a chat completion."""

    def __init__(
        self,
        session: Session,
        fields: Fields,
        ask: ChatAsk,
        drawing: Drawing,
        messages: Sequence[Message],
        envelope: Envelope,
        *,
        timeout_s: float,
    ) -> None:
        """Raises: RequestError: the request asks for what only a server that renders can do."""
        _refuse_unrendered(fields, ask)
        self._session, self._ask, self._drawing = session, ask, drawing
        self._messages, self._envelope, self._timeout_s = messages, envelope, timeout_s
        self._tools = () if ask.tool_choice == "none" else offered_tools(ask)
        self._sampled: list[Completion] = []

    async def whole(self) -> Whole:
        """Render, ask, and write the reply."""
        await self._sample()
        return Whole(reply_body(self._envelope, self._sampled), self._sampled)

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Render, ask, and yield the reply once all of it is there."""
        await self._sample()
        options = self._ask.stream_options
        has_usage = bool(options and options.include_usage)
        for data in chunk_bodies(self._envelope, self._sampled, has_usage=has_usage):
            yield Chunk(data, decode_json(_CHUNK, data))

    def completions(self) -> list[Completion]:
        """Return what was sampled."""
        return self._sampled

    async def _sample(self) -> None:
        with single_errors():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._complete(index)) for index in range(self._ask.n or 1)]
        self._sampled = [task.result() for task in tasks]

    async def _complete(self, index: int) -> Completion:
        seed = self._drawing.seed
        return await self._session.conversation.complete(
            self._messages,
            self._drawing.sampling,
            seed=seed if seed is None or not index else derive_seed(seed, "choice", index),
            tools=self._tools,
            timeout_s=self._timeout_s,
        )


_CHUNK = msgspec.json.Decoder(ChatChunk)


class _Function(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None


class _Tool(msgspec.Struct, frozen=True):
    function: _Function


def offered_tools(ask: ChatAsk) -> tuple[ToolSpec, ...]:
    """Return the tools on offer as renderers read them. Raises: RequestError: one of them is no function."""
    found: list[ToolSpec] = []
    for index, tool in enumerate(ask.tools or ()):
        where = f"tools[{index}]"
        if tool.get("type", "function") != "function":
            raise RequestError(f"{where}.type must be 'function': got {tool['type']!r:.40}", param=f"{where}.type")
        try:
            function = msgspec.convert(tool, _Tool).function
        except msgspec.ValidationError as error:
            raise RequestError(f"{where} must be a function: {error}", param=where) from None
        found.append(ToolSpec(function.name, function.description or "", function.parameters or {}))
    return tuple(found)


def _refuse_unrendered(fields: Fields, ask: ChatAsk) -> None:
    def value_of(name: str) -> object:
        return msgspec.json.decode(fields[name]) if name in fields else None

    refuse_unsupported(value_of, {**NEUTRAL, **NEUTRAL_CHAT}, "a gateway that renders chats itself")
    for index, message in enumerate(ask.messages):
        for part in message.content if isinstance(message.content, list) else ():
            if part.text is None:
                where = f"messages[{index}].content"
                raise RequestError(f"{where} must be text: got a part of type {part.type!r:.40}", param=where)
    if ask.top_logprobs:
        raise RequestError("top_logprobs must be 0 where chats are rendered here", param="top_logprobs")
