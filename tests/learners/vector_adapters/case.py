"""One golden case in one precision, and what adapters share to read it."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from turngate.learners.losses import Clip
from turngate.learners.offpolicy import Correction

__all__ = ["Adapter", "Case", "Values", "gradient", "numbers"]

Values: TypeAlias = dict[str, Any]


class Case:
    """One golden case in one precision, with typed access to its fields."""

    def __init__(self, case: Values, dtype: torch.dtype) -> None:
        self.case, self.dtype = case, dtype
        self.params: Values = case["params"]
        self.inputs: Values = case["inputs"]

    def real(self, name: str, default: object = None) -> Tensor:
        return torch.tensor(numbers(self.inputs.get(name, default)), dtype=self.dtype)

    def mask(self, name: str = "mask", like: str = "logp") -> Tensor:
        if name in self.inputs:
            return torch.tensor(self.inputs[name]).bool()
        return torch.ones_like(self.real(like), dtype=torch.bool)

    def ids(self, name: str, like: Tensor) -> Tensor | None:
        """Integer ids in the shape of `like`; labels of any kind are numbered, one per row is spread over it."""
        values = self.inputs.get(name)
        if values is None:
            return None
        if isinstance(values[0], list):
            return torch.tensor(values)
        labels = {label: i for i, label in enumerate(dict.fromkeys(values))}
        column = torch.tensor([labels[v] for v in values])
        return column.unsqueeze(1).expand_as(like) if like.ndim == 2 else column

    def clip(self) -> Clip:
        dual = self.params.get("dual_c")
        return Clip(self.params.get("eps_low", 0.2), self.params.get("eps_high", 0.28), dual)

    def correction(self, prefix: str = "") -> Correction:
        params = {k.removeprefix(prefix): v for k, v in self.params.items()}
        return Correction(
            params.get("level", "token"),
            params.get("mode", "truncate"),
            params.get("upper", 2.0),
            params.get("lower"),
            bool(params.get("normalise", params.get("batch_normalise", False))),
        )


def numbers(value: Any) -> Any:
    """Decode the JSON spelling of NaN and infinities."""
    if isinstance(value, list):
        return [numbers(v) for v in value]
    return (
        {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value, value)
        if isinstance(value, str)
        else value
    )


def gradient(scalar: Tensor, of: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(scalar, of, retain_graph=True)
    return grad


Adapter: TypeAlias = Callable[[Case], Values]
"""Calls the product's public function with a case's params and inputs, and names what it returns as the case does."""
