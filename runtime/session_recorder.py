"""The record of an agent that calls the model as it likes: every request goes on from whatever it really goes on from.

An agent's own loop branches: sub-agents with chats of their own, several requests at once, rewritten histories, n > 1.
So each reply extends, among all segments of the session, the longest whose ids start its prompt exactly, and begins a
new one when there is none. No token is ever in doubt, and each is trained once, whatever the agent does.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from turngate.runtime.json_ids import JsonIds
from turngate.runtime.open_segment import OpenSegment, int32_ids, what_is_missing
from turngate.runtime.recorder import NO_SEGMENT, Recorder
from turngate.runtime.rendering import says_the_same
from turngate.runtime.types import NO_TURN, Completion, Message

__all__ = ["Placed", "SessionRecorder"]


class Placed(NamedTuple):
    """Where a turn stands."""

    segment: int
    start: int
    length: int
    answers: int
    """The turn that the messages go on from, and whose answer they therefore show; NO_TURN for none."""


class _Branch(NamedTuple):
    """The end of one chat: what was shown last, what the model said to it, in which turn and to which agent."""

    messages: Sequence[Message]
    said: Message
    turn: int
    role: str

    def goes_on_in(self, messages: Sequence[Message]) -> bool:
        """Whether `messages` are this chat and at least one message more."""
        known = self.messages
        count = len(known)
        if not (count + 1 < len(messages) and says_the_same(self.said, messages[count])):
            return False
        shown = list(messages[:count])
        # At C speed first: only SDKs that write the arguments of calls anew need the longer look.
        return shown == list(known) or all(map(says_the_same, known, shown))


class SessionRecorder(Recorder):
    """Records the turns of one session, in the order in which replies were delivered."""

    # Changed by place(): all of it.
    __slots__ = ("_branches", "_newest", "_unplaced")

    def __init__(self) -> None:
        super().__init__()
        self._branches: dict[int, _Branch] = {}
        """Ends of chats, the newest last, by the segment that holds their tokens; below 0 where there are no tokens."""
        self._newest: _Branch | None = None
        self._unplaced = 0

    def place(self, completion: Completion, turn: int, messages: Sequence[Message], role: str = "") -> Placed:
        """Record a turn and return where it stands.

        Args: messages: what was asked with; they must not change any more. role: who asked; decides between segments
            that are the same to the last id.
        Raises: MalformedReply: its prompt holds what is no token id; nothing was recorded.
        """
        if missing := what_is_missing(completion):
            self.refuse_training(f"{missing} (turn {turn})")
            self._unplaced += 1
            key, place = -self._unplaced, (*self.position(), 0)
            came_from = self._chat_before(messages)
        else:
            came_from = self._longest_prefix(completion.prompt_token_ids, role)
            if came_from != NO_SEGMENT:
                self._segments[came_from].extend(completion.prompt_token_ids)
            place = self._put(completion, turn, came_from)
            key = place[0]
            if came_from == NO_SEGMENT:
                came_from = self._chat_before(messages)
                self.drifts += came_from is not None
        earlier = self._branches.pop(came_from, None) if came_from is not None else None
        said = Message("assistant", completion.text, completion.tool_calls)
        self._newest = self._branches[key] = _Branch(messages, said, turn, role)
        return Placed(*place, earlier.turn if earlier is not None else NO_TURN)

    def messages(self) -> tuple[Message, ...]:
        """Return the chat of the newest turn, its reply included."""
        newest = self._newest
        return (*newest.messages, newest.said) if newest is not None else ()

    def _chat_before(self, messages: Sequence[Message]) -> int | None:
        """Return the key of the newest chat that `messages` go on from, by their words; None when there is none."""
        for key in reversed(self._branches):
            if self._branches[key].goes_on_in(messages):
                return key
        return None

    def _longest_prefix(self, prompt: Sequence[int], role: str) -> int:
        """Return the index of the longest segment that `prompt` starts with; NO_SEGMENT when there is none."""
        if type(prompt) is JsonIds:
            found = self._longest(lambda segment: segment.starts_text(prompt), role)
            if found != NO_SEGMENT:
                return found
            # Parsed to the last id: it begins a segment, unless it extends one that was written in another form.
        ids = int32_ids(prompt)
        return self._longest(lambda segment: ids.startswith(segment.token_ids), role)

    def _longest(self, is_prefix: Callable[[OpenSegment], bool], role: str) -> int:
        # The last one first, because it nearly always is it; then only those are looked at that would be preferred.
        segments = self._segments
        best, rank = NO_SEGMENT, (-1, False)
        if self._last != NO_SEGMENT and is_prefix(segments[self._last]):
            best, rank = self._last, self._rank(self._last, role)
        for at in range(len(segments)):
            if at != best and (this := self._rank(at, role)) > rank and is_prefix(segments[at]):
                best, rank = at, this
        return best

    def _rank(self, at: int, role: str) -> tuple[int, bool]:
        branch = self._branches.get(at)
        return len(self._segments[at]), branch is not None and branch.role == role
