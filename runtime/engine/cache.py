"""Keys and values of running sequences, and of finished ones whose prefix may come back.

`KVRows` holds one row per running sequence in one tensor. `PrefixCache` remembers which token prefixes have
computed keys and values, in a running row or stored after the sequence finished, and finds the longest one a new
prompt starts with. Entries belong to one set of weights: the owner clears the cache when the weights change.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["BLOCK", "Entry", "KVRows", "PrefixCache", "block_keys"]

BLOCK = 8
"""Tokens per index block. Prefixes are found by whole blocks and then matched token by token."""
_CANDIDATES = 8
"""Entries with equal leading blocks that are compared token by token; siblings of one group are the common case."""


class KVRows:
    """Keys and values, token-major: `kv[layer, row, position]` is the key followed by the value.

    The last row is trash: writes that must go nowhere go there. `previous[layer, row]` is the unsmeared, unrotated
    key of the row's last token, which the next key needs.
    """

    def __init__(self, layers: int, rows: int, length: int, head_dim: int, device: torch.device) -> None:
        self.kv = torch.zeros(layers, rows + 1, length, 2 * head_dim, device=device)
        self.previous = torch.zeros(layers, rows + 1, head_dim, device=device)
        self.flat = self.kv.view(layers, -1, 2 * head_dim)
        self.rows, self.length = rows, length
        self.trash_slot = rows * length

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a row's first tokens and its state over another row."""
        self.kv[:, target, :length] = self.kv[:, source, :length]
        self.previous[:, target] = self.previous[:, source]

    def export(self, row: int, length: int) -> Tensor:
        """Return a copy of a row's first tokens, shape (layers, length, 2 * head_dim)."""
        return self.kv[:, row, :length].clone()

    def restore(self, row: int, stored: Tensor, length: int) -> None:
        """Write the first tokens of an exported row into a row."""
        self.kv[:, row, :length] = stored[:, :length]


class Entry:
    """One token sequence with computed keys and values: in `row` while it runs, in `stored` afterwards."""

    __slots__ = ("ids", "keys", "row", "stored")

    def __init__(self, ids: Sequence[int], row: int) -> None:
        self.ids = ids
        self.keys: list[int] = []
        self.row = row
        self.stored: Tensor | None = None

    def __repr__(self) -> str:
        return f"<Entry {len(self.ids)} tokens, {'stored' if self.stored is not None else f'row {self.row}'}>"


class PrefixCache:
    """Finds computed prefixes.

    Mutable state: the block index over all entries; the stored entries in order of last use, and the same by their last
    block key.
    """

    def __init__(self, max_tokens: int) -> None:
        """Keep at most `max_tokens` tokens of finished sequences; 0 stores none and finds none."""
        self.max_tokens = max_tokens
        self.tokens = 0
        self._index: dict[int, dict[Entry, None]] = {}
        self._stored: dict[Entry, None] = {}
        self._ends: dict[int, dict[Entry, None]] = {}

    def __len__(self) -> int:
        """Number of finished sequences held."""
        return len(self._stored)

    def __repr__(self) -> str:
        return f"<PrefixCache {len(self)} entries, {self.tokens} of {self.max_tokens} tokens>"

    def find(self, ids: Sequence[int], keys: Sequence[int]) -> tuple[Entry | None, int]:
        """Return the entry that shares the longest prefix with `ids`, and its length in tokens; (None, 0) if none.

        `keys` are the block keys of `ids`.
        """
        for depth in range(len(keys), 0, -1):
            candidates = self._index.get(keys[depth - 1])
            if not candidates:
                continue
            recent = zip(reversed(candidates), range(_CANDIDATES), strict=False)
            best, length = max(((e, _common_prefix(e.ids, ids, depth)) for e, _ in recent), key=lambda found: found[1])
            if length >= depth * BLOCK:
                self._touch(best)
                return best, length
        return None, 0

    def add(self, entry: Entry, keys: Sequence[int]) -> None:
        """Make a running sequence findable under its block keys; again after it grew, with all its keys."""
        if not self.max_tokens:
            return
        for key in keys[len(entry.keys) :]:
            self._index.setdefault(key, {})[entry] = None
        entry.keys = list(keys)

    def store(self, entry: Entry, stored: Tensor) -> None:
        """Keep a finished sequence; drops what it makes redundant, then the least recently used beyond the bound."""
        for older in list(self._redundant(entry)):
            self.drop(older)
        entry.stored = stored
        self._stored[entry] = None
        if entry.keys:
            self._ends.setdefault(entry.keys[-1], {})[entry] = None
        self.tokens += len(entry.ids)
        while self.tokens > self.max_tokens:
            self.drop(next(iter(self._stored)))

    def drop(self, entry: Entry) -> None:
        """Forget an entry, running or stored."""
        for key in entry.keys:
            _discard(self._index, key, entry)
        if entry in self._stored:
            if entry.keys:
                _discard(self._ends, entry.keys[-1], entry)
            del self._stored[entry]
            self.tokens -= len(entry.ids)
            entry.stored = None
        entry.keys = []

    def clear(self) -> None:
        """Forget everything: the weights changed."""
        for entry in list(self._stored):
            self.drop(entry)
        for owners in self._index.values():
            for entry in owners:
                entry.keys = []
        self._index.clear()

    def _touch(self, entry: Entry) -> None:
        if entry in self._stored:
            del self._stored[entry]
            self._stored[entry] = None

    def _redundant(self, entry: Entry) -> Iterator[Entry]:
        """Yield stored entries that are prefixes of `entry`: the turns before it."""
        # Only entries that end in a block of this one: hundreds of siblings may share the leading blocks.
        for depth, key in enumerate(entry.keys, 1):
            for other in self._ends.get(key, ()):
                is_prefix = len(other.keys) == depth and _common_prefix(other.ids, entry.ids, depth) == len(other.ids)
                if is_prefix and other is not entry:
                    yield other


def block_keys(ids: Sequence[int], known: Sequence[int] = ()) -> list[int]:
    """Return one key per whole block of `ids`, each covering everything up to it; `known` are leading keys."""
    keys = list(known)
    previous = keys[-1] if keys else 0
    for start in range(len(keys) * BLOCK, len(ids) - BLOCK + 1, BLOCK):
        previous = hash((previous, *ids[start : start + BLOCK]))
        keys.append(previous)
    return keys


def _discard(index: dict[int, dict[Entry, None]], key: int, entry: Entry) -> None:
    owners = index.get(key, {})
    owners.pop(entry, None)
    if not owners:
        index.pop(key, None)


def _common_prefix(a: Sequence[int], b: Sequence[int], blocks: int) -> int:
    """Return the length of the common prefix; 0 when the leading blocks differ after all (a hash collision)."""
    length = blocks * BLOCK
    if a[:length] != b[:length]:
        return 0
    top = min(len(a), len(b))
    while length < top and a[length] == b[length]:
        length += 1
    return length
