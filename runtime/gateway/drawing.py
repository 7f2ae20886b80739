"""How the next reply is drawn: what the session pins and has left goes before what the agent asks for."""

from typing import NamedTuple

import msgspec

from turngate.runtime.capabilities import Capabilities
from turngate.runtime.endpoint import ChatEndpoint
from turngate.runtime.errors import ConfigError
from turngate.runtime.gateway.asks import ChatAsk, Fields, TextAsk
from turngate.runtime.openai_api.refusals import RequestError
from turngate.runtime.session import Session
from turngate.runtime.types import Sampling

__all__ = ["DEFAULT_MAX_TOKENS", "SHAPING", "Drawing", "default_cap", "drawing_for"]

SHAPING = (
    "allowed_token_ids",
    "bad_words",
    "best_of",
    "dry_multiplier",
    "dynatemp_range",
    "frequency_penalty",
    "guidance",
    "length_penalty",
    "logit_bias",
    "logits_processors",
    "min_p",
    "min_tokens",
    "mirostat",
    "presence_penalty",
    "repeat_penalty",
    "repetition_penalty",
    "typical_p",
    "use_beam_search",
    "xtc_probability",
)
"""What else changes the distribution: where the session pins its sampling, the agent has no say in it."""
_CONSTRAINING = (
    "grammar",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "json_schema",
    "response_format",
    "structured_outputs",
    "tool_choice",
)
"""What only lets some tokens pass. Agents live on the shape of such replies, so it goes to the server even where the
session pins its sampling; but log-probs among the tokens that may pass are not the policy's."""
_FREE = (b"null", b"{}", b'{"type":"text"}', b'"none"', b'"auto"')
"""Values of these that let all pass."""
_NOTHING = (b"null", b"0", b"0.0", b"{}", b"[]", b"false")
_AROUND_ONE = ("best_of", "length_penalty", "repeat_penalty", "repetition_penalty", "typical_p")
_UNIT = (b"null", b"1", b"1.0")
DEFAULT_MAX_TOKENS = 1024
"""Where ids are sent, servers need a cap; an agent that names none gets this one, if the context has room for it."""


class Drawing(NamedTuple):
    """How a reply is to be drawn."""

    sampling: Sampling
    max_tokens: int | None
    """Cap to send; None leaves it to the server, because neither agent nor session has one."""
    is_pinned: bool
    is_known: bool
    """False when fields that we do not know the meaning of shape the distribution too."""
    seed: int | None
    constrained_by: str
    """The field that lets only some tokens pass; empty when all may."""

    @property
    def recorded(self) -> Sampling | None:
        """The sampling as the record is told of it; None when nobody can say."""
        return self.sampling if self.is_known else None


def default_cap(endpoint: ChatEndpoint) -> int:
    """Return the cap for agents that name none: a server refuses to write more than its context has room for."""
    found: Capabilities | None = getattr(endpoint, "capabilities", None)
    context = found.max_context if found is not None else None
    return DEFAULT_MAX_TOKENS if context is None else max(1, min(DEFAULT_MAX_TOKENS, context // 4))


def drawing_for(fields: Fields, ask: ChatAsk | TextAsk, session: Session, *, cap: int = DEFAULT_MAX_TOKENS) -> Drawing:
    """Return how the reply to a request is drawn.

    Args: cap: where neither agent nor session have one, and the server needs one.
    Raises: RequestError: what the agent asks for cannot be.
    """
    pinned = session.sampling
    limit = ask.limit if isinstance(ask, ChatAsk) else ask.max_tokens
    if limit is None and pinned is not None:
        limit = pinned.max_tokens
    try:
        asked = Sampling(
            temperature=1.0 if ask.temperature is None else ask.temperature,
            top_p=1.0 if ask.top_p is None else ask.top_p,
            top_k=max(0, ask.top_k or 0),
            max_tokens=max(1, limit or cap),
            stop=ask.stops or (pinned.stop if pinned is not None else ()),
        )
    except ConfigError as error:
        raise RequestError(str(error), param=str(error).partition(" ")[0]) from None
    drawn = session.allowed_sampling(asked, ask.n or 1)
    has_cap = limit is not None or session.limits.max_policy_tokens is not None
    return Drawing(
        drawn,
        drawn.max_tokens if has_cap and limit != 0 else limit,
        pinned is not None,
        pinned is not None or not any(_shapes(name, fields[name]) for name in SHAPING if name in fields),
        session.next_seed() if ask.seed is None else ask.seed,
        next((name for name in _CONSTRAINING if name in fields and _constrains(fields[name])), ""),
    )


def _shapes(name: str, value: msgspec.Raw) -> bool:
    neutral = _UNIT if name in _AROUND_ONE else _NOTHING
    return bytes(value) not in neutral


def _constrains(value: msgspec.Raw) -> bool:
    return bytes(value).translate(None, b" \n\r\t") not in _FREE
