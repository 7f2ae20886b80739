"""Chats as token ids, made on our side: what a renderer does, and when two messages say the same.

Token-in/token-out: what was sampled is never turned into text and back. A chat is rendered whole once; from then on
only what is new is rendered, and its ids are appended to those that the model really saw and sampled.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from turngate.envs.base import ToolCall, ToolSpec
from turngate.runtime.errors import ConfigError
from turngate.runtime.types import Message

__all__ = ["Renderer", "Reply", "content_text", "says_the_same"]


class Reply(msgspec.Struct, frozen=True):
    """What a sampled turn says."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()


class Renderer(Protocol):
    """Knows one model's chat format. Stateless: one object serves every episode. No method waits."""

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """The ids that end a turn; the server must stop at them. Empty when its own settings will do."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Return the ids of a chat, up to where the model is to speak.

        Raises: ConfigError: the format has no way to write this chat.
        """
        ...

    def extend(
        self, completion_ids: Sequence[int], new_messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> list[int]:
        """Return the ids that follow `completion_ids`, which the model has sampled, up to where it is to speak again.

        They are: the end of turn, where the model was cut before it; whatever the format writes between turns; the new
        messages; the beginning of the model's turn. Raises ConfigError as `render` does.
        """
        ...

    def parse(self, token_ids: Sequence[int], *, has_tools: bool = True, call_id_prefix: str = "call") -> Reply:
        """Return what sampled ids say, without the end of turn.

        Args: has_tools: look for tool calls, which get the ids `<call_id_prefix>_0`, `<call_id_prefix>_1`; without
            tools on offer all is text.
        Raises: ConfigError: an id is none of this model's.
        """
        ...


def content_text(content: object) -> str:
    """Return a message's content as text: None is empty, text parts as the OpenAI API has them are joined.

    Raises: ConfigError: it is of another kind, or has parts that are no text.
    """
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, (list, tuple)):
        raise ConfigError(f"content must be a text, text parts or None: got {type(content).__name__}")
    return "".join(map(_part_text, content))


def _part_text(part: object) -> str:
    text: Any = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f"parts of content must be texts: got {part!r:.80}; a renderer knows no others")
    return text


def says_the_same(one: Message, other: Message) -> bool:
    """Whether two messages are the same to the model that wrote one of them, or was shown it.

    Agents' SDKs rename tool calls, write their arguments anew and turn an empty content into None; that is the same.
    """
    if one is other or one == other:
        return True
    if one.role != other.role or len(one.tool_calls) != len(other.tool_calls):
        return False
    try:
        if content_text(one.content) != content_text(other.content):
            return False
    except ConfigError:
        return False
    return all(map(_calls_the_same, one.tool_calls, other.tool_calls))


def _calls_the_same(one: ToolCall, other: ToolCall) -> bool:
    if one.name != other.name:
        return False
    return one.arguments == other.arguments or _is_same_json(one.arguments, other.arguments)


def _is_same_json(one: str, other: str) -> bool:
    try:
        # Written anew rather than compared as Python values, to which true and 1 are the same.
        return _sorted_json(msgspec.json.decode(one)) == _sorted_json(msgspec.json.decode(other))
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return False


_sorted_json = msgspec.json.Encoder(order="sorted").encode
