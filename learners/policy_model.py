"""What a learner needs of a model, and where it gets one: the embedded engine's model and others look the same.

source (light, picklable) -> load -> model: score, values, parameters, save
                          -> reference -> the same before training, frozen
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias, runtime_checkable

import msgspec
from torch import Tensor, nn

from turngate.runtime.engine.config import ValueKind
from turngate.runtime.engine.model import CONFIG_FILE, PolicyModel, Scores
from turngate.runtime.engine.packing import Packed
from turngate.runtime.errors import ConfigError
from turngate.runtime.files import write_atomically

__all__ = [
    "EmbeddedModel",
    "ModelChoice",
    "ModelSizes",
    "ModelSource",
    "ScoringModel",
    "TrainableModel",
    "mark_value_kind",
    "model_source",
    "require_model_choice",
    "with_value_head",
]


class ModelSizes(Protocol):
    """The two sizes that data must fit."""

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        ...

    @property
    def max_context(self) -> int:
        """Longest sequence, in tokens."""
        ...


class ScoringModel(Protocol):
    """A model that says how likely tokens are."""

    @property
    def config(self) -> ModelSizes:
        """The sizes that data must fit."""
        ...

    def score(self, packed: Packed, *, temperature: float = 1.0, with_entropy: bool = False) -> Scores:
        """Return log-probs of the scored tokens under softmax(logits / temperature), float32 and on the CPU.

        The same sequence gets the same numbers up to rounding whatever it is packed with, and twice the same: dropout
        is off. Differentiable, except where the model is a frozen reference. Values are those of a head on the trunk.
        """
        ...


class TrainableModel(ScoringModel, Protocol):
    """A model that can learn: an `nn.Module` with a few verbs. Parameters that must stay as they are need no gradient.

    `train` and `eval` make no difference to what it computes.
    """

    def values(self, packed: Packed) -> Tensor | None:
        """Return the value of the state before each scored token, float32 (M,) on the CPU; None without a head."""
        ...

    def save_weights(self, path: Path) -> None:
        """Write what servers load to one safetensors file, whole or not at all, with a canary in its metadata."""
        ...

    def save(self, folder: Path) -> None:
        """Write everything of the model that loading it again needs, a value head included, exactly."""
        ...

    # What every nn.Module has.

    def modules(self) -> Iterator[nn.Module]:
        """Return all modules, itself first."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return every parameter once."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return every parameter once, with its name."""
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
        """Return itself."""
        ...


@runtime_checkable
class ModelSource(Protocol):
    """Which model a learner starts from. Light and picklable: it travels to the learner's process and loads there."""

    def load(self, folder: Path | None, *, value_head: bool = False) -> TrainableModel:
        """Return the model to train: from a folder that its `save` wrote, or as it is at the start when None.

        Args: value_head: it must have one; a new head is zero, so that all values are equal at first.
        Raises: ConfigError: there is no such model. LearnerError, PublishError: what was saved does not fit.
        """
        ...

    def reference(self, policy: TrainableModel) -> ScoringModel:
        """Return the model as it was before all training, frozen; it may share weights with `policy`, loaded by it."""
        ...

    def copy_companions(self, folder: Path) -> None:
        """Put beside saved weights what a server needs and training leaves alone: tokenizer, chat template."""
        ...


ModelChoice: TypeAlias = Path | str | ModelSource
"""A folder, of the embedded engine or of transformers, or a source with its options."""


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model folder of the embedded engine."""

    folder: Path

    def load(self, folder: Path | None, *, value_head: bool = False) -> PolicyModel:
        """Return the model; what it publishes has a value head only if the start has: servers hold that model."""
        model = PolicyModel.load(self.folder if folder is None else folder)
        if value_head:
            model = with_value_head(model)
        model.serves_value_head = PolicyModel.read_config(self.folder).value_head
        return model

    def reference(self, policy: TrainableModel) -> PolicyModel:
        """Return a second copy of the start."""
        return PolicyModel.load(self.folder).requires_grad_(False)

    def copy_companions(self, folder: Path) -> None:
        """Copy the tokenizer, if there is one."""
        tokenizer = self.folder / "tokenizer.json"
        if tokenizer.exists():
            write_atomically(folder / "tokenizer.json", tokenizer.read_bytes())


def with_value_head(model: PolicyModel) -> PolicyModel:
    """Return a copy of `model` that has a value head; a new one is zero, so that all values are equal at first."""
    headed = PolicyModel(msgspec.structs.replace(model.config, value_head=True))
    headed.load_tensors(headed.state_dict() | model.state_dict())
    return headed


def mark_value_kind(model: TrainableModel, kind: ValueKind) -> None:
    """Let a model's folder say what its value head puts out, so that whoever serves it reads it right."""
    if isinstance(model, PolicyModel):
        model.config = msgspec.structs.replace(model.config, value_kind=kind)


def require_model_choice(choice: object) -> None:
    """Raise ConfigError unless a model can come from there; reads nothing."""
    if not isinstance(choice, str | Path | ModelSource):
        raise ConfigError(f"model must be a folder or a source such as HuggingFaceModel(folder): got {choice!r}")


def model_source(choice: ModelChoice) -> ModelSource:
    """Return the source of a model; a folder's `config.json` tells whose it is.

    Raises: ConfigError: it is neither a folder's path nor a source.
    """
    require_model_choice(choice)
    if isinstance(choice, ModelSource):
        return choice
    folder = Path(choice)
    if is_huggingface_folder(folder):
        from turngate.learners.huggingface import HuggingFaceModel

        return HuggingFaceModel(folder)
    return EmbeddedModel(folder)


class _AnyConfig(msgspec.Struct):
    model_type: str = ""
    """Every configuration of transformers has one, ours none."""


def is_huggingface_folder(folder: Path) -> bool:
    """Return whether a folder holds a model of transformers; False when there is nothing to read."""
    try:
        return bool(msgspec.json.decode((folder / CONFIG_FILE).read_bytes(), type=_AnyConfig).model_type)
    except (OSError, msgspec.MsgspecError):
        return False  # the embedded model's own reading says what is wrong
