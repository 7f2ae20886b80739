"""A bounded memory of answers."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from turngate.runtime.errors import ConfigError

__all__ = ["LRU"]

V = TypeVar("V")


class LRU(Generic[V]):
    """A bounded memory: the least recently used entry goes when it is full; size 0 remembers nothing."""

    def __init__(self, size: int) -> None:
        if size < 0:
            raise ConfigError(f"cache_size must be 0 or more: got {size}")
        self._size = size
        self._entries: OrderedDict[Hashable, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> V | None:
        """Return what was put, if it is still there."""
        if (value := self._entries.get(key)) is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: Hashable, value: V) -> None:
        """Remember."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self._size:
            self._entries.popitem(last=False)
