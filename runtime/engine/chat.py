"""The chat template: messages to ids and sampled ids back to a message.

    <|user|> content <|end|> <|assistant|> content <|call|> name arguments <|end|> <|tool|> result <|end|> <|assistant|>

Rendering is append-only: the ids of a history plus a reply extend the ids of the history plus the sampled ids,
whenever the model sampled what `encode` would have written. That keeps one episode one token sequence and lets the
prefix cache serve every turn but the first.
"""

from collections.abc import Sequence

import msgspec

from turngate.envs.base import ToolCall, ToolSpec
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.errors import ConfigError
from turngate.runtime.rendering import Reply
from turngate.runtime.types import Message

__all__ = ["ROLES", "parse_reply", "render"]

ROLES = ("system", "user", "assistant", "tool")


def render(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    add_generation_prompt: bool = True,
    *,
    tools: Sequence[ToolSpec] = (),
) -> list[int]:
    """Return the ids of a conversation, ending with the assistant's marker when a reply is asked for.

    Tools on offer are described at the end of the first system message, or in one of their own.

    Raises: ConfigError: a message has a role outside `ROLES`; the error names `messages[i].role`.
    """
    out: list[int] = []
    if tools and not (messages and messages[0].role == "system"):
        messages = [Message("system", ""), *messages]
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            raise ConfigError(f"messages[{index}].role must be one of {', '.join(ROLES)}: got {message.role!r}")
        out.append(tokenizer.special(f"<|{message.role}|>"))
        out += tokenizer.encode(message.content)
        if tools and index == 0:
            out += tokenizer.encode(_describe(tools, has_text=bool(message.content)))
        for call in message.tool_calls:
            out.append(tokenizer.special("<|call|>"))
            out += tokenizer.encode(f"{call.name} {call.arguments}")
        out.append(tokenizer.end)
    if add_generation_prompt:
        out.append(tokenizer.special("<|assistant|>"))
    return out


def parse_reply(ids: Sequence[int], tokenizer: Tokenizer, *, call_id_prefix: str = "call") -> Reply:
    """Return the message that sampled ids stand for; the inverse of `render` on what it wrote for one reply.

    Calls are numbered `<prefix>_0`, `<prefix>_1`. The end-of-turn token and stray role markers are left out.
    """
    call = tokenizer.special("<|call|>")
    cuts = [index for index, token in enumerate(ids) if token == call]
    bounds = [*cuts, len(ids)]
    text = tokenizer.decode(ids[: bounds[0]])
    calls: list[ToolCall] = []
    for start, stop in zip(cuts, bounds[1:], strict=True):
        name, _, arguments = tokenizer.decode(ids[start + 1 : stop]).partition(" ")
        calls.append(ToolCall(f"{call_id_prefix}_{len(calls)}", name, arguments))
    return Reply(text, tuple(calls))


def _describe(tools: Sequence[ToolSpec], *, has_text: bool) -> str:
    """Return the tools as text: one line each, name, description, parameters as JSON."""
    lines = [f"{tool.name}: {tool.description} {msgspec.json.encode(tool.parameters).decode()}" for tool in tools]
    return ("\n" if has_text else "") + "\n".join(lines)
