"""A segment under construction, and the two forms in which prompts come: integers and the JSON text of a reply."""

from array import array
from collections.abc import Sequence
from struct import pack

from turngate.runtime.json_ids import JsonIds, ids_text, parse_ids
from turngate.runtime.types import NO_TURN, NO_VERSION, Completion, Segment

__all__ = ["OpenSegment", "int32_ids", "what_is_missing"]

_NO_VERSION = array("i", [NO_VERSION]).tobytes()
_NO_TURN = array("i", [NO_TURN]).tobytes()


class OpenSegment:
    """A segment that grows: the same five arrays, and the ids as JSON text where prompts come so."""

    # Changed by extend(), add_context() and add_completion(): all of it.
    __slots__ = ("logprobs", "policy_mask", "text", "token_ids", "turn_ids", "versions")

    def __init__(self) -> None:
        self.text = bytearray()
        """Ids separated by commas; empty when a prompt came as integers."""
        self.token_ids = bytearray()
        self.policy_mask = bytearray()
        self.logprobs = bytearray()
        self.versions = bytearray()
        self.turn_ids = bytearray()

    @classmethod
    def begun_with(cls, prompt: Sequence[int]) -> "OpenSegment":
        """Return a segment that holds `prompt` as context. Raises MalformedReply when it holds what is no token id."""
        segment = cls()
        segment.add_context(int32_ids(prompt))
        if type(prompt) is JsonIds:
            segment.text += prompt.text[1:-1]
        return segment

    def __len__(self) -> int:
        return len(self.policy_mask)

    def starts_text(self, prompt: JsonIds) -> bool:
        """Whether the text of `prompt` starts with this segment's; False too when this segment has no text."""
        return bool(self.text) and prompt.text_after(self.text) is not None

    def extend(self, prompt: Sequence[int]) -> bool:
        """Append what `prompt` has beyond this segment, as context; False, and nothing, when it does not start so."""
        if self.text and type(prompt) is JsonIds and (rest := prompt.text_after(self.text)) is not None:
            new = parse_ids(rest).tobytes()
            if new:
                self.text += b","
                self.text += rest[1:-1]
            self.add_context(new)
            return True
        ids = int32_ids(prompt)
        if not ids.startswith(self.token_ids):
            return False
        self.text.clear()
        self.add_context(ids[len(self.token_ids) :])
        return True

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


def int32_ids(ids: Sequence[int]) -> bytes:
    """Return ids as the record stores them. Raises MalformedReply when JSON text holds what is no token id."""
    return (ids.ids() if type(ids) is JsonIds else array("i", ids)).tobytes()


def what_is_missing(completion: Completion) -> str:
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
