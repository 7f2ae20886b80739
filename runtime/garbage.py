"""How often Python looks for garbage while thousands of agents live."""

import gc
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["rare_collections"]


@contextmanager
def rare_collections() -> Generator[None]:
    """Let the garbage collector run seldom: with thousands of live agents it took a quarter of the loop's CPU."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
