"""The OpenAI-compatible wire format, as typed structs that name only the fields we need.

Beyond the OpenAI API, as vLLM and the embedded engine have them: `return_token_ids` and `top_k` in requests,
`token_ids` and `prompt_token_ids` in replies. Of the embedded engine alone: `policy_versions`, one per token, and with
`guidance` the `base_logprobs` and `value_versions`, one each per token, and the `value_version` at the end.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from turngate.envs.base import ToolSpec
from turngate.runtime.errors import MalformedReply
from turngate.runtime.json_ids import DECODE_ERRORS, TokenId
from turngate.runtime.types import Message, TokenGuidance

__all__ = ["ChatReply", "ChatRequest", "TextReply", "TextRequest", "decode_reply", "wire_messages", "wire_tools"]

LOGPROB_SLACK = 1e-6
"""How far above 0 rounding may push the log-probability of a certain token."""
LEAST_LOGPROB = -1e30
"""The least that may come: they are recorded as float32, in which sums of lower ones would be infinite."""
Logprob = Annotated[float, msgspec.Meta(ge=LEAST_LOGPROB, le=LOGPROB_SLACK)]
"""Checked while decoding. JSON has no NaN or infinity, and numbers out of range are refused."""


class WireFunction(msgspec.Struct):
    """Name and raw JSON arguments of a tool call."""

    name: str
    arguments: str = ""


class WireToolCall(msgspec.Struct):
    """A tool call as the API spells it."""

    function: WireFunction
    id: str = ""
    type: str = "function"


class WireMessage(msgspec.Struct):
    """An assistant message with tool calls; all other messages are encoded from `Message` directly."""

    role: str
    content: str
    tool_calls: tuple[WireToolCall, ...]


class WireTool(msgspec.Struct):
    """A tool on offer."""

    function: ToolSpec
    type: str = "function"


class ChatRequest(msgspec.Struct, omit_defaults=True, kw_only=True):
    """POST /chat/completions. Fields with defaults are left out when unset."""

    model: str
    messages: "Sequence[Message | WireMessage]"
    temperature: float
    top_p: float
    max_tokens: int
    logprobs: bool
    top_logprobs: int | None = None
    top_k: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    tools: tuple[WireTool, ...] = ()
    guidance: TokenGuidance | None = None


class TextRequest(msgspec.Struct, omit_defaults=True, kw_only=True):
    """POST /completions with a prompt of token ids."""

    model: str
    prompt: Sequence[int] | msgspec.Raw
    temperature: float
    top_p: float
    max_tokens: int
    logprobs: int
    top_k: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: Sequence[int] = ()
    echo: bool = False
    stream: bool = False
    guidance: TokenGuidance | None = None


class TokenLogprob(msgspec.Struct, gc=False):
    """One sampled token; its text and alternatives are skipped."""

    logprob: Logprob


class ChatLogprobs(msgspec.Struct):
    """Log-probs of a chat choice."""

    content: list[TokenLogprob] | None = None


class ReplyMessage(msgspec.Struct):
    """The sampled message."""

    content: str | None = None
    tool_calls: list[WireToolCall] | None = None


class ChatChoice(msgspec.Struct):
    """One sampled completion."""

    message: ReplyMessage
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[TokenId] | None = None
    policy_versions: list[TokenId] | None = None
    base_logprobs: list[Logprob] | None = None
    value_versions: list[TokenId] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()


class Usage(msgspec.Struct):
    """Token counts of one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class ChatReply(msgspec.Struct):
    """Reply of /chat/completions."""

    choices: list[ChatChoice]
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    """Not decoded: it repeats what the turns before have shown, see `json_ids`."""
    usage: Usage | None = None
    value_version: TokenId = 0


class TextLogprobs(msgspec.Struct):
    """Flat log-probs of the legacy completions API."""

    token_logprobs: list[float | None] | None = None
    tokens: msgspec.Raw = msgspec.Raw()
    """Decoded only where there are no other ids."""


class TextChoice(msgspec.Struct):
    """One sampled completion."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: TextLogprobs | None = None
    token_ids: list[TokenId] | None = None
    policy_versions: list[TokenId] | None = None
    base_logprobs: list[Logprob] | None = None
    value_versions: list[TokenId] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()


class TextReply(msgspec.Struct):
    """Reply of /completions."""

    choices: list[TextChoice]
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    """Of the only prompt; of several prompts each choice has its own."""
    usage: Usage | None = None
    value_version: TokenId = 0


_decode_chat = msgspec.json.Decoder(ChatReply).decode
_decode_text = msgspec.json.Decoder(TextReply).decode


def wire_messages(messages: Sequence[Message]) -> "Sequence[Message | WireMessage]":
    """Return messages in the shape the API wants; the sequence itself when nothing needs changing."""
    for message in messages:
        if message.tool_calls:
            return [_wire_message(message) if message.tool_calls else message for message in messages]
    return messages


def _wire_message(message: Message) -> WireMessage:
    calls = tuple(WireToolCall(WireFunction(c.name, c.arguments), c.id) for c in message.tool_calls)
    return WireMessage(message.role, message.content, calls)


def wire_tools(tools: Sequence[ToolSpec]) -> tuple[WireTool, ...]:
    """Return tools in the shape the API wants; an empty list is left out of the request, as it changes prompts."""
    return tuple(WireTool(tool) for tool in tools)


def decode_reply(body: bytes, *, text: bool = False) -> ChatReply | TextReply:
    """Decode a reply of /completions (`text`) or /chat/completions.

    Raises: MalformedReply: not JSON, or a needed field is missing or of the wrong type; the message has its path.
    """
    try:
        return _decode_text(body) if text else _decode_chat(body)
    except DECODE_ERRORS as error:
        raise MalformedReply(f"reply must be a completion object: {error}; it starts with {body[:80]!r}") from error
