"""What a streamed reply adds up to: its chunks are read on their way to the agent, for the record."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from turngate.runtime.error_bodies import error_message
from turngate.runtime.errors import MalformedReply
from turngate.runtime.json_ids import DECODE_ERRORS, TokenId
from turngate.runtime.types import Completion
from turngate.runtime.wire import (
    ChatChoice,
    ChatLogprobs,
    ReplyMessage,
    TextChoice,
    TextLogprobs,
    WireFunction,
    WireToolCall,
)
from turngate.runtime.wire_replies import check_finished, choice_completion, prompt_ids, spelled_ids

__all__ = ["Arrival", "CollectedChat", "CollectedText"]

_MAX_INDEX = 1024
"""Of choices and tool calls; a server that counts higher is broken."""


class Arrival(msgspec.Struct, frozen=True):
    """Versions around a request: as the client knew them when it was sent and when the reply was there."""

    sent: int
    received: int
    newest: int | None


class _FunctionDelta(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallDelta(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _FunctionDelta | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_CallDelta] | None = None


class _Part(msgspec.Struct):
    """What a chunk adds to one choice."""

    index: int = 0
    finish_reason: str | None = None
    token_ids: list[TokenId] | None = None
    policy_versions: list[TokenId] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()


class _ChatPart(_Part):
    delta: _Delta | None = None
    logprobs: ChatLogprobs | None = None


class _TextPart(_Part):
    text: str | None = None
    logprobs: TextLogprobs | None = None


class _Chunk(msgspec.Struct):
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw | None = None


class ChatChunk(_Chunk):
    """One event of a streamed chat completion; text and calls are kept for those who translate."""

    choices: list[_ChatPart] = []
    usage: msgspec.Raw = msgspec.Raw()


class TextChunk(_Chunk):
    """One event of a streamed text completion."""

    choices: list[_TextPart] = []


_decode_chat = msgspec.json.Decoder(ChatChunk).decode
_decode_text = msgspec.json.Decoder(TextChunk).decode

ChoiceT = TypeVar("ChoiceT", ChatChoice, TextChoice)
ChunkT = TypeVar("ChunkT", ChatChunk, TextChunk)
T = TypeVar("T")


class _Collected(Generic[ChoiceT]):
    """The choices of one reply, growing by what each chunk adds."""

    # Changed by add(): both.

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._choices: dict[int, ChoiceT] = {}
        self._prompts: dict[int, bytes] = {}
        """Ids of prompts as JSON, by choice; that of the reply as a whole at -1."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self._choices)} of {self._expected} choices>"

    def completions(self, arrival: Arrival) -> list[Completion]:
        """Return the choices as the record has them. Raises MalformedReply: they are not whole, or contradictory."""
        return [
            choice_completion(choice, prompt, arrival.sent, arrival.received, arrival.newest)
            for choice, prompt in self._finished()
        ]

    def _opened(self, decode: Callable[[bytes], ChunkT], data: bytes) -> ChunkT:
        """Return the chunk that is in an event. Raises MalformedReply: none is, or an error."""
        try:
            chunk = decode(data)
        except DECODE_ERRORS as error:
            raise MalformedReply(
                f"events of a stream must be chunks of a completion: {error}; one starts with {data[:80]!r}"
            ) from error
        if chunk.error is not None and bytes(chunk.error) != b"null":
            raise MalformedReply(f"stream must come to its end: got the error {error_message(data)!r}")
        self._keep_prompt(-1, chunk.prompt_token_ids)
        return chunk

    def _choice(self, index: int, empty: Callable[[], ChoiceT]) -> ChoiceT:
        """Return the choice that a part belongs to, as far as it has come."""
        choice = self._choices.get(_checked(index))
        if choice is None:
            choice = self._choices[index] = empty()
        return choice

    def _keep(self, choice: ChoiceT, part: _Part) -> None:
        if choice.finish_reason is not None and part.token_ids:
            raise MalformedReply(f"a streamed choice must end once: got tokens after {choice.finish_reason!r}")
        choice.finish_reason = part.finish_reason or choice.finish_reason
        check_finished(choice)  # before the agent takes an abort for the end of the turn
        if part.token_ids is not None:
            choice.token_ids = _extended(choice.token_ids, part.token_ids)
        if part.policy_versions is not None:
            choice.policy_versions = _extended(choice.policy_versions, part.policy_versions)
        self._keep_prompt(part.index, part.prompt_token_ids)

    def _keep_prompt(self, index: int, ids: msgspec.Raw) -> None:
        if (text := bytes(ids)) and text != b"null" and self._prompts.setdefault(index, text) != text:
            raise MalformedReply("a stream must be of one prompt: got other prompt_token_ids than before")

    def _finished(self) -> list[tuple[ChoiceT, Sequence[int]]]:
        """Return the choices with their prompts. Raises MalformedReply: they are not whole, or more than asked for."""
        whole = [index for index, choice in self._choices.items() if choice.finish_reason is not None]
        if len(whole) != self._expected or len(self._choices) > self._expected:
            raise MalformedReply(
                f"streamed reply must finish all its choices: expected {self._expected}, got {len(whole)} of "
                f"{len(self._choices)}"
            )
        shared = self._prompts.get(-1, b"")
        return [(self._choices[i], prompt_ids(self._prompts.get(i, shared))) for i in sorted(self._choices)]


class CollectedChat(_Collected[ChatChoice]):
    """Adds up a streamed chat completion."""

    def add(self, data: bytes) -> ChatChunk:
        """Take in the data of an event and return it decoded. Raises MalformedReply: it is none, or an error."""
        chunk = self._opened(_decode_chat, data)
        for part in chunk.choices:
            choice = self._choice(part.index, lambda: ChatChoice(ReplyMessage()))
            self._keep(choice, part)
            if part.logprobs is not None and part.logprobs.content:
                choice.logprobs = choice.logprobs or ChatLogprobs()
                choice.logprobs.content = _extended(choice.logprobs.content, part.logprobs.content)
            if part.delta is not None:
                _keep_delta(choice.message, part.delta)
        return chunk


class CollectedText(_Collected[TextChoice]):
    """Adds up a streamed text completion."""

    def add(self, data: bytes) -> TextChunk:
        """Take in the data of an event, as `CollectedChat.add` does."""
        chunk = self._opened(_decode_text, data)
        for part in chunk.choices:
            choice = self._choice(part.index, TextChoice)
            if not part.token_ids and part.logprobs is not None:
                part.token_ids = spelled_ids(part.logprobs.tokens)
            self._keep(choice, part)
            choice.text += part.text or ""
            if part.logprobs is not None and part.logprobs.token_logprobs:
                choice.logprobs = choice.logprobs or TextLogprobs()
                choice.logprobs.token_logprobs = _extended(choice.logprobs.token_logprobs, part.logprobs.token_logprobs)
        return chunk


def _extended(known: list[T] | None, new: list[T]) -> list[T]:
    """Return a list of ours with more in it: made anew per chunk, it would cost the square of a reply's length."""
    if known is None:
        return list(new)
    known += new
    return known


def _keep_delta(message: ReplyMessage, delta: _Delta) -> None:
    if delta.content:
        message.content = (message.content or "") + delta.content
    for part in delta.tool_calls or ():
        calls = message.tool_calls
        if calls is None:
            calls = message.tool_calls = []
        while len(calls) <= _checked(part.index):
            calls.append(WireToolCall(WireFunction("")))
        call = calls[part.index]
        call.id = part.id or call.id
        if part.function is not None:
            call.function.name += part.function.name or ""
            call.function.arguments += part.function.arguments or ""


def _checked(index: int) -> int:
    if not 0 <= index < _MAX_INDEX:
        raise MalformedReply(f"indices in a stream must be in [0, {_MAX_INDEX}): got {index}")
    return index
