"""Messages and tools as agents write them: our own structs, or plain dictionaries as the OpenAI API has them."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import msgspec

from turngate.envs.base import ToolCall, ToolSpec
from turngate.runtime.answers import describe_error, writable
from turngate.runtime.errors import EnvError
from turngate.runtime.types import Message, Sampling

__all__ = ["AnyMessage", "AnyTool", "chat_messages", "chat_role", "chat_tools", "why_not_asked", "why_not_sendable"]

AnyMessage: TypeAlias = Message | Mapping[str, Any]
AnyTool: TypeAlias = ToolSpec | Mapping[str, Any]

_STRUCTS: set[type] = {Message}
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def chat_messages(messages: Sequence[AnyMessage]) -> tuple[Message, ...]:
    """Return messages as structs, in a sequence that nobody changes later.

    Raises: EnvError: one of them is no message; it is the agent's doing.
    """
    if (
        type(messages) in (list, tuple) and set(map(type, messages)) == _STRUCTS
    ):  # at C speed: histories grow, and every turn sends all of it
        return tuple(cast(Sequence[Message], messages))
    given: object = messages
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence) or not given:
        raise EnvError(f"messages must be a list with at least one message: got {messages!r:.80} (session.chat)")
    return tuple(
        message if type(message) is Message else _message(message, f"session.chat: messages[{index}]")
        for index, message in enumerate(messages)
    )


def chat_tools(tools: Sequence[AnyTool]) -> tuple[ToolSpec, ...]:
    """Return tools as structs. Raises: EnvError: one of them is no function to offer."""
    return tuple(
        tool if isinstance(tool, ToolSpec) else _tool(tool, f"session.chat: tools[{index}]")
        for index, tool in enumerate(tools)
    )


def chat_role(role: object) -> str:
    """Return the name of an agent of the episode as the record has it. Raises: EnvError: it is none."""
    if not isinstance(role, str) or writable(role) != role:
        raise EnvError(f"role must be text that UTF-8 can carry: got {writable(repr(role))[:80]} (session.chat)")
    return _plain(role)


def why_not_asked(chat: Sequence[Message], tools: Sequence[ToolSpec], sampling: object, seed: object) -> str:
    """Say what of a request no server can be asked; empty when it is well. Asked only once something has failed."""
    if why := why_not_sendable(chat):
        return why
    if type(seed) is not int:
        return f"seed must be an integer: got {writable(repr(seed))[:80]} (session.chat)"
    if not isinstance(sampling, Sampling):
        return f"sampling must be a Sampling: got {writable(repr(sampling))[:80]} (session.chat)"
    for what, given in [("sampling", sampling), *((f"tools[{at}]", tool) for at, tool in enumerate(tools))]:
        try:
            msgspec.json.encode(given)
        except Exception as error:  # whatever an agent has put into it
            return f"{what} must be JSON: got {describe_error(error)} (session.chat)"
    return ""


def why_not_sendable(chat: Sequence[Message]) -> str:
    """Say what in a chat no request can carry; empty when it is well. Asked only once something has failed."""
    for index, message in enumerate(chat):
        texts = [message.role, message.content, message.tool_call_id]
        texts += [text for call in message.tool_calls for text in (call.id, call.name, call.arguments)]
        for text in texts:
            if type(text) is not str or writable(text) != text:
                shown = writable(repr(text))[:80]
                return f"messages must be text that UTF-8 can carry: got {shown} (session.chat: messages[{index}])"
    return ""


def _tool(given: object, where: str) -> ToolSpec:
    function = cast(Mapping[str, Any], given).get("function") if isinstance(given, Mapping) else None
    if isinstance(function, Mapping):
        name, parameters = function.get("name"), function.get("parameters") or {}
        if isinstance(name, str) and isinstance(parameters, dict):
            return ToolSpec(_plain(name), str(function.get("description") or ""), cast(dict[str, Any], parameters))
    raise EnvError(f"tool must be a ToolSpec or a dict with a function and its name: got {given!r:.80} ({where})")


def _message(given: object, where: str) -> Message:
    if not isinstance(given, Mapping):
        raise EnvError(f"message must be a Message or a dict: got {given!r:.80} ({where})")
    message = cast(Mapping[str, Any], given)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise EnvError(f"role must be one of {', '.join(sorted(_ROLES))}: got {role!r:.80} ({where})")
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, (list, tuple)):
        raise EnvError(f"tool_calls must be a list: got {calls!r:.80} ({where})")
    call_id = message.get("tool_call_id") or ""
    if not isinstance(call_id, str):
        raise EnvError(f"tool_call_id must be text: got {call_id!r:.80} ({where})")
    return Message(
        _plain(role),
        _text(message.get("content"), where),
        tuple(
            _tool_call(call, f"{where}.tool_calls[{index}]")
            for index, call in enumerate(cast("Sequence[object]", calls))
        ),
        _plain(call_id),
    )


def _plain(text: str) -> str:
    """Return text as a plain str: what is more, as NumPy's is, no encoder takes."""
    return text if type(text) is str else str.__str__(text)


def _text(content: object, where: str) -> str:
    """Return the text of a message's content; parts of text are joined, None is empty."""
    if isinstance(content, str):
        return _plain(content)
    if content is None:
        return ""
    if not isinstance(content, (list, tuple)):
        raise EnvError(f"content must be text or a list of text parts: got {content!r:.80} ({where})")
    texts: list[str] = []
    for part in cast("Sequence[object]", content):
        text = cast(Mapping[str, Any], part).get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise EnvError(f"parts of content must have a text: got {part!r:.80} ({where}); other kinds cannot be sent")
        texts.append(text)
    return "".join(texts)


def _tool_call(call: object, where: str) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    function = cast(Mapping[str, Any], call).get("function") if isinstance(call, Mapping) else None
    if isinstance(function, Mapping):
        name, arguments = function.get("name"), function.get("arguments", "")
        if isinstance(name, str) and isinstance(arguments, str):
            call_id = str(cast(Mapping[str, Any], call).get("id") or "")
            return ToolCall(_plain(call_id), _plain(name), _plain(arguments))
    raise EnvError(f"tool call must have a function with a name and arguments as JSON text: got {call!r:.80} ({where})")
