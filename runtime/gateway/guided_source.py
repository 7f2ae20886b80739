"""A reply that was chosen among several of the server's own: drawn one by one, each as the agent asked for it."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from turngate.envs.base import ToolSpec
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.errors import MalformedReply
from turngate.runtime.gateway.asks import ChatAsk, Fields, TextAsk
from turngate.runtime.gateway.collected import ChatChunk, TextChunk
from turngate.runtime.gateway.drawing import Drawing
from turngate.runtime.gateway.edits import chat_body, text_body
from turngate.runtime.gateway.rendered_source import offered_tools
from turngate.runtime.gateway.sources import Chunk, ServerSource, Whole
from turngate.runtime.guidance import Guidance
from turngate.runtime.guided_conversation import decision_point
from turngate.runtime.json_ids import DECODE_ERRORS
from turngate.runtime.openai_api.refusals import RequestError
from turngate.runtime.seeds import derive_seed
from turngate.runtime.session import Session
from turngate.runtime.types import Completion, Message
from turngate.runtime.unwrap import single_errors

__all__ = ["GuidedSource"]

_encode = msgspec.json.Encoder().encode
_decode_chat_chunk = msgspec.json.Decoder(ChatChunk).decode
_decode_text_chunk = msgspec.json.Decoder(TextChunk).decode
_OF_THE_REPLY = ("n", "best_of", "stream", "stream_options")
"""Fields that say how many choices come, and how: of the reply that the agent gets, and not of a draw."""


class _Reply(NamedTuple):
    """One drawn reply, its body decoded."""

    fields: dict[str, Any]
    completion: Completion


class GuidedSource:
    """Draws every choice several times and gives the chosen ones, whole or in chunks, as the server wrote them."""

    # Changed by whole() and chunks(): _chosen.

    def __init__(
        self,
        session: Session,
        endpoint: Endpoint,
        fields: Fields,
        ask: ChatAsk | TextAsk,
        drawing: Drawing,
        messages: Sequence[Message],
        guidance: Guidance,
        *,
        timeout_s: float,
    ) -> None:
        """Args: as of the other sources; each choice of each prompt is a decision of its own."""
        self._session, self._endpoint, self._ask, self._guidance = session, endpoint, ask, guidance
        self._drawing, self._timeout_s = drawing, timeout_s
        self._is_text = isinstance(ask, TextAsk)
        self._fields, self._messages = fields, messages
        self._prompts: Sequence[str | list[int] | None] = ask.prompts if isinstance(ask, TextAsk) else (None,)
        self._tools = _tools_of(ask)
        self._chosen: list[_Reply] = []

    async def whole(self) -> Whole:
        """Draw, choose, and return the reply."""
        await self._decide()
        body = self._merged()
        return Whole(_encode(body), self.completions())

    async def chunks(self) -> AsyncGenerator[Chunk]:
        """Draw, choose, and yield the reply, each choice in one piece: before the choice there is nothing to say."""
        await self._decide()
        options = self._ask.stream_options
        body = self._merged()
        usage = body.pop("usage", None)
        decode = _decode_text_chunk if self._is_text else _decode_chat_chunk
        for event in _events(body, usage if options and options.include_usage else None, is_text=self._is_text):
            data = _encode(event)
            yield Chunk(data, decode(data))

    def completions(self) -> list[Completion]:
        """Return what was chosen, each with its decision."""
        return [reply.completion for reply in self._chosen]

    async def _decide(self) -> None:
        with single_errors():
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._choose(index)) for index in range(len(self._prompts) * (self._ask.n or 1))
                ]
        self._chosen = [task.result() for task in tasks]

    async def _choose(self, index: int) -> _Reply:
        prompt = self._prompts[index // (self._ask.n or 1)]
        messages = self._messages if prompt is None else (Message("user", prompt if isinstance(prompt, str) else ""),)
        drawn: list[Whole | None] = []

        async def ask(at: int, seed: int) -> Completion:
            source = ServerSource(
                self._endpoint,
                lambda: self._body(prompt, seed),
                choices=1,
                timeout_s=self._timeout_s,
                is_text=self._is_text,
                prompt=prompt if isinstance(prompt, list) else (),
            )
            whole = drawn[at] = await source.whole()
            return whole.completions[0]

        def draw(seed: int) -> Awaitable[Completion]:
            drawn.append(None)  # now: draws are asked for in their order, and answered in any
            return ask(len(drawn) - 1, seed)

        root = self._drawing.seed
        seed = root if root is None or index == 0 else derive_seed(root, "choice", index)
        version = self._endpoint.policy_version
        point = decision_point(messages, self._tools, seed, self._session.task, version)
        completion = await self._guidance.choose(draw, point)
        there = [whole for whole in drawn if whole is not None]  # decisions number the draws that came
        whole = there[completion.decision.chosen if completion.decision is not None else 0]
        return _Reply(_decoded(whole.body), completion)

    def _body(self, prompt: object, seed: int) -> bytes:
        """Return the request for one draw; made when it is sent, as the model's name may change with its version."""
        fields = {name: value for name, value in self._fields.items() if name not in _OF_THE_REPLY}
        if "seed" in fields:  # the agent's own, sent with each, would draw the same each time
            fields["seed"] = msgspec.Raw(b"%d" % seed)
        if prompt is not None:
            fields["prompt"] = msgspec.Raw(_encode(prompt))
        drawing, model, dialect = self._drawing._replace(seed=seed), self._endpoint.model, self._endpoint.dialect
        if isinstance(self._ask, ChatAsk):
            return chat_body(fields, self._ask, drawing, model=model, dialect=dialect)
        return text_body(fields, self._ask, drawing, model=model, dialect=dialect)

    def _merged(self) -> dict[str, Any]:
        """Return one reply that holds all choices."""
        first = self._chosen[0].fields
        merged = {name: value for name, value in first.items() if name not in ("choices", "usage")}
        choices: list[dict[str, Any]] = []
        for index, reply in enumerate(self._chosen):
            choice = {**reply.fields["choices"][0], "index": index}
            if self._is_text and "prompt_token_ids" in reply.fields:
                choice.setdefault("prompt_token_ids", reply.fields["prompt_token_ids"])
            choices.append(choice)
        usage = _usage([reply.fields for reply in self._chosen], self._ask.n or 1)
        return {**merged, "choices": choices, "usage": usage}


def _decoded(body: bytes) -> dict[str, Any]:
    """Return a reply with all its fields, also those that nobody reads. Raises: MalformedReply: they cannot be read."""
    try:
        found: dict[str, Any] = msgspec.json.decode(body)
    except DECODE_ERRORS as error:
        raise MalformedReply(f"reply must be JSON throughout: {error}") from error
    return found


def _tools_of(ask: ChatAsk | TextAsk) -> tuple[ToolSpec, ...]:
    if isinstance(ask, TextAsk):
        return ()
    try:
        return offered_tools(ask)
    except RequestError:
        return ()  # the server may know them; a value function is shown no half of them


def _usage(replies: Sequence[Mapping[str, Any]], choices: int) -> dict[str, int]:
    """Return the tokens of what was chosen, each prompt's `choices` after the other's; the draws beside them are the
    gateway's own affair."""
    found = [reply.get("usage") or {} for reply in replies]
    prompt = sum(one.get("prompt_tokens", 0) for one in found[::choices])
    sampled = sum(one.get("completion_tokens", 0) for one in found)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _events(body: dict[str, Any], usage: object, *, is_text: bool) -> Iterator[dict[str, Any]]:
    """Yield a whole reply as the chunks of a stream."""
    choices = body.pop("choices")
    prompt = {} if is_text else {"prompt_token_ids": body.pop("prompt_token_ids", None)}
    if not is_text:
        body["object"] = "chat.completion.chunk"
    for number, choice in enumerate(choices):
        if is_text:
            yield {**body, "choices": [choice]}
            continue
        index, reason = choice["index"], choice.pop("finish_reason", None)
        message = {name: value for name, value in choice.pop("message").items() if value is not None and name != "role"}
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
        opening = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        yield {**body, "choices": [opening], **(prompt if number == 0 else {})}
        yield {**body, "choices": [{**choice, "delta": message, "finish_reason": None}]}
        yield {**body, "choices": [{"index": index, "delta": {}, "finish_reason": reason}]}
    if usage is not None:
        yield {**body, "choices": [], "usage": usage}
