"""A trajectory token by token, for people: what each id says, and what training knows about it."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from turngate.runtime.types import Segment, Trajectory

if TYPE_CHECKING:
    from turngate.runtime.engine.tokenizer import Tokenizer

__all__ = ["TokenView", "render_tokens", "view_tokens"]


class TokenView(msgspec.Struct, frozen=True):
    """One token of a segment."""

    segment: int
    index: int
    """Position in the segment."""
    token_id: int
    text: str
    """The token on its own: a space that the tokenizer implies before it is not shown."""
    is_policy: bool
    """True when this segment's context generated it; else the rest says nothing."""
    logprob: float
    version: int
    turn: int


def view_tokens(trajectory: Trajectory, tokenizer: "Tokenizer | Callable[[int], str]") -> Iterator[TokenView]:
    """Yield the tokens of all segments in order.

    Args: tokenizer: that of the model that was served, or any function from an id to its text.
    Raises: ConfigError: an id is outside the tokenizer's vocabulary.
    """
    text_of = tokenizer if callable(tokenizer) else _text_of(tokenizer)
    for number, segment in enumerate(trajectory.segments):
        logprobs, versions, turns = segment.logprob_values(), segment.version_values(), segment.turn_values()
        for s, token_id in enumerate(segment.ids()):
            is_policy = bool(segment.policy_mask[s])
            yield TokenView(number, s, token_id, text_of(token_id), is_policy, logprobs[s], versions[s], turns[s])


def render_tokens(trajectory: Trajectory, tokenizer: "Tokenizer | Callable[[int], str]") -> str:
    """Return a table of all tokens as text; `*` marks those the policy sampled, the others are context.

    Args, Raises: as `view_tokens`.
    """
    lines: list[str] = []
    for view in view_tokens(trajectory, tokenizer):
        if view.index == 0:
            lines += _head(view.segment, trajectory.segments[view.segment])
        known = f"*{view.turn:5}{view.version:9}{view.logprob:10.4f}" if view.is_policy else " " * 25
        text = view.text.replace("\n", "\\n")
        lines.append(f"{view.index:6}{view.token_id:9}  {known}  {text}".rstrip())
    return "\n".join(lines)


def _head(number: int, segment: Segment) -> list[str]:
    return [
        f"segment {number}: {len(segment)} tokens, {sum(segment.policy_mask)} sampled",
        f"{'s':>6}{'id':>9}  {'turn':>6}{'version':>9}{'logprob':>10}  text",
    ]


def _text_of(tokenizer: "Tokenizer") -> Callable[[int], str]:
    return lambda token_id: tokenizer.bytes_of(token_id).decode("utf-8", "backslashreplace")
