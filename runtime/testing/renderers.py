"""A renderer for the fakes' tokenizer, under which one text has several tokenisations."""

import re
from collections.abc import Sequence

from turngate.envs.base import ToolCall, ToolSpec
from turngate.runtime.errors import ConfigError
from turngate.runtime.rendering import Reply
from turngate.runtime.testing.endpoints import render_ids
from turngate.runtime.types import Message

__all__ = ["PAIR", "FakeRenderer"]

_END = 260
PAIR = 300
"""An id that reads `ab`, which `render_ids` would write as two: what was sampled need not be what is rendered."""
_CALL = re.compile(r"(\w+)\((.*)\)\Z", re.DOTALL)


class FakeRenderer:
    """Renders as `render_ids` does, and remembers how many ids it has made."""

    stop_token_ids: tuple[int, ...] = (_END,)

    def __init__(self) -> None:
        self.rendered: list[int] = []
        """Ids made, one entry per call of `render` or `extend`."""
        self.whole = 0
        """Calls of `render`."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Return the ids of a chat, after the names of the tools."""
        self.whole += 1
        return self._made([*"".join(tool.name for tool in tools).encode(), *_ids(messages)])

    def extend(
        self, completion_ids: Sequence[int], new_messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> list[int]:
        """Return what follows sampled ids."""
        return self._made([*([] if completion_ids[-1] == _END else [_END]), *_ids(new_messages)])

    def parse(self, token_ids: Sequence[int], *, has_tools: bool = True, call_id_prefix: str = "call") -> Reply:
        """Return the text; with tools, all of it is one call when it looks like `name(arguments)`."""
        text = b"".join(b"ab" if i == PAIR else bytes([i]) for i in token_ids if i < 256 or i == PAIR).decode(
            errors="replace"
        )
        found = _CALL.match(text) if has_tools else None
        return Reply("", (ToolCall(f"{call_id_prefix}_0", found[1], found[2]),)) if found else Reply(text)

    def _made(self, ids: list[int]) -> list[int]:
        self.rendered.append(len(ids))
        return ids


def _ids(messages: Sequence[Message]) -> list[int]:
    try:
        return render_ids(messages)
    except KeyError as error:
        raise ConfigError(f"role must be one that the template knows: got {error}") from None
