"""Canaries travel in the header of a weights file and are read without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from turngate.runtime.canary import CANARY_KEY, Canary, canary_metadata, read_canary, read_metadata
from turngate.runtime.errors import PublishError, RecordError

CANARY = Canary((3, 1, 2), (-0.5, -1.25))


def write(path: Path, metadata: dict[str, str] | None) -> Path:
    import safetensors.torch
    import torch

    safetensors.torch.save_file({"a": torch.ones(2)}, path, metadata)
    return path


def test_a_canary_comes_back_from_the_file_it_was_written_to(tmp_path: Path) -> None:
    path = write(tmp_path / "w.safetensors", canary_metadata(CANARY) | {"format": "pt"})
    assert read_canary(path) == CANARY
    assert read_metadata(path)["format"] == "pt"


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_file_without_a_canary_has_none(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    assert read_canary(write(tmp_path / "w.safetensors", metadata)) is None


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, b"\x04\0\0\0\0\0\0\0[1]x", b"\x02\0\0\0\0\0\0\0{"])
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w").write_bytes(content)
    with pytest.raises(PublishError, match="whole safetensors file"):
        read_canary(tmp_path / "w")
    with pytest.raises(PublishError, match="whole safetensors file"):
        read_canary(tmp_path / "missing")


@pytest.mark.parametrize("text", ["{}", "nonsense", '{"token_ids": [1, 2], "logprobs": []}'])
def test_a_garbled_canary_is_refused(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "w.safetensors", {CANARY_KEY: text})
    with pytest.raises(PublishError, match="canary"):
        read_canary(path)


def test_log_probs_must_align_with_ids() -> None:
    with pytest.raises(RecordError, match="expected 2, got 1"):
        Canary((1, 2, 3), (-0.5,))


def test_reading_needs_no_torch() -> None:
    code = "import sys, turngate.runtime.canary; sys.exit('torch' in sys.modules or 'safetensors' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
