"""Renders chats as the embedded engine does, without torch: token in, token out against `turngate serve`."""

from collections.abc import Sequence
from pathlib import Path

from turngate.envs.base import ToolSpec
from turngate.runtime.engine.chat import parse_reply, render
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.rendering import Reply
from turngate.runtime.types import Message

__all__ = ["EngineRenderer"]


class EngineRenderer:
    """The chat template of the embedded engine, which is append-only.

    Gives the ids that the engine itself would, but for one thing: what was sampled stays as it was sampled, where the
    engine would tokenise its text again.
    """

    def __init__(self, model: str | Path | Tokenizer) -> None:
        """Read the tokenizer of a model folder, or take one. Raises ConfigError: there is none."""
        self.tokenizer = model if isinstance(model, Tokenizer) else Tokenizer.load(Path(model))
        self.stop_token_ids = (self.tokenizer.end,)

    def __repr__(self) -> str:
        return f"<EngineRenderer {self.tokenizer!r}>"

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Return the ids of a chat, up to where the model is to speak. Raises ConfigError: a role that nobody knows."""
        return render(messages, self.tokenizer, tools=tools)

    def extend(
        self, completion_ids: Sequence[int], new_messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> list[int]:
        """Return the ids that follow `completion_ids`, up to where the model is to speak again."""
        end = self.tokenizer.end
        has_ended = bool(completion_ids) and completion_ids[-1] == end
        # The tools were described at the head of the chat.
        return [*(() if has_ended else (end,)), *render(new_messages, self.tokenizer)]

    def parse(self, token_ids: Sequence[int], *, has_tools: bool = True, call_id_prefix: str = "call") -> Reply:
        """Return what sampled ids say, without the end of turn."""
        if has_tools:
            return parse_reply(token_ids, self.tokenizer, call_id_prefix=call_id_prefix)
        return Reply(self.tokenizer.decode(token_ids))
