"""Sources of models: which folder is whose, and what the embedded one loads."""

from pathlib import Path
from typing import Any

import pytest
import torch

from turngate.learners.grpo import GRPO
from turngate.learners.huggingface import HuggingFaceModel
from turngate.learners.policy_model import EmbeddedModel, ModelSource, model_source, with_value_head
from turngate.runtime.canary import read_canary
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.engine.packing import pack
from turngate.runtime.errors import ConfigError


def test_a_folder_of_the_embedded_engine_is_recognised(folder: Path, tmp_path: Path) -> None:
    assert model_source(folder) == model_source(str(folder)) == EmbeddedModel(folder)
    assert model_source(tmp_path / "nothing") == EmbeddedModel(tmp_path / "nothing")


def test_a_folder_of_transformers_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 32}')
    assert model_source(str(tmp_path)) == HuggingFaceModel(tmp_path)


def test_a_source_is_taken_as_it_is(folder: Path) -> None:
    source = HuggingFaceModel(folder)
    assert model_source(source) is source
    assert isinstance(source, ModelSource)
    assert isinstance(EmbeddedModel(folder), ModelSource)


def test_anything_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="model must be a folder or a source"):
        model_source(3)
    with pytest.raises(ConfigError, match="model must be a folder or a source"):
        GRPO(PolicyModel)


def test_a_head_that_training_adds_is_saved_but_not_published(folder: Path, tmp_path: Path) -> None:
    source = EmbeddedModel(folder)
    model = source.load(None, value_head=True)
    model.save_weights(tmp_path / "weights.safetensors")
    PolicyModel.load(folder).load_weights(tmp_path / "weights.safetensors")
    model.save(tmp_path / "saved")
    again = source.load(tmp_path / "saved", value_head=True)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert "value_head.weight" in again.state_dict()
    assert not again.serves_value_head


def test_a_head_of_the_start_is_published(model: PolicyModel, tmp_path: Path) -> None:
    with_value_head(model).save(tmp_path / "start")
    headed = EmbeddedModel(tmp_path / "start").load(None)
    headed.save_weights(tmp_path / "weights.safetensors")
    PolicyModel.load(tmp_path / "start").load_weights(tmp_path / "weights.safetensors")


def test_values_alone_are_those_of_a_whole_score(model: PolicyModel) -> None:
    headed, packed = with_value_head(model), pack([[1, 2, 3, 4], [5, 6]])
    assert headed.value_head is not None
    torch.nn.init.normal_(headed.value_head.weight, generator=torch.Generator().manual_seed(0))
    values, scores = headed.values(packed), headed.score(packed)
    assert values is not None
    assert scores.values_M is not None
    assert torch.equal(values, scores.values_M)
    assert model.values(packed) is None


def test_weights_of_the_embedded_model_carry_a_canary(lab: Any, model: PolicyModel, tmp_path: Path) -> None:
    model.save_weights(tmp_path / "weights.safetensors")
    canary = read_canary(tmp_path / "weights.safetensors")
    assert canary is not None
    scored = model.score(pack([canary.token_ids])).logprobs_M.tolist()
    assert list(canary.logprobs) == scored
    other = lab.make_model(seed=1).score(pack([canary.token_ids])).logprobs_M.tolist()
    assert max(abs(a - b) for a, b in zip(other, scored, strict=True)) > 0.1
