"""One model's keys and values for the rows of a batch, and the prefixes that are known from before."""

from collections.abc import Sequence

from turngate.runtime.engine.cache import Entry, PrefixCache, block_keys
from turngate.runtime.engine.incremental import Incremental, Span
from turngate.runtime.engine.model import PolicyModel

__all__ = ["CachedRows"]


class CachedRows:
    """Rows of a batch with a prefix cache over them.

    Mutable state: the key-value rows inside `engine`, and the cache. Whoever owns the rows says which sequence is in
    which, and holds each running sequence's entry.
    """

    def __init__(self, model: PolicyModel, rows: int, max_cached_tokens: int) -> None:
        self.engine = Incremental(model, rows)
        self.cache = PrefixCache(max_cached_tokens)

    def place(self, row: int, ids: Sequence[int], entry: Entry | None, length: int) -> Span:
        """Copy a known prefix of `length` tokens into `row` and return what is left of `ids` to run."""
        if entry is not None and entry.stored is not None:
            self.engine.cache.restore(row, entry.stored, length)
        elif entry is not None:
            self.engine.cache.move(entry.row, row, length)
        start = max(0, length - 1)
        return Span(row, start, length, ids[start:])

    def make_findable(self, row: int, ids: Sequence[int], keys: Sequence[int]) -> Entry:
        """Let others start from a running row, whose keys and values for `ids` are computed."""
        entry = Entry(ids, row)
        self.cache.add(entry, keys)
        return entry

    def keep(self, entry: Entry | None, row: int, ids: Sequence[int]) -> None:
        """Hand a leaving row's keys and values of `ids` to the cache."""
        if entry is None or not self.cache.max_tokens:
            return
        entry.ids = ids
        self.cache.add(entry, block_keys(entry.ids, entry.keys))
        self.cache.store(entry, self.engine.cache.export(row, len(entry.ids)))

    def move(self, source: int, target: int, length: int, entry: Entry | None) -> None:
        """Move a row's first tokens into a gap; its entry goes along."""
        self.engine.cache.move(source, target, length)
        if entry is not None:
            entry.row = target

    def renew(self) -> None:
        """The model has new weights: take them over and forget what the old ones computed for others."""
        self.engine.refresh()
        self.cache.clear()
