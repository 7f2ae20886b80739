"""Target networks follow a critic slowly and know how old they are."""

import io

import pytest
import torch
from torch import nn

from turngate.learners.target_network import TargetNetwork
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.errors import ConfigError, LearnerError


class Toy(nn.Module):
    """One weight, one buffer of each kind."""

    scale: torch.Tensor
    steps: torch.Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), value))
        self.register_buffer("scale", torch.full((1,), value))
        self.register_buffer("steps", torch.tensor(int(value)), persistent=False)


def test_it_starts_as_a_frozen_copy_of_its_own() -> None:
    module = Toy(1.0)
    target = TargetNetwork(module, tau=0.5, version=4)
    with torch.no_grad():
        module.weight.fill_(9.0)
    assert target.module.weight.tolist() == [1.0, 1.0, 1.0]
    assert not any(p.requires_grad for p in target.module.parameters())
    assert module.weight.requires_grad
    assert repr(target) == "<TargetNetwork tau 0.5, version 4>"


def test_an_update_takes_over_its_share_of_the_parameters_and_all_buffers() -> None:
    target = TargetNetwork(Toy(0.0), tau=0.25)
    target.update(Toy(8.0), 1)
    assert target.module.weight.tolist() == [2.0, 2.0, 2.0]
    assert (target.module.scale.item(), target.module.steps.item()) == (8.0, 8)
    target.update(Toy(8.0), 2)
    assert target.module.weight.tolist() == [3.5, 3.5, 3.5]
    assert target.version == 2


def test_tau_one_is_an_exact_copy() -> None:
    target, module = TargetNetwork(Toy(0.1), tau=1.0), Toy(0.0)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([1 / 3, 1e30, -1e-30]))
    target.update(module, 1)
    assert torch.equal(target.module.weight, module.weight)


def test_a_model_with_tied_weights_stays_tied(model: PolicyModel) -> None:
    target = TargetNetwork(model, tau=0.5)
    target.update(model, 1)
    for name, value in model.state_dict().items():
        assert torch.equal(target.module.state_dict()[name], value)


def test_a_restart_goes_on_exactly() -> None:
    target = TargetNetwork(Toy(0.0), tau=0.3)
    target.update(Toy(1.0), 5)
    content = io.BytesIO()
    torch.save(target.state_dict(), content)
    content.seek(0)
    again = TargetNetwork(Toy(7.0), tau=0.3)
    again.load_state_dict(torch.load(content, weights_only=True))
    for one in (target, again):
        one.update(Toy(2.0), 6)
    assert torch.equal(again.module.weight, target.module.weight)
    assert again.version == target.version == 6


def test_versions_must_not_fall() -> None:
    target = TargetNetwork(Toy(0.0), tau=0.5, version=3)
    with pytest.raises(LearnerError, match="versions must not fall"):
        target.update(Toy(1.0), 2)
    assert target.module.weight.tolist() == [0.0, 0.0, 0.0]


def test_another_module_is_refused_by_name() -> None:
    target: TargetNetwork[nn.Module] = TargetNetwork(nn.Linear(2, 1), tau=0.5)
    with pytest.raises(LearnerError, match=r"got other parameters \['weight'\]"):
        target.update(nn.Linear(3, 1), 1)
    with pytest.raises(LearnerError, match=r"got other parameters \['bias'\]"):
        target.update(nn.Linear(2, 1, bias=False), 1)


@pytest.mark.parametrize("tau", [0.0, -0.1, 1.1, float("nan")])
def test_tau_must_be_a_share(tau: float) -> None:
    with pytest.raises(ConfigError, match="tau must be above 0"):
        TargetNetwork(Toy(0.0), tau=tau)


def test_frozen_parameters_are_shared_and_never_saved() -> None:
    base, head = nn.Linear(2, 2, bias=False).requires_grad_(False), nn.Linear(2, 2, bias=False)
    module = nn.Sequential(base, head)
    target = TargetNetwork(module, tau=0.5)
    assert target.module[0].weight is base.weight
    assert target.module[1].weight is not head.weight
    frozen = base.weight.clone()
    with torch.no_grad():
        head.weight.zero_()
    target.update(module, 1)
    assert torch.equal(base.weight, frozen)
    state = target.state_dict()
    assert list(state["module"]) == ["1.weight"]
    again = TargetNetwork(module, tau=0.5)
    again.load_state_dict(state)
    assert torch.equal(again.module.state_dict()["1.weight"], target.module.state_dict()["1.weight"])
