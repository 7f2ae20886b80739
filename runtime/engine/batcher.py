"""Continuous batching: sequences join and leave a running batch between two decode steps.

Synchronous and single-threaded: one thread calls `submit`, `cancel`, `swap_weights` and `step` in turn.
"""

from collections.abc import Mapping

import torch

from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.engine.request import BatcherConfig, BatcherStatistics, Finished, Progress, Rejection, Request
from turngate.runtime.engine.tokenizer import Tokenizer

__all__ = ["Batcher"]


class Batcher:
    """Decodes many sequences together. Not thread-safe: one thread drives it."""

    def __init__(
        self, model: PolicyModel, tokenizer: Tokenizer, config: BatcherConfig | None = None, *, policy_version: int = 0
    ) -> None:
        raise NotImplementedError

    @property
    def policy_version(self) -> int:
        """Version of the weights that serve now."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """True while `step` would do something."""
        raise NotImplementedError

    def submit(self, request: Request) -> int | Rejection:
        """Queue a request; returns its sequence id, or why it was not taken."""
        raise NotImplementedError

    def cancel(self, sequence_id: int) -> bool:
        """Drop a sequence and free its slot; False when it is not known (any more). It reports nothing further."""
        raise NotImplementedError

    def step(self) -> list[Progress | Finished]:
        """Admit what fits, decode one token for every running sequence, report what streams or finished."""
        raise NotImplementedError

    def swap_weights(self, state: Mapping[str, torch.Tensor], policy_version: int) -> None:
        """Serve new weights from the next step on.

        Raises: PublishError: the weights do not fit the model or are not finite; the old ones go on serving.
        """
        raise NotImplementedError

    def statistics(self) -> BatcherStatistics:
        """Return counts and present load."""
        raise NotImplementedError
