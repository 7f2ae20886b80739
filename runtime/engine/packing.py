"""Sequences of different lengths side by side, with little padding: what the model's training pass reads.

Sequences are sorted by length and cut into blocks of similar lengths; a block is a rectangle (rows, length) padded
on the right, and all blocks lie one after another in one flat axis N. Causal attention never looks right, so the
padding influences nothing. Linear layers run on the whole flat axis, attention block by block.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from turngate.runtime.errors import ConfigError

__all__ = ["Packed", "Queries", "QueryBlock", "block_rows", "pack"]

_MAX_WASTE = 0.06
"""Share of padding a block may reach before a new one is opened: a block costs about as much as 6 % of its work."""
_MIN_BLOCK_TOKENS = 512
"""Below this a block is too small to be worth its own attention call, whatever its padding."""
_QUERY_SHARE = 0.7
"""With fewer asked positions than this share of N the last layer runs on the asked ones alone."""


Indices: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"


class Ints(Protocol):
    """Anything numpy reads as integers: a list, bytes, a memoryview, an array."""

    def __len__(self) -> int: ...


class QueryBlock(NamedTuple):
    """The asked positions of one block as a rectangle (rows, queries), padded by repeating index 0."""

    source: torch.Tensor
    """(rows, queries) index into the M asked positions."""
    positions: torch.Tensor
    """(rows, queries) position of each query in its own sequence."""


class Queries(NamedTuple):
    """The asked positions of all blocks."""

    blocks: tuple[QueryBlock, ...]
    """One per block of the batch."""
    index_M: torch.Tensor
    """Flat index of each scored token into the concatenated rectangles."""


class Packed(NamedTuple):
    """A packed batch. M counts the tokens to score, in the order of the sequences given and of their tokens."""

    ids_N: torch.Tensor
    """int64 ids of all blocks, padding included."""
    blocks: tuple[tuple[int, int], ...]
    """(rows, length) of each block, in the order of N."""
    asked_M: torch.Tensor
    """Flat index into N of the position that predicts each scored token: the one before it."""
    targets_M: torch.Tensor
    """Id of each scored token."""
    queries: Queries | None
    """Where few positions are asked: how the last layer finds them. None when it should run on all of N."""

    def to(self, device: torch.device | str) -> "Packed":
        """Return the batch on another device."""
        queries = self.queries and Queries(
            tuple(QueryBlock(*(t.to(device) for t in block)) for block in self.queries.blocks),
            self.queries.index_M.to(device),
        )
        asked_M, targets_M = self.asked_M.to(device), self.targets_M.to(device)
        return Packed(self.ids_N.to(device), self.blocks, asked_M, targets_M, queries)


def pack(ids: Sequence[Ints], masks: Sequence[Ints | None] | None = None, *, pad: int = 0) -> Packed:
    """Pack sequences of ids; `masks[i][s]` is true where token s of sequence i is to be scored.

    A missing mask scores every token but the first, which nothing predicts.

    Raises: ConfigError: a sequence is empty, a mask has another length, or a mask asks for a first token.
    """
    lengths = np.array([len(row) for row in ids], dtype=np.int64)
    if not len(lengths) or lengths.min() < 1:
        raise ConfigError("sequences must not be empty: got none or one of length 0; drop them before packing")
    scored = [_scored_tokens(i, len(row), None if masks is None else masks[i]) for i, row in enumerate(ids)]
    order = np.argsort(-lengths, kind="stable")
    blocks = block_rows(lengths[order].tolist())
    flat = np.full(sum(rows * length for rows, length in blocks), pad, dtype=np.int64)
    starts = np.empty(len(ids), dtype=np.int64)
    row_starts = np.concatenate([np.full(rows, length, dtype=np.int64) for rows, length in blocks]).cumsum()
    starts[order] = row_starts - np.repeat([length for _, length in blocks], [rows for rows, _ in blocks])
    for row, start in zip(ids, starts.tolist(), strict=True):
        flat[start : start + len(row)] = np.asarray(row)
    asked = np.concatenate([tokens + (start - 1) for tokens, start in zip(scored, starts.tolist(), strict=True)])
    queries = _queries(scored, order, blocks) if 0 < len(asked) < _QUERY_SHARE * len(flat) else None
    ids_N, asked_M, targets_M = torch.from_numpy(flat), torch.from_numpy(asked), torch.from_numpy(flat[asked + 1])
    return Packed(ids_N, blocks, asked_M, targets_M, queries)


def block_rows(lengths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Cut lengths, sorted from long to short, into blocks (rows, length) with little padding."""
    blocks: list[tuple[int, int]] = []
    rows, longest, used = 0, 0, 0
    for length in lengths:
        if rows and rows * longest >= _MIN_BLOCK_TOKENS and used + length < (1 - _MAX_WASTE) * (rows + 1) * longest:
            blocks.append((rows, longest))
            rows, used = 0, 0
        if not rows:
            longest = length
        rows, used = rows + 1, used + length
    return (*blocks, (rows, longest)) if rows else tuple(blocks)


def _scored_tokens(index: int, length: int, mask: Ints | None) -> Indices:
    if mask is None:
        return np.arange(1, length, dtype=np.int64)
    if len(mask) != length:
        raise ConfigError(f"masks must align with ids: expected {length}, got {len(mask)} (sequence {index})")
    flags = np.frombuffer(mask, dtype=np.uint8) if isinstance(mask, bytes) else np.asarray(mask)
    tokens = np.flatnonzero(flags).astype(np.int64)
    if len(tokens) and tokens[0] == 0:
        raise ConfigError(
            f"masks must leave out the first token, which nothing predicts: got it set (sequence {index})"
        )
    return tokens


def _queries(
    scored: Sequence[Indices],
    order: Indices,
    blocks: tuple[tuple[int, int], ...],
) -> Queries:
    """Lay the asked positions of each block out as a rectangle; says where each token went."""
    counts = np.array([len(tokens) for tokens in scored], dtype=np.int64)
    first_of = np.concatenate([[0], counts.cumsum()[:-1]])
    index = np.empty(int(counts.sum()), dtype=np.int64)
    made: list[QueryBlock] = []
    row, base = 0, 0
    for rows, _ in blocks:
        members = order[row : row + rows].tolist()
        width = max(1, int(counts[members].max()))
        source = np.zeros((rows, width), dtype=np.int64)
        positions = np.zeros((rows, width), dtype=np.int64)
        for line, member in enumerate(members):
            count, first = int(counts[member]), int(first_of[member])
            source[line, :count] = np.arange(first, first + count)
            positions[line, :count] = scored[member] - 1
            index[first : first + count] = base + line * width + np.arange(count)
        made.append(QueryBlock(torch.from_numpy(source), torch.from_numpy(positions)))
        row, base = row + rows, base + rows * width
    return Queries(tuple(made), torch.from_numpy(index))
