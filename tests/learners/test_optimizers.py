"""Muon, AdamW, their schedule, and exact resumption."""

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.learners.tiny_transformers import make_folder
from turngate.learners import HuggingFaceModel, LoRA
from turngate.learners.optimizers import Muon, MuonAdamW, Schedule, orthogonalise, split_parameters
from turngate.runtime.engine.model import ModelConfig, PolicyModel
from turngate.runtime.errors import ConfigError, LearnerError


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4))


def train(model: nn.Module, optimizer: MuonAdamW, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        model(torch.tensor([step % 7, 2])).square().sum().backward()
        optimizer.step(1.0 / (step + 1))
        optimizer.zero_grad()


@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (16, 4)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape: tuple[int, int]) -> None:
    matrix = (
        torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    )
    values = torch.linalg.svdvals(orthogonalise(matrix))
    assert values.min() > 0.3
    assert values.max() < 1.3


def test_a_zero_gradient_stays_zero() -> None:
    assert orthogonalise(torch.zeros(1, 4, 4)).abs().sum() == 0


def test_muon_moves_every_direction_by_the_same_amount() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.diag(torch.tensor([1.0, 0.01]))
    Muon([weight], lr=0.1).step()
    moved = weight.detach().diagonal()
    assert (moved < 0).all()
    assert moved.max() / moved.min() > 0.3  # the gradient's own ratio is 0.01


def test_muon_moves_tall_matrices_further_so_that_outputs_move_alike() -> None:
    tall, wide = nn.Parameter(torch.zeros(16, 4)), nn.Parameter(torch.zeros(4, 16))
    gradient = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    tall.grad, wide.grad = gradient.clone(), gradient.T.clone()
    Muon([tall, wide], lr=0.1).step()
    torch.testing.assert_close(tall.detach(), 2 * wide.detach().T)


def test_muon_batches_equal_shapes_without_mixing_them() -> None:
    gradients = [torch.randn(4, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    alone, together = (
        [nn.Parameter(torch.zeros(4, 4)) for _ in gradients],
        [nn.Parameter(torch.zeros(4, 4)) for _ in gradients],
    )
    for parameters in (alone, together):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
    for parameter in alone:
        Muon([parameter], lr=0.1).step()
    Muon(together, lr=0.1).step()
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other)


def test_muon_refuses_vectors() -> None:
    with pytest.raises(ConfigError, match="2 dimensions"):
        Muon([nn.Parameter(torch.zeros(3))], lr=0.1)


def test_embeddings_norms_and_heads_go_to_adamw() -> None:
    model = PolicyModel(
        ModelConfig(vocab_size=9, width=8, layers=1, heads=2, head_dim=4, mlp_width=16, value_head=True)
    )
    matrices, others = split_parameters(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)].split(".")[-2] for p in matrices} == {"q", "k", "v", "out", "up", "down"}
    assert {names[id(p)] for p in others} == {"embed.weight", "layers.0.smear", "value_head.weight"}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_of_other_libraries_models_only_matrices_of_layers_go_to_muon(tmp_path: Path, kind: str, tied: bool) -> None:
    folder = make_folder(tmp_path / "model", kind, tie_word_embeddings=tied)
    model = HuggingFaceModel(folder).load(None, value_head=True)
    matrices, others = split_parameters(model)
    names = {id(parameter): name.removeprefix("network.") for name, parameter in model.named_parameters()}
    hidden = {"llama": 2 * 7, "gpt2": 2 * 4, "qwen3_moe": 2 * 4}[kind]  # stacked experts are three-dimensional
    assert len(matrices) == hidden
    assert all(".layers." in names[id(p)] or ".h." in names[id(p)] for p in matrices)
    assert not any("norm" in names[id(p)] or "gate.weight" in names[id(p)] for p in matrices)
    assert "value_head.weight" in {names[id(p)] for p in others}
    assert len(matrices) + len(others) == len(list(model.parameters()))


def test_adapters_go_to_adamw_and_what_they_lie_on_to_neither(tmp_path: Path) -> None:
    model = HuggingFaceModel(make_folder(tmp_path / "model"), lora=LoRA(rank=2)).load(None)
    matrices, others = split_parameters(model)
    assert not matrices
    assert {id(p) for p in others} == {id(p) for name, p in model.named_parameters() if "lora_" in name}


def test_without_a_rate_for_muon_everything_is_adamws() -> None:
    model, other = net(), net()
    one = MuonAdamW(model, muon_lr=None, adamw_lr=0.01)
    plain = torch.optim.AdamW(other.parameters(), 0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for trained, optimizer in ((model, one), (other, plain)):
        trained(torch.tensor([1, 2])).square().sum().backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_resuming_from_a_state_dict_is_exact() -> None:
    straight, model = net(), net()
    train(straight, optimizer := MuonAdamW(straight, muon_lr=0.02, adamw_lr=0.01), 6)
    train(model, optimizer := MuonAdamW(model, muon_lr=0.02, adamw_lr=0.01), 3)
    state = copy.deepcopy(optimizer.state_dict())
    train(model, resumed := MuonAdamW(model, muon_lr=0.02, adamw_lr=0.01), 0)
    resumed.load_state_dict(state)
    train(model, resumed, 3, start=3)
    for one, other in zip(straight.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_state_of_another_model_is_refused() -> None:
    state = MuonAdamW(net(), muon_lr=0.1, adamw_lr=0.1).state_dict()
    with pytest.raises(LearnerError, match="must match the model"):
        MuonAdamW(nn.Linear(4, 4, bias=False), muon_lr=0.1, adamw_lr=0.1).load_state_dict(state)
    with pytest.raises(LearnerError, match="must match the model"):
        MuonAdamW(nn.Sequential(net(), net()), muon_lr=0.1, adamw_lr=0.1).load_state_dict(state)


def test_gradients_are_clipped_together_and_the_norm_before_is_returned() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad, model.bias.grad = torch.full((2, 2), 3.0), torch.zeros(2)
    assert MuonAdamW(model, muon_lr=0.1, adamw_lr=0.1).clip_grad_norm(1.0) == pytest.approx(6.0)
    assert model.weight.grad.norm().item() == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("lr", [-1.0, math.nan, math.inf])
def test_learning_rates_that_are_none_are_refused(lr: float) -> None:
    with pytest.raises(ConfigError, match="muon_lr"):
        MuonAdamW(net(), muon_lr=lr, adamw_lr=0.1)


def test_schedule_warms_up_then_holds_then_decays_by_80_percent() -> None:
    schedule = Schedule(warmup_updates=5, total_updates=100)
    factors = [schedule.factor(i) for i in range(120)]
    assert factors[:6] == [pytest.approx(f) for f in (0.2, 0.4, 0.6, 0.8, 1.0, 1.0)]
    assert factors[40] == pytest.approx(1.0)
    assert factors[70] == pytest.approx(0.6)
    assert factors[100:] == [pytest.approx(0.2)] * 20


def test_schedule_of_unknown_length_never_decays() -> None:
    assert Schedule().factor(0) == 1.0
    assert Schedule(warmup_updates=2).factor(10_000) == 1.0


@pytest.mark.parametrize("wrong", [{"warmup_updates": -1}, {"decay_start": 1.5}, {"decay_to": -0.1}])
def test_schedules_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Schedule(**wrong)
