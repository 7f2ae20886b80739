"""The few edits between agent and server: what the record needs is asked for, and what nobody asked for stays here."""

from typing import Any, NamedTuple

import msgspec

from turngate.runtime.dialect import Dialect
from turngate.runtime.gateway.asks import ChatAsk, Fields, TextAsk
from turngate.runtime.gateway.drawing import SHAPING, Drawing

__all__ = ["Keep", "chat_body", "kept_by", "strip", "text_body"]

_encode = msgspec.json.Encoder().encode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_choices = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode

_REPLY_EXTRAS = ("prompt_token_ids", "policy_version")
_CHOICE_EXTRAS = ("token_ids", "prompt_token_ids", "policy_versions")
"""What `return_token_ids` adds to replies, and the embedded engine's versions."""


class Keep(NamedTuple):
    """What of a reply the agent has asked for itself."""

    logprobs: bool
    token_ids: bool


def kept_by(ask: ChatAsk | TextAsk) -> Keep:
    """Return what the agent has asked for."""
    asked = ask.logprobs is True if isinstance(ask, ChatAsk) else ask.logprobs is not None
    return Keep(asked, bool(ask.return_token_ids))


def chat_body(fields: Fields, ask: ChatAsk, drawing: Drawing, *, model: str, dialect: Dialect) -> bytes:
    """Return the body of the request to the server: the agent's own with few edits."""
    edited: dict[str, Any] = dict(fields)
    _edit(edited, ask, drawing, model, dialect)
    if dialect.logprobs:
        edited["logprobs"] = True
        if dialect.top_logprobs is not None:
            edited["top_logprobs"] = max(dialect.top_logprobs, ask.top_logprobs or 0)
    if drawing.max_tokens != ask.limit:
        name = "max_tokens" if ask.max_completion_tokens is None else "max_completion_tokens"
        edited[name] = drawing.max_tokens
    return _encode(edited)


def text_body(fields: Fields, ask: TextAsk, drawing: Drawing, *, model: str, dialect: Dialect) -> bytes:
    """Return the body of a request to /completions, as `chat_body` does."""
    edited: dict[str, Any] = dict(fields)
    _edit(edited, ask, drawing, model, dialect)
    if dialect.logprobs:
        edited["logprobs"] = max(ask.logprobs or 0, dialect.top_logprobs or 1)
    if drawing.max_tokens != ask.max_tokens:
        edited["max_tokens"] = drawing.max_tokens
    return _encode(edited)


def _edit(edited: dict[str, Any], ask: ChatAsk | TextAsk, drawing: Drawing, model: str, dialect: Dialect) -> None:
    sampling = drawing.sampling
    edited["model"] = model
    if dialect.asks_ids:
        edited["return_token_ids"] = True
    if dialect.token_id_strings:
        edited["return_tokens_as_token_ids"] = True
    if dialect.seed:
        edited["seed"] = drawing.seed
    if drawing.is_pinned:
        for name in SHAPING:
            edited.pop(name, None)
    if drawing.is_pinned or dialect.token_mode != "text":
        # Said in so many words: a server's defaults may come from the model's own settings.
        edited["temperature"], edited["top_p"] = sampling.temperature, sampling.top_p
        if dialect.top_k:
            edited["top_k"] = sampling.top_k
        else:
            edited.pop("top_k", None)
    if sampling.stop != ask.stops:
        edited["stop"] = list(sampling.stop)


def strip(reply: bytes, keep: Keep) -> bytes:
    """Return a reply, or one chunk of it, without what only the record needs; the rest as it came.

    The reply must have been decoded before: it is known to be an object with a list of choices.
    """
    if keep.token_ids and keep.logprobs:
        return reply
    fields: dict[str, Any] = dict(_decode_fields(reply))
    if not keep.token_ids:
        for name in _REPLY_EXTRAS:
            fields.pop(name, None)
    if "choices" in fields:
        fields["choices"] = [_stripped(choice, keep) for choice in _decode_choices(fields["choices"])]
    return _encode(fields)


def _stripped(choice: dict[str, Any], keep: Keep) -> dict[str, Any]:
    if not keep.logprobs and "logprobs" in choice:
        choice["logprobs"] = None
    if not keep.token_ids:
        for name in _CHOICE_EXTRAS:
            choice.pop(name, None)
    return choice
