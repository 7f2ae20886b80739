"""A lossless word-level tokenizer, trained locally and pinned in a file.

Texts of tool-using agents repeat a small set of words, so one token per word keeps episodes short and makes
copying from the context easy for a small model: `red`, ` red` and `"red"` all hold the same token.

    text   search["red backpack"] $69
    tokens search · [" · red · backpack · "] $ · 6 · 9

A text is cut into words and identifiers (`item_3`), single digits, and runs of everything else. Two neighbouring
tokens that are both words or digits are read with one space between them, unless both are digits; whatever differs
from that rule is written out with an explicit space or joiner token. Pieces outside the vocabulary become bytes.
So `decode(encode(text)) == text` for every text, and every sequence of ids decodes to something.
"""

import codecs
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from turngate.runtime.errors import ConfigError
from turngate.runtime.files import write_atomically

__all__ = ["SPECIAL_TOKENS", "StreamDecoder", "Tokenizer"]

SPECIAL_TOKENS = (
    "<|pad|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|call|>",
)
"""Tokens of the chat template. No text ever encodes to them, so users cannot forge a role."""

_BYTES = 256
_SPACE = ord(" ")
_JOINER = _BYTES
_FIRST_SPECIAL = _JOINER + 1
_FIRST_PIECE = _FIRST_SPECIAL + len(SPECIAL_TOKENS)

# What a token looks like to its neighbours. Falsy: it never asks for a space.
_GLUE, _WORD, _DIGIT = 0, 1, 2

# Words and identifiers, ASCII digits one by one, runs of the rest. The last branch takes non-ASCII digits.
_PIECE = re.compile(r"[^\W\d_]+(?:_[^\W_]+)*|[0-9]|[\W_]+|.", re.DOTALL)
# The same without identifiers: how an identifier outside the vocabulary is cut further.
_FINE_PIECE = re.compile(r"[^\W\d_]+|[0-9]|[\W_]+|.", re.DOTALL)
_WORD_PIECE = re.compile(r"[^\W\d_]+(?:_[^\W_]+)*")
_SEPARATOR_PIECE = re.compile(r"[\W_]+")

_CACHED_TEXTS = 8192
_CACHED_CHARS = 8192
"""Whole texts are remembered because an agent's history is sent again every turn; huge ones are not."""


class _File(msgspec.Struct, frozen=True, tag_field="format", tag="turngate-tokenizer-1"):
    special: list[str]
    pieces: list[str]


class Tokenizer:
    """Maps text to ids and back. Immutable; ids 0-255 are bytes, then a joiner, the special tokens, the pieces."""

    def __init__(self, pieces: Sequence[str]) -> None:
        """Build from the learned pieces, in id order.

        Raises: ConfigError: a piece is repeated or is not one word or one separator run.
        """
        _check_pieces(pieces)
        self.pieces = tuple(pieces)
        names = [*map(str.encode, SPECIAL_TOKENS)]
        self._bytes = [*(bytes([i]) for i in range(_BYTES)), b"", *names, *map(str.encode, pieces)]
        self._kinds = bytearray(len(self._bytes))
        self._kinds[ord("0") : ord("9") + 1] = bytes([_DIGIT]) * 10
        for token, piece in enumerate(pieces, _FIRST_PIECE):
            self._kinds[token] = _WORD if _WORD_PIECE.match(piece) else _GLUE
        self._ids: dict[str, tuple[int, ...]] = {chr(i): (i,) for i in range(128) if not chr(i).isalpha()}
        self._ids.update((piece, (token,)) for token, piece in enumerate(pieces, _FIRST_PIECE))
        self._longest_separator = max((len(p) for p in self._ids if _SEPARATOR_PIECE.fullmatch(p)), default=1)
        self._specials = {name: _FIRST_SPECIAL + i for i, name in enumerate(SPECIAL_TOKENS)}
        self._encode_cached = lru_cache(maxsize=_CACHED_TEXTS)(self._encode)

    @classmethod
    def train(cls, texts: Iterable[str], max_vocab: int = 2048, *, min_count: int = 1) -> "Tokenizer":
        """Choose the pieces that save the most bytes over `texts`; ties are broken by the piece itself.

        Raises: ConfigError: max_vocab leaves no room for the bytes and special tokens.
        """
        if max_vocab < _FIRST_PIECE:
            raise ConfigError(f"max_vocab must be at least {_FIRST_PIECE}: got {max_vocab}; bytes and roles need that")
        counts = Counter(chain.from_iterable(map(_PIECE.findall, texts)))
        saved = {
            piece: count * (len(piece.encode()) - (0 if _WORD_PIECE.match(piece) else 1))
            for piece, count in counts.items()
            if count >= min_count and _is_piece(piece)
        }
        best = sorted((piece for piece in saved if saved[piece] > 0), key=lambda piece: (-saved[piece], piece))
        return cls(best[: max_vocab - _FIRST_PIECE])

    def __len__(self) -> int:
        """Vocabulary size."""
        return len(self._bytes)

    def __repr__(self) -> str:
        return f"<Tokenizer {len(self)} tokens, {len(self.pieces)} pieces>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and other.pieces == self.pieces

    def __hash__(self) -> int:
        return hash(self.pieces)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self.pieces,)

    @property
    def end(self) -> int:
        """Id of the end-of-turn token, the model's stop token."""
        return self._specials["<|end|>"]

    @property
    def pad(self) -> int:
        """Id that fills unused positions."""
        return self._specials["<|pad|>"]

    def special(self, name: str) -> int:
        """Id of a special token by its name, such as `<|user|>`.

        Raises: KeyError: there is no such token.
        """
        return self._specials[name]

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; never a special token.

        Raises: ConfigError: the text holds a lone surrogate, which has no bytes.
        """
        return list(self._encode_cached(text) if len(text) <= _CACHED_CHARS else self._encode(text))

    def count(self, text: str) -> int:
        """Return the number of tokens of `text`."""
        return len(self._encode_cached(text) if len(text) <= _CACHED_CHARS else self._encode(text))

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of any ids; bytes that are not UTF-8 become U+FFFD.

        Special tokens are left out, or written by name with `skip_special=False`; either way no space is implied
        next to them.

        Raises: ConfigError: an id is outside the vocabulary.
        """
        return b"".join(self.decode_pieces(ids, skip_special=skip_special)).decode("utf-8", "replace")

    def decode_pieces(self, ids: Iterable[int], *, skip_special: bool = True) -> list[bytes]:
        """Return one byte string per id, with the implied space in front, that concatenate to the text."""
        decoder = StreamDecoder(self, skip_special=skip_special)
        return [decoder.push_bytes(token) for token in ids]

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of one token on its own, without implied spaces; a special token gives its name.

        Raises: ConfigError: the id is outside the vocabulary.
        """
        self._check_id(token)
        return self._bytes[token]

    def is_special(self, token: int) -> bool:
        """True for tokens of the chat template."""
        return _FIRST_SPECIAL <= token < _FIRST_PIECE

    def save(self, path: Path) -> None:
        """Write the vocabulary to a JSON file, whole or not at all."""
        data = msgspec.json.encode(_File(list(SPECIAL_TOKENS), list(self.pieces)))
        write_atomically(path, msgspec.json.format(data, indent=1))

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read a vocabulary written by `save`; `path` is the file or the model folder that holds it.

        Raises: ConfigError: the file is missing, is not a tokenizer, or was made for other special tokens.
        """
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            file = msgspec.json.decode(path.read_bytes(), type=_File)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"tokenizer must be a readable tokenizer.json: {error} ({path})") from error
        if tuple(file.special) != SPECIAL_TOKENS:
            raise ConfigError(f"special tokens must be {SPECIAL_TOKENS}: got {file.special} ({path}); train it again")
        return cls(file.pieces)

    def _encode(self, text: str) -> tuple[int, ...]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            where = f"lone surrogate {text[error.start]!r} at index {error.start}"
            raise ConfigError(f"text must be valid Unicode: got a {where}; replace it before encoding") from None
        return tuple(self._encode_pieces(_PIECE.findall(text)))

    def _encode_pieces(self, pieces: Iterable[str]) -> list[int]:
        """Return the ids of consecutive pieces, with explicit spaces and joiners where the implied space is wrong."""
        out: list[int] = []
        kinds, known = self._kinds, self._ids
        previous, has_space = _GLUE, False
        for piece in pieces:
            if piece == " ":
                has_space = True
                continue
            ids = known.get(piece) or self._encode_unknown(piece)
            kind = kinds[ids[0]]
            if previous and kind:
                implied = previous == _WORD or kind == _WORD
                if has_space != implied:
                    out.append(_SPACE if has_space else _JOINER)
            elif has_space:
                out.append(_SPACE)
            out += ids
            previous, has_space = kinds[ids[-1]], False
        if has_space:
            out.append(_SPACE)
        return out

    def _encode_unknown(self, piece: str) -> Sequence[int]:
        """Return the ids of a piece outside the vocabulary: smaller known pieces, else bytes."""
        if _SEPARATOR_PIECE.match(piece):
            return self._encode_separators(piece)
        parts = _FINE_PIECE.findall(piece)
        return self._encode_pieces(parts) if len(parts) > 1 else tuple(piece.encode())

    def _encode_separators(self, run: str) -> list[int]:
        """Return the ids of a separator run, longest known prefix first."""
        out: list[int] = []
        while run:
            for length in range(min(len(run), self._longest_separator), 0, -1):
                if ids := self._ids.get(run[:length]):
                    break
            else:
                length, ids = 1, tuple(run[0].encode())
            out += ids
            run = run[length:]
        return out

    def _check_id(self, token: int) -> None:
        if not 0 <= token < len(self._bytes):
            raise ConfigError(f"token ids must lie in [0, {len(self._bytes)}): got {token}; use this model's tokenizer")


class StreamDecoder:
    """Decodes ids one by one: the texts returned by `push` and `finish` concatenate to `decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._previous = _GLUE
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that `token` completes; empty while a multi-byte character is unfinished."""
        return self._utf8.decode(self.push_bytes(token))

    def push_bytes(self, token: int) -> bytes:
        """Return the bytes that `token` adds, the implied space included."""
        tokenizer = self._tokenizer
        tokenizer._check_id(token)
        kind = tokenizer._kinds[token]
        has_space = self._previous and kind and (self._previous == _WORD or kind == _WORD)
        self._previous = kind
        if self._skip_special and tokenizer.is_special(token):
            return b""
        return b" " + tokenizer._bytes[token] if has_space else tokenizer._bytes[token]

    def finish(self) -> str:
        """Return what an unfinished character at the end decodes to."""
        return self._utf8.decode(b"", final=True)


def _is_piece(piece: str) -> bool:
    """True for what may be learned: words, and separator runs of two bytes or more that are not already a token."""
    try:
        size = len(piece.encode())
    except UnicodeEncodeError:
        return False
    return bool(_WORD_PIECE.fullmatch(piece) or (size > 1 and _SEPARATOR_PIECE.fullmatch(piece)))


def _check_pieces(pieces: Sequence[str]) -> None:
    for piece in pieces:
        if not _is_piece(piece):
            raise ConfigError(f"pieces must be words or separator runs of two or more bytes: got {piece!r}; retrain")
    if len(set(pieces)) != len(pieces):
        repeated = next(piece for piece, count in Counter(pieces).items() if count > 1)
        raise ConfigError(f"pieces must be distinct: got {repeated!r} twice; retrain the tokenizer")
