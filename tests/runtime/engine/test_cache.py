import torch

from turngate.runtime.engine.cache import BLOCK, Entry, KVRows, PrefixCache, block_keys

A = list(range(100, 100 + 5 * BLOCK))


def added(cache: PrefixCache, ids: list[int], row: int = 0) -> Entry:
    entry = Entry(ids, row)
    cache.add(entry, block_keys(ids))
    return entry


def stored(cache: PrefixCache, ids: list[int]) -> Entry:
    entry = added(cache, ids)
    cache.store(entry, torch.zeros(1, len(ids), 2))
    return entry


def find(cache: PrefixCache, ids: list[int]) -> tuple[Entry | None, int]:
    return cache.find(ids, block_keys(ids))


def test_block_keys_cover_whole_blocks_and_can_be_continued():
    keys = block_keys(A)
    assert len(keys) == 5
    assert block_keys(A[: 2 * BLOCK + 3]) == keys[:2]
    assert block_keys(A, keys[:2]) == keys
    assert block_keys([0, *A[1:]])[-1] != keys[-1]


def test_the_longest_prefix_is_found_token_by_token_beyond_the_block():
    cache = PrefixCache(1000)
    short, long = added(cache, A[: 2 * BLOCK]), added(cache, A[: 3 * BLOCK + 5])
    assert find(cache, A) == (long, 3 * BLOCK + 5)
    assert find(cache, [*A[: 2 * BLOCK + 2], 1, 2, 3]) == (long, 2 * BLOCK + 2)
    assert find(cache, A[: BLOCK - 1]) == (None, 0)
    assert find(cache, [7, *A[1:]]) == (None, 0)
    cache.drop(long)
    assert find(cache, A) == (short, 2 * BLOCK)


def test_dropping_one_of_two_entries_keeps_their_common_prefix_findable():
    cache = PrefixCache(1000)
    first, second = stored(cache, [*A, 1]), stored(cache, [*A, 2])
    cache.drop(second)
    assert find(cache, A) == (first, len(A))


def test_a_later_turn_replaces_the_turns_before_it():
    cache = PrefixCache(1000)
    stored(cache, A[: 2 * BLOCK])
    sibling = stored(cache, [*A[:BLOCK], *[9] * BLOCK])
    later = stored(cache, A)
    assert len(cache) == 2
    assert cache.tokens == len(A) + 2 * BLOCK
    assert find(cache, A[: 2 * BLOCK]) == (later, 2 * BLOCK)
    assert find(cache, sibling.ids) == (sibling, 2 * BLOCK)


def test_storing_looks_at_what_ends_inside_not_at_every_sibling():
    cache = PrefixCache(10_000)
    siblings = [stored(cache, [*A, *[i] * BLOCK]) for i in range(20)]
    later = added(cache, [*siblings[3].ids, 7])
    cache._index.clear()  # it names all siblings under each of their shared blocks
    assert list(cache._redundant(later)) == [siblings[3]]


def test_nothing_is_left_in_the_indices_of_what_was_dropped():
    cache = PrefixCache(1000)
    entries = [stored(cache, ids) for ids in (A[: BLOCK - 1], A[: 2 * BLOCK], A, [*A, 1], [0, *A])]
    assert len(cache) == 3
    for entry in entries:
        cache.drop(entry)
    assert (cache._index, cache._ends, cache._stored, cache.tokens) == ({}, {}, {}, 0)


def test_the_least_recently_used_entry_leaves_first():
    cache = PrefixCache(3 * 2 * BLOCK)
    rows = [[i] * (2 * BLOCK) for i in range(4)]
    for row in rows[:3]:
        stored(cache, row)
    find(cache, rows[0])
    stored(cache, rows[3])
    assert [find(cache, row)[1] for row in rows] == [2 * BLOCK, 0, 2 * BLOCK, 2 * BLOCK]
    assert cache.tokens == 3 * 2 * BLOCK
    assert repr(cache) == "<PrefixCache 3 entries, 48 of 48 tokens>"


def test_an_entry_larger_than_the_bound_is_not_kept():
    cache = PrefixCache(BLOCK)
    stored(cache, A)
    assert (len(cache), cache.tokens, find(cache, A)) == (0, 0, (None, 0))


def test_clearing_forgets_running_and_stored_entries():
    cache = PrefixCache(1000)
    running = added(cache, A)
    stored(cache, A[: 2 * BLOCK])
    cache.clear()
    assert (len(cache), cache.tokens, find(cache, A)) == (0, 0, (None, 0))
    cache.add(running, block_keys(A))
    assert find(cache, A) == (running, len(A))


def test_a_cache_of_no_tokens_finds_nothing():
    cache = PrefixCache(0)
    added(cache, A)
    assert find(cache, A) == (None, 0)


def test_an_equal_key_of_other_tokens_is_not_taken_for_a_match():
    cache = PrefixCache(1000)
    added(cache, A)
    assert cache.find([1] * BLOCK, block_keys(A)[:1]) == (None, 0)


def test_rows_move_export_and_restore_their_first_tokens():
    rows = KVRows(2, 3, 16, 4, torch.device("cpu"))
    rows.kv[:, 0] = torch.randn(2, 16, 8)
    rows.previous[:, 0] = 1
    rows.move(0, 2, 5)
    assert torch.equal(rows.kv[:, 2, :5], rows.kv[:, 0, :5])
    assert rows.kv[:, 2, 5:].abs().max() == 0
    assert rows.previous[:, 2].eq(1).all()
    rows.restore(1, rows.export(0, 8), 6)
    assert torch.equal(rows.kv[:, 1, :6], rows.kv[:, 0, :6])
    assert rows.kv[:, 1, 6:].abs().max() == 0
