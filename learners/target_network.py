"""A slowly following copy of a critic, so that targets do not chase the values trained towards them."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from turngate.runtime.errors import ConfigError, LearnerError

__all__ = ["TargetNetwork"]


class Averageable(Protocol):
    """What an average needs of an `nn.Module`."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return every parameter once."""
        ...

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Return every buffer once."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return all tensors by name."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Copy tensors in by name."""
        ...

    def eval(self) -> Self:
        """Return itself, with dropout off."""
        ...


ModuleT = TypeVar("ModuleT", bound=Averageable)


class TargetNetwork(Generic[ModuleT]):
    """An exponential moving average of a module's parameters: target <- (1 - tau) target + tau module.

    State: the copy, which never trains, and `version`, that of the module it was last updated from. Buffers are copied;
    parameters that are frozen in the module, such as those under adapters, are shared with it and never saved.
    In bfloat16 a small tau rounds to nothing: keep such critics in float32.
    Source: Lillicrap et al. 2015 (1509.02971). ArCHer (2402.19446) uses tau 0.1.
    """

    def __init__(self, module: ModuleT, *, tau: float, version: int = 0) -> None:
        """Start as an exact copy of `module`; tau in (0, 1], 1 copies it at every update."""
        if not 0 < tau <= 1:
            raise ConfigError(f"tau must be above 0 and at most 1: got {tau}; 1 has no target network")
        frozen = {id(p): p for _, p in module.named_parameters() if not p.requires_grad}
        self.module: ModuleT = copy.deepcopy(module, dict(frozen)).eval()
        self._shared = {name for name, p in self.module.named_parameters() if id(p) in frozen}
        for _, parameter in self.module.named_parameters():
            parameter.requires_grad_(False)
        self.tau, self.version = tau, version

    def __repr__(self) -> str:
        return f"<TargetNetwork tau {self.tau}, version {self.version}>"

    @torch.no_grad()
    def update(self, module: ModuleT, version: int) -> None:
        """Take over a share `tau` of `module`, which is at `version`.

        Raises: LearnerError: the module has other parameters, or a version older than the last one.
        """
        if version < self.version:
            raise LearnerError(f"versions must not fall: expected {self.version} or more, got {version}; restore both")
        ours, theirs = dict(self.module.named_parameters()), dict(module.named_parameters())
        if {n: p.shape for n, p in ours.items()} != {n: p.shape for n, p in theirs.items()}:
            differing = sorted(n for n in ours.keys() | theirs.keys() if _shape(ours, n) != _shape(theirs, n))
            raise LearnerError(f"the module must be the one that was copied: got other parameters {differing[:5]}")
        for name, parameter in ours.items():
            if name in self._shared:
                continue
            # A copy, whatever rounding lerp does at 1.
            _ = parameter.copy_(theirs[name]) if self.tau == 1 else parameter.lerp_(theirs[name], self.tau)
        sources = dict(module.named_buffers())
        for name, buffer in self.module.named_buffers():
            buffer.copy_(sources[name])
        self.version = version

    def state_dict(self) -> dict[str, Any]:
        """Return the copy's tensors and the version, for torch.save."""
        tensors = {name: t for name, t in self.module.state_dict().items() if name not in self._shared}
        return {"module": tensors, "version": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`; tau stays as configured.

        Raises: KeyError, RuntimeError: it is another module's, as torch reports it.
        """
        own = {name: t for name, t in self.module.state_dict().items() if name in self._shared}
        self.module.load_state_dict(own | state["module"])
        self.version = int(state["version"])


def _shape(parameters: dict[str, nn.Parameter], name: str) -> torch.Size | None:
    return parameters[name].shape if name in parameters else None
