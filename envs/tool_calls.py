"""Tool calls as text: what a parser returns, the seam parsers meet, and reading JSON that a model wrote.

Models write tool calls in formats of their own. A parser reads one format, never evaluates what it reads, and says of
every call that it cannot read what is wrong with it.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import msgspec

from turngate.envs.base import ToolCall, ToolResult, ToolSpec

__all__ = [
    "CALL_KEYS",
    "JSON_ERRORS",
    "ParsedReply",
    "ToolParser",
    "excerpt",
    "is_sendable",
    "read_call",
    "read_json",
    "read_json_at",
]

JSON_ERRORS = (ValueError, RecursionError, msgspec.MsgspecError)
"""What reading JSON of others may raise: beside malformed JSON, texts nested too deep and lone surrogates."""
CALL_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})
"""Keys of a call as JSON; `type` and `id` are read over."""


class ParsedReply(msgspec.Struct, frozen=True):
    """A model's reply, taken apart."""

    text: str
    """The reply without the calls that were read. Malformed calls stay where they stand, so that the history shows the
    model what it wrote."""
    tool_calls: tuple[ToolCall, ...] = ()
    """In the order of the text; ids are made from the position, the same for the same text."""
    errors: tuple[str, ...] = ()
    """One sentence for each call that could not be read, for the model to see."""


class ToolParser(Protocol):
    """One text format of tool calls. Stateless: one object serves every rollout."""

    def parse(self, text: str, *, id_prefix: str = "call") -> ParsedReply:
        """Take a reply apart; calls get the ids `<id_prefix>_0`, `<id_prefix>_1`. Raises nothing, whatever the text."""
        ...

    def render_call(self, call: ToolCall) -> str:
        """Return the text that `parse` reads back as this call, but for its id."""
        ...

    def render_tools(self, tools: Sequence[ToolSpec]) -> str:
        """Return what a system prompt must say of the tools and of the format, for models without a template for it."""
        ...

    def render_results(self, results: Sequence[ToolResult]) -> str:
        """Return the results of one turn as the text of a user message."""
        ...


def read_json(text: str) -> Any:
    """Decode one JSON value, more strictly than `json.loads`: no NaN, no infinities, no key twice in one object.

    Raises: one of JSON_ERRORS.
    """
    return _DECODER.decode(text)


def read_json_at(text: str, start: int) -> tuple[Any, int]:
    """Decode the JSON value that begins exactly at `start`; return it and where it ends. Raises: one of JSON_ERRORS."""
    return _DECODER.raw_decode(text, start)


def read_call(text: str, call_id: str) -> ToolCall:
    """Return the call that a JSON object stands for: `name` and `arguments`, which some formats name `parameters`.

    Arguments are kept as the raw text of an object, or are a string that holds that text. Whether they fit the tool is
    for the tool to say.

    Raises: ValueError: the object is no call, and why. RecursionError: the text is nested too deep.
    """
    value = read_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"a call must be a JSON object: got {_kind(value)}")
    if unknown := value.keys() - CALL_KEYS:
        raise ValueError(f"a call must have the keys name and arguments only: got {sorted(unknown)[0]!r:.80} too")
    name, given = value.get("name"), [key for key in ("arguments", "parameters") if key in value]
    if not isinstance(name, str) or not name:
        raise ValueError(f"a call must have the name of a tool: got {_kind(name) if 'name' in value else 'no name'}")
    if len(given) != 1:
        raise ValueError("a call must have arguments: got none" if not given else "a call must have arguments once")
    name, arguments = _sendable(name), value[given[0]]
    if isinstance(arguments, dict):
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])[given[0]]
        return ToolCall(call_id, name, bytes(raw).decode())
    if isinstance(arguments, str):
        return ToolCall(call_id, name, _sendable(arguments))
    raise ValueError(f"arguments of a call must be a JSON object: got {_kind(arguments)}")


def excerpt(text: str, limit: int = 60) -> str:
    """Return the start of a text on one line, as UTF-8 can carry it, for an error message."""
    cut = " ".join(text[:limit].split()) + ("..." if len(text) > limit else "")
    return cut.encode(errors="backslashreplace").decode()


def is_sendable(text: str) -> bool:
    """True when UTF-8 can carry the text: it has no lone surrogates."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _sendable(text: str) -> str:
    if not is_sendable(text):
        raise ValueError("a call must be text that UTF-8 can carry: got a lone surrogate")
    return text


def _kind(value: object) -> str:
    """Return what a decoded value is, as JSON names it."""
    match value:
        case dict():
            return "an object"
        case list():
            return "a list"
        case str():
            return "a string" if value else "an empty string"
        case None:
            return "null"
        case _:
            return "a boolean" if isinstance(value, bool) else "a number"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"a JSON object must name each key once: got {excerpt(twice)!r} twice")
    return made


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"a JSON number must be finite: got {constant}")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        _refuse(excerpt(text))
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
