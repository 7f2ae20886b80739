"""The seam between the runtime and whatever learns: four synchronous methods."""

from pathlib import Path
from typing import Protocol

from turngate.runtime.types import Batch, UpdateReport

__all__ = ["Learner"]


class Learner(Protocol):
    """Turns batches into weights. Knows nothing of asyncio, HTTP or environments.

    An instance is sent to its worker process by pickling before `load`, so it must be light until then:
    build models and optimizers in `load`. A learner that forms ratios may say in an attribute `sampling` which
    distribution it takes the rollouts to be drawn from; `train` then refuses a runtime that samples another one.
    """

    def load(self, folder: Path | None) -> None:
        """Get ready: from a folder written by `save`, or from the configured start when None. Called once, first."""
        ...

    def update(self, batch: Batch) -> UpdateReport:
        """Take one policy update on `batch`; the policy version grows by one when its weights are published."""
        ...

    def save_weights(self, path: Path) -> None:
        """Write the policy's weights to one safetensors file, whole or not at all."""
        ...

    def save(self, folder: Path) -> None:
        """Write everything needed to go on exactly from here: weights, optimizer, RNG."""
        ...
