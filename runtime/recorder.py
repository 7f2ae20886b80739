"""What the model saw and sampled, token by token, as segments that grow by the new part only.

Token truth: ids are stored as the server saw and sampled them. Where the next prompt extends the segment so far
exactly, the turn extends it; otherwise (truncated, summarised, re-rendered, drifted) a new segment starts with the
ids really used. So every generated token has `policy_mask` 1 exactly once, behind the context it was sampled from.
"""

from array import array
from collections.abc import Sequence
from struct import pack

from turngate.runtime.json_ids import JsonIds, ids_text, parse_ids
from turngate.runtime.types import NO_TURN, NO_VERSION, Completion, Segment

__all__ = ["Recorder"]

_NO_VERSION = array("i", [NO_VERSION]).tobytes()
_NO_TURN = array("i", [NO_TURN]).tobytes()


class _Open:
    """A segment under construction; the same five arrays, growable, and the ids as JSON where prompts come so."""

    __slots__ = ("logprobs", "policy_mask", "text", "token_ids", "turn_ids", "versions")

    def __init__(self) -> None:
        self.text = bytearray()
        """Ids separated by commas; empty when a prompt came as integers."""
        self.token_ids = bytearray()
        self.policy_mask = bytearray()
        self.logprobs = bytearray()
        self.versions = bytearray()
        self.turn_ids = bytearray()

    def extension(self, prompt: Sequence[int]) -> bytes | None:
        """Return the int32 ids by which `prompt` extends this segment; None when it does not start with it."""
        if self.text and type(prompt) is JsonIds and (rest := prompt.text_after(self.text)) is not None:
            new = parse_ids(rest).tobytes()
            if new:
                self.text += b","
                self.text += rest[1:-1]
            return new
        ids = _int32(prompt)
        if not ids.startswith(self.token_ids):
            return None
        self.text.clear()
        return ids[len(self.token_ids) :]

    def add_context(self, ids: bytes) -> None:
        """Append ids that this segment's policy did not sample."""
        count = len(ids) // 4
        self.token_ids += ids
        self.policy_mask += bytes(count)
        self.logprobs += bytes(4 * count)
        self.versions += _NO_VERSION * count
        self.turn_ids += _NO_TURN * count

    def add_completion(self, completion: Completion, turn: int) -> None:
        """Append what was sampled."""
        ids = completion.token_ids
        count = len(ids)
        if self.text and count:
            self.text += b","
            self.text += ids_text(ids)
        self.token_ids += array("i", ids)
        self.policy_mask += b"\x01" * count
        self.logprobs += array("f", completion.logprobs)
        self.versions += array("i", completion.versions)
        self.turn_ids += pack("i", turn) * count

    def close(self) -> Segment:
        """Return the segment as it stands."""
        return Segment(
            bytes(self.token_ids),
            bytes(self.policy_mask),
            bytes(self.logprobs),
            bytes(self.versions),
            bytes(self.turn_ids),
        )


class Recorder:
    """Records the turns of one episode. Makes no copies of what it already holds."""

    # Changed by add(): all of it.
    __slots__ = ("_closed", "_next", "_open", "drifts", "policy_tokens", "untrainable_because")

    def __init__(self) -> None:
        self._closed: list[Segment] = []
        self._open: _Open | None = None
        self._next: bytes | None = None
        self.policy_tokens = 0
        """Generated tokens recorded so far."""
        self.drifts = 0
        """Turns that were expected to extend the segment before and did not."""
        self.untrainable_because = ""
        """What the server failed to give, at the first turn it did; empty while everything is there."""

    def __repr__(self) -> str:
        count = len(self._closed) + (self._open is not None)
        return f"<Recorder {count} segments, {self.policy_tokens} policy tokens>"

    def add(self, completion: Completion, turn: int, *, goes_on: bool = False) -> tuple[int, int, int]:
        """Record a turn and return (segment, start, length): where its tokens stand.

        A completion without token ids or log-probs leaves no tokens, and the trajectory untrainable. `goes_on` says
        that its messages extend those of the turn before: when its ids do not, that is a drift.
        """
        if missing := _missing(completion):
            self.untrainable_because = self.untrainable_because or f"{missing} (turn {turn})"
            return *self.position(), 0
        prompt = completion.prompt_token_ids
        segment = self._open
        new = segment.extension(prompt) if segment is not None else None
        if segment is None or new is None:
            if segment is not None:
                self._closed.append(segment.close())
                self.drifts += goes_on
            segment = self._open = _Open()
            new = _int32(prompt)
            if type(prompt) is JsonIds:
                segment.text += prompt.text[1:-1]
        segment.add_context(new)
        start = len(segment.policy_mask)
        segment.add_completion(completion, turn)
        length = len(completion.token_ids)
        self.policy_tokens += length
        return len(self._closed), start, length

    def position(self) -> tuple[int, int]:
        """Return (segment, start) of a turn without tokens of its own, such as an injected one."""
        return len(self._closed), len(self._open.policy_mask) if self._open is not None else 0

    def segments(self) -> tuple[Segment, ...]:
        """Return what was recorded so far."""
        return (*self._closed, self._open.close()) if self._open is not None else tuple(self._closed)

    def add_last_context(self, prompt: Sequence[int]) -> None:
        """Record the prompt that comes after the last turn, of which no completion is wanted; empty says nothing."""
        if prompt:
            self._next = _int32(prompt)

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
        return bytes(self._open.token_ids) if self._open is not None else b""


def _int32(ids: Sequence[int]) -> bytes:
    return (ids.ids() if type(ids) is JsonIds else array("i", ids)).tobytes()


def _missing(completion: Completion) -> str:
    """Name what the server did not give; empty when the turn can be trained on."""
    if not completion.prompt_token_ids:
        return "the server gave no prompt token ids"
    if not completion.token_ids and (completion.text or completion.tool_calls):
        return "the server gave no token ids"
    if len(completion.logprobs) != len(completion.token_ids):
        return "the server gave no log-probs"
    if len(completion.versions) != len(completion.token_ids):
        return "the endpoint gave no policy versions"
    return ""
