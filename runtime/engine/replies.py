"""What the engine answers: OpenAI's reply objects with vLLM's token ids, and the policy version of every token."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from turngate.envs.base import ToolCall
from turngate.runtime.engine.request import Finished, TopLogprobs
from turngate.runtime.engine.tokenizer import StreamDecoder, Tokenizer

__all__ = [
    "AssistantMessage",
    "ChatChoice",
    "ChatDelta",
    "ChatLogprobs",
    "ChatReply",
    "CompletionChoice",
    "CompletionLogprobs",
    "CompletionReply",
    "Pooled",
    "PoolingReply",
    "TokenLogprob",
    "Usage",
    "chat_logprobs",
    "completion_logprobs",
    "implied_space",
    "now_s",
    "tool_call_parts",
    "usage_of",
]

Omitted = msgspec.UnsetType
OMIT = msgspec.UNSET


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token and its log-prob, as chat completions spell it."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list["TokenLogprob"] | Omitted = OMIT


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probs of a chat choice; `content` is aligned with its token ids."""

    content: list[TokenLogprob]


class AssistantMessage(msgspec.Struct, frozen=True):
    """A whole reply message."""

    content: str | None
    tool_calls: list[dict[str, Any]] | Omitted = OMIT
    role: str = "assistant"


class ChatDelta(msgspec.Struct, frozen=True):
    """What one chunk adds to a reply message."""

    role: str | Omitted = OMIT
    content: str | Omitted = OMIT
    tool_calls: list[dict[str, Any]] | Omitted = OMIT


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One alternative, whole (`message`) or in part (`delta`)."""

    index: int
    message: AssistantMessage | Omitted = OMIT
    delta: ChatDelta | Omitted = OMIT
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: Sequence[int] | Omitted = OMIT
    policy_versions: Sequence[int] | Omitted = OMIT
    base_logprobs: Sequence[float] | Omitted = OMIT
    value_versions: Sequence[int] | Omitted = OMIT


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log-probs of a text choice: four lists of one length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One continuation, whole or in part."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: Sequence[int] | Omitted = OMIT
    prompt_token_ids: Sequence[int] | Omitted = OMIT
    policy_versions: Sequence[int] | Omitted = OMIT
    base_logprobs: Sequence[float] | Omitted = OMIT
    value_versions: Sequence[int] | Omitted = OMIT


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """How much of the prompt came from the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request. Prompts are counted once, however many choices share them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatReply(msgspec.Struct, frozen=True, kw_only=True):
    """A chat completion, or one chunk of it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | Omitted | None = OMIT
    prompt_token_ids: Sequence[int] | Omitted = OMIT
    policy_version: int
    value_version: int | Omitted = OMIT
    """With guidance: the critic's."""


class CompletionReply(msgspec.Struct, frozen=True, kw_only=True):
    """A text completion, or one chunk of it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | Omitted | None = OMIT
    prompt_token_ids: Sequence[int] | Omitted = OMIT
    policy_version: int
    value_version: int | Omitted = OMIT
    """With guidance: the critic's."""


class Pooled(msgspec.Struct, frozen=True):
    """The value after one input."""

    index: int
    data: list[float]
    object: str = "pooling"


class PoolingReply(msgspec.Struct, frozen=True, kw_only=True):
    """Values of several inputs."""

    id: str
    created: int
    model: str
    data: list[Pooled]
    usage: Usage
    value_version: int
    object: str = "list"


def chat_logprobs(
    decoder: StreamDecoder,
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    top_logprobs: Sequence[TopLogprobs],
    *,
    by_id: bool | None = False,
) -> ChatLogprobs:
    """Return the log-probs of consecutive tokens; `decoder` remembers what came before them.

    Args: by_id: name tokens `token_id:123` instead of by their text, as `return_tokens_as_token_ids` asks.
    """
    content: list[TokenLogprob] = []
    for index, (token, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        piece = decoder.push_bytes(token)
        top = [_alternative(tokenizer, *pair, by_id=by_id) for pair in top_logprobs[index]] if top_logprobs else []
        content.append(TokenLogprob(_name(token, piece, by_id), logprob, list(piece), top))
    return ChatLogprobs(content)


def _alternative(tokenizer: Tokenizer, token: int, logprob: float, *, by_id: bool | None) -> TokenLogprob:
    piece = tokenizer.bytes_of(token)
    return TokenLogprob(_name(token, piece, by_id), logprob, list(piece))


def _name(token: int, piece: bytes, by_id: bool | None) -> str:
    return f"token_id:{token}" if by_id else piece.decode(errors="replace")


def completion_logprobs(
    decoder: StreamDecoder,
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    top_logprobs: Sequence[TopLogprobs],
    *,
    offset: int = 0,
    by_id: bool | None = False,
) -> CompletionLogprobs:
    """Return the log-probs of consecutive tokens in the flat form; `offset` is the text's length before them.

    Args: by_id: as of `chat_logprobs`.
    """
    tokens: list[str] = []
    offsets: list[int] = []
    for token in token_ids:
        piece = decoder.push_bytes(token)
        tokens.append(_name(token, piece, by_id))
        offsets.append(offset)
        # A special token is named among the tokens and is not in the text.
        offset += 0 if tokenizer.is_special(token) else len(piece.decode(errors="replace"))
    top = [_top_by_name(tokenizer, entry, by_id) for entry in top_logprobs] if top_logprobs else None
    return CompletionLogprobs(tokens, list(logprobs), top, offsets)


def implied_space(tokenizer: Tokenizer, prompt: Sequence[int], token_ids: Sequence[int]) -> str:
    """Return the space that is read between a prompt and its continuation, so that their texts can be joined."""
    if not prompt or not token_ids:
        return ""
    decoder = StreamDecoder(tokenizer)
    decoder.push_bytes(prompt[-1])
    return " " if len(decoder.push_bytes(token_ids[0])) > len(tokenizer.bytes_of(token_ids[0])) else ""


def _top_by_name(tokenizer: Tokenizer, top: TopLogprobs, by_id: bool | None) -> dict[str, float] | None:
    """Alternatives by their name, best first; of two tokens that read the same the likelier is kept."""
    names: dict[str, float] = {}
    for token, logprob in top:
        names.setdefault(_name(token, tokenizer.bytes_of(token), by_id), logprob)
    return names or None


def tool_call_parts(calls: Sequence[ToolCall], *, with_index: bool = False) -> list[dict[str, Any]]:
    """Return tool calls as the API spells them; chunks number them, whole messages do not."""
    return [
        {
            **({"index": index} if with_index else {}),
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(calls)
    ]


def usage_of(prompts: Sequence[Sequence[int]], finished: Sequence[Finished], n: int) -> Usage:
    """Return the usage of a request with `n` choices per prompt, choices of one prompt being neighbours.

    Cached tokens are those of each prompt's first choice: its siblings reuse what the first one computed.
    """
    prompt_tokens = sum(map(len, prompts))
    completion_tokens = sum(len(one.token_ids) for one in finished)
    cached = sum(one.cached_tokens for one in finished[::n])
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, PromptTokensDetails(cached))


def now_s() -> int:
    """Whole seconds since the epoch, for `created`; nothing in the engine depends on it."""
    return int(time.time())
