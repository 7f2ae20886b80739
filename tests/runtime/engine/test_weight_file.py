import json
import os
import struct
import threading

import pytest
import safetensors.torch
import torch

from turngate.runtime.engine.weight_file import fit_weights, max_file_bytes, read_weights
from turngate.runtime.errors import PublishError

OWN = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
LIMIT = max_file_bytes(OWN)


def test_a_file_is_read_whole(tmp_path):
    safetensors.torch.save_file(OWN, tmp_path / "w")
    assert {name: tensor.tolist() for name, tensor in read_weights(tmp_path / "w", max_bytes=LIMIT).items()} == {
        "w": [1.0, 2.0],
        "b": [3.0],
    }


def header_only(dtype: str) -> bytes:
    header = json.dumps({"w": {"dtype": dtype, "shape": [4], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


def make_torn(path):
    safetensors.torch.save_file(OWN, path)
    path.write_bytes(path.read_bytes()[:-1])


def make_large(path):
    path.touch()
    os.truncate(path, LIMIT + 1)  # a hole: it costs no disk, and reading it would cost memory


MAKE = {
    "missing": lambda path: None,
    "empty": lambda path: path.touch(),
    "torn": make_torn,
    "a header that lies": lambda path: path.write_bytes(struct.pack("<Q", 2**60) + b"{}"),
    "a dtype unknown to torch": lambda path: path.write_bytes(header_only("F8_E8M0")),
    "a folder": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path),
    "too large": make_large,
}


@pytest.mark.parametrize("kind", MAKE)
def test_what_is_no_file_of_weights_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "w"
    MAKE[kind](path)
    refusals: list[PublishError] = []

    def read() -> None:
        with pytest.raises(PublishError, match="must be a whole safetensors file") as caught:
            read_weights(path, max_bytes=LIMIT)
        refusals.append(caught.value)

    reader = threading.Thread(target=read, daemon=True)  # which a pipe without a writer would hold for ever
    reader.start()
    reader.join(20)
    assert len(refusals) == 1
    assert str(path) in str(refusals[0])


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000, "\ud800"])
def test_a_path_that_cannot_exist_is_refused(tmp_path, path):
    with pytest.raises(PublishError, match="must be a whole safetensors file"):
        read_weights(tmp_path / path, max_bytes=LIMIT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_floating_point_weights_are_converted_to_the_models_type(dtype):
    fitting = fit_weights(OWN, {name: tensor.to(dtype) for name, tensor in OWN.items()}, "here")
    assert {tensor.dtype for tensor in fitting.values()} == {torch.float32}
    assert fitting["w"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8, torch.complex64])
def test_weights_of_another_kind_of_number_are_refused(dtype):
    with pytest.raises(PublishError, match=rf"must be floating-point numbers: got {dtype} \(w, here\)"):
        fit_weights(OWN, {**OWN, "w": OWN["w"].to(dtype)}, "here")


@pytest.mark.parametrize(
    "wrong",
    [
        torch.tensor([1.0, float("nan")]),
        torch.tensor([1.0, float("inf")]),
        torch.tensor([1.0, 1e39], dtype=torch.float64),  # finite, but not as float32
        torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn),
    ],
)
def test_numbers_that_the_model_cannot_hold_are_refused(wrong):
    with pytest.raises(PublishError, match=r"must be finite: got NaN or infinity \(w, here\)"):
        fit_weights(OWN, {**OWN, "w": wrong}, "here")


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"w": OWN["w"]}, r"missing \['b'\], unknown \[\]"),
        ({**OWN, "x": OWN["w"]}, r"missing \[\], unknown \['x'\]"),
        ({**OWN, "w": torch.ones(2, 1)}, r"expected \(2,\), got \(2, 1\) \(w, here\)"),
    ],
)
def test_other_names_and_shapes_are_refused(new, message):
    with pytest.raises(PublishError, match=message):
        fit_weights(OWN, new, "here")
