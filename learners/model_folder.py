"""Folders and files in the layout that transformers and vLLM read."""

import importlib
import os
import shutil
import struct
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from turngate.runtime.files import write_atomically

__all__ = ["beside", "copy_companions", "quiet", "write_model_folder", "write_weights_file"]

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_WRITTEN = {"config.json", "generation_config.json", "adapter_config.json"}
"""By the model itself."""
_MAX_COMPANION_BYTES = 64 * 2**20
"""The largest tokenizers have a third of it."""
_ONE_FILE = "1000TB"
"""Larger than any model: one file per publication."""


def copy_companions(source: Path, folder: Path) -> None:
    """Copy what lies beside the weights of a model: tokenizer, chat template, code; links are followed."""
    for path in sorted(source.iterdir()) if source.is_dir() else []:
        is_weights = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.name in _WRITTEN or is_weights or path.name.startswith(".") or not path.is_file():
            continue
        if path.stat().st_size <= _MAX_COMPANION_BYTES:
            write_atomically(folder / path.name, path.read_bytes())


def write_model_folder(lm: Any, folder: Path, *, untie: bool = False) -> None:
    """Write a causal LM as `save_pretrained` does; each file whole or not at all.

    Args: untie: write a head that is tied to the embeddings as a tensor of its own, and say so in the configuration.
    """
    with beside(folder) as made:
        _save_pretrained(lm, made, untie=untie)
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(made.iterdir()):
            os.replace(path, folder / path.name)


def write_weights_file(
    lm: Any, path: Path, metadata: Mapping[str, str], *, dtype: torch.dtype, untie: bool = False
) -> None:
    """Write all weights of a causal LM to one safetensors file, whole or not at all, under the names of its folder."""
    with beside(path) as made:
        _save_pretrained(lm, made, untie=untie, dtype=dtype, max_shard_size=_ONE_FILE)
        _add_metadata(made / "model.safetensors", made / "described", metadata)
        os.replace(made / "described", path)


def _save_pretrained(lm: Any, folder: Path, *, untie: bool, dtype: torch.dtype | None = None, **options: Any) -> None:
    """Let transformers write: it knows each model's names on disk, which need not be those in memory."""
    state: dict[str, Tensor] = {name: tensor.detach() for name, tensor in lm.state_dict().items()}
    if dtype is not None:
        # Tied tensors stay one, so that the second name of each is left out as usual.
        cast: dict[int, Tensor] = {}
        for name, tensor in state.items():
            if tensor.is_floating_point():
                state[name] = cast.setdefault(tensor.data_ptr(), tensor.to(dtype))
    configs = [lm.config, lm.config.get_text_config()] if untie else []
    was_tied = [getattr(config, "tie_word_embeddings", False) for config in configs]
    if untie:
        seen: set[int] = set()
        for name, tensor in state.items():
            state[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
            seen.add(tensor.data_ptr())
    for config in configs:
        config.tie_word_embeddings = False
    try:
        with quiet():
            lm.save_pretrained(folder, state_dict=state, **options)
    finally:
        for config, is_tied in zip(configs, was_tied, strict=True):
            config.tie_word_embeddings = is_tied


def _add_metadata(source: Path, target: Path, metadata: Mapping[str, str]) -> None:
    """Copy a safetensors file with more metadata; the tensors are copied as they are, through no memory to speak of."""
    with source.open("rb") as old, target.open("xb") as new:
        (size,) = struct.unpack("<Q", old.read(8))
        header: dict[str, Any] = msgspec.json.decode(old.read(size))
        header["__metadata__"] = {**header.get("__metadata__", {}), **metadata}
        text = msgspec.json.encode(header)
        text += b" " * (-len(text) % 8)  # tensors begin at multiples of eight
        new.write(struct.pack("<Q", len(text)) + text)
        shutil.copyfileobj(old, new, 2**22)
        new.flush()
        os.fsync(new.fileno())  # else a power cut could leave a renamed but empty file


@contextmanager
def quiet() -> Generator[None]:
    """Keep the progress bars of transformers off the terminal, where those of the run are."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


@contextmanager
def beside(path: Path) -> Generator[Path]:
    """Give an empty folder on the file system of `path`, and remove what is left of it."""
    made = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    made.mkdir(parents=True)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
