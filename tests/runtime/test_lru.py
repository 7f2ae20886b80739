"""A bounded memory."""

import pytest

from turngate.runtime.errors import ConfigError
from turngate.runtime.lru import LRU


def test_memory_forgets_what_was_used_longest_ago() -> None:
    memory: LRU[int] = LRU(2)
    memory.put("a", 1)
    memory.put("b", 2)
    assert memory.get("a") == 1
    memory.put("c", 3)
    assert (memory.get("a"), memory.get("b"), memory.get("c"), len(memory)) == (1, None, 3, 2)


def test_memory_of_size_zero_remembers_nothing() -> None:
    memory: LRU[int] = LRU(0)
    memory.put("a", 1)
    assert (memory.get("a"), len(memory)) == (None, 0)


def test_memory_of_negative_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="cache_size must be 0 or more"):
        LRU(-1)
