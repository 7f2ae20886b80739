"""A chat completion told in the words of the responses API: as one object, or as a stream of events."""

import time
from typing import Any

import msgspec

from turngate.runtime.gateway.collected import ChatChunk
from turngate.runtime.gateway.responses import ResponsesAsk, response_object
from turngate.runtime.gateway.sse import named_piece
from turngate.runtime.openai_api.refusals import RequestError
from turngate.runtime.types import Completion

__all__ = ["Translation"]

_encode = msgspec.json.Encoder().encode


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None


class _WithUsage(msgspec.Struct):
    usage: _Usage | None = None


_decode_usage = msgspec.json.Decoder(_WithUsage).decode


class Translation:
    """One response. Use either `whole`, or `opening`, `chunk` for each chunk and `closing`."""

    # Changed by chunk() and closing(): _items, _text, _calls, _usage, _count.

    def __init__(self, ask: ResponsesAsk, id: str, model: str) -> None:
        self.id = id
        self._ask, self._model, self._created = ask, model, int(time.time())
        self._root = id.removeprefix("resp_")
        self._items: list[dict[str, Any]] = []
        self._text: dict[str, Any] | None = None
        self._calls: dict[int, dict[str, Any]] = {}
        self._usage: _Usage | None = None
        self._count = 0

    @property
    def output(self) -> list[dict[str, Any]]:
        """The items so far."""
        return self._items

    def whole(self, body: bytes, completion: Completion) -> bytes:
        """Return the response for the body of a chat completion."""
        self._usage = _decode_usage(body).usage
        if completion.text or not completion.tool_calls:
            self._text = self._new_text()
            self._text["content"] = [_text_part(completion.text)]
        for call in completion.tool_calls:
            item = self._new_call(call.id, call.name)
            item["arguments"] = call.arguments
        return _encode(self._finished(completion.stop_reason))

    def opening(self) -> bytes:
        """Return the events that begin a stream."""
        begun = self._object()
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def chunk(self, chunk: ChatChunk) -> bytes:
        """Return the events that a chunk is told by; maybe none."""
        if (usage := bytes(chunk.usage)) and usage != b"null":
            self._usage = msgspec.json.decode(usage, type=_Usage)
        events = b""
        for part in chunk.choices:
            if part.delta is None:
                continue
            if part.delta.content:
                events += self._add_text(part.delta.content)
            for call in part.delta.tool_calls or ():
                function = call.function
                name, arguments = (function.name, function.arguments) if function else (None, None)
                events += self._add_call(call.index, call.id, name, arguments)
        return events

    def closing(self, completion: Completion) -> bytes:
        """Return the events that end the stream."""
        events = b""
        if not self._items:
            events += self._open_text()
        for index, item in enumerate(self._items):
            events += self._close_text(index, item) if item is self._text else self._close_call(index, item)
        told = self._finished(completion.stop_reason)
        return events + self._event(f"response.{told['status']}", response=told)

    def failure(self, problem: RequestError) -> bytes:
        """Return the event that ends a stream halfway."""
        error = {"message": problem.message, "code": problem.code, "param": problem.param, "type": problem.kind}
        return self._event("error", message=problem.message, code=problem.code, param=problem.param, error=error)

    # Items.

    def _new_text(self) -> dict[str, Any]:
        item = {"type": "message", "id": f"msg_{self._root}", "status": "in_progress", "role": "assistant"}
        self._items.append({**item, "content": []})
        return self._items[-1]

    def _new_call(self, call_id: str, name: str) -> dict[str, Any]:
        item = {"type": "function_call", "id": f"fc_{self._root}_{len(self._items)}", "call_id": call_id}
        self._items.append({**item, "name": name, "arguments": "", "status": "in_progress"})
        return self._items[-1]

    def _open_text(self) -> bytes:
        self._text = self._new_text()
        index, item = len(self._items) - 1, self._text
        events = self._event("response.output_item.added", output_index=index, item=item)
        item["content"] = [_text_part("")]
        return events + self._event(
            "response.content_part.added", item_id=item["id"], output_index=index, content_index=0, part=_text_part("")
        )

    def _add_text(self, text: str) -> bytes:
        events = b"" if self._text is not None else self._open_text()
        item = self._text
        assert item is not None
        item["content"][0]["text"] += text
        at = {"item_id": item["id"], "output_index": self._items.index(item), "content_index": 0}
        return events + self._event("response.output_text.delta", **at, delta=text, logprobs=[])

    def _close_text(self, index: int, item: dict[str, Any]) -> bytes:
        at = {"item_id": item["id"], "output_index": index, "content_index": 0}
        part = item["content"][0]
        item["status"] = "completed"
        return (
            self._event("response.output_text.done", **at, text=part["text"], logprobs=[])
            + self._event("response.content_part.done", **at, part=part)
            + self._event("response.output_item.done", output_index=index, item=item)
        )

    def _add_call(self, number: int, call_id: str | None, name: str | None, arguments: str | None) -> bytes:
        events = b""
        item = self._calls.get(number)
        if item is None:
            item = self._calls[number] = self._new_call(call_id or f"call_{self._root}_{number}", name or "")
            events = self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)
        elif name:
            item["name"] += name
        if arguments:
            item["arguments"] += arguments
            at = {"item_id": item["id"], "output_index": self._items.index(item)}
            events += self._event("response.function_call_arguments.delta", **at, delta=arguments)
        return events

    def _close_call(self, index: int, item: dict[str, Any]) -> bytes:
        item["status"] = "completed"
        done = {"arguments": item["arguments"], "name": item["name"]}
        at = {"item_id": item["id"], "output_index": index}
        return self._event("response.function_call_arguments.done", **at, **done) + self._event(
            "response.output_item.done", output_index=index, item=item
        )

    # The response around them.

    def _finished(self, stop_reason: str) -> dict[str, Any]:
        is_cut = stop_reason == "length"
        for item in self._items:
            item["status"] = "incomplete" if is_cut else "completed"
        reason = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {}
        return self._object(status="incomplete" if is_cut else "completed", usage=self._told_usage(), **reason)

    def _object(self, **more: Any) -> dict[str, Any]:
        return response_object(self._ask, self.id, self._created, self._model, output=self._items, **more)

    def _told_usage(self) -> dict[str, Any] | None:
        usage = self._usage
        if usage is None:
            return None
        cached = (usage.prompt_tokens_details or {}).get("cached_tokens") or 0
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _event(self, name: str, /, **fields: Any) -> bytes:
        self._count += 1
        return named_piece(name, _encode({"type": name, "sequence_number": self._count - 1, **fields}))


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
