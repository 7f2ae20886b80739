"""Weights on their way into a model: read from whatever a path turns out to name, checked before anything changes."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from turngate.runtime.errors import PublishError

__all__ = ["fit_weights", "max_file_bytes", "read_weights"]

_HEADER_BYTES = 16 * 2**20
"""Room for names and metadata: a thousand times what a model of ours writes."""
_WIDEST_BYTES = 8
"""Of a float64, the widest number a file may hold per weight."""


def max_file_bytes(own: Mapping[str, Tensor]) -> int:
    """Return how large a file with these tensors can be; whatever is larger holds something else."""
    return _HEADER_BYTES + _WIDEST_BYTES * sum(tensor.numel() for tensor in own.values())


def read_weights(path: Path, *, max_bytes: int) -> dict[str, Tensor]:
    """Read a safetensors file of at most `max_bytes`. Never waits for a writer: a pipe or a device is refused.

    Raises: PublishError: it cannot be read or is not a whole safetensors file.
    """
    try:
        return safetensors.torch.load(_read_regular(path, max_bytes))
    except (OSError, ValueError, KeyError, SafetensorError) as error:  # KeyError: a dtype that torch does not have
        raise PublishError(f"weights must be a whole safetensors file: {error} ({path}); publish it again") from error


def fit_weights(own: Mapping[str, Tensor], new: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Return the new tensors in the type of a model's own.

    Raises: PublishError: names, shapes or values do not fit.
    """
    missing, extra = sorted(own.keys() - new.keys()), sorted(new.keys() - own.keys())
    if missing or extra:
        raise PublishError(f"weights must have this model's names: missing {missing}, unknown {extra} ({where})")
    return {name: _fit(tensor, new[name], f"{name}, {where}") for name, tensor in own.items()}


def _fit(own: Tensor, new: Tensor, where: str) -> Tensor:
    if new.shape != own.shape:
        expected, got = tuple(own.shape), tuple(new.shape)
        raise PublishError(f"weights must have this model's shapes: expected {expected}, got {got} ({where})")
    if not new.dtype.is_floating_point:
        raise PublishError(f"weights must be floating-point numbers: got {new.dtype} ({where})")
    fitting = new.to(own.dtype)
    if not torch.isfinite(fitting).all():  # after the conversion: 1e200 is finite as float64 only
        raise PublishError(f"weights must be finite: got NaN or infinity ({where}); look at the learner")
    return fitting


def _read_regular(path: Path, max_bytes: int) -> bytes:
    # Asked of the open file, not of its name, which may change; opening without O_NONBLOCK would wait at a pipe.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if status.st_size > max_bytes:
            raise ValueError(f"expected at most {max_bytes} bytes, got {status.st_size}; it is not of this model")
        return file.read(status.st_size)
