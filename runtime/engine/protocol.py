"""What clients may ask of the engine: typed requests, decoded and checked, with the offending field named.

The wire format is OpenAI's, with vLLM's `top_k`, `return_token_ids`, `return_tokens_as_token_ids` and token-id
prompts. Fields nobody knows are ignored, as other servers do; fields that would change the distribution and are not
implemented are refused rather than ignored, because a client that trains on the reply must be able to trust its
log-probs.
"""

from typing import Annotated, Any, Literal, TypeVar

import msgspec

from turngate.envs.base import ToolCall, ToolSpec
from turngate.runtime.openai_api.neutral import NEUTRAL, NEUTRAL_CHAT, refuse_unsupported
from turngate.runtime.openai_api.refusals import RequestError, decode_json
from turngate.runtime.openai_api.sampling_fields import OfferedFunction, SamplingFields, check, check_sampling
from turngate.runtime.types import Message

__all__ = [
    "CalledFunction",
    "ChatMessage",
    "ChatRequest",
    "ChatToolCall",
    "CompletionRequest",
    "ContentPart",
    "CriticRequest",
    "GenerationFields",
    "GuidanceFields",
    "OfferedTool",
    "PoolingRequest",
    "WeightsRequest",
    "decode_request",
]

MAX_TOP_LOGPROBS = 20
"""As OpenAI; each alternative costs a dictionary in the reply."""
MAX_STOPS = 16
"""Every stop string is searched for after every token."""

MAX_POLICY_VERSION = 2**31 - 1
"""Clients store one version per token, as an int32."""


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message; the engine reads text parts only."""

    type: str
    text: str = ""


class CalledFunction(msgspec.Struct, frozen=True):
    """The function of a tool call; `arguments` is JSON text as the model wrote it."""

    name: str
    arguments: str


class ChatToolCall(msgspec.Struct, frozen=True):
    """One tool call of an earlier assistant message."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class OfferedTool(msgspec.Struct, frozen=True):
    """One tool on offer."""

    function: OfferedFunction
    type: Literal["function"] = "function"

    def as_spec(self) -> ToolSpec:
        """Return the tool as the chat template reads it."""
        return self.function.as_spec()


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation, as clients send it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = None

    def as_message(self) -> Message:
        """Return the message as the chat template reads it."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        calls = tuple(ToolCall(c.id, c.function.name, c.function.arguments) for c in self.tool_calls or ())
        # `developer` is OpenAI's newer name of `system`.
        role = "system" if self.role == "developer" else self.role
        return Message(role, content or "", calls, self.tool_call_id or "")


class GuidanceFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens are guided; see `TokenGuidance`."""

    beta: float
    top_k: int = 8
    tail: Literal["base", "zero"] = "base"


class PoolingRequest(msgspec.Struct, kw_only=True, frozen=True):
    """POST /pooling, as vLLM has it for reward models: the value after the last token of each input."""

    input: str | list[str | int | list[int]]
    """A text, several texts, one list of token ids, or several lists of token ids."""
    model: str | None = None


class CriticRequest(msgspec.Struct, kw_only=True, frozen=True):
    """POST /admin/critic."""

    path: str
    """A safetensors file, or a folder holding model.safetensors, on the engine's machine."""
    value_version: Annotated[int, msgspec.Meta(ge=0, le=MAX_POLICY_VERSION)]


class GenerationFields(SamplingFields, kw_only=True, frozen=True):
    """What chat and text completions have in common. No `model` means the served one, as with vLLM."""

    return_tokens_as_token_ids: bool | None = None
    guidance: GuidanceFields | None = None
    """Ours: draw every token by the values of what it leads to."""

    # Known to other servers, not implemented here: refused unless they change nothing (see NEUTRAL).
    best_of: int | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float | None = None
    response_format: dict[str, Any] | None = None
    suffix: str | None = None


class ChatRequest(GenerationFields, kw_only=True, frozen=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    """OpenAI's newer name of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: Any = None
    """`none` keeps the tools from the model; forcing a call is not implemented."""
    functions: list[Any] | None = None


class CompletionRequest(GenerationFields, kw_only=True, frozen=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    """A text, several texts, one list of token ids, or several lists of token ids."""
    echo: bool | None = None
    logprobs: int | None = None
    """Number of alternatives per token; 0 gives the log-probs of the tokens alone."""


class WeightsRequest(msgspec.Struct, kw_only=True, frozen=True):
    """POST /admin/weights."""

    path: str
    """A safetensors file, or a folder holding model.safetensors, on the engine's machine."""
    policy_version: Annotated[int, msgspec.Meta(ge=0, le=MAX_POLICY_VERSION)]


_ME = "this engine"

RequestT = TypeVar("RequestT", ChatRequest, CompletionRequest, CriticRequest, PoolingRequest, WeightsRequest)


def decode_request(decoder: "msgspec.json.Decoder[RequestT]", body: bytes) -> RequestT:
    """Return the request in `body`, checked field by field.

    Raises: RequestError: 400 with the field named in `param`, as precisely as it is known.
    """
    request = decode_json(decoder, body)
    if isinstance(request, GenerationFields):
        _check_generation(request)
    return request


def _check_generation(request: GenerationFields) -> None:
    refuse_unsupported(lambda name: getattr(request, name), NEUTRAL, _ME)
    check_sampling(request)
    if len(request.stops) > MAX_STOPS:
        raise RequestError(f"stop must hold at most {MAX_STOPS} strings: got {len(request.stops)}", param="stop")
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options must come with stream: true", param="stream_options")
    if isinstance(request, ChatRequest):
        _check_chat(request)
    elif isinstance(request, CompletionRequest):
        _check_completion(request)


def _check_chat(request: ChatRequest) -> None:
    refuse_unsupported(lambda name: getattr(request, name), NEUTRAL_CHAT, _ME)
    if not request.messages:
        raise RequestError("messages must not be empty: expected at least one message, got []", param="messages")
    for index, message in enumerate(request.messages):
        _check_message(message, f"messages[{index}]")
    for name in ("max_tokens", "max_completion_tokens"):
        check(getattr(request, name), name, "an integer >= 1", lambda v: v >= 1)
    _check_top_logprobs(request.top_logprobs, "top_logprobs")
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs must come with logprobs: true", param="top_logprobs")


def _check_message(message: ChatMessage, where: str) -> None:
    if isinstance(message.content, list):
        for index, part in enumerate(message.content):
            if part.type != "text":
                raise RequestError(
                    f"{where}.content[{index}].type must be 'text': got {part.type!r:.40}; this engine reads text only",
                    param=f"{where}.content[{index}].type",
                )
    if message.content is None and message.role != "assistant":
        raise RequestError(f"{where}.content must be a text: got null", param=f"{where}.content")


def _check_completion(request: CompletionRequest) -> None:
    # Nothing to generate makes sense only when the prompt itself is to be scored.
    least = 0 if request.echo else 1
    check(request.max_tokens, "max_tokens", f"an integer >= {least}", lambda v: v >= least)
    _check_top_logprobs(request.logprobs, "logprobs")


def _check_top_logprobs(value: int | None, name: str) -> None:
    check(value, name, f"an integer in [0, {MAX_TOP_LOGPROBS}]", lambda v: 0 <= v <= MAX_TOP_LOGPROBS)
