"""Canaries travel in the header of a weights file and are read without torch."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from turngate.runtime.canary import CANARY_KEY, Canary, canary_metadata, check_canary, read_canary, read_metadata
from turngate.runtime.errors import EndpointError, MalformedReply, PublishError, PublishRefused, RecordError

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


class Server:
    """Scores ids with what it was told, or fails."""

    def __init__(self, logprobs: Sequence[float], error: EndpointError | None = None) -> None:
        self.logprobs, self.error = logprobs, error

    async def score(self, token_ids: Sequence[int], *, timeout_s: float = 60.0) -> list[float]:
        if self.error is not None:
            raise self.error
        return [0.0, *self.logprobs]


async def test_a_server_that_agrees_passes_with_what_was_measured() -> None:
    report = await check_canary(Server((-0.5, -1.5)), CANARY, 0.2)
    assert (report.mean_error, report.max_error) == (0.125, 0.25)


@pytest.mark.parametrize(
    ("logprobs", "options", "cause"),
    [
        ((-3.0, -4.0), {}, "another model"),
        ((-0.6, -1.35), {}, r"different precisions.*canary_tolerance"),
        ((-0.6, -1.35), {"is_tied": True}, r"tie_word_embeddings.*untied copy"),
        ((-2.0, -2.0), {"previous": Canary((3, 1, 2), (-2.0, -2.0))}, "still answers like the weights before"),
        ((-2.0, -2.0), {"previous": Canary((9, 9, 9), (-2.0, -2.0))}, "another model"),
    ],
)
async def test_a_server_that_disagrees_is_refused_with_the_likely_cause(
    logprobs: tuple[float, ...], options: dict[str, Any], cause: str
) -> None:
    with pytest.raises(PublishRefused, match=rf"within 0\.05 of the learner's.*{cause}"):
        await check_canary(Server(logprobs), CANARY, 0.05, **options)


async def test_a_server_that_cannot_score_is_no_mismatch() -> None:
    with pytest.raises(PublishError, match=r"must score the canary.*no echo.*canary_tolerance=math\.inf") as error:
        await check_canary(Server((), MalformedReply("no echo")), CANARY, 0.2)
    assert not isinstance(error.value, PublishRefused)
