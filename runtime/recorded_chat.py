"""A recorded chat as its ids: what a branch goes on from, so that it sees what the episode saw and not its text anew.

One text has many tokenisations. Where chats are rendered here, a conversation that starts in the middle would render
the earlier answers from their text; given the recorded chat, it keeps the ids as they were sampled.
"""

import itertools
from array import array
from collections.abc import Sequence

import msgspec

from turngate.runtime.types import Completion, Message, Trajectory

__all__ = ["RecordedChat", "chat_before", "chat_with", "has_other_context", "own_starts"]


class RecordedChat(msgspec.Struct, frozen=True):
    """A chat up to and with an answer that was sampled."""

    messages: tuple[Message, ...]
    """The last is the answer."""
    prompt: bytes
    """int32 ids that the answer was sampled behind."""
    token_ids: bytes
    """int32 ids of the answer."""

    def head(self) -> tuple[Message, ...]:
        """Return the messages before the first answer: rendered, not sampled."""
        return tuple(itertools.takewhile(lambda message: message.role != "assistant", self.messages))

    def prompt_ids(self) -> list[int]:
        """Return the prompt's ids."""
        return memoryview(self.prompt).cast("i").tolist()

    def answer_ids(self) -> list[int]:
        """Return the answer's ids."""
        return memoryview(self.token_ids).cast("i").tolist()


def own_starts(trajectory: Trajectory) -> list[int]:
    """Return, by turn, where its action stands among the messages; shorter than the turns where some are missing."""
    found = [index for index, message in enumerate(trajectory.messages) if message.role == "assistant"]
    return found[max(0, len(found) - len(trajectory.turns)) :]


def chat_before(trajectory: Trajectory, position: int) -> RecordedChat | None:
    """Return the chat up to the last answer sampled before the turn at `position`.

    None where it is not known: another renders it, nothing was sampled yet, or it was not one growing sequence of ids.
    """
    sampled = [number for number, turn in enumerate(trajectory.turns[:position]) if turn.length]
    if trajectory.token_mode != "tokens" or not sampled:
        return None
    if any(trajectory.turns[number].segment for number in sampled):
        return None
    starts, last = own_starts(trajectory), trajectory.turns[sampled[-1]]
    ids = trajectory.segments[0].token_ids
    return RecordedChat(
        trajectory.messages[: starts[sampled[-1]] + 1],
        ids[: 4 * last.start],
        ids[4 * last.start : 4 * (last.start + last.length)],
    )


def chat_with(shown: Sequence[Message], drawn: Completion) -> RecordedChat | None:
    """Return the chat that a draw answers, with it; None when its ids are not known."""
    if not drawn.token_ids or not drawn.prompt_token_ids:
        return None
    answer = Message("assistant", drawn.text, drawn.tool_calls)
    prompt, ids = array("i", drawn.prompt_token_ids), array("i", drawn.token_ids)
    return RecordedChat((*shown, answer), prompt.tobytes(), ids.tobytes())


def has_other_context(trajectory: Trajectory, position: int, continuation: Trajectory, *, with_action: bool) -> bool:
    """Whether a continuation saw its start written with other ids than the episode did; False where nobody knows.

    Args: with_action: it began with the turn's action, not before it.
    """
    taken = trajectory.turns[position]
    first = next((turn for turn in continuation.turns if turn.length), None)
    if first is None or not taken.length:
        return False
    end = taken.start + taken.length if with_action else taken.start
    known = trajectory.segments[taken.segment].token_ids[: 4 * end]
    seen = continuation.segments[first.segment].token_ids[: 4 * first.start]
    return not seen.startswith(known) if with_action else seen != known
