"""Any causal LM of transformers as the model of a learner, by its folder: all weights, or adapters on them."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors import SafetensorError

from turngate.learners.causal_lm import CausalLM, Sizes, WithoutAdapters, check_head
from turngate.learners.lora import LoRA, attach, write_merged
from turngate.learners.model_folder import copy_companions, quiet, write_model_folder
from turngate.learners.policy_model import ScoringModel, TrainableModel
from turngate.runtime.errors import ConfigError, LearnerError

__all__ = ["HuggingFaceModel", "Precision", "untie_folder"]

Precision: TypeAlias = Literal["float32", "bfloat16"]

_CANARY_TEXT = "Whoever serves these words with other weights gives other odds for them."
_CANARY_TOKENS = 16
_UNLIMITED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class HuggingFaceModel:
    """Which model to train and how it is held. Light and picklable; transformers is not imported before `load`."""

    folder: Path | str
    """As `save_pretrained` writes it: config.json and safetensors. Nothing is ever downloaded."""
    lora: LoRA | None = None
    """Train adapters alone; None trains all weights."""
    dtype: Precision = "float32"
    """What matrices are multiplied in. Weights that train and the optimizer's state are float32 either way; with
    bfloat16 a frozen base under adapters is held in it, and so are the weights that are published."""
    gradient_checkpointing: bool = True
    """Keep only the states between layers and compute the rest again in the backward pass: a third more work for a
    fraction of the memory."""
    value_head: bool = False
    """A scalar read off the trunk. PPO with a critic on the trunk adds one by itself."""
    untie: bool = False
    """Publish and save a head that is tied to the embeddings as a tensor of its own; they still train as one. For
    servers that reload no tied head: start them from `untie_folder`."""
    attention: str | None = None
    """`attn_implementation` of transformers; None leaves it to the model."""
    max_context: int | None = None
    """Longest sequence, in tokens; None stands for the model's `max_position_embeddings`."""
    device: str = "auto"
    """`auto` is the first GPU, or the CPU without one."""

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | Path):
            raise ConfigError(f"folder must be the path of a model: got {self.folder!r} (HuggingFaceModel)")
        if self.lora is not None and not isinstance(self.lora, LoRA):
            raise ConfigError(f"lora must be LoRA(...) or None: got {self.lora!r} (HuggingFaceModel)")
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype must be float32 or bfloat16: got {self.dtype!r} (HuggingFaceModel)")
        if self.max_context is not None and self.max_context < 2:
            raise ConfigError(f"max_context must be at least 2: got {self.max_context} (HuggingFaceModel)")
        if self.untie and self.lora is not None:
            raise ConfigError("untie must be left out with lora: only adapters are published, the head stays as it was")

    @property
    def path(self) -> Path:
        """The folder as a path."""
        return Path(self.folder)

    def load(self, folder: Path | None, *, value_head: bool = False) -> CausalLM:
        """Return the model to train: from a folder that its `save` wrote, or as it is at the start when None.

        Raises: ConfigError: transformers is missing, or there is no such model. LearnerError: what was saved does not
        fit it.
        """
        is_lora, is_bfloat16 = self.lora is not None, self.dtype == "bfloat16"
        dtype = torch.bfloat16 if is_lora and is_bfloat16 else torch.float32
        lm = _read(self, self.path if folder is None or is_lora else folder, dtype)
        sizes = self._sizes(lm)
        check_head(lm, self.path)
        network = lm if self.lora is None else attach(lm, self.lora, self.path.absolute())
        lm.eval()
        if self.gradient_checkpointing:
            _checkpoint_layers(lm, self.path)
        model = CausalLM(
            network,
            sizes,
            is_lora=is_lora,
            is_bfloat16=is_bfloat16,
            value_head=value_head or self.value_head,
            untie=self.untie,
            canary_ids=_canary_ids(self.path, sizes),
        )
        if folder is not None:
            model.restore(folder)
        is_gpu = self.device == "auto" and torch.cuda.is_available()
        return model.to("cuda" if is_gpu else "cpu" if self.device == "auto" else self.device)

    def reference(self, policy: TrainableModel) -> ScoringModel:
        """Return the start: the policy without its adapters, or a second copy of all weights."""
        if isinstance(policy, CausalLM) and self.lora is not None:
            return WithoutAdapters(policy)
        return self.load(None).requires_grad_(False)

    def copy_companions(self, folder: Path) -> None:
        """Copy tokenizer, chat template and the like; with `LoRA(merged=True)` write the merged model, too."""
        copy_companions(self.path, folder)
        if self.lora is not None and self.lora.merged:
            dtype = torch.bfloat16 if self.dtype == "bfloat16" else torch.float32
            write_merged(_read(self, self.path, dtype), folder, folder / "merged")
            copy_companions(self.path, folder / "merged")

    def _sizes(self, lm: Any) -> Sizes:
        tables = [table for table in (lm.get_input_embeddings(), lm.get_output_embeddings()) if table is not None]
        known = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
        return Sizes(min(int(t.weight.shape[0]) for t in tables), self.max_context or known or _UNLIMITED)


def untie_folder(source: Path | str, folder: Path | str) -> Path:
    """Write a copy of a model whose head is a tensor of its own, equal to the embeddings, and return `folder`.

    A server started from it takes a new head on reload; vLLM keeps a tied one without a word.
    """
    source, folder = Path(source), Path(folder)
    write_model_folder(_read(HuggingFaceModel(source), source, "auto"), folder, untie=True)
    copy_companions(source, folder)
    return folder


def _read(spec: HuggingFaceModel, folder: Path, dtype: torch.dtype | str) -> Any:
    """Return a causal LM with the weights of `folder`, on the CPU; whether its head is tied, the start says."""
    transformers = _transformers()
    if not (folder / "config.json").is_file():
        hint = "; it holds adapters: name their base and pass lora" if (folder / "adapter_config.json").exists() else ""
        raise ConfigError(f"model folder must hold a config.json: found none ({folder}){hint}")
    offline = {"local_files_only": True, "trust_remote_code": False}
    options: dict[str, Any] = {} if spec.attention is None else {"attn_implementation": spec.attention}
    try:
        with quiet():
            config = transformers.AutoConfig.from_pretrained(spec.path, **offline)
            lm, found = transformers.AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=dtype, output_loading_info=True, **offline, **options
            )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        kind = ConfigError if folder == spec.path else LearnerError
        raise kind(f"model folder must hold a causal LM that transformers can load: {error} ({folder})") from error
    if missing := sorted(map(str, found["missing_keys"])):
        raise ConfigError(f"weights must be complete: {len(missing)} are missing, such as {missing[0]} ({folder})")
    return lm


def _checkpoint_layers(lm: Any, where: Path) -> None:
    """Turn gradient checkpointing on in a model that stays in eval mode otherwise.

    transformers checkpoints only layers that are training. A layer's own flag is enough for that; the modules inside,
    where dropout is, keep theirs.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"gradient_checkpointing must be False for {type(lm).__name__}: none of its layers supports it ({where})"
        )
    # The name before transformers 5.20 or so.
    enable = getattr(lm, "activation_checkpointing_enable", None) or lm.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for layer in layers:
        layer.training = True


def _canary_ids(folder: Path, sizes: Sizes) -> tuple[int, ...]:
    """Return a few words in the model's own tokens, which no server refuses; ids from all over without a tokenizer."""
    ids: list[int] = []
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(_CANARY_TEXT, add_special_tokens=False).ids
    if len(ids) < 2 or max(ids) >= sizes.vocab_size:
        ids = list(range(0, sizes.vocab_size, -(-sizes.vocab_size // _CANARY_TOKENS)))
    return tuple(ids[: min(_CANARY_TOKENS, sizes.max_context)])


def _transformers() -> Any:
    """Import transformers, here and late: it takes seconds."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(f"transformers must be installed: {error}; pip install 'turngate[hf]'") from error
