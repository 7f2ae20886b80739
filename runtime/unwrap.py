"""Errors as their cause raised them: users of a coroutine need not know that it ran a task group."""

from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["single_errors"]


@contextmanager
def single_errors() -> Generator[None]:
    """Raise the first error of an exception group by itself, the others as notes on it; cancellation passes through."""
    try:
        yield
    except BaseExceptionGroup as group:
        first, *others = _leaves(group)
        for other in others[:4]:
            first.add_note(f"also: {type(other).__name__}: {other}")
        raise first from first.__cause__


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
