"""Parsers of the common text formats of tool calls: Hermes tags, bare JSON, and the shopping grammar.

    TOOL_PARSERS["hermes"].parse('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>').tool_calls

Time is linear in the length of the text, whatever it holds.
"""

import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from turngate.envs.base import ToolCall, ToolResult, ToolSpec
from turngate.envs.shopping.grammar import Command, format_command, parse_command
from turngate.envs.shopping.tools import ARGUMENT_NAMES
from turngate.envs.tool_calls import (
    CALL_KEYS,
    JSON_ERRORS,
    ParsedReply,
    ToolParser,
    excerpt,
    is_sendable,
    read_call,
    read_json,
    read_json_at,
)

__all__ = ["TOOL_PARSERS", "HermesParser", "JsonParser", "ShoppingParser", "tool_parser"]

MAX_CALLS = 64
"""Calls read from one reply. A model in a loop writes thousands, and each must be answered in the next prompt."""
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BLANKS = re.compile(r"[ \t\r\n]*")
_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[ \t]*$", re.MULTILINE)
_FENCE_LANGUAGES = ("", "json", "tool_call", "tool_code")
_SHOPPING_START = re.compile(r"(?:search|click|select|buy)[ \t]*[\[({]")


class HermesParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere in the text: Hermes, Qwen2.5, Qwen3."""

    def parse(self, text: str, *, id_prefix: str = "call") -> ParsedReply:
        """Take a reply apart; what stands in `<think>` is no call."""
        found = _Found(text, id_prefix)
        at = text.find(_OPEN, _thought_end(text))
        while at >= 0:
            if found.count == MAX_CALLS:
                found.refuse(f"a reply must have at most {MAX_CALLS} tool calls: the others were not read")
                break
            at = text.find(_OPEN, self._read(text, at, found))
        return found.reply()

    def _read(self, text: str, at: int, found: "_Found") -> int:
        """Read the call whose tag opens at `at`; return where to look for the next."""
        start = _after_blanks(text, at + len(_OPEN))
        try:
            # The JSON says where it ends: a string in it may hold the closing tag.
            end = read_json_at(text, start)[1]
            close = _after_blanks(text, end)
            if not text.startswith(_CLOSE, close):
                raise ValueError(f"a call must end with {_CLOSE}: got {excerpt(text[close : close + 20])!r}")
            call = read_call(text[start:end], found.next_id())
        except JSON_ERRORS as error:
            stop = text.find(_CLOSE, start)
            found.refuse(_because(error, text[start : min(start + 80, stop if stop >= 0 else len(text))]))
            return start
        found.take(at, close + len(_CLOSE), call)
        return close + len(_CLOSE)

    def render_call(self, call: ToolCall) -> str:
        """Return the call in its tags."""
        return f"{_OPEN}\n{_call_json(call)}\n{_CLOSE}"

    def render_tools(self, tools: Sequence[ToolSpec]) -> str:
        """Return the tools in `<tools>` tags, and how to call one."""
        shape = '{"name": "<name of the tool>", "arguments": {<arguments by name>}}'
        how = f"To call a tool, write a JSON object in tags, once per call:\n{_OPEN}\n{shape}\n{_CLOSE}"
        return f"# Tools\n\nYou may call these tools:\n<tools>\n{_tool_lines(tools)}\n</tools>\n\n{how}"

    def render_results(self, results: Sequence[ToolResult]) -> str:
        """Return each result in `<tool_response>` tags, as Qwen's chat template does."""
        return "\n".join(f"<tool_response>\n{result.text}\n</tool_response>" for result in results)


class JsonParser:
    """A JSON object with `name` and `arguments` or `parameters`, or a list of them: the whole reply, or code fences.

    The way of Llama 3, whose marker `<|python_tag|>` may stand before it. JSON that does not look like a call is text.
    """

    def parse(self, text: str, *, id_prefix: str = "call") -> ParsedReply:
        """Take a reply apart; what stands in `<think>` is no call."""
        found = _Found(text, id_prefix)
        start = _thought_end(text)
        body = text[start:].strip().removeprefix("<|python_tag|>").strip()
        if body[:1] in ("{", "["):
            self._read(text, start, len(text), body, found)
        else:
            fences = list(_FENCE.finditer(text, start))
            for opening, closing in zip_longest(fences[::2], fences[1::2]):
                if opening[1] in _FENCE_LANGUAGES and found.count < MAX_CALLS:
                    inner = text[opening.end() : closing.start() if closing else len(text)].strip()
                    self._read(text, opening.start(), closing.end() if closing else len(text), inner, found)
        return found.reply()

    def _read(self, text: str, at: int, stop: int, body: str, found: "_Found") -> None:
        """Read the calls in `body`, which is all that stands from `at` to `stop`; all of them or none."""
        try:
            value = read_json(body)
        except JSON_ERRORS as error:
            if body[:1] in ("{", "[") and '"name"' in body:
                found.refuse(_because(error, body))
            return
        values = value if isinstance(value, list) else [value]
        if not values or not any(_is_like_a_call(one) for one in values):
            return
        try:
            if found.count + len(values) > MAX_CALLS:
                raise ValueError(f"a reply must have at most {MAX_CALLS} tool calls: got {found.count + len(values)}")
            raws = msgspec.json.decode(body, type=list[msgspec.Raw]) if isinstance(value, list) else [body.encode()]
            calls = [read_call(bytes(raw).decode(), found.next_id(index)) for index, raw in enumerate(raws)]
        except JSON_ERRORS as error:
            found.refuse(_because(error, body))
        else:
            found.take(at, stop, *calls)

    def render_call(self, call: ToolCall) -> str:
        """Return the call as one JSON object."""
        return _call_json(call)

    def render_tools(self, tools: Sequence[ToolSpec]) -> str:
        """Return the tools, one a line, and how to call one."""
        shape = '{"name": "<name of the tool>", "arguments": {<arguments by name>}}'
        how = f"To call a tool, answer with nothing but a JSON object, or a list of them for several calls:\n{shape}"
        return f"You may call these tools:\n{_tool_lines(tools)}\n\n{how}"

    def render_results(self, results: Sequence[ToolResult]) -> str:
        """Return the results, one after the other."""
        return "\n".join(result.text for result in results)


class ShoppingParser:
    """The shop's grammar as calls: `search["red backpack"]` is a call of `search` with a query."""

    def parse(self, text: str, *, id_prefix: str = "call") -> ParsedReply:
        """Take a reply apart: it is one command and nothing else, or it has no call."""
        command = parse_command(text)
        if command is not None and is_sendable(text):
            name = ARGUMENT_NAMES.get(command.verb)
            arguments = msgspec.json.encode({name: command.argument} if name else {}).decode()
            return ParsedReply("", (ToolCall(f"{id_prefix}_0", command.verb, arguments),))
        if command is not None or _SHOPPING_START.match(text.lstrip()):
            return ParsedReply(text, errors=(f'a command must be like click["item_1"]: got {excerpt(text)!r}',))
        return ParsedReply(text)

    def render_call(self, call: ToolCall) -> str:
        """Return the call as a command, or as JSON when the grammar has no words for it."""
        name = ARGUMENT_NAMES.get(call.name)
        try:
            arguments = msgspec.json.decode(call.arguments or "{}", type=dict[str, str])
        except JSON_ERRORS:
            return _call_json(call)
        command = Command(call.name, arguments.get(name, "") if name else "")
        text = format_command(command)
        is_whole = set(arguments) == ({name} if name else set())
        return text if is_whole and parse_command(text) == command else _call_json(call)

    def render_tools(self, tools: Sequence[ToolSpec]) -> str:
        """Return the tools as commands."""
        lines = [f'{t.name}["..."]: {t.description}' if t.parameters.get("required") else t.name for t in tools]
        return "Answer with one command and nothing else:\n" + "\n".join(lines)

    def render_results(self, results: Sequence[ToolResult]) -> str:
        """Return the results, one after the other."""
        return "\n".join(result.text for result in results)


TOOL_PARSERS: dict[str, ToolParser] = {"hermes": HermesParser(), "json": JsonParser(), "shopping": ShoppingParser()}
"""The parsers by name; put your own in."""


def tool_parser(parser: str | ToolParser) -> ToolParser:
    """Return a parser by its name; a parser is returned as it is. Raises: ValueError: there is none of this name."""
    if not isinstance(parser, str):
        return parser
    if parser not in TOOL_PARSERS:
        raise ValueError(f"a tool parser must be one of {', '.join(sorted(TOOL_PARSERS))}: got {parser!r}")
    return TOOL_PARSERS[parser]


class _Found:
    """What one pass over a text has found so far."""

    # Changed by take() and refuse(): all but the text and the prefix.
    __slots__ = ("_calls", "_errors", "_kept_to", "_pieces", "_prefix", "_text")

    def __init__(self, text: str, prefix: str) -> None:
        self._text, self._prefix = text, prefix
        self._calls, self._errors, self._pieces = list[ToolCall](), list[str](), list[str]()
        self._kept_to = 0

    @property
    def count(self) -> int:
        return len(self._calls) + len(self._errors)

    def next_id(self, ahead: int = 0) -> str:
        return f"{self._prefix}_{len(self._calls) + ahead}"

    def take(self, start: int, stop: int, *calls: ToolCall) -> None:
        """Take out the text from `start` to `stop`, which stands for `calls`."""
        self._pieces.append(self._text[self._kept_to : start])
        self._kept_to = stop
        self._calls += calls

    def refuse(self, why: str) -> None:
        """Leave a call where it stands and say what is wrong with it."""
        self._errors.append(why)

    def reply(self) -> ParsedReply:
        if not self._calls:
            return ParsedReply(self._text, errors=tuple(self._errors))
        pieces = (piece.strip() for piece in (*self._pieces, self._text[self._kept_to :]))
        return ParsedReply("\n".join(filter(None, pieces)), tuple(self._calls), tuple(self._errors))


def _thought_end(text: str) -> int:
    """Return where a reasoning model has ended its thoughts; the end of the text when it was cut in the middle."""
    end = text.rfind("</think>")
    if end >= 0:
        return end + len("</think>")
    return len(text) if text.lstrip().startswith("<think>") else 0


def _after_blanks(text: str, start: int) -> int:
    found = _BLANKS.match(text, start)
    return found.end() if found else start


def _is_like_a_call(value: object) -> bool:
    """True for objects that nobody writes but to call a tool, well or badly."""
    if not isinstance(value, dict):
        return False
    has_arguments = "arguments" in value or "parameters" in value
    if "name" in value and has_arguments:
        return True
    return isinstance(value.get("function"), dict) or (bool(value) and value.keys() <= CALL_KEYS - {"type", "id"})


def _because(error: Exception, text: str) -> str:
    why = "it is nested too deep" if isinstance(error, RecursionError) else excerpt(str(error), 200)
    return f"a tool call could not be read: {why} (it starts with {excerpt(text)!r})"


def _call_json(call: ToolCall) -> str:
    """Return a call as a JSON object: its arguments as they were written when that is one, as a string otherwise."""
    try:
        is_object = isinstance(read_json(call.arguments), dict)
    except JSON_ERRORS:
        is_object = False
    arguments = call.arguments if is_object else msgspec.json.encode(call.arguments).decode()
    return f'{{"name": {msgspec.json.encode(call.name).decode()}, "arguments": {arguments}}}'


def _tool_lines(tools: Sequence[ToolSpec]) -> str:
    """Return tools as lines of JSON, in the shape of the OpenAI API."""
    shown: list[dict[str, Any]] = [{"type": "function", "function": tool} for tool in tools]
    return "\n".join(msgspec.json.encode(tool).decode() for tool in shown)
