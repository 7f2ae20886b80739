"""Muon on the hidden matrices, AdamW on everything else, and the learning-rate schedule they share."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor, nn

from turngate.runtime.errors import ConfigError, LearnerError

__all__ = ["Muon", "MuonAdamW", "Schedule", "orthogonalise", "split_parameters"]

# Quintic coefficients of Jordan et al. 2024 (Muon): they trade exact convergence for a steep slope at zero, so five
# steps bring every singular value into about [0.7, 1.2].
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


class Schedule(msgspec.Struct, frozen=True):
    """Linear warm-up, constant, then linear decay; a factor on every learning rate."""

    warmup_updates: int = 0
    """The first update runs at 1 / warmup_updates of the learning rate. 0 starts at the full rate."""
    total_updates: int = 0
    """Length of the run; 0 means unknown and never decays."""
    decay_start: float = 0.4
    """Fraction of the run after which the decay begins."""
    decay_to: float = 0.2
    """Factor at the end of the run and beyond."""

    def __post_init__(self) -> None:
        if self.warmup_updates < 0 or self.total_updates < 0:
            raise ConfigError(
                "warmup_updates and total_updates must not be negative: "
                f"got {self.warmup_updates} and {self.total_updates}"
            )
        if not 0.0 <= self.decay_start <= 1.0:
            raise ConfigError(f"decay_start must be a fraction of the run: expected 0 to 1, got {self.decay_start}")
        if not 0.0 <= self.decay_to <= 1.0:
            raise ConfigError(f"decay_to must be a factor: expected 0 to 1, got {self.decay_to}")

    def factor(self, update: int) -> float:
        """Return the factor of update number `update`, counted from 0."""
        warmup = min(1.0, (update + 1) / self.warmup_updates) if self.warmup_updates else 1.0
        if not self.total_updates:
            return warmup
        start = self.decay_start * self.total_updates
        progress = (update - start) / max(self.total_updates - start, 1.0)
        return warmup * (1.0 - (1.0 - self.decay_to) * min(1.0, max(0.0, progress)))


def orthogonalise(matrices_BMN: Tensor) -> Tensor:
    """Return the nearest (semi-)orthogonal matrices, roughly: singular values land in about [0.7, 1.2].

    Source: Jordan et al. 2024, Muon; Newton-Schulz iteration on the smaller Gram matrix. Zero matrices stay zero.
    """
    a, b, c = _NEWTON_SCHULZ
    x: Tensor = matrices_BMN
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if is_tall else x
    return result


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised: every direction of a hidden matrix moves by the same amount.

    Source: Jordan et al. 2024. Updates are scaled by sqrt(max(1, rows / columns)): one learning rate fits all shapes.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, *, momentum: float = 0.95, nesterov: bool = True):
        super().__init__(list(params), {"lr": lr, "momentum": momentum, "nesterov": nesterov})
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.ndim != 2:
                raise ConfigError(f"Muon must get matrices: expected 2 dimensions, got shape {tuple(parameter.shape)}")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in by_shape.items():
                # One batched iteration per shape: small matrices are bound by call overhead, not by arithmetic.
                updates = orthogonalise(torch.stack([self._direction(group, p) for p in parameters]))
                scale = group["lr"] * math.sqrt(max(1.0, shape[0] / shape[1]))
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.add_(update, alpha=-scale)

    def _direction(self, group: dict[str, Any], parameter: nn.Parameter) -> Tensor:
        assert parameter.grad is not None
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum"]
        buffer.lerp_(parameter.grad, 1.0 - group["momentum"])
        return parameter.grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer


class Parametrised(Protocol):
    """What an optimizer reads of an `nn.Module`."""

    def modules(self) -> Iterator[nn.Module]:
        """Return all modules, itself first."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return every parameter once."""
        ...


def split_parameters(model: Parametrised) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return (hidden matrices for Muon, everything else for AdamW), in the model's own order; frozen ones are neither.

    Embeddings and output heads are matrices too, but their rows are looked up one by one: orthogonalising them would
    move rare tokens as far as frequent ones. They are recognised by being an `nn.Embedding`, by a name that ends in
    `head`, by being what a model of transformers calls its output embeddings, or by having a single row. Routers
    (`gate`, `router`) are heads over experts. The thin factors of adapters (`lora_`) are AdamW's: only their product is
    a hidden matrix. So are norms, biases, and experts stacked in one tensor.
    """
    modules = list(model.modules())
    tables = [module for module in modules if isinstance(module, nn.Embedding)]
    heads = [_output_table(module) for module in modules]
    looked_up = {id(p) for module in (*tables, *heads) if isinstance(module, nn.Module) for p in module.parameters()}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_named_out = any(_is_no_hidden_name(part) for part in name.split("."))
        is_matrix = parameter.ndim == 2 and min(parameter.shape) > 1
        is_hidden = is_matrix and not is_named_out and id(parameter) not in looked_up
        (matrices if is_hidden else others).append(parameter)
    return matrices, others


def _is_no_hidden_name(part: str) -> bool:
    return part.endswith("head") or part.startswith("lora_") or part in ("gate", "router")


def _output_table(module: nn.Module) -> object:
    ask = getattr(module, "get_output_embeddings", None)
    return ask() if callable(ask) else None


class MuonAdamW:
    """The two optimizers of one model behind the four verbs of one.

    State: the two optimizers and the number of steps taken, all of it in `state_dict`.
    """

    def __init__(
        self, model: Parametrised, *, muon_lr: float | None, adamw_lr: float, betas: tuple[float, float] = (0.9, 0.95)
    ) -> None:
        """Raises: ConfigError: a learning rate is none. `muon_lr=None` gives AdamW the matrices, too."""
        for name, lr in (("muon_lr", muon_lr), ("adamw_lr", adamw_lr)):
            if lr is not None and not (math.isfinite(lr) and lr >= 0):
                raise ConfigError(f"{name} must be a learning rate: expected 0 or more, got {lr}")
        matrices, others = split_parameters(model)
        if muon_lr is None:
            matrices, others = [], matrices + others
        self._parameters = matrices + others
        self._parts: list[tuple[torch.optim.Optimizer, float]] = []
        if matrices and muon_lr is not None:
            self._parts.append((Muon(matrices, muon_lr), muon_lr))
        if others:
            self._parts.append((torch.optim.AdamW(others, adamw_lr, betas=betas, weight_decay=0.0), adamw_lr))

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for optimizer, _ in self._parts:
            optimizer.zero_grad(set_to_none=True)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale all gradients together to at most `max_norm` and return the norm before; may be NaN or infinite."""
        return float(nn.utils.clip_grad_norm_(self._parameters, max_norm))

    def step(self, factor: float = 1.0) -> None:
        """Take one step at `factor` times the learning rates."""
        for optimizer, lr in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return all state; tensors are shared with the optimizer, so write or copy them before the next step."""
        return {"parts": [optimizer.state_dict() for optimizer, _ in self._parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly from `state`. Raises LearnerError when it belongs to another model."""
        parts = state.get("parts", [])
        if len(parts) != len(self._parts):
            raise LearnerError(
                f"optimizer state must match the model: expected {len(self._parts)} parts, got {len(parts)}; "
                "was the checkpoint written for another model?"
            )
        try:
            for (optimizer, _), part in zip(self._parts, parts, strict=True):
                optimizer.load_state_dict(part)
        except (KeyError, ValueError) as error:
            raise LearnerError(
                f"optimizer state must match the model: {error}; is the checkpoint another model's?"
            ) from error
