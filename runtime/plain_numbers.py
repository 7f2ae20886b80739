"""Settings as plain numbers: they go into requests and records, which are JSON and know no NumPy."""

import operator
from collections.abc import Iterable

import msgspec

from turngate.runtime.errors import ConfigError

__all__ = ["make_plain", "plain_float", "plain_int"]


def plain_float(name: str, value: object, where: str) -> float:
    """Return a setting as a float. Raises: ConfigError: it is no number."""
    try:
        if isinstance(value, (str, bytes)):  # they have a float to them, which nobody meant
            raise TypeError
        return float(value)  # type: ignore[arg-type]  # what has no __float__ is refused
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{name} must be a number: got {value!r:.80} ({where})") from None


def plain_int(name: str, value: object, where: str) -> int:
    """Return a setting as an int. Raises: ConfigError: it is no whole number."""
    try:
        return operator.index(value)  # type: ignore[arg-type]  # what has no __index__ is refused
    except TypeError:
        raise ConfigError(f"{name} must be a whole number: got {value!r:.80} ({where})") from None


def make_plain(settings: msgspec.Struct, *, floats: Iterable[str] = (), ints: Iterable[str] = ()) -> None:
    """Make the named fields of frozen settings plain, from their `__post_init__`. Raises: ConfigError: one is none."""
    where = type(settings).__name__
    for name in floats:
        if type(value := getattr(settings, name)) is not float:
            msgspec.structs.force_setattr(settings, name, plain_float(name, value, where))
    for name in ints:
        if type(value := getattr(settings, name)) is not int:
            msgspec.structs.force_setattr(settings, name, plain_int(name, value, where))
