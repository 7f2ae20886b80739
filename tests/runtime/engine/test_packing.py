import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turngate.runtime.engine.packing import block_rows, pack
from turngate.runtime.errors import ConfigError

LENGTHS = st.lists(st.integers(1, 120), min_size=1, max_size=40)


def rows_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 1000) for _ in range(length)] for length in lengths]


@given(LENGTHS)
def test_every_token_but_the_first_is_scored_in_order_without_a_mask(lengths):
    rows = rows_of(lengths)
    packed = pack(rows)
    assert packed.targets_M.tolist() == [token for row in rows for token in row[1:]]
    assert packed.ids_N[packed.asked_M].tolist() == [token for row in rows for token in row[:-1]]


@given(LENGTHS, st.integers(0, 9))
def test_masked_tokens_are_scored_in_order_and_found_by_the_last_layer(lengths, seed):
    rows, rng = rows_of(lengths), random.Random(seed)
    masks = [bytes([0, *(rng.random() < 0.2 for _ in row[1:])]) for row in rows]
    packed = pack(rows, masks)
    scored = [(row[s], s) for row, mask in zip(rows, masks, strict=True) for s in range(len(row)) if mask[s]]
    assert packed.targets_M.tolist() == [token for token, _ in scored]
    if not scored:
        return
    assert packed.queries is not None
    sources = torch.cat([block.source.flatten() for block in packed.queries.blocks])
    positions = torch.cat([block.positions.flatten() for block in packed.queries.blocks])
    assert sources[packed.queries.index_M].tolist() == list(range(len(scored)))
    assert positions[packed.queries.index_M].tolist() == [position - 1 for _, position in scored]


@given(LENGTHS)
def test_blocks_hold_every_sequence_once_with_little_padding(lengths):
    lengths = sorted(lengths, reverse=True)
    blocks = block_rows(lengths)
    assert sum(rows for rows, _ in blocks) == len(lengths)
    first = 0
    for rows, length in blocks:
        members = lengths[first : first + rows]
        assert length == members[0]
        # Blocks of 512 tokens and more waste at most 6 %.
        assert rows * length < 512 + length or sum(members) >= 0.94 * rows * length
        first += rows


def test_a_dense_mask_lets_the_last_layer_run_everywhere():
    assert pack([[1, 2, 3, 4]]).queries is None
    assert pack([[1, 2, 3, 4]], [b"\0\0\0\1"]).queries is not None


def test_nothing_to_score_is_an_empty_batch():
    packed = pack([[1, 2]], [[0, 0]])
    assert (packed.targets_M.tolist(), packed.queries) == ([], None)


@pytest.mark.parametrize(
    ("rows", "masks", "message"),
    [
        ([], None, "must not be empty"),
        ([[1], []], None, "must not be empty"),
        ([[1, 2]], [[0]], r"must align with ids: expected 2, got 1 \(sequence 0\)"),
        ([[1], [1, 2]], [[0], [1, 1]], r"leave out the first token.*\(sequence 1\)"),
    ],
)
def test_what_cannot_be_packed_is_refused(rows, masks, message):
    with pytest.raises(ConfigError, match=message):
        pack(rows, masks)
