"""Adapters train alone, are written as peft writes them, and come off again."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tests.learners.tiny_transformers import KINDS, Sampler, make_folder, plain_logprobs, read
from turngate.learners import GRPO, HuggingFaceModel, LoRA
from turngate.learners.causal_lm import CausalLM
from turngate.learners.lora import LORA_KEY
from turngate.runtime.canary import read_canary
from turngate.runtime.engine.packing import pack
from turngate.runtime.errors import ConfigError, LearnerError

IDS = [[3, 4, 5, 6, 7, 8, 9, 3, 2], [1, 2, 3]]
RATES = {"adamw_lr": 1e-2, "off_policy": "decoupled", "parity": "report"}


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """A tiny Llama."""
    return make_folder(tmp_path / "start")


def trained(lab: Any, folder: Path, lora: LoRA, **options: Any) -> GRPO:
    """Return a learner after one update."""
    grpo = GRPO(HuggingFaceModel(folder, lora=lora, **options), **RATES)
    grpo.load(None)
    grpo.update(lab.sample_batch(Sampler(read(folder)), [[0.0, 1.0, 0.0, 1.0]]))
    return grpo


def scored(model: Any) -> Tensor:
    with torch.no_grad():
        made: Tensor = model.score(pack(IDS)).logprobs_M
    return made


def plain(model: Any) -> Tensor:
    with torch.no_grad():
        return torch.cat([plain_logprobs(model, row) for row in IDS])


@pytest.mark.parametrize("kind", KINDS)
def test_only_adapters_change(lab: Any, tmp_path: Path, kind: str) -> None:
    folder = make_folder(tmp_path / "start", kind)
    model = trained(lab, folder, LoRA(rank=2))._loaded.model
    fresh = HuggingFaceModel(folder, lora=LoRA(rank=2)).load(None)
    changed = {
        name
        for (name, one), (_, other) in zip(fresh.named_parameters(), model.named_parameters(), strict=True)
        if not torch.equal(one, other)
    }
    assert changed == {name for name, _ in model.named_parameters() if "lora_" in name}
    assert not any(p.requires_grad for name, p in model.named_parameters() if "lora_" not in name)


@pytest.mark.parametrize("kind", KINDS)
def test_fresh_adapters_change_nothing_and_equal_seeds_make_equal_ones(tmp_path: Path, kind: str) -> None:
    folder = make_folder(tmp_path / "start", kind)
    state = torch.random.get_rng_state()
    one, other, third = (HuggingFaceModel(folder, lora=LoRA(rank=2, seed=seed)).load(None) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.testing.assert_close(scored(one), plain(read(folder)), rtol=0, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), third.parameters(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_model_under_the_adapters(lab: Any, tmp_path: Path, kind: str) -> None:
    folder = make_folder(tmp_path / "start", kind)
    source = HuggingFaceModel(folder, lora=LoRA(rank=2))
    model = trained(lab, folder, LoRA(rank=2))._loaded.model
    reference = source.reference(model)
    moved = scored(model)
    torch.testing.assert_close(scored(reference), plain(read(folder)), rtol=0, atol=1e-5)
    assert torch.equal(scored(model), moved)  # they are back
    assert (moved - scored(reference)).abs().max() > 1e-3
    assert all(p.requires_grad == ("lora_" in name) for name, p in model.named_parameters())
    assert not reference.score(pack(IDS)).logprobs_M.requires_grad


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_adapters_are_pefts_with_their_configuration(
    lab: Any, start: Path, tmp_path: Path, dtype: Any
) -> None:
    grpo = trained(lab, start, LoRA(rank=2, alpha=6, targets=("q_proj", "up_proj")), dtype=dtype)
    path = tmp_path / "adapter.safetensors"
    grpo.save_weights(path)
    tensors = load_file(path)
    assert len(tensors) == 2 * 2 * 2
    assert tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (2, 32)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    config = json.loads(metadata[LORA_KEY])
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (2, 6, 0.0)
    assert sorted(config["target_modules"]) == ["q_proj", "up_proj"]
    assert config["base_model_name_or_path"] == str(start)
    # What a server makes of the file.
    served = tmp_path / "served"
    served.mkdir()
    (served / "adapter_config.json").write_text(metadata[LORA_KEY])
    (served / "adapter_model.safetensors").write_bytes(path.read_bytes())
    model = peft.PeftModel.from_pretrained(read(start), str(served))
    tolerance = 1e-5 if dtype == "float32" else 0.1
    torch.testing.assert_close(plain(model), scored(grpo._loaded.model), rtol=0, atol=tolerance)
    canary = read_canary(path)
    assert canary is not None
    expected = plain_logprobs(model, list(canary.token_ids)).tolist()
    assert canary.logprobs == pytest.approx(expected, abs=tolerance)


def test_a_checkpoint_is_an_adapter_folder_that_transformers_loads(lab: Any, start: Path, tmp_path: Path) -> None:
    (start / "chat_template.jinja").write_text("")
    grpo = trained(lab, start, LoRA(rank=2))
    grpo.save(tmp_path / "checkpoint")
    folder = tmp_path / "checkpoint" / "model"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"]
    torch.testing.assert_close(plain(read(folder)), scored(grpo._loaded.model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_merged_checkpoint_is_a_whole_model(lab: Any, tmp_path: Path, kind: str) -> None:
    start = make_folder(tmp_path / "start", kind)
    (start / "chat_template.jinja").write_text("")
    grpo = trained(lab, start, LoRA(rank=2, merged=True))
    grpo.save(tmp_path / "checkpoint")
    folder = tmp_path / "checkpoint" / "model" / "merged"
    assert load_file(folder / "model.safetensors").keys() == load_file(start / "model.safetensors").keys()
    assert (folder / "chat_template.jinja").exists()
    torch.testing.assert_close(plain(read(folder)), scored(grpo._loaded.model), rtol=0, atol=1e-4)


@pytest.mark.parametrize("other", [LoRA(rank=3), LoRA(rank=2, targets=("q_proj",))])
def test_adapters_of_another_shape_are_refused(start: Path, tmp_path: Path, other: LoRA) -> None:
    HuggingFaceModel(start, lora=LoRA(rank=2)).load(None).save(tmp_path / "saved")
    with pytest.raises(LearnerError, match="must hold the adapters that are configured"):
        HuggingFaceModel(start, lora=other).load(tmp_path / "saved")
    (tmp_path / "saved" / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(LearnerError, match="checkpoint must be readable"):
        HuggingFaceModel(start, lora=LoRA(rank=2)).load(tmp_path / "saved")


def test_targets_must_be_layers_of_the_model(start: Path) -> None:
    with pytest.raises(ConfigError, match="targets must name layers of the model"):
        HuggingFaceModel(start, lora=LoRA(targets=("nothing_like_it",))).load(None)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rank": 0}, "rank must be at least 1"),
        ({"alpha": 0}, "alpha must be at least 1"),
        ({"targets": "q_proj"}, "targets must be 'all-linear' or names of layers"),
        ({"targets": ()}, "targets must name at least one layer"),
        ({"seed": -(2**63) - 1}, "seed must be a signed 64-bit integer"),
    ],
)
def test_what_cannot_work_is_told_at_once(options: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        LoRA(**options)


def test_a_frozen_base_is_held_in_bfloat16_and_adapters_in_float32(start: Path) -> None:
    model = HuggingFaceModel(start, lora=LoRA(rank=2), dtype="bfloat16").load(None)
    assert isinstance(model, CausalLM)
    assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.float32}
    assert {p.dtype for n, p in model.named_parameters() if "lora_" not in n} == {torch.bfloat16}
