"""The basics of the responses API on top of chat completions: text, function tools, earlier turns by id or in full."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from turngate.runtime.gateway.asks import check_utf8
from turngate.runtime.openai_api.refusals import RequestError, decode_json

__all__ = ["Chats", "ResponsesAsk", "decode_responses", "output_messages", "response_object"]

_encode = msgspec.json.Encoder().encode

_PASSED_ON = (
    "frequency_penalty",
    "metadata",
    "parallel_tool_calls",
    "presence_penalty",
    "seed",
    "stop",
    "temperature",
    "top_k",
    "top_p",
    "user",
)
"""Fields that mean the same to chat completions."""


class Chats(Protocol):
    """Remembers chats by the id of the response that ended them."""

    def get(self, key: str, /) -> "list[object] | None": ...


class ResponsesAsk(msgspec.Struct, kw_only=True, frozen=True):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    background: bool | None = None
    conversation: Any = None
    frequency_penalty: float | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    user: str | None = None

    def as_chat(self, chats: Chats) -> tuple[bytes, list[object]]:
        """Return the chat request that asks the same, and its messages without the instructions.

        Raises: RequestError: it asks for what chat completions have not, or goes on from a response nobody knows.
        """
        history: list[object] = []
        if self.previous_response_id:
            known = chats.get(self.previous_response_id)
            if known is None:
                raise RequestError(
                    f"previous_response_id must be of this session: got {self.previous_response_id!r:.80}; "
                    "send the whole input instead",
                    status=404,
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            history = list(known)
        history += input_messages(self.input)
        head = [{"role": "system", "content": self.instructions}] if self.instructions else []
        body: dict[str, Any] = {"model": self.model, "messages": [*head, *history], "stream": self.stream}
        body |= {name: value for name in _PASSED_ON if (value := getattr(self, name)) is not None}
        if self.max_output_tokens is not None:
            body["max_tokens"] = self.max_output_tokens
        if self.tools:
            body["tools"] = [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(self.tools)]
        if self.tool_choice is not None:
            body["tool_choice"] = _chat_choice(self.tool_choice)
        if (shape := _chat_format(self.text)) is not None:
            body["response_format"] = shape
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        return _encode(body), history


_DECODER = msgspec.json.Decoder(ResponsesAsk)


def decode_responses(body: bytes) -> ResponsesAsk:
    """Return a request of the responses API. Raises: RequestError: 400, or what is not implemented here."""
    check_utf8(body)
    ask = decode_json(_DECODER, body)
    for name in ("background", "conversation"):
        if getattr(ask, name):
            raise RequestError(f"{name} is not supported by the gateway: leave it out", param=name)
    if not ask.input:
        raise RequestError("input must not be empty: expected a text or items", param="input")
    return ask


def input_messages(given: str | list[dict[str, Any]]) -> list[object]:
    """Return the input as chat messages; what one turn of the model said is one message again.

    Raises: RequestError: an item is of a kind that chats have not.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        where = f"input[{index}]"
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _content(item.get("content"), where)})
        elif kind == "function_call":
            call = _call(item, where)
            if not (messages and messages[-1]["role"] == "assistant"):
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _content(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind != "reasoning":  # what the model thought is not shown to it again
            raise RequestError(
                f"{where}.type must be message, function_call or function_call_output: got {kind!r:.40}",
                param=f"{where}.type",
            )
    if not messages:
        raise RequestError("input must hold a message: got none", param="input")
    return list(messages)


def _content(given: object, where: str) -> object:
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise RequestError(f"{where}.content must be a text or parts: got {type(given).__name__}", param=where)
    parts = [_part(part, where) for part in given]
    if all(isinstance(part, str) for part in parts):
        return "".join(map(str, parts))
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _part(part: object, where: str) -> object:
    if isinstance(part, dict):
        kind = part.get("type")
        if kind in ("input_text", "output_text", "text", "refusal"):
            text = part.get("refusal" if kind == "refusal" else "text")
            if isinstance(text, str):
                return text
        elif kind == "input_image" and isinstance(part.get("image_url"), str):
            return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    raise RequestError(
        f"parts of {where} must be input_text, output_text or input_image: got {part!r:.80}", param=where
    )


def _call(item: dict[str, Any], where: str) -> dict[str, Any]:
    for name in ("call_id", "name", "arguments"):
        if not isinstance(item.get(name), str):
            raise RequestError(f"{where}.{name} must be a text: got {item.get(name)!r:.40}", param=f"{where}.{name}")
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _chat_tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(
            f"{where}.type must be 'function': got {tool.get('type')!r:.40}; other tools need OpenAI's own servers",
            param=f"{where}.type",
        )
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _chat_choice(choice: str | dict[str, Any]) -> object:
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _chat_format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    shape = (text or {}).get("format")
    if not isinstance(shape, dict) or shape.get("type") in (None, "text"):
        return None
    if shape.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {k: v for k, v in shape.items() if k != "type"}}
    return dict(shape)


def output_messages(output: Sequence[dict[str, Any]]) -> list[object]:
    """Return the output of a response as the chat goes on with it."""
    return input_messages(list(output))


def response_object(
    ask: ResponsesAsk, id: str, created: int, model: str, *, output: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """Return a response as the API has it, in progress unless `more` says otherwise."""
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": ask.instructions,
        "max_output_tokens": ask.max_output_tokens,
        "model": model,
        "output": output,
        "parallel_tool_calls": True if ask.parallel_tool_calls is None else ask.parallel_tool_calls,
        "previous_response_id": ask.previous_response_id,
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": ask.temperature,
        "text": ask.text or {"format": {"type": "text"}},
        "tool_choice": ask.tool_choice or "auto",
        "tools": ask.tools or [],
        "top_p": ask.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": ask.user,
        "metadata": ask.metadata or {},
        **more,
    }
