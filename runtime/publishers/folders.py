"""Weights files laid out as the folders that servers load: whole models and LoRA adapters."""

import os
import shutil
import struct
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from turngate.runtime.canary import MAX_HEADER_BYTES, read_metadata
from turngate.runtime.errors import ConfigError, PublishRefused
from turngate.runtime.json_ids import DECODE_ERRORS

__all__ = ["LORA_KEY", "Version", "VersionFolders", "adapter_folder", "check_tensors", "is_tied", "model_folder"]

LORA_KEY = "turngate.lora"
"""Name, in the metadata of an adapter's weights, of its adapter_config.json."""

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
"""Files of a model folder that hold weights or say where they are."""
_ADAPTERS = "; these are LoRA adapters: give them to a publisher of adapters, as VLLMPublisher(mode='lora')"


class _Tensor(msgspec.Struct):
    shape: tuple[int, ...]


class _Config(msgspec.Struct):
    tie_word_embeddings: bool = False
    text_config: "_Config | None" = None


def is_tied(base_model: Path) -> bool:
    """Whether the model in a folder uses its embedding as its head. Raises: ConfigError: there is no config.json."""
    try:
        config = msgspec.json.decode((base_model / "config.json").read_bytes(), type=_Config)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"base_model must be a Hugging Face model folder: {error}; pass the folder that the server was started with"
        ) from error
    return config.tie_word_embeddings or (config.text_config is not None and config.text_config.tie_word_embeddings)


def check_tensors(weights: Path, base_model: Path) -> None:
    """Require that weights have the names and shapes of the model they replace, from the files' headers alone.

    Servers check less: they keep what a file lacks, and are left half loaded by what does not fit. Says nothing when
    the base model has no safetensors files to compare with. Raises: PublishRefused.
    """
    own: dict[str, tuple[int, ...]] = {}
    for file in sorted(base_model.glob("*.safetensors")):
        own |= _shapes(file)
    if not own:
        return
    new = _shapes(weights)
    if missing := sorted(own.keys() - new.keys()) or sorted(new.keys() - own.keys()):
        raise PublishRefused(
            f"weights must have the names of the model in {base_model}: expected {len(own)} tensors, got {len(new)}; "
            f"not in both: {', '.join(missing[:3])} ({weights}){_ADAPTERS if _are_adapters(new) else ''}"
        )
    for name, shape in new.items():
        if shape != own[name]:
            raise PublishRefused(f"weights must have the model's shapes: expected {own[name]}, got {shape} ({name})")


def _are_adapters(names: Iterable[str]) -> bool:
    return any(".lora_A." in name for name in names)


def model_folder(base_model: Path, weights: Path) -> Callable[[Path], None]:
    """Return what fills a folder with a whole model: what the base model has beside its weights, and these weights."""

    def fill(folder: Path) -> None:
        for file in sorted(base_model.iterdir()):
            if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES):
                _link(file, folder / file.name)
        _link(weights, folder / "model.safetensors")

    return fill


def adapter_folder(weights: Path) -> Callable[[Path], None]:
    """Return what fills a folder with a LoRA adapter as peft writes it.

    Raises: PublishRefused: the file's metadata has no adapter configuration.
    """
    config = read_metadata(weights).get(LORA_KEY)
    if config is None:
        raise PublishRefused(
            f"weights must be a LoRA adapter: got no {LORA_KEY} in their metadata ({weights}); train one, "
            "HuggingFaceModel(..., lora=LoRA()), or publish with mode='reload'"
        )

    def fill(folder: Path) -> None:
        (folder / "adapter_config.json").write_text(config)
        _link(weights, folder / "adapter_model.safetensors")

    return fill


class Version(NamedTuple):
    """What a server can go back to."""

    folder: Path
    label: str
    """As the server is told it."""


class VersionFolders:
    """One folder per publication below a root, whole or absent. Names never repeat: servers may cache by path."""

    def __init__(self, root: Path | None) -> None:
        """Keep folders below `root`; None: below `served` beside the first weights published."""
        self._root = root

    def __repr__(self) -> str:
        return f"<VersionFolders {self._root}>"

    def add(self, weights: Path, policy_version: int, fill: Callable[[Path], None]) -> Path:
        """Make a folder for a version and return it. Raises: PublishRefused: the disk does not let us."""
        root = self._root = self._root or weights.parent / "served"
        name = f"policy-{policy_version:06d}-{uuid.uuid4().hex[:8]}"
        partial, folder = root / f".{name}", root / name
        try:
            partial.mkdir(parents=True)
            fill(partial)
            partial.rename(folder)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise PublishRefused(f"{weights} must be laid out as a folder below {root}: {error}") from error
        return folder

    def keep_only(self, folders: Iterable[Path]) -> None:
        """Remove all version folders but these."""
        if self._root is None:
            return
        kept = set(folders)
        for folder in self._root.glob("policy-*-*"):
            if folder not in kept:
                shutil.rmtree(folder, ignore_errors=True)


def _link(source: Path, target: Path) -> None:
    """Give a file another name; a copy where the file system cannot, as across devices."""
    real = source.resolve()  # a link's target: hub caches hold links, and a link to one would not outlive it
    try:
        os.link(real, target)
    except OSError:
        shutil.copyfile(real, target)


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        if not file.is_file():
            raise ValueError("there is no such file")  # opening a pipe would wait for a writer
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            if size > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            header = msgspec.json.decode(opened.read(size), type=dict[str, msgspec.Raw])
        return {n: msgspec.json.decode(t, type=_Tensor).shape for n, t in header.items() if n != "__metadata__"}
    except (OSError, struct.error, *DECODE_ERRORS) as error:
        raise PublishRefused(f"weights must be a whole safetensors file: {error} ({file})") from error
