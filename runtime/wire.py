"""The OpenAI-compatible wire format, as typed structs that name only the fields we need.

Beyond the OpenAI API, as vLLM and the embedded engine have them: `return_token_ids` and `top_k` in requests,
`token_ids` and `prompt_token_ids` in replies. Of the embedded engine alone: `policy_versions`, one per token, and with
`guidance` the `base_logprobs` and `value_versions`, one each per token, and the `value_version` at the end.
"""

from collections.abc import Sequence
from typing import Annotated, TypeAlias, TypeVar, cast

import msgspec

from turngate.envs.base import ToolCall, ToolSpec
from turngate.runtime.errors import GenerationAborted, MalformedReply
from turngate.runtime.json_ids import DECODE_ERRORS, JsonIds, TokenId, parse_ids
from turngate.runtime.types import Completion, Message, TokenGuidance

__all__ = [
    "ChatReply",
    "ChatRequest",
    "TextReply",
    "TextRequest",
    "chat_completion",
    "check_finished",
    "check_logprobs",
    "check_prompt",
    "choice_completion",
    "decode_reply",
    "prompt_ids",
    "spelled_ids",
    "text_completion",
    "wire_messages",
    "wire_tools",
]

_LOGPROB_SLACK = 1e-6
"""How far above 0 rounding may push the log-probability of a certain token."""
_LEAST_LOGPROB = -1e30
"""Of what may come: below the smallest float32, in which they are recorded, sums of them are infinite."""
Logprob = Annotated[float, msgspec.Meta(ge=_LEAST_LOGPROB, le=_LOGPROB_SLACK)]
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
_ID_STRING = b'"token_id:'
"""How vLLM begins a token when asked for `return_tokens_as_token_ids`."""


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


def chat_completion(
    reply: ChatReply, version_sent: int, version_received: int, newest_version: int | None = None
) -> Completion:
    """Check a chat reply and return its only choice as a completion.

    Args: newest_version: the newest policy version that can be in service; None when nobody knows.
    Raises: MalformedReply: what is there contradicts itself, or claims a version from the future. Missing ids or
        log-probs are not an error.
    """
    prompt = prompt_ids(reply.prompt_token_ids)
    return choice_completion(_first(reply.choices), prompt, version_sent, version_received, newest_version)


def prompt_ids(text: "bytes | msgspec.Raw") -> Sequence[int]:
    """Return the ids that a server wrote as a JSON array; none when it wrote nothing, or null."""
    text = bytes(text)
    return JsonIds(text) if text and text != b"null" else ()


def choice_completion(
    choice: ChatChoice | TextChoice,
    prompt: Sequence[int],
    version_sent: int,
    version_received: int,
    newest_version: int | None = None,
) -> Completion:
    """Check one choice of a reply and return it. Raises MalformedReply as `chat_completion` does."""
    check_finished(choice)
    text, logprobs, calls = _said_in_chat(choice) if isinstance(choice, ChatChoice) else _said_in_text(choice)
    return Completion(
        text,
        *_aligned(choice, logprobs, version_sent, newest_version),
        prompt,
        choice.finish_reason or "stop",
        calls,
        version_sent,
        version_received,
    )


def text_completion(
    reply: TextReply,
    prompt: Sequence[int],
    version_sent: int,
    version_received: int,
    newest_version: int | None = None,
) -> Completion:
    """Check a reply of /completions to a prompt of ids. Raises MalformedReply as `chat_completion` does.

    Also when the server says that it has seen another prompt: cut, or with ids of its own before it.
    """
    choice = _first(reply.choices)
    check_prompt(prompt_ids(choice.prompt_token_ids) or prompt_ids(reply.prompt_token_ids), prompt)
    return choice_completion(choice, prompt, version_sent, version_received, newest_version)


def check_prompt(told: Sequence[int], sent: Sequence[int]) -> None:
    """Require of the prompt that a server says it has seen, if it says so, that it is the one it was sent.

    Raises: MalformedReply: the tokens sampled after it are none after ours.
    """
    if not told or (type(told) is JsonIds and type(sent) is JsonIds and told.text == sent.text):
        return
    if list(told) != list(sent):
        raise MalformedReply(
            f"prompt_token_ids must be those that were sent: expected {len(sent)} ids, got {len(told)} or others"
        )


_Said: TypeAlias = tuple[str, Sequence[float], tuple[ToolCall, ...]]
"""Text, log-probs and tool calls of a choice."""


def _said_in_chat(choice: ChatChoice) -> _Said:
    message = choice.message
    logprobs: list[float] = []
    if choice.logprobs is not None and choice.logprobs.content is not None:
        logprobs = [token.logprob for token in choice.logprobs.content]
    calls = message.tool_calls or ()
    return message.content or "", logprobs, tuple(ToolCall(c.id, c.function.name, c.function.arguments) for c in calls)


def _said_in_text(choice: TextChoice) -> _Said:
    if not choice.token_ids and choice.logprobs is not None:
        choice.token_ids = spelled_ids(choice.logprobs.tokens)
    logprobs: Sequence[float | None] = []
    if choice.logprobs is not None and choice.logprobs.token_logprobs:
        logprobs = choice.logprobs.token_logprobs
        check_logprobs(logprobs, "choices[0].logprobs.token_logprobs")
    return choice.text, cast(Sequence[float], logprobs), ()


C = TypeVar("C", ChatChoice, TextChoice)


def _first(choices: list[C]) -> C:
    if not choices:
        raise MalformedReply("choices must hold one completion: expected 1, got 0 (choices)")
    return choices[0]


def check_finished(choice: ChatChoice | TextChoice) -> None:
    """Require that a choice came to an end of its own. Raises MalformedReply."""
    if choice.finish_reason in ("abort", "error"):
        # No sample of the policy: its end was not the model's, nor a length that we asked for.
        kind = GenerationAborted if choice.finish_reason == "abort" else MalformedReply
        raise kind(f"generation must finish: got {choice.finish_reason!r} (choices[0].finish_reason)")


def spelled_ids(tokens: msgspec.Raw) -> list[int] | None:
    """Return the ids of tokens spelled `token_id:123`; None when they are texts. Raises MalformedReply: some are."""
    text = bytes(tokens)
    # The first is enough to tell: a server spells all of them so, or none.
    if not text.lstrip(b"[ \n\r\t").startswith(_ID_STRING):
        return None
    return parse_ids(text.replace(_ID_STRING, b"").replace(b'"', b""), "choices[0].logprobs.tokens").tolist()


def _aligned(
    choice: ChatChoice | TextChoice, logprobs: Sequence[float], version_sent: int, newest_version: int | None
) -> tuple[Sequence[int], Sequence[float], Sequence[int]]:
    """Return (ids, log-probs, versions) of the sampled tokens, aligned; empty where the server gave none."""
    ids, versions = choice.token_ids, choice.policy_versions
    if not ids:
        return (), (), ()
    count = len(ids)
    if logprobs and len(logprobs) != count:
        raise MalformedReply(
            f"logprobs must align with token_ids: expected {count}, got {len(logprobs)} (choices[0].logprobs)"
        )
    if not versions:
        # The server does not say: the version known at send is the oldest that can have produced a token.
        return ids, logprobs, [version_sent] * count
    if len(versions) != count:
        raise MalformedReply(
            f"policy_versions must align with token_ids: expected {count}, got {len(versions)} "
            "(choices[0].policy_versions)"
        )
    if newest_version is not None and max(versions) > newest_version:
        raise MalformedReply(
            f"policy_versions must have been published: expected at most {newest_version}, got {max(versions)} "
            "(choices[0].policy_versions); tell an endpoint whose server is ahead its policy_version"
        )
    return ids, logprobs, versions


def check_logprobs(logprobs: Sequence[float | None], where: str) -> None:
    """Require finite log-probs of at most 0. Raises MalformedReply naming the first that is not."""
    for at, logprob in enumerate(logprobs):
        if logprob is None or not _LEAST_LOGPROB <= logprob <= _LOGPROB_SLACK:
            raise MalformedReply(f"log-probs must be finite and at most 0: got {logprob} ({where}[{at}])")
