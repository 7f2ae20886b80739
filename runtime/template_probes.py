"""Chats on which a template is tried out: does it only append, and do increments write what it writes?"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from turngate.envs.base import ToolCall, ToolSpec
from turngate.runtime.chat_template import ChatTemplate
from turngate.runtime.errors import ConfigError
from turngate.runtime.types import Message

__all__ = ["PROBES", "Probe", "find_differences"]

Probe: TypeAlias = tuple[str, tuple[Message, ...], tuple[ToolSpec, ...]]
"""Name, chat, tools on offer."""
_HINT = "; or give tool_parser=None, if there are no tools"
Tail: TypeAlias = Callable[[Message, Sequence[Message], Sequence[ToolSpec]], str]
"""(answer, new messages, tools) -> what follows the answer, from its end of turn on."""

_SYSTEM, _HI, _MORE = Message("system", "You count."), Message("user", "One, two?"), Message("user", "And then?")
_SAID = Message("assistant", "Three.")
_THOUGHT = Message("assistant", "<think>\nTwo and one.\n</think>\n\nThree.")
_PADDED = Message("assistant", " Three. \n")
_NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
_TOOLS = (ToolSpec("next_number", "Gives the next number.", _NUMBER), ToolSpec("stop", "Ends.", {"type": "object"}))


def _calls(text: str, *numbers: int) -> Message:
    calls = (ToolCall(f"call0000{n}", "next_number", f'{{"n": {n}}}') for n in numbers)
    return Message("assistant", text, tuple(calls))


def _result(number: int) -> Message:
    return Message("tool", str(number + 1), (), f"call0000{number}")


PROBES: tuple[Probe, ...] = (
    ("several turns", (_HI, _SAID, _MORE, _SAID, _MORE, _SAID, _MORE), ()),
    ("a system prompt", (_SYSTEM, _HI, _SAID, _MORE, _SAID, _MORE), ()),
    ("answers with blanks around them", (_HI, _PADDED, _MORE, _PADDED, _MORE), ()),
    ("reasoning", (_HI, _THOUGHT, _MORE, _THOUGHT, _MORE), ()),
    ("tools on offer", (_SYSTEM, _HI, _SAID, _MORE, _SAID, _MORE), _TOOLS),
    ("tool calls", (_HI, _calls("", 2), _result(2), _SAID, _MORE, _calls("", 3), _result(3)), _TOOLS),
    ("text with tool calls", (_HI, _calls("Let me see.", 2), _result(2), _SAID, _MORE), _TOOLS),
    ("several calls at once", (_SYSTEM, _HI, _calls("", 2, 3), _result(2), _result(3), _SAID, _MORE), _TOOLS),
    ("reasoning with tool calls", (_HI, _calls("<think>\nHm.\n</think>\n\n", 2), _result(2), _THOUGHT, _MORE), _TOOLS),
)


def find_differences(template: ChatTemplate, tail: Tail, *, has_tools: bool = True) -> tuple[str, ...]:
    """Return, one sentence each, where a chat written whole differs from the same chat written turn by turn.

    Chats that the template refuses say nothing: it will refuse them in earnest, too.

    Raises: ConfigError: what it writes last depends on where it stands, so that increments would be wrong.
    """
    found: dict[str, str] = {}
    for name, chat, tools in PROBES:
        if tools and not has_tools:
            continue
        try:
            for difference in _differences(template, tail, name, chat, tools):
                found.setdefault(name, difference)
        except _Refused:
            continue
    return tuple(f"{difference} ({name})" for name, difference in found.items())


class _Refused(Exception):
    """The template does not write this chat."""


def _differences(
    template: ChatTemplate, tail: Tail, name: str, chat: Sequence[Message], tools: Sequence[ToolSpec]
) -> Iterator[str]:
    """Yield what is different at each answer of a chat."""
    for at, answer in enumerate(chat):
        if answer.role != "assistant":
            continue
        stop = next((i for i in range(at + 1, len(chat)) if chat[i].role == "assistant"), len(chat))
        try:
            before, whole = template.text(chat[:at], tools), template.text(chat[:stop], tools)
            new = tail(answer, chat[at + 1 : stop], tools)
        except ConfigError as error:
            raise _Refused from error
        if not whole.endswith(new):
            raise ConfigError(
                f"chat template must write new messages the same wherever they stand: expected {_end(whole, new)!r} at "
                f"the end, got {_end(new, whole)!r} (probe: {name}); what is new cannot be rendered alone, so let the "
                f"server render: token_mode='server'{_HINT if tools else ''}"
            )
        if not whole.startswith(before):
            yield "earlier messages are written otherwise once others follow"
            continue
        written = whole[len(before) : len(whole) - len(new)]
        if not answer.tool_calls and written != answer.content:
            yield "an earlier answer is written otherwise than it was said"
        elif template.encode(whole) != [*template.encode(before), *template.encode(written), *template.encode(new)]:
            yield "tokens reach over the border between an answer and what is around it"


def _end(text: str, other: str) -> str:
    """Return the end of a text from a little before where it differs from the end of another."""
    same = 0
    while same < min(len(text), len(other)) and text[-1 - same] == other[-1 - same]:
        same += 1
    return text[max(0, len(text) - same - 20) :][:60]
