import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from turngate.runtime.canary import Canary, canary_metadata

IDS = (3, 1, 2, 4)


def canary(version: float, ids: tuple[int, ...] = IDS) -> Canary:
    """The canary of made-up weights: each version is half a nat away from the one before."""
    return Canary(ids, tuple(-1.0 - version / 2 - position / 8 for position in range(len(ids) - 1)))


def write_weights(path, version: float, *, width: int = 2, **metadata: str):
    save_file(
        {"embed": np.full((4, width), version, np.float32), "head": np.ones((width, 4), np.float32)},
        path,
        {"format": "pt", **canary_metadata(canary(version)), **metadata},
    )
    return path


@pytest.fixture
def base_model(tmp_path):
    """A model folder of version 0."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny", "tie_word_embeddings": False}))
    (folder / "tokenizer.json").write_text("{}")
    write_weights(folder / "model.safetensors", 0)
    return folder


@pytest.fixture
def weights(tmp_path):
    """Weights files by version, as a learner leaves them."""

    def make(version: float, **options):
        return write_weights(tmp_path / f"{version}.safetensors", version, **options)

    return make
