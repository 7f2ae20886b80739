"""What agents ask: typed where the gateway reads, verbatim where it does not, so that unknown fields pass through."""

from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from turngate.envs.base import ToolCall
from turngate.runtime.openai_api.refusals import RequestError, decode_json
from turngate.runtime.openai_api.sampling_fields import INT64, SamplingFields, check, check_sampling, prompts_of
from turngate.runtime.types import Message

__all__ = [
    "AskedMessage",
    "ChatAsk",
    "Fields",
    "Part",
    "TextAsk",
    "check_utf8",
    "decode_chat",
    "decode_text",
]

Fields: TypeAlias = dict[str, msgspec.Raw]
"""A JSON object whose values are left as they came."""


class Part(msgspec.Struct, frozen=True):
    """One part of a message; other kinds than text are passed on and leave a mark in the record."""

    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """The function of a tool call."""

    name: str
    arguments: str | dict[str, Any] | None = None
    """JSON as text; some agents send the object itself."""


class AskedToolCall(msgspec.Struct, frozen=True):
    """One tool call of an earlier reply."""

    function: CalledFunction | None = None
    id: str = ""

    def as_call(self) -> ToolCall:
        """Return it as the record has it."""
        function = self.function or CalledFunction("")
        arguments = function.arguments
        if isinstance(arguments, dict):
            arguments = msgspec.json.encode(arguments).decode()
        return ToolCall(self.id, function.name, arguments or "")


_OLD_ROLES = {"developer": "system", "function": "tool"}
"""Chat templates know the other name."""


class AskedMessage(msgspec.Struct, frozen=True):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    tool_calls: list[AskedToolCall] | None = None
    tool_call_id: str | None = None

    def as_message(self) -> Message:
        """Return it as the record has it: what is no text is named in brackets."""
        content = self.content
        if isinstance(content, list):
            content = "".join(f"[{part.type}]" if part.text is None else part.text for part in content)
        calls = self.tool_calls
        role = _OLD_ROLES.get(self.role, self.role)
        return Message(role, content or "", tuple(c.as_call() for c in calls) if calls else (), self.tool_call_id or "")


class ChatAsk(SamplingFields, kw_only=True, frozen=True):
    """POST /v1/chat/completions."""

    messages: list[AskedMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None

    @property
    def limit(self) -> int | None:
        """Cap on generated tokens, under its newer or older name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TextAsk(SamplingFields, kw_only=True, frozen=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Texts, or lists of token ids. Raises: RequestError: 400, both in one list, or none."""
        return prompts_of(self.prompt)

    @property
    def is_scoring(self) -> bool:
        """Whether nothing is to be generated."""
        return bool(self.echo) and self.max_tokens == 0


AskT = TypeVar("AskT", ChatAsk, TextAsk)

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CHAT = msgspec.json.Decoder(ChatAsk)
_TEXT = msgspec.json.Decoder(TextAsk)


def decode_chat(body: bytes) -> tuple[Fields, ChatAsk]:
    """Return a chat request field by field, and what the gateway reads of it. Raises: RequestError: 400."""
    fields, ask = _decode(_CHAT, body)
    if not ask.messages:
        raise RequestError("messages must not be empty: expected at least one message, got []", param="messages")
    for index, message in enumerate(ask.messages):
        if message.content is None and message.role != "assistant":
            where = f"messages[{index}].content"
            raise RequestError(f"{where} must be a text or a list of parts: got null", param=where)
    check(ask.max_completion_tokens, "max_completion_tokens", "an integer >= 1", lambda v: 1 <= v < INT64)
    check(ask.max_tokens, "max_tokens", "an integer >= 1", lambda v: 1 <= v < INT64)
    check(ask.top_logprobs, "top_logprobs", "an integer >= 0", lambda v: 0 <= v < INT64)
    return fields, ask


def decode_text(body: bytes) -> tuple[Fields, TextAsk]:
    """Return a request of /completions as `decode_chat` does. Raises: RequestError: 400."""
    fields, ask = _decode(_TEXT, body)
    if ask.prompts == [""]:
        raise RequestError("prompt must not be empty: expected a text or token ids, got ''", param="prompt")
    if ask.echo and ask.max_tokens != 0:
        raise RequestError("echo must come with max_tokens: 0, for scoring: expected 0", param="echo")
    check(ask.max_tokens, "max_tokens", "an integer >= 0", lambda v: 0 <= v < INT64)
    check(ask.logprobs, "logprobs", "an integer >= 0", lambda v: 0 <= v < INT64)
    return fields, ask


def check_utf8(body: bytes) -> None:
    """Require text; what is passed on verbatim is not decoded anywhere else. Raises: RequestError: 400."""
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise RequestError(f"the body must be valid JSON: {error}") from None


def _decode(decoder: "msgspec.json.Decoder[AskT]", body: bytes) -> tuple[Fields, AskT]:
    check_utf8(body)
    ask = decode_json(decoder, body)
    fields = decode_json(_FIELDS, body)
    check_sampling(ask)
    return fields, ask
