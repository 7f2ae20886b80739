"""A canary: a short prompt whose log-probs tell whether a server really serves the weights it was given.

The learner writes it into the metadata of every weights file. A server that answers 200 and keeps old weights, a tied
head above all, gives itself away. Reading it needs neither torch nor safetensors: a file's header is JSON.
"""

import struct
from pathlib import Path

import msgspec

from turngate.runtime.errors import PublishError, RecordError

__all__ = ["CANARY_KEY", "Canary", "canary_metadata", "read_canary", "read_metadata"]

CANARY_KEY = "turngate.canary"
"""Name of the canary in the metadata of a safetensors file."""

_MAX_HEADER_BYTES = 100_000_000
"""What the safetensors format allows; more is another kind of file."""


class Canary(msgspec.Struct, frozen=True):
    """A sequence of ids and the log-probs of all but the first, at temperature 1 over the whole vocabulary."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """`logprobs[i]` is that of `token_ids[i + 1]` given all ids before it."""
    dtype: str = "float32"
    """What the learner computed them in: a server of another precision agrees less closely."""

    def __post_init__(self) -> None:
        if len(self.token_ids) < 2 or len(self.logprobs) != len(self.token_ids) - 1:
            raise RecordError(
                "a canary must have one log-prob for every id but the first: expected "
                f"{max(len(self.token_ids) - 1, 1)}, got {len(self.logprobs)}"
            )


class _Header(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict[str, str])


def canary_metadata(canary: Canary) -> dict[str, str]:
    """Return the canary as metadata of a safetensors file."""
    return {CANARY_KEY: msgspec.json.encode(canary).decode()}


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file from its header alone; empty when it has none.

    Raises: PublishError: the file cannot be read or is no safetensors file.
    """
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            return msgspec.json.decode(file.read(size), type=_Header).metadata
    except (OSError, ValueError, struct.error, msgspec.MsgspecError) as error:
        raise PublishError(f"weights must be a whole safetensors file: {error} ({path}); publish it again") from error


def read_canary(path: Path) -> Canary | None:
    """Return the canary of a weights file; None when it carries none.

    Raises: PublishError: the file is no safetensors file, or its canary is garbled.
    """
    text = read_metadata(path).get(CANARY_KEY)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=Canary)
    except (msgspec.MsgspecError, RecordError) as error:
        raise PublishError(f"the canary of the weights must be readable: {error} ({path})") from error
