"""Weights files laid out as folders: what is no weights file is refused, whatever is in it."""

import struct

import pytest

from turngate.runtime.canary import read_canary
from turngate.runtime.errors import PublishError, PublishRefused
from turngate.runtime.publishers.folders import check_tensors


def safetensors(header: bytes, *, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if size is None else size) + header


DEEP = safetensors(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
HUGE = safetensors(b"{}", size=2**63 + 1)
LONG = safetensors(b"{}", size=10**12)


@pytest.mark.parametrize("content", [DEEP, HUGE, LONG, b"", b"abc", safetensors(b"[]"), safetensors(b"{")])
def test_a_header_that_lies_is_refused_before_memory_is_taken_for_it(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(safetensors(b'{"w": {"shape": [1]}}'))
    (tmp_path / "new").write_bytes(content)
    with pytest.raises(PublishRefused, match="weights must be a whole safetensors file"):
        check_tensors(tmp_path / "new", tmp_path)
    with pytest.raises(PublishError, match="whole safetensors file"):
        read_canary(tmp_path / "new")


def test_adapters_for_a_publisher_of_whole_models_are_told_where_they_belong(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(safetensors(b'{"w": {"shape": [1]}}'))
    (tmp_path / "new").write_bytes(safetensors(b'{"base_model.model.w.lora_A.weight": {"shape": [1]}}'))
    (tmp_path / "other").write_bytes(safetensors(b'{"v": {"shape": [1]}}'))
    with pytest.raises(PublishRefused, match="these are LoRA adapters"):
        check_tensors(tmp_path / "new", tmp_path)
    with pytest.raises(PublishRefused, match=r"not in both: w \([^()]*other\)$"):
        check_tensors(tmp_path / "other", tmp_path)
