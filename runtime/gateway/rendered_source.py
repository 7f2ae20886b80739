"""A reply to a chat that was rendered here: ids go to the server, and what comes back becomes a chat completion."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from turngate.envs.base import ToolSpec
from turngate.runtime.endpoint import ChatEndpoint, Endpoint
from turngate.runtime.gateway.asks import ChatAsk, Fields
from turngate.runtime.gateway.collected import ChatChunk, CollectedText
from turngate.runtime.gateway.drawing import Drawing
from turngate.runtime.gateway.rendered import (
    Envelope,
    chunk_bodies,
    closing_bodies,
    opening_body,
    reply_body,
    text_body,
)
from turngate.runtime.gateway.sources import Chunk, Whole
from turngate.runtime.gateway.speaking import Speaker
from turngate.runtime.gateway.sse import DONE, event_data
from turngate.runtime.gateway.upstream import arrival
from turngate.runtime.guidance import Guidance
from turngate.runtime.openai_api.neutral import NEUTRAL, NEUTRAL_CHAT, refuse_unsupported
from turngate.runtime.openai_api.refusals import RequestError, decode_json
from turngate.runtime.openai_api.sampling_fields import OfferedFunction
from turngate.runtime.seeds import derive_seed
from turngate.runtime.session import Session
from turngate.runtime.token_conversation import TokenConversation
from turngate.runtime.types import Completion, Message, Sampling
from turngate.runtime.unwrap import single_errors
from turngate.runtime.wire_replies import check_prompt

__all__ = ["RenderedSource", "offered_tools"]


class RenderedSource:
    """What was sampled after a prompt of ids that our renderer made, written as a chat completion."""

    def __init__(
        self,
        session: Session,
        endpoint: ChatEndpoint,
        fields: Fields,
        ask: ChatAsk,
        drawing: Drawing,
        messages: Sequence[Message],
        envelope: Envelope,
        *,
        timeout_s: float,
        guidance: Guidance | None = None,
    ) -> None:
        """Args: guidance: chooses each choice among several draws.

        Raises: RequestError: the request asks for what only a server that renders can do.
        """
        _refuse_unrendered(fields, ask)
        self._conversation, self._is_guided = session.guided(guidance), guidance is not None
        self._session, self._endpoint, self._ask, self._drawing = session, endpoint, ask, drawing
        self._messages, self._envelope, self._timeout_s = messages, envelope, timeout_s
        self._tools = () if ask.tool_choice == "none" else offered_tools(ask)
        self._sampled: list[Completion] = []

    async def whole(self) -> Whole:
        """Render, ask, and write the reply."""
        await self._sample()
        return Whole(reply_body(self._envelope, self._sampled), self._sampled)

    async def chunks(self) -> AsyncGenerator[Chunk]:
        """Render, ask, and yield the reply: words as they are sampled where there can be no tool calls among them."""
        options = self._ask.stream_options
        has_usage = bool(options and options.include_usage)
        endpoint, conversation = self._endpoint, self._session.conversation
        if self._is_plain() and isinstance(endpoint, Endpoint) and isinstance(conversation, TokenConversation):
            async with aclosing(self._words(endpoint, conversation, has_usage)) as words:
                async for data in words:
                    yield Chunk(data, decode_json(_CHUNK, data))
            return
        await self._sample()
        for data in chunk_bodies(self._envelope, self._sampled, has_usage=has_usage):
            yield Chunk(data, decode_json(_CHUNK, data))

    def completions(self) -> list[Completion]:
        """Return what was sampled."""
        return self._sampled

    def _is_plain(self) -> bool:
        """Whether the reply is one text and nothing else is asked of it."""
        ask = self._ask
        is_more = self._tools or ask.logprobs or ask.return_token_ids or (ask.n or 1) > 1
        return not (is_more or self._is_guided) and self._drawing.sampling.guidance is None

    async def _words(
        self, endpoint: Endpoint, conversation: TokenConversation, has_usage: bool
    ) -> AsyncGenerator[bytes]:
        assert endpoint.renderer is not None
        speaker = Speaker(endpoint.renderer, self._drawing.sampling.stop)
        heard = _Heard()
        task = asyncio.create_task(self._complete_heard(endpoint, conversation, heard), name="turngate gateway words")
        task.add_done_callback(lambda _: heard.wake())
        is_opened = False
        try:
            while not task.done():
                words = speaker.push(await heard.take())
                if words and not is_opened:
                    is_opened = True
                    yield opening_body(self._envelope, has_usage=has_usage)
                if words:
                    yield text_body(self._envelope, words, has_usage=has_usage)
            completion = await task
        finally:
            task.cancel()
            await asyncio.wait({task})
        if not is_opened:
            yield opening_body(self._envelope, has_usage=has_usage)
        rest = speaker.rest(completion.text)
        if rest:
            yield text_body(self._envelope, rest, has_usage=has_usage)
        for data in closing_bodies(self._envelope, completion, has_usage=has_usage):
            yield data
        self._sampled = [completion]

    async def _complete_heard(self, endpoint: Endpoint, conversation: TokenConversation, heard: "_Heard") -> Completion:
        async def generate(
            prompt: Sequence[int], sampling: Sampling, /, *, seed: int | None = None, timeout_s: float = 600.0
        ) -> Completion:
            body = endpoint.text_body(prompt, sampling, seed=seed, stream=True)
            collected, sent = CollectedText(1), endpoint.serving_version
            async with (
                endpoint.stream("/completions", body, timeout_s=timeout_s) as pieces,
                aclosing(event_data(pieces)) as told,
            ):
                async for data in told:
                    if data == DONE:
                        break
                    for part in collected.add(data).choices:
                        heard.put(part.token_ids or ())
            (completion,) = collected.completions(arrival(endpoint, sent))
            check_prompt(completion.prompt_token_ids, prompt)
            return msgspec.structs.replace(completion, prompt_token_ids=prompt)

        return await conversation.complete(
            self._messages,
            self._drawing.sampling,
            seed=self._drawing.seed,
            timeout_s=self._timeout_s,
            generate=generate,
        )

    async def _sample(self) -> None:
        with single_errors():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._complete(index)) for index in range(self._ask.n or 1)]
        self._sampled = [task.result() for task in tasks]

    async def _complete(self, index: int) -> Completion:
        seed = self._drawing.seed
        return await self._conversation.complete(
            self._messages,
            self._drawing.sampling,
            seed=seed if seed is None or not index else derive_seed(seed, "choice", index),
            tools=self._tools,
            timeout_s=self._timeout_s,
        )


class _Heard:
    """Ids between the one who gets them and the one who reads them."""

    # Changed by all its methods: both.

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, ids: Sequence[int]) -> None:
        self._ids += ids
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[int]:
        """Return what has come since; waits for something, or to be woken."""
        if not self._ids:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        ids, self._ids = self._ids, []
        return ids


_CHUNK = msgspec.json.Decoder(ChatChunk)


class _Tool(msgspec.Struct, frozen=True):
    function: OfferedFunction


def offered_tools(ask: ChatAsk) -> tuple[ToolSpec, ...]:
    """Return the tools on offer as renderers read them. Raises: RequestError: one of them is no function."""
    found: list[ToolSpec] = []
    for index, tool in enumerate(ask.tools or ()):
        where = f"tools[{index}]"
        if tool.get("type", "function") != "function":
            raise RequestError(f"{where}.type must be 'function': got {tool['type']!r:.40}", param=f"{where}.type")
        try:
            found.append(msgspec.convert(tool, _Tool).function.as_spec())
        except msgspec.ValidationError as error:
            raise RequestError(f"{where} must be a function: {error}", param=where) from None
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
