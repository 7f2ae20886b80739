"""How many threads torch computes with while small models train."""

import os
from collections.abc import Generator
from contextlib import contextmanager

import torch

__all__ = ["one_thread"]


@contextmanager
def one_thread() -> Generator[None]:
    """Compute on one thread, unless OMP_NUM_THREADS says otherwise; the number before is restored.

    More threads gain little on matrices of a hundred columns, and where anything else runs they wait for one another: a
    step of `fit_critic` beside two busy processes took twelve times the CPU time on two threads.
    """
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
