"""Token ids as the JSON text a server sent, so that a growing prompt is parsed by its new part only.

A server echoes the whole prompt with every turn. Its text starts, byte for byte, with the text of what was recorded
before; one comparison at C speed shows it, and only the rest becomes integers.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Annotated, overload

import msgspec

from turngate.runtime.errors import MalformedReply

__all__ = ["DECODE_ERRORS", "JsonIds", "TokenId", "ids_text", "parse_ids"]

DECODE_ERRORS = (msgspec.MsgspecError, RecursionError, ValueError)
"""What decoding the JSON of others may raise: beside errors of its own, text nested too deep or beyond UTF-8."""

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""Stored as int32."""

_decode_ids = msgspec.json.Decoder(list[TokenId]).decode
_encode = msgspec.json.Encoder().encode


def parse_ids(text: bytes, where: str = "prompt_token_ids") -> "array[int]":
    """Return the ids of a JSON array as int32. Raises MalformedReply naming the first that is none."""
    try:
        return array("i", _decode_ids(text))
    except DECODE_ERRORS as error:
        raise MalformedReply(f"token ids must be integers from 0 to 2**31 - 1: {error} ({where})") from error


def ids_text(ids: Sequence[int]) -> bytes:
    """Return ids as JsonIds writes them, without the brackets."""
    return _encode(ids if isinstance(ids, (list, tuple)) else list(ids))[1:-1]


class JsonIds(Sequence[int]):
    """A sequence of token ids that is decoded, and checked, when somebody looks at it."""

    __slots__ = ("_ids", "_length", "text")

    def __init__(self, text: bytes, length: int = -1) -> None:
        """Wrap the text of a JSON array; `length` is the number of ids where it is known, else they are counted.

        Raises: MalformedReply: it is no array.
        """
        if text[:1] != b"[":
            raise MalformedReply(f"prompt_token_ids must be an array: got {text[:40]!r}")
        self.text = text.translate(None, b" \n\r\t") if b" " in text else text
        self._ids: array[int] | None = None
        self._length = length

    def __repr__(self) -> str:
        return f"<JsonIds {len(self)}>"

    def ids(self) -> "array[int]":
        """Return the ids as int32. Raises MalformedReply."""
        if self._ids is None:
            self._ids = parse_ids(self.text)
        return self._ids

    def text_after(self, known: bytes | bytearray) -> bytes | None:
        """Return the JSON array that follows the ids written as `known`; None when the text does not start so."""
        if not self.text.startswith(known, 1):
            return None
        rest = self.text[len(known) + 1 :]
        if rest[:1] == b",":
            return b"[" + rest[1:]
        return b"[]" if rest == b"]" else None  # a digit: the last known id is the start of a longer number

    def __bool__(self) -> bool:
        return self.text != b"[]"

    def __len__(self) -> int:
        if self._length < 0:
            self._length = 0 if self.text == b"[]" else self.text.count(b",") + 1
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> "array[int]": ...
    def __getitem__(self, index: int | slice) -> "int | array[int]":
        return self.ids()[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids())
