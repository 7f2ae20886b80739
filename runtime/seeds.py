"""Seeds: one root per run, from which every environment, sampler and shuffle derives its own stream."""

from hashlib import blake2b

from turngate.runtime.errors import ConfigError

__all__ = ["derive_seed", "require_seed"]

_SEED_MASK = (1 << 63) - 1
"""Seeds fit a signed 64-bit integer, the narrowest of what servers, numpy and torch accept."""


def derive_seed(root: int, purpose: str, *ids: int | str) -> int:
    """Return the seed of the stream named by (root, purpose, ids), uniform in [0, 2**63).

    Equal names give equal seeds in every process and Python version; different names give independent ones. Strings
    and integers are told apart: the ids `1` and `"1"` name two streams.
    """
    name = repr((root, purpose, *ids)).encode()
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little") & _SEED_MASK


def require_seed(seed: object, where: str) -> None:
    """Raise ConfigError unless a generator of torch can start from that; it would only say `Overflow`."""
    if type(seed) is not int or not -_SEED_MASK - 1 <= seed <= _SEED_MASK:
        raise ConfigError(f"seed must be a signed 64-bit integer: got {seed!r} ({where})")
