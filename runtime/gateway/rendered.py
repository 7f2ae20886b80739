"""Replies that the gateway writes itself: where it renders the chat and the server sees nothing but ids."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from turngate.runtime.types import Completion

__all__ = ["Envelope", "chunk_bodies", "closing_bodies", "opening_body", "reply_body", "text_body"]

_encode = msgspec.json.Encoder().encode


class Envelope(msgspec.Struct, frozen=True):
    """What every chunk of a reply repeats."""

    id: str
    created: int
    model: str

    def around(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """Return the JSON of a reply or a chunk."""
        told = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return _encode({**told, "choices": choices, **more})


def reply_body(envelope: Envelope, completions: Sequence[Completion]) -> bytes:
    """Return a chat completion, with everything that anybody may ask for."""
    choices = [
        {
            "index": index,
            "message": _message(one, with_index=False),
            "logprobs": _logprobs(one),
            "finish_reason": one.stop_reason,
            "token_ids": list(one.token_ids),
        }
        for index, one in enumerate(completions)
    ]
    prompt = list(completions[0].prompt_token_ids)
    return envelope.around("chat.completion", choices, usage=_usage(completions), prompt_token_ids=prompt)


def chunk_bodies(envelope: Envelope, completions: Sequence[Completion], *, has_usage: bool) -> Iterator[bytes]:
    """Yield the chunks of the same reply, each choice's text in one piece."""
    kind = "chat.completion.chunk"
    more: dict[str, Any] = {"usage": None} if has_usage else {}
    for index, one in enumerate(completions):
        first = {"prompt_token_ids": list(one.prompt_token_ids)} if index == 0 else {}
        opening = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        yield envelope.around(kind, [{**opening, "logprobs": None}], **more, **first)
        said = {**_message(one, with_index=True)}
        del said["role"]
        if said["content"] is None:
            del said["content"]
        whole = {"index": index, "delta": said, "logprobs": _logprobs(one), "finish_reason": None}
        yield envelope.around(kind, [{**whole, "token_ids": list(one.token_ids)}], **more)
        end = {"index": index, "delta": {}, "logprobs": None, "finish_reason": one.stop_reason}
        yield envelope.around(kind, [end], **more)
    if has_usage:
        yield envelope.around(kind, [], usage=_usage(completions))


def opening_body(envelope: Envelope, *, has_usage: bool) -> bytes:
    """Return the chunk that opens a stream of one choice."""
    delta = {"role": "assistant", "content": ""}
    return _single(envelope, delta, None, has_usage)


def text_body(envelope: Envelope, text: str, *, has_usage: bool) -> bytes:
    """Return a chunk of text."""
    return _single(envelope, {"content": text}, None, has_usage)


def closing_bodies(envelope: Envelope, completion: Completion, *, has_usage: bool) -> Iterator[bytes]:
    """Yield the chunks that end a stream of one choice."""
    yield _single(envelope, {}, completion.stop_reason, has_usage)
    if has_usage:
        yield envelope.around("chat.completion.chunk", [], usage=_usage([completion]))


def _single(envelope: Envelope, delta: dict[str, Any], finish_reason: str | None, has_usage: bool) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    more: dict[str, Any] = {"usage": None} if has_usage else {}
    return envelope.around("chat.completion.chunk", [choice], **more)


def _message(one: Completion, *, with_index: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": one.text}
    if one.tool_calls:
        message["content"] = one.text or None
        message["tool_calls"] = [
            {
                **({"index": index} if with_index else {}),
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(one.tool_calls)
        ]
    return message


def _logprobs(one: Completion) -> dict[str, Any] | None:
    """Return log-probs; tokens are spelled by their ids, as vLLM does on request: the gateway has no texts of them."""
    if len(one.logprobs) != len(one.token_ids):
        return None
    entries: list[dict[str, Any]] = [
        {"token": f"token_id:{token_id}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token_id, logprob in zip(one.token_ids, one.logprobs, strict=True)
    ]
    return {"content": entries}


def _usage(completions: Sequence[Completion]) -> dict[str, int]:
    prompt, sampled = len(completions[0].prompt_token_ids), sum(len(one.token_ids) for one in completions)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
