"""Server-sent events: one chunk per step of a choice, as soon as it was sampled."""

from collections.abc import Sequence
from typing import Protocol

import msgspec
from aiohttp import web

from turngate.runtime.engine.chat import parse_reply
from turngate.runtime.engine.generation import Generation
from turngate.runtime.engine.protocol import ChatRequest, CompletionRequest
from turngate.runtime.engine.replies import (
    OMIT,
    ChatChoice,
    ChatDelta,
    ChatReply,
    CompletionChoice,
    CompletionReply,
    Omitted,
    Usage,
    chat_logprobs,
    completion_logprobs,
    implied_space,
    tool_call_parts,
    usage_of,
)
from turngate.runtime.engine.request import Finished, Progress
from turngate.runtime.engine.tokenizer import StreamDecoder, Tokenizer
from turngate.runtime.openai_api.refusals import RequestError, error_body

__all__ = ["ChatStream", "CompletionStream", "Envelope", "send_stream"]

_ENCODER = msgspec.json.Encoder()
_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class Envelope(msgspec.Struct, frozen=True):
    """What every chunk of a reply repeats."""

    id: str
    created: int
    model: str


class _Stream(Protocol):
    """Turns reports into chunks."""

    def opening(self) -> Sequence[ChatReply | CompletionReply]: ...
    def progress(self, index: int, report: Progress) -> ChatReply | CompletionReply | None: ...
    def finished(self, index: int, report: Finished) -> ChatReply | CompletionReply: ...
    def closing(self, finished: Sequence[Finished]) -> ChatReply | CompletionReply | None: ...


async def send_stream(http: web.Request, generation: Generation, stream: _Stream) -> web.StreamResponse:
    """Send chunks until all choices are finished. Cancelled, or the client gone: the caller frees the slots.

    A request that is turned away is still answered with a status of its own; a failure halfway is an error event.
    """
    reply = web.StreamResponse(headers=_HEADERS)
    finished: dict[int, Finished] = {}
    try:
        async for index, report in generation.reports():
            chunks: list[ChatReply | CompletionReply | None] = []
            if not reply.prepared:
                await reply.prepare(http)
                chunks += stream.opening()
            if isinstance(report, Finished):
                finished[index] = report
                chunks.append(stream.finished(index, report))
            else:
                chunks.append(stream.progress(index, report))
            if data := b"".join(b"data: %b\n\n" % _ENCODER.encode(chunk) for chunk in chunks if chunk):
                await reply.write(data)
    except RequestError as error:
        if not reply.prepared:
            raise
        await reply.write(b"data: %b\n\n" % error_body(error))
        return reply
    closing = stream.closing([finished[index] for index in sorted(finished)])
    last = b"data: %b\n\n" % _ENCODER.encode(closing) if closing else b""
    await reply.write(last + b"data: [DONE]\n\n")
    await reply.write_eof()
    return reply


class ChatStream:
    """Chunks of a chat completion."""

    def __init__(self, ask: ChatRequest, envelope: Envelope, prompt: list[int], tokenizer: Tokenizer) -> None:
        self._ask = ask
        self._envelope = envelope
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._version = 0
        n = ask.n or 1
        self._decoders = [StreamDecoder(tokenizer, skip_special=False) for _ in range(n)]
        self._is_calling = [False] * n  # a choice whose text has turned into tool calls, sent whole at its end
        self._has_usage = bool(ask.stream_options and ask.stream_options.include_usage)

    def opening(self) -> list[ChatReply]:
        """Return the chunks that open each choice: the role and, if asked for, the prompt's ids."""
        opened = [ChatChoice(index=i, delta=ChatDelta("assistant", "")) for i in range(len(self._decoders))]
        first, *others = [self._chunk([choice]) for choice in opened]
        if self._ask.return_token_ids:
            first = msgspec.structs.replace(first, prompt_token_ids=self._prompt)
        return [first, *others]

    def progress(self, index: int, report: Progress) -> ChatReply:
        """Return the chunk of one step."""
        self._version = max(self._version, *report.versions) if report.versions else self._version
        if self._ask.tools and self._tokenizer.special("<|call|>") in report.token_ids:
            self._is_calling[index] = True
        logprobs = None
        if self._ask.logprobs:
            logprobs = chat_logprobs(
                self._decoders[index],
                self._tokenizer,
                report.token_ids,
                report.logprobs,
                report.top_logprobs,
                by_id=self._ask.return_tokens_as_token_ids,
            )
        choice = ChatChoice(
            index=index,
            delta=ChatDelta(content="" if self._is_calling[index] else report.text),
            logprobs=logprobs,
            token_ids=report.token_ids if self._ask.return_token_ids else OMIT,
            policy_versions=report.versions,
            base_logprobs=report.base_logprobs if self._ask.guidance else OMIT,
            value_versions=report.value_versions if self._ask.guidance else OMIT,
        )
        return self._chunk([choice])

    def finished(self, index: int, report: Finished) -> ChatReply:
        """Return the chunk that ends a choice, with the tool calls it made."""
        delta, finish_reason = ChatDelta(), str(report.finish_reason)
        if self._is_calling[index]:
            prefix = f"call_{self._envelope.id[-8:]}_{index}"
            calls = parse_reply(report.token_ids, self._tokenizer, call_id_prefix=prefix).tool_calls
            delta = ChatDelta(tool_calls=tool_call_parts(calls, with_index=True))
            finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
        choice = ChatChoice(index=index, delta=delta, finish_reason=finish_reason)
        return self._chunk([choice], value_version=report.value_version if self._ask.guidance else OMIT)

    def closing(self, finished: Sequence[Finished]) -> ChatReply | None:
        """Return the chunk with the usage, if it was asked for."""
        return self._chunk([], usage_of([self._prompt], finished, len(finished))) if self._has_usage else None

    def _chunk(
        self, choices: list[ChatChoice], usage: Usage | None = None, *, value_version: int | Omitted = OMIT
    ) -> ChatReply:
        return ChatReply(
            id=self._envelope.id,
            object="chat.completion.chunk",
            created=self._envelope.created,
            model=self._envelope.model,
            choices=choices,
            usage=usage if self._has_usage else OMIT,
            policy_version=self._version,
            value_version=value_version,
        )


class CompletionStream:
    """Chunks of a text completion."""

    def __init__(
        self, ask: CompletionRequest, envelope: Envelope, prompts: list[list[int]], tokenizer: Tokenizer
    ) -> None:
        self._ask = ask
        self._envelope = envelope
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._version = 0
        self._n = ask.n or 1
        choices = len(prompts) * self._n
        self._decoders = [StreamDecoder(tokenizer, skip_special=False) for _ in range(choices)]
        for index, decoder in enumerate(self._decoders):
            decoder.push_bytes(prompts[index // self._n][-1])
        self._offsets = [0] * choices
        self._is_opened = [False] * choices
        self._has_usage = bool(ask.stream_options and ask.stream_options.include_usage)

    def opening(self) -> list[CompletionReply]:
        """Return no chunks: text completions have no opening."""
        return []

    def progress(self, index: int, report: Progress) -> CompletionReply:
        """Return the chunk of one step; a choice's first one has the prompt's ids, if asked for."""
        self._version = max(self._version, *report.versions) if report.versions else self._version
        logprobs, text = None, report.text
        prompt_ids: list[int] | Omitted = OMIT
        if not self._is_opened[index]:
            self._is_opened[index] = True
            prompt = self._prompts[index // self._n]
            text = implied_space(self._tokenizer, prompt, report.token_ids) + text if text else ""
            prompt_ids = prompt if self._ask.return_token_ids else OMIT
        if self._ask.logprobs is not None:
            decoder, offset = self._decoders[index], self._offsets[index]
            logprobs = completion_logprobs(
                decoder,
                self._tokenizer,
                report.token_ids,
                report.logprobs,
                report.top_logprobs,
                offset=offset,
                by_id=self._ask.return_tokens_as_token_ids,
            )
        self._offsets[index] += len(text)
        choice = CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            token_ids=report.token_ids if self._ask.return_token_ids else OMIT,
            prompt_token_ids=prompt_ids,
            policy_versions=report.versions,
            base_logprobs=report.base_logprobs if self._ask.guidance else OMIT,
            value_versions=report.value_versions if self._ask.guidance else OMIT,
        )
        return self._chunk([choice])

    def finished(self, index: int, report: Finished) -> CompletionReply:
        """Return the chunk that ends a choice."""
        choice = CompletionChoice(index=index, text="", finish_reason=report.finish_reason)
        return self._chunk([choice], value_version=report.value_version if self._ask.guidance else OMIT)

    def closing(self, finished: Sequence[Finished]) -> CompletionReply | None:
        """Return the chunk with the usage, if it was asked for."""
        return self._chunk([], usage_of(self._prompts, finished, self._n)) if self._has_usage else None

    def _chunk(
        self, choices: list[CompletionChoice], usage: Usage | None = None, *, value_version: int | Omitted = OMIT
    ) -> CompletionReply:
        return CompletionReply(
            id=self._envelope.id,
            object="text_completion",
            created=self._envelope.created,
            model=self._envelope.model,
            choices=choices,
            usage=usage if self._has_usage else OMIT,
            policy_version=self._version,
            value_version=value_version,
        )
