"""A causal LM of transformers gives learners exactly what a plain forward pass of transformers gives."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.learners.tiny_transformers import KINDS, VOCABULARY, make_folder, plain_logprobs, read
from turngate.learners import causal_lm
from turngate.learners.causal_lm import check_head
from turngate.learners.huggingface import HuggingFaceModel
from turngate.learners.lora import LoRA
from turngate.runtime.engine.packing import pack
from turngate.runtime.errors import ConfigError

IDS = [[3, 4, 5, 6, 7, 8, 9, 3, 2], [1, 2, 3], [5, 6, 7, 8, 2], [4, 4]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model folder per kind."""
    base = tmp_path_factory.mktemp("models")
    return {kind: make_folder(base / kind, kind) for kind in KINDS}


def plain(model: Any, ids: Sequence[list[int]], temperature: float = 1.0) -> Tensor:
    return torch.cat([plain_logprobs(model, row, temperature) for row in ids])


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a.detach(), b.detach(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_a_plain_forward_pass(folders: Any, kind: str, temperature: float) -> None:
    model = HuggingFaceModel(folders[kind]).load(None)
    scores = model.score(pack(IDS), temperature=temperature)
    close(scores.logprobs_M, plain(read(folders[kind]), IDS, temperature))
    assert scores.values_M is None
    assert scores.entropy_M is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("rows", [1, 1000])
def test_gradients_are_those_of_a_naive_loss(
    folders: Any, kind: str, checkpointing: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal_lm, "_LOGITS_PER_CHUNK", rows * VOCABULARY)
    model = HuggingFaceModel(folders[kind], gradient_checkpointing=checkpointing).load(None)
    torch.autograd.backward(model.score(pack(IDS), temperature=0.7).logprobs_M.square().sum())
    naive = read(folders[kind])
    torch.autograd.backward(plain(naive, IDS, 0.7).square().sum())
    own = dict(model.lm.named_parameters())
    for name, parameter in naive.named_parameters():
        if parameter.grad is None:  # an expert nobody chose
            assert own[name].grad is None or not own[name].grad.any()
        else:
            torch.testing.assert_close(own[name].grad, parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_neither_padding_nor_company_changes_a_number(folders: Any, kind: str) -> None:
    model = HuggingFaceModel(folders[kind]).load(None)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in (2, 90, 5, 33, 90, 64, 3, 120, 41)]
    alone = torch.cat([model.score(pack([row]), with_entropy=True).logprobs_M for row in rows])
    for pad in (0, 7):
        packed = pack(rows, pad=pad)
        assert len({length for _, length in packed.blocks}) > 1 or len(packed.ids_N) > sum(map(len, rows))
        close(model.score(packed).logprobs_M, alone)


def test_only_asked_tokens_are_scored_in_the_order_asked(folders: Any) -> None:
    model = HuggingFaceModel(folders["llama"]).load(None)
    masks = [[0, 0, 0, 1, 0, 1, 0, 0, 0], [0, 1, 1], [0, 0, 0, 0, 1], [0, 0]]
    asked = torch.tensor([bool(flag) for mask in masks for flag in mask[1:]])
    close(model.score(pack(IDS, masks)).logprobs_M, plain(read(folders["llama"]), IDS)[asked])


def test_logits_are_made_at_asked_positions_alone_and_a_chunk_at_a_time(
    folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal_lm, "_LOGITS_PER_CHUNK", 2 * VOCABULARY)
    model = HuggingFaceModel(folders["llama"]).load(None)
    made: list[int] = []
    model.lm.lm_head.register_forward_hook(lambda module, args, output: made.append(output.shape[:-1].numel()))
    masks = [[0, 0, 0, 1, 0, 1, 0, 0, 0], [0, 1, 1], [0, 0, 0, 0, 1], [0, 0]]
    loss = model.score(pack(IDS, masks), with_entropy=True).logprobs_M.sum()
    assert made == [2, 2, 1]
    torch.autograd.backward(loss)
    assert made == [2, 2, 1, 1, 2, 2]  # made again for the backward pass instead of kept


def test_entropy_is_the_whole_distributions(folders: Any) -> None:
    scores = HuggingFaceModel(folders["qwen3"]).load(None).score(pack(IDS), temperature=0.5, with_entropy=True)
    model = read(folders["qwen3"])
    logits = torch.cat([model(input_ids=torch.tensor([row])).logits[0, :-1] for row in IDS]) / 0.5
    assert scores.entropy_M is not None
    close(scores.entropy_M, torch.distributions.Categorical(logits=logits).entropy())


def test_checkpointing_computes_layers_again_and_dropout_stays_off(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", attention_dropout=0.5)
    calls: list[int] = []
    for checkpointing in (False, True):
        model = HuggingFaceModel(folder, gradient_checkpointing=checkpointing).load(None)
        model.lm.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        for mode in (True, False):
            model.train(mode)
            scored = model.score(pack(IDS)).logprobs_M
            close(scored, plain(read(folder), IDS))
        torch.autograd.backward(scored.sum())
        assert len(calls) == (3 if checkpointing else 2)
        calls.clear()


@pytest.mark.parametrize("lora", [False, True])
def test_values_are_read_off_the_trunk_and_flow_back_into_it(folders: Any, lora: bool) -> None:
    model = HuggingFaceModel(folders["llama"], lora=LoRA(rank=2) if lora else None).load(None, value_head=True)
    assert model.value_head is not None
    fresh = model.values(pack(IDS))
    assert fresh is not None
    assert not fresh.any()
    nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(0))
    values = model.values(pack(IDS))
    assert values is not None
    trunk = read(folders["llama"]).model
    states = torch.cat([trunk(input_ids=torch.tensor([row])).last_hidden_state[0, :-1] for row in IDS])
    close(values, (states @ model.value_head.weight.T).squeeze(-1))
    both = model.score(pack(IDS)).values_M
    assert both is not None
    close(values, both)
    torch.autograd.backward(values.sum())
    assert model.value_head.weight.grad is not None
    trained = [p for n, p in model.named_parameters() if p.requires_grad and ("q_proj" in n or "lora_B" in n)]
    assert any(p.grad is not None and p.grad.any() for p in trained)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_close_and_keeps_float32_where_it_trains(folders: Any, kind: str) -> None:
    model = HuggingFaceModel(folders[kind], dtype="bfloat16").load(None)
    logprobs_M = model.score(pack(IDS)).logprobs_M
    close(logprobs_M, plain(read(folders[kind]), IDS), 0.08)
    assert logprobs_M.dtype == torch.float32
    assert not torch.equal(logprobs_M, HuggingFaceModel(folders[kind]).load(None).score(pack(IDS)).logprobs_M)
    torch.autograd.backward(logprobs_M.sum())
    trained = [p for p in model.parameters() if p.grad is not None]
    assert {p.dtype for p in trained} == {p.grad.dtype for p in trained if p.grad is not None} == {torch.float32}


def test_bfloat16_gradients_survive_scoring_without_and_chunks(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast keeps casts of weights; one made under no_grad would cut the gradient of the next pass."""
    monkeypatch.setattr(causal_lm, "_LOGITS_PER_CHUNK", 2 * VOCABULARY)
    model = HuggingFaceModel(folders["llama"], dtype="bfloat16").load(None)
    with torch.no_grad():
        model.score(pack(IDS))
    torch.autograd.backward(model.score(pack(IDS)).logprobs_M.sum())
    exact = read(folders["llama"])
    torch.autograd.backward(plain(exact, IDS).sum())
    for name, parameter in exact.named_parameters():
        got = model.lm.get_parameter(name).grad
        assert (got - parameter.grad).norm() <= 0.1 * parameter.grad.norm() + 1e-3


def test_temperature_must_be_positive(folders: Any) -> None:
    with pytest.raises(ConfigError, match="temperature must be positive"):
        HuggingFaceModel(folders["llama"]).load(None).score(pack(IDS), temperature=0.0)


def test_a_model_that_makes_its_logits_otherwise_is_refused(folders: Any) -> None:
    model = read(folders["llama"])
    forward = type(model).forward

    class Odd(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, **options: Any) -> Any:
            output = forward(self, input_ids=input_ids, **options)
            if input_ids is not None:
                output.logits = output.logits + torch.nn.functional.one_hot(input_ids, VOCABULARY)
            return output

    check_head(model, Path("folder"))
    model.__class__ = Odd
    with pytest.raises(ConfigError, match="must be a function of its trunk's last state"):
        check_head(model, Path("folder"))
