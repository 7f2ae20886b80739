"""Renders chats with a model's own template, by what is new alone, proved against the template at construction.

A template is a program over all messages. What it writes for new ones is found by difference: they are put behind a
short chat that ends in a marker for the model's answer, and what comes after the marker's end of turn is what follows
any answer. That this is what the template writes at the end of whole chats, byte by byte, is tried out first.
"""

import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from turngate.envs.base import ToolCall, ToolSpec
from turngate.envs.tool_calls import ToolParser
from turngate.envs.tool_parsers import tool_parser as named_parser
from turngate.runtime.chat_template import ChatTemplate
from turngate.runtime.errors import ConfigError
from turngate.runtime.rendering import Reply
from turngate.runtime.template_probes import find_differences
from turngate.runtime.types import Message

__all__ = ["HuggingFaceRenderer"]

_log = logging.getLogger("turngate.rendering")


class HuggingFaceRenderer:
    """The chat format of any model with a chat template; needs the extra `hf`.

    renderer = HuggingFaceRenderer("models/qwen", tool_parser="hermes")
    Endpoint(url, model="qwen", dialect=Dialect(token_mode="tokens"), renderer=renderer)
    """

    def __init__(
        self,
        model: Any,
        *,
        tool_parser: str | ToolParser | None = "hermes",
        chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Read the tokenizer of a model folder, or take one of transformers, and try its template out.

        Args: tool_parser: the format in which the model writes tool calls, see `TOOL_PARSERS`; None finds none. It also
                writes tools, calls and results where the template leaves them out.
            chat_template_kwargs: what the template is told besides, such as `enable_thinking`.
        Raises: ConfigError: there is no tokenizer or template, or one that writes a message according to its place.
        """
        try:
            self._parser = named_parser(tool_parser) if tool_parser is not None else None
        except ValueError as error:
            raise ConfigError(str(error)) from None
        tokenizer = _tokenizer_in(Path(model)) if isinstance(model, (str, Path)) else model
        self._name = str(tokenizer.name_or_path)
        self._template = ChatTemplate(tokenizer, chat_template_kwargs, self._parser)
        # Random, so that no message can hold it; letters and digits, so that no filter changes it.
        random = secrets.token_hex(8)
        self._mark, self._next_mark = f"answer{random}", f"next{random}"
        stops = self._template.ends_of_text
        self._end = self._end_text("user", stops)
        stops |= self._id_of(self._end)
        try:
            # Where calls end is no place to stop unless somebody says so: others may follow.
            self._calling_end = self._end_text("tool", stops)
        except ConfigError:
            self._calling_end = self._end  # a template without tools: it will refuse every chat that has some
        self._ends = self._id_of(self._end) | self._id_of(self._calling_end)
        self.stop_token_ids: tuple[int, ...] = tuple(sorted(stops))
        self._names_matter = self._shows_names()
        self.differs_from_template: tuple[str, ...] = find_differences(
            self._template, self._tail, has_tools=self._parser is not None
        )
        """Where whole chats are written otherwise than turn by turn, one sentence each: there the template changes what
        it has written before, and what the model really saw and sampled is kept. Empty when nothing differs."""
        self._tell()

    def __repr__(self) -> str:
        count = len(self.differs_from_template)
        return f"<HuggingFaceRenderer {self._name}{f', {count} differences from the template' if count else ''}>"

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Return the ids of a chat, up to where the model is to speak. Raises ConfigError: the template refuses it."""
        return self._template.encode(self._template.text(messages, tools))

    def extend(
        self, completion_ids: Sequence[int], new_messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> list[int]:
        """Return the ids that follow `completion_ids`, up to where the model is to speak again.

        Raises: ConfigError: the template refuses the new messages.
        """
        calls = self.parse(completion_ids).tool_calls if self._names_matter and _are_results(new_messages) else ()
        ids = self._template.encode(self._tail(Message("assistant", "", calls), new_messages, tools))
        has_ended = bool(completion_ids) and completion_ids[-1] in self._ends
        return ids[1:] if has_ended else ids

    def parse(self, token_ids: Sequence[int], *, has_tools: bool = True, call_id_prefix: str = "call") -> Reply:
        """Return what sampled ids say, without the end of turn."""
        if token_ids and token_ids[-1] in self.stop_token_ids:
            token_ids = token_ids[:-1]
        if not has_tools or self._parser is None:
            return Reply(self._template.decode(token_ids, keep_special=False))
        # Tags of tool calls are special tokens in some vocabularies.
        said = self._parser.parse(self._template.decode(token_ids, keep_special=True), id_prefix=call_id_prefix)
        return Reply(said.text, said.tool_calls)

    def _tail(self, answer: Message, new_messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        """Return what the template writes after an answer: its end of turn, and all that comes then."""
        end = self._calling_end if _are_results(new_messages) else self._end
        after = self._after_mark(answer.tool_calls, new_messages, tools)
        return after[after.index(end) :] if end in after else after

    def _after_mark(self, calls: Sequence[ToolCall], new_messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        """Return what is written after the words of an answer: whatever closes them, and all that comes then."""
        text = self._template.text([Message("user", "hi"), self._sentinel(calls, new_messages), *new_messages], tools)
        _, found, after = text.partition(self._mark)
        if not found:
            raise ConfigError(f"chat template must show what the assistant says: it does not ({self._name})")
        return after

    def _sentinel(self, calls: Sequence[ToolCall], new_messages: Sequence[Message]) -> Message:
        """Return an answer that the new messages can follow: with calls where they are results."""
        if not _are_results(new_messages):
            return Message("assistant", self._mark)
        results = [message for message in new_messages if message.role == "tool"]
        names = [call.name for call in calls][: len(results)]
        names += ["tool"] * (len(results) - len(names))
        arguments = f'{{"text": "{self._mark}"}}'
        made = (ToolCall(result.tool_call_id, name, arguments) for result, name in zip(results, names, strict=True))
        return Message("assistant", "", tuple(made))

    def _end_text(self, role: str, stops: frozenset[int]) -> str:
        """Return the special token that ends the model's turn before a message of `role`; empty when there is none.

        Args: stops: where models are known to stop; one of them, rather than what closes a call.
        Raises: ConfigError: the template refuses such a message, or leaves it out.
        """
        new = [Message(role, self._next_mark, (), "call00001")]
        closing, found, _ = self._after_mark((), new, ()).partition(self._next_mark)
        if not found:
            raise ConfigError(f"chat template must show messages of the role {role}: it does not ({self._name})")
        return self._template.special_in(closing, stops)

    def _id_of(self, end: str) -> frozenset[int]:
        ids = self._template.encode(end)
        return frozenset(ids if len(ids) == 1 else ())

    def _shows_names(self) -> bool:
        """Whether results are written with the name of the tool."""
        result = [Message("tool", "hi", (), "call00001")]
        try:
            tails = {self._tail(Message("assistant", "", (ToolCall("", n, "{}"),)), result, ()) for n in ("up", "down")}
        except ConfigError:
            return False
        return len(tails) > 1

    def _tell(self) -> None:
        if self._template.writes_tools_itself:
            _log.info("%s: the chat template leaves tools out; the tool parser writes them", self._name)
        if self.differs_from_template:
            differences = "; ".join(self.differs_from_template)
            _log.info("%s: the chat template does not only append: %s", self._name, differences)


def _are_results(messages: Sequence[Message]) -> bool:
    return bool(messages) and messages[0].role == "tool"


def _tokenizer_in(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(f"HuggingFaceRenderer needs the extra hf: {error}; pip install 'turngate[hf]'") from error
    if not folder.is_dir():
        raise ConfigError(f"model must be a folder with a tokenizer: there is no folder {folder}")
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model folder must hold a tokenizer: {error} ({folder})") from error
