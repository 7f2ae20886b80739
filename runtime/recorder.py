"""What the model saw and sampled, token by token, as segments that grow by the new part only.

Token truth: ids are stored as the server saw and sampled them. Where the next prompt extends the segment so far
exactly, the turn extends it; otherwise (truncated, summarised, re-rendered, drifted) a new segment starts with the
ids really used. So every generated token has `policy_mask` 1 exactly once, behind the context it was sampled from.
"""

from collections.abc import Sequence

from turngate.runtime.open_segment import OpenSegment, int32_ids, what_is_missing
from turngate.runtime.types import Completion, Segment

__all__ = ["NO_SEGMENT", "Recorder"]

NO_SEGMENT = -1
"""Index of no segment."""


class Recorder:
    """Records the turns of one episode, whose prompts extend the last segment or start a new one."""

    # Changed by add(): all of it.
    __slots__ = ("_last", "_next", "_segments", "drifts", "policy_tokens", "untrainable_because")

    def __init__(self) -> None:
        self._segments: list[OpenSegment] = []
        self._last = NO_SEGMENT
        self._next: bytes | None = None
        self.policy_tokens = 0
        """Generated tokens recorded so far."""
        self.drifts = 0
        """Turns that were expected to extend a segment and did not."""
        self.untrainable_because = ""
        """What the server failed to give, at the first turn it did; empty while everything is there."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self._segments)} segments, {self.policy_tokens} policy tokens>"

    def add(self, completion: Completion, turn: int, *, goes_on: bool = False) -> tuple[int, int, int]:
        """Record a turn and return (segment, start, length): where its tokens stand.

        A completion without token ids or log-probs leaves no tokens, and the trajectory untrainable. `goes_on` says
        that its messages extend those of the turn before: when its ids do not, that is a drift.
        """
        if missing := what_is_missing(completion):
            self.refuse_training(f"{missing} (turn {turn})")
            return *self.position(), 0
        at = self._last
        if at != NO_SEGMENT and not self._segments[at].extend(completion.prompt_token_ids):
            at = NO_SEGMENT
            self.drifts += goes_on
        return self._put(completion, turn, at)

    def _put(self, completion: Completion, turn: int, at: int) -> tuple[int, int, int]:
        """Append what was sampled to segment `at`, which ends in its prompt; to a new one for NO_SEGMENT."""
        if at == NO_SEGMENT:
            at = len(self._segments)
            self._segments.append(OpenSegment.begun_with(completion.prompt_token_ids))
        self._last = at
        segment = self._segments[at]
        start = len(segment.policy_mask)
        segment.add_completion(completion, turn)
        length = len(completion.token_ids)
        self.policy_tokens += length
        return at, start, length

    def refuse_training(self, why: str) -> None:
        """Make the record one that cannot be trained on; the first reason stays."""
        self.untrainable_because = self.untrainable_because or why

    def position(self) -> tuple[int, int]:
        """Return (segment, start) of a turn without tokens of its own, such as an injected one."""
        at = self._last
        return (at, len(self._segments[at])) if at != NO_SEGMENT else (0, 0)

    def segments(self) -> tuple[Segment, ...]:
        """Return what was recorded so far."""
        return tuple(segment.close() for segment in self._segments)

    def add_last_context(self, prompt: Sequence[int]) -> None:
        """Record the prompt that comes after the last turn, of which no completion is wanted; empty says nothing."""
        if prompt:
            self._next = int32_ids(prompt)

    @property
    def knows_last_context(self) -> bool:
        """Whether the prompt after the last turn is known."""
        return self._next is not None

    def last_context(self) -> bytes:
        """Return the prompt after the last turn, int32, or else the newest prompt with its completion.

        The latter lacks what the environment answered last. Empty when nothing was recorded.
        """
        if self._next is not None:
            return self._next
        return bytes(self._segments[self._last].token_ids) if self._last != NO_SEGMENT else b""
