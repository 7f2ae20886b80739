"""Files of a checkpoint that hold tensors and counters: written whole or not at all, read without unpickling code."""

import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from turngate.runtime.errors import LearnerError
from turngate.runtime.files import write_atomically

__all__ = ["read_state", "write_state"]


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write tensors, numbers and containers of them to one file."""
    content = io.BytesIO()
    torch.save(dict(state), content)
    write_atomically(path, content.getvalue())


def read_state(path: Path, apply: Callable[[dict[str, Any]], None]) -> None:
    """Read what `write_state` wrote and hand it to `apply`, which puts it where it belongs.

    Raises: LearnerError: the file cannot be read, or `apply` found something missing or of another shape.
    """
    try:
        apply(torch.load(path, weights_only=True))
    except (OSError, EOFError, LookupError, TypeError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        if isinstance(error, LearnerError):
            raise
        raise LearnerError(f"checkpoint must be readable: {error} ({path}); use an older one") from error
