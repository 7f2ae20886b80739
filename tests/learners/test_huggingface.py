"""Models of transformers under GRPO and PPO: they learn, resume exactly, and what they write loads elsewhere."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from tests.learners.tiny_transformers import KINDS, Sampler, make_folder, plain_logprobs, read
from turngate.learners import GRPO, PPO, HuggingFaceModel, LoRA
from turngate.learners.critic import CriticConfig
from turngate.learners.huggingface import untie_folder
from turngate.learners.policy_learner import PolicyLearner
from turngate.learners.replay import ReplayConfig
from turngate.runtime.canary import read_canary
from turngate.runtime.engine.packing import pack
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.types import Batch, Trajectory

REWARDS = [[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]]
IDS = [[3, 4, 5, 6, 7, 8, 9, 3, 2], [1, 2, 3]]
RATES = {"muon_lr": None, "adamw_lr": 1e-3, "off_policy": "decoupled", "parity": "report"}


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """A tiny Llama."""
    return make_folder(tmp_path / "start")


@pytest.fixture
def batch(lab: Any, start: Path) -> Batch:
    """What it sampled."""
    made: Batch = lab.sample_batch(Sampler(read(start)), REWARDS)
    return made


def loaded(learner: PolicyLearner, folder: Path | None = None) -> PolicyLearner:
    learner.load(folder)
    return learner


def weights(learner: PolicyLearner) -> dict[str, Tensor]:
    state = {name: tensor.clone() for name, tensor in learner._loaded.model.state_dict().items()}
    critic = getattr(learner, "_critic", None)
    return state | ({} if critic is None else {f"critic.{n}": t.clone() for n, t in critic.model.state_dict().items()})


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def logits(model: Any) -> Tensor:
    made: Tensor = model(input_ids=torch.tensor([IDS[0]])).logits
    return made.detach()


# --- learning


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("lora", [None, LoRA(rank=4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_makes_rewarded_tokens_likelier(lab: Any, tmp_path: Path, kind: str, lora: Any, dtype: Any) -> None:
    folder = make_folder(tmp_path / "model", kind)
    batch = lab.sample_batch(Sampler(read(folder)), REWARDS)
    options = RATES | ({"adamw_lr": 1e-2} if lora else {})
    grpo = loaded(GRPO(HuggingFaceModel(folder, lora=lora, dtype=dtype), **options, epochs=4))
    before = [likelihoods(grpo, group.trajectories) for group in batch.groups]
    metrics = grpo.update(batch).metrics
    after = [likelihoods(grpo, group.trajectories) for group in batch.groups]
    for old, new, rewards in zip(before, after, REWARDS, strict=True):
        gains = torch.tensor(new) - torch.tensor(old)
        won = torch.tensor(rewards) > 0
        assert gains[won].mean() > gains[~won].mean() + 0.01
    assert metrics["parity_max_abs"] < (1e-4 if dtype == "float32" else 0.1)


def likelihoods(learner: PolicyLearner, trajectories: tuple[Trajectory, ...]) -> list[float]:
    """Return the mean log-prob per generated token of each trajectory."""
    rows = [trajectory.segments[0] for trajectory in trajectories]
    ids = [memoryview(row.token_ids).cast("i").tolist() for row in rows]
    masks = [list(row.policy_mask) for row in rows]
    with torch.no_grad():
        scored = learner._loaded.model.score(pack(ids, masks)).logprobs_M.split([sum(mask) for mask in masks])
    return [float(part.mean()) for part in scored]


@pytest.mark.parametrize("place", ["trunk", "separate"])
@pytest.mark.parametrize("lora", [None, LoRA(rank=2)])
def test_ppo_moves_policy_and_values(start: Path, batch: Batch, place: Any, lora: Any) -> None:
    source = HuggingFaceModel(start, lora=lora)
    ppo = loaded(PPO(source, critic=CriticConfig(place=place, muon_lr=None, adamw_lr=1e-3), **RATES))
    before = weights(ppo)
    metrics = ppo.update(batch).metrics
    after = weights(ppo)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert metrics["value_loss"] > 0
    assert ("value_head.weight" if place == "trunk" else "critic.value_head.weight") in moved
    assert any("q_proj" in name for name in moved if not name.startswith("critic."))


def test_the_kl_term_starts_at_zero_and_pulls_towards_the_start(start: Path, batch: Batch) -> None:
    for lora in (None, LoRA(rank=2)):
        grpo = loaded(GRPO(HuggingFaceModel(start, lora=lora), kl_coef=0.1, kl_in="loss_k2", **RATES))
        first = grpo.update(batch).metrics["reference_kl_k1"]
        second = grpo.update(msgspec.structs.replace(batch, policy_version=1)).metrics["reference_kl_k1"]
        assert first == pytest.approx(0.0, abs=1e-7)
        assert abs(second) > 1e-6


@pytest.mark.parametrize("cap", [16, 8192])
def test_micro_batches_change_nothing(start: Path, batch: Batch, cap: int) -> None:
    whole, cut = (loaded(GRPO(HuggingFaceModel(start), **RATES, microbatch_tokens=n)) for n in (8192, cap))
    a, b = whole.update(batch).metrics, cut.update(batch).metrics
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    assert a["entropy"] == pytest.approx(b["entropy"], rel=1e-5)


def test_a_tied_model_learns(lab: Any, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tied", tie_word_embeddings=True)
    grpo = loaded(GRPO(HuggingFaceModel(folder), off_policy="decoupled"))
    grpo.update(lab.sample_batch(Sampler(read(folder)), REWARDS))
    lm = grpo._loaded.model.lm
    assert lm.lm_head.weight is lm.model.embed_tokens.weight


# --- going on


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16"}, {"lora": LoRA(rank=2)}, {"lora": LoRA(rank=2), "dtype": "bfloat16"}],
    ids=["float32", "bfloat16", "lora", "lora-bfloat16"],
)
@pytest.mark.parametrize("method", ["grpo", "trunk", "separate"])
def test_save_load_update_equals_update_bit_for_bit(
    start: Path, batch: Batch, tmp_path: Path, options: Any, method: str
) -> None:
    def make() -> PolicyLearner:
        source = HuggingFaceModel(start, **options)
        if method == "grpo":
            return GRPO(source, **RATES | {"muon_lr": 1e-3}, kl_coef=0.01)
        replay = ReplayConfig(start_after=4, batch_trajectories=4) if method == "separate" else None
        return PPO(source, critic=CriticConfig(place=method), replay=replay, **RATES)

    later = msgspec.structs.replace(batch, policy_version=1)
    straight, first, second = loaded(make()), loaded(make()), make()
    straight.update(batch)
    straight.update(later)
    first.update(batch)
    first.save(tmp_path / "checkpoint")
    second.load(tmp_path / "checkpoint")
    assert same(weights(first), weights(second))
    second.update(later)
    assert same(weights(straight), weights(second))


def test_a_tied_head_stays_tied_over_an_untied_checkpoint(lab: Any, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tied", tie_word_embeddings=True)
    grpo = loaded(GRPO(HuggingFaceModel(folder, untie=True), **RATES))
    grpo.update(lab.sample_batch(Sampler(read(folder)), REWARDS))
    grpo.save(tmp_path / "checkpoint")
    again = loaded(GRPO(HuggingFaceModel(folder, untie=True), **RATES), tmp_path / "checkpoint")
    assert again._loaded.model.lm.lm_head.weight is again._loaded.model.lm.model.embed_tokens.weight
    assert same(weights(grpo), weights(again))


def test_a_broken_checkpoint_is_the_learners_error(start: Path, tmp_path: Path) -> None:
    loaded(PPO(HuggingFaceModel(start), critic=CriticConfig(place="trunk"), **RATES)).save(tmp_path / "checkpoint")
    head = tmp_path / "checkpoint" / "model" / "value_head" / "value_head.safetensors"
    head.write_bytes(b"nonsense")
    with pytest.raises(LearnerError, match="checkpoint must be readable"):
        loaded(PPO(HuggingFaceModel(start), critic=CriticConfig(place="trunk"), **RATES), tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "model" / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(LearnerError, match="must hold a causal LM"):
        loaded(GRPO(HuggingFaceModel(start), **RATES), tmp_path / "checkpoint")


# --- what is written


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_loads_in_transformers(tmp_path: Path, kind: str) -> None:
    folder = make_folder(tmp_path / "start", kind)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        (folder / name).write_text("{}")
    (folder / ".hidden").write_text("")
    (folder / "other.bin").write_text("")
    (folder / "tokenizer.json").unlink()
    ppo = PPO(HuggingFaceModel(folder), critic=CriticConfig(place="trunk"), **RATES)
    ppo.load(None)
    with torch.no_grad():
        for parameter in ppo._loaded.model.lm.parameters():
            parameter.mul_(1.01)
    ppo.save(tmp_path / "checkpoint")
    model = tmp_path / "checkpoint" / "model"
    assert torch.equal(logits(read(model)), logits(ppo._loaded.model.lm))
    assert sorted(path.name for path in model.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer_config.json",
        "value_head",
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_weights_have_the_names_of_the_folder_and_a_canary(tmp_path: Path, kind: str, dtype: Any) -> None:
    folder = make_folder(tmp_path / "start", kind)
    model = HuggingFaceModel(folder, dtype=dtype, value_head=True).load(None)
    model.save_weights(tmp_path / "weights.safetensors")
    published, known = load_file(tmp_path / "weights.safetensors"), load_file(folder / "model.safetensors")
    assert published.keys() == known.keys()
    for name, tensor in published.items():
        assert torch.equal(tensor, known[name].to(getattr(torch, dtype)))
    with safe_open(tmp_path / "weights.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
    canary = read_canary(tmp_path / "weights.safetensors")
    assert canary is not None
    assert canary.dtype == dtype
    expected = plain_logprobs(read(folder), list(canary.token_ids)).tolist()
    assert canary.logprobs == pytest.approx(expected, abs=1e-5 if dtype == "float32" else 0.1)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_published_weights_are_those_after_the_update(start: Path, batch: Batch, tmp_path: Path) -> None:
    content = (start / "model.safetensors").read_bytes()
    grpo = loaded(GRPO(HuggingFaceModel(start), **RATES))
    grpo.update(batch)
    grpo.save_weights(tmp_path / "weights.safetensors")
    assert (start / "model.safetensors").read_bytes() == content  # it may be mapped into memory
    served = read(start)
    before = logits(served)
    served.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert not torch.equal(logits(served), before)
    canary = read_canary(tmp_path / "weights.safetensors")
    assert canary is not None
    expected = plain_logprobs(served, list(canary.token_ids)).tolist()
    assert canary.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_tied_head_is_written_once_or_as_its_own_tensor(tmp_path: Path, kind: str) -> None:
    folder = make_folder(tmp_path / "tied", kind, tie_word_embeddings=True)
    for untie, dtype in ((False, "float32"), (True, "float32"), (False, "bfloat16"), (True, "bfloat16")):
        model = HuggingFaceModel(folder, untie=untie, dtype=dtype).load(None)
        model.save_weights(tmp_path / "weights.safetensors")
        assert ("lm_head.weight" in load_file(tmp_path / "weights.safetensors")) == untie
        model.save(tmp_path / "saved")
        assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] != untie
        assert torch.equal(logits(read(tmp_path / "saved")), logits(read(folder)))
        assert model.lm.config.tie_word_embeddings


def test_an_untied_copy_has_a_head_of_its_own(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tied", tie_word_embeddings=True)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    made = untie_folder(folder, tmp_path / "untied")
    assert "lm_head.weight" in load_file(made / "model.safetensors")
    assert torch.equal(logits(read(made)), logits(read(folder)))
    assert (made / "chat_template.jinja").read_text() == "{{ messages }}"
    with torch.no_grad():
        copy = HuggingFaceModel(made).load(None)
        assert copy.lm.lm_head.weight is not copy.lm.model.embed_tokens.weight


def test_canaries_are_words_of_the_models_own_tokenizer(start: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"?": 0, "Whoever": 5, "serves": 6, "weights": 7, ".": 8}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(start / "tokenizer.json"))
    canary = HuggingFaceModel(start).load(None).canary()
    assert canary.token_ids[:3] == (5, 6, 0)


def test_canaries_end_in_tokens_that_are_likely_under_the_weights_of_now(start: Path) -> None:
    model = HuggingFaceModel(start).load(None)
    ids = model.canary().token_ids
    with torch.no_grad():
        logits_TV = model.lm(input_ids=torch.tensor([ids])).logits[0]
    for at in range((len(ids) + 1) // 2, len(ids)):
        assert ids[at] == int(logits_TV[at - 1].topk(2).indices[1])


# --- the specification


def test_a_spec_is_light_picklable_and_imports_nothing_of_transformers(start: Path) -> None:
    learner = GRPO(HuggingFaceModel(start, lora=LoRA(rank=8)), off_policy="decoupled")
    sent = pickle.dumps(learner)
    assert len(sent) < 4096
    code = (
        "import pickle, sys\n"
        f"learner = pickle.loads({sent!r})\n"
        "print(learner.model.lora.rank, 'transformers' in sys.modules, 'peft' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["8", "False", "False"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": "float16"}, "dtype must be float32 or bfloat16"),
        ({"lora": 8}, r"lora must be LoRA\(...\)"),
        ({"max_context": 1}, "max_context must be at least 2"),
        ({"untie": True, "lora": LoRA()}, "untie must be left out with lora"),
    ],
)
def test_what_cannot_work_is_told_at_once(options: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        HuggingFaceModel("folder", **options)


def test_folders_without_a_model_are_told_apart(start: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must hold a config"):
        HuggingFaceModel(tmp_path / "nothing").load(None)
    loaded(GRPO(HuggingFaceModel(start, lora=LoRA(rank=2)), **RATES)).save(tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="it holds adapters: name their base"):
        HuggingFaceModel(tmp_path / "checkpoint" / "model").load(None)
    (start / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="must hold a causal LM that transformers can load"):
        HuggingFaceModel(start).load(None)


def test_incomplete_weights_are_refused(start: Path) -> None:
    from safetensors.torch import save_file

    tensors = load_file(start / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, start / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 are missing, such as model\.layers\.1\.mlp\.up_proj\.weight"):
        HuggingFaceModel(start).load(None)


def test_sizes_are_the_models(start: Path) -> None:
    sizes = HuggingFaceModel(start).load(None).config
    assert (sizes.vocab_size, sizes.max_context) == (24, 128)
    assert HuggingFaceModel(start, max_context=10).load(None).config.max_context == 10


def test_segments_longer_than_the_context_are_refused(start: Path, batch: Batch) -> None:
    grpo = loaded(GRPO(HuggingFaceModel(start, max_context=8), **RATES))
    with pytest.raises(LearnerError, match="segments must fit the model: expected at most 8 tokens"):
        grpo.update(batch)
