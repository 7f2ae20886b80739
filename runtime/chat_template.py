"""A model's own chat template, as transformers runs it: messages in, text out, and text to ids and back."""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from turngate.envs.base import ToolCall, ToolResult, ToolSpec
from turngate.envs.tool_calls import ToolParser
from turngate.runtime.errors import ConfigError
from turngate.runtime.rendering import content_text
from turngate.runtime.types import Message

__all__ = ["ChatTemplate"]

_MARK = "turngate1mark"
"""Looked for in what a template writes; letters and digits, so that no filter changes it."""
_TOOL = ToolSpec("look", "Looks.", {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]})


class ChatTemplate:
    """Writes chats as a tokenizer's template does. `parser` writes the tools where the template does not know them."""

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any], parser: ToolParser | None) -> None:
        """Hold a tokenizer of transformers. Raises ConfigError: it has no chat template, or one that writes nothing."""
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                f"tokenizer must have a chat template: got none ({tokenizer.name_or_path}); take the folder of a model "
                "tuned for chats, or set tokenizer.chat_template"
            )
        self._tokenizer, self._kwargs = tokenizer, dict(kwargs)
        self._in_parts = False
        self._knows_developer = "developer" in str(tokenizer.chat_template)
        self._parser: ToolParser | None = None
        if _MARK not in self.text([Message("user", _MARK)]):
            # Templates of models that see pictures may read lists of parts only.
            self._in_parts = True
            if _MARK not in self.text([Message("user", _MARK)]):
                raise ConfigError(f"chat template must show what the user says: it does not ({tokenizer.name_or_path})")
        if not self._knows_tools():
            self._parser = parser

    @property
    def writes_tools_itself(self) -> bool:
        """Whether tools, calls and results are written by the parser, because the template leaves them out."""
        return self._parser is not None

    def text(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a chat. Raises ConfigError: the template refuses it, and why."""
        if self._parser is not None:
            messages, tools = _without_tools(messages, tools, self._parser), ()
        try:
            text: str = self._tokenizer.apply_chat_template(
                [self._dict(message) for message in messages],
                # Some templates take an empty list for tools on offer, and say so to the model.
                tools=[_tool_dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._kwargs,
            )
            return text
        except ConfigError:
            raise
        except Exception as error:  # a template is a program of the model's authors, and raises what it likes
            roles = ", ".join(message.role for message in messages)
            raise ConfigError(
                f"chat template must accept the chat: {type(error).__name__}: {error} (roles {roles})"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text in which special tokens stand by name."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int], *, keep_special: bool) -> str:
        """Return the text of ids, special tokens by name or not at all. Raises ConfigError: it has no such ids."""
        try:
            text: str = self._tokenizer.decode(
                list(ids), skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False
            )
            return text
        except Exception as error:  # of ids that it does not have, each kind of tokenizer raises something else
            raise ConfigError(f"tokenizer must know the token ids: {type(error).__name__}: {error}") from error

    def special_in(self, text: str, stops: frozenset[int]) -> str:
        """Return the first of `stops` in a text, or else its first special token; empty when there is none."""
        added = self._tokenizer.added_tokens_decoder.items()
        for tokens in ([t for i, t in added if i in stops], [t for _, t in added if t.special]):
            found = [(text.index(token.content), -len(token.content)) for token in tokens if token.content in text]
            if found:
                start, length = min(found)
                return text[start : start - length]
        return ""

    @property
    def ends_of_text(self) -> frozenset[int]:
        """The ids at which the model's authors have it stop, as far as the tokenizer and its folder say."""
        eos: Any = None
        try:
            with open(f"{self._tokenizer.name_or_path}/generation_config.json", "rb") as file:
                eos = json.load(file).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            pass
        ids = {self._tokenizer.eos_token_id, *(eos if isinstance(eos, list) else (eos,))}
        return frozenset(i for i in ids if isinstance(i, int))

    def _dict(self, message: Message) -> dict[str, Any]:
        # Newer name of `system`; templates that do not know a role may leave its messages out.
        role = "system" if message.role == "developer" and not self._knows_developer else message.role
        content: Any = content_text(message.content)
        if self._in_parts:
            content = [{"type": "text", "text": content}] if content else []
        shown: dict[str, Any] = {"role": role, "content": content}
        if message.tool_calls:
            shown["tool_calls"] = [_call_dict(call) for call in message.tool_calls]
        if message.tool_call_id:
            shown["tool_call_id"] = message.tool_call_id
        return shown

    def _knows_tools(self) -> bool:
        """Whether the template shows the model tools, calls and results."""
        user = Message("user", "hi")
        call = Message("assistant", "", (ToolCall("call00001", _TOOL.name, json.dumps({"at": _MARK})),))
        result = Message("tool", f"{_MARK}2", (), "call00001")
        try:
            shown = self.text([user, call, result], [_TOOL])
            is_shown = _MARK in shown.replace(f"{_MARK}2", "") and f"{_MARK}2" in shown
            return is_shown and _TOOL.description in self.text([user], [_TOOL])
        except ConfigError:
            return False


def _call_dict(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}


def _arguments(text: str) -> Any:
    """Return arguments as templates want them, a dict; the text itself when it is no JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _tool_dict(tool: ToolSpec) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _without_tools(messages: Sequence[Message], tools: Sequence[ToolSpec], parser: ToolParser) -> list[Message]:
    """Return a chat in which tools, calls and results are plain text of system, assistant and user."""
    plain: list[Message] = []
    if tools:
        head = messages[0] if messages and messages[0].role == "system" else None
        parts = [content_text(head.content)] if head else []
        plain.append(Message("system", "\n\n".join([*parts, parser.render_tools(tools)])))
        messages = messages[1:] if head else messages
    for is_result, group in groupby(messages, key=lambda message: message.role == "tool"):
        if is_result:
            results = [ToolResult(message.tool_call_id, content_text(message.content)) for message in group]
            plain.append(Message("user", parser.render_results(results)))
        else:
            plain += [_with_written_calls(message, parser) for message in group]
    return plain


def _with_written_calls(message: Message, parser: ToolParser) -> Message:
    if not message.tool_calls:
        return message
    text = content_text(message.content)
    return Message(message.role, "\n".join([*([text] if text else []), *map(parser.render_call, message.tool_calls)]))
