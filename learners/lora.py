"""Low-rank adapters (LoRA) on a causal LM of transformers: few weights train, the rest stays as it was.

peft does the work. What is written is its standard layout: names such as
`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`, and the adapter's configuration as JSON.
"""

import json
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor

from turngate.learners.model_folder import write_model_folder
from turngate.runtime.engine.weight_file import max_file_bytes, read_weights
from turngate.runtime.errors import ConfigError, LearnerError, PublishError
from turngate.runtime.files import write_atomically
from turngate.runtime.publishers.folders import LORA_KEY
from turngate.runtime.seeds import require_seed

__all__ = ["ADAPTER_CONFIG", "ADAPTER_WEIGHTS", "LORA_KEY", "LoRA", "adapter_tensors", "attach", "without_adapters"]

_HARMLESS: tuple[tuple[str, type[Warning]], ...] = (
    ("`is_gradient_checkpointing` is deprecated", FutureWarning),  # peft asks an older transformers' question
    ("fan_in_fan_out is set to False", UserWarning),  # peft corrects it for the layers of GPT-2
    ("The following (rank|alpha)_pattern keys did not match", RuntimeWarning),  # its own patterns for experts
)
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRA:
    """Which adapters train. There is no dropout: with it the learner's log-probs would never be the sampler's."""

    rank: int = 16
    alpha: int = 32
    """The adapters' product counts alpha / rank times."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the linear layers that get adapters; by default all but the output head."""
    merged: bool = False
    """Checkpoints also hold `model/merged`: a whole model with the adapters added into its weights."""
    seed: int = 0
    """Of the first factors; the second ones start at zero, so that nothing changes at first."""

    def __post_init__(self) -> None:
        for name in ("rank", "alpha"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1: got {getattr(self, name)} (LoRA)")
        if isinstance(self.targets, str) and self.targets != "all-linear":
            raise ConfigError(
                f"targets must be 'all-linear' or names of layers: got {self.targets!r}; write ({self.targets!r},)"
            )
        if not self.targets:
            raise ConfigError("targets must name at least one layer: got none; leave it out for all of them")
        require_seed(self.seed, "LoRA")


def attach(lm: Any, lora: LoRA, base: Path) -> Any:
    """Put fresh adapters into a causal LM, in place, freeze the rest, and return peft's model around it.

    Raises: ConfigError: no layer has one of the names.
    """
    import peft

    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.targets if isinstance(lora.targets, str) else list(lora.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):  # peft draws from the global generator, on the CPU
        torch.manual_seed(lora.seed)
        try:
            with _known_warnings():
                model: Any = peft.get_peft_model(lm, config)
        except ValueError as error:
            raise ConfigError(f"targets must name layers of the model: {error} ({base})") from error
    model.peft_config["default"].base_model_name_or_path = str(base)
    return model


def adapter_config(model: Any) -> str:
    """Return the configuration of a model's adapters as JSON, as peft writes it."""
    plain = {key: sorted(v) if isinstance(v, set) else v for key, v in model.peft_config["default"].to_dict().items()}
    return json.dumps(plain, indent=2, sort_keys=True)


def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """Return the adapters' weights under their standard names, on the CPU."""
    import peft

    # Embeddings never train here; "auto" would look for the base model's folder to tell whether they did.
    state = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def write_adapter(model: Any, path: Path, metadata: dict[str, str]) -> None:
    """Write the adapters to one safetensors file, whole or not at all; its metadata says how to use them."""
    described = metadata | {"format": "pt", LORA_KEY: adapter_config(model)}
    write_atomically(path, safetensors.torch.save(adapter_tensors(model), described))


def read_adapter(model: Any, folder: Path) -> None:
    """Set the adapters to those of a folder. Raises: LearnerError: they are not of this shape, or unreadable."""
    import peft

    own, path = adapter_tensors(model), folder / ADAPTER_WEIGHTS
    try:
        saved = read_weights(path, max_bytes=max_file_bytes(own))
    except PublishError as error:
        raise LearnerError(f"checkpoint must be readable: {error}; use an older one") from error
    wrong = sorted(n for n in own.keys() | saved.keys() if _shape(own, n) != _shape(saved, n))
    if wrong:
        raise LearnerError(
            f"the checkpoint must hold the adapters that are configured: {len(wrong)} differ, such as {wrong[0]}: "
            f"expected shape {_shape(own, wrong[0])}, got {_shape(saved, wrong[0])} ({path}); use the same LoRA(...)"
        )
    peft.set_peft_model_state_dict(model, saved)


def write_merged(lm: Any, adapter: Path, folder: Path) -> None:
    """Add a folder's adapters into the weights of their base, in place, and write that as a whole model folder."""
    import peft

    with _known_warnings():
        merged: Any = peft.PeftModel.from_pretrained(lm, str(adapter)).merge_and_unload()
    write_model_folder(merged, folder)


@contextmanager
def without_adapters(model: Any) -> Generator[None]:
    """Compute as if there were no adapters; they are back afterwards, trainable as before."""
    with torch.no_grad(), model.disable_adapter():
        yield


@contextmanager
def _known_warnings() -> Generator[None]:
    with warnings.catch_warnings():
        for about, category in _HARMLESS:
            warnings.filterwarnings("ignore", about, category)
        yield


def _shape(tensors: dict[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None
