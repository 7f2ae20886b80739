"""PPO as a whole: what its critic learns, how episodes that were cut short continue, and that it resumes exactly."""

import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from turngate.learners.critic import CriticConfig
from turngate.learners.episode_credit import GAEConfig
from turngate.learners.ppo import PPO
from turngate.learners.replay import ReplayConfig
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.types import Batch, Trajectory

REWARDS = [[0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]]
EASY = {"parity": "report", "off_policy": "decoupled"}


def learner(folder: Path, **options: Any) -> PPO:
    ppo = PPO(folder, **(EASY | options))
    ppo.load(None)
    return ppo


def weights(ppo: PPO) -> dict[str, Tensor]:
    assert ppo._state is not None
    state = {name: tensor.clone() for name, tensor in ppo._state.model.state_dict().items()}
    if ppo._critic is not None:
        state |= {f"critic.{name}": tensor.clone() for name, tensor in ppo._critic.model.state_dict().items()}
    return state


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("level", ["turn", "token", "bilevel"])
@pytest.mark.parametrize("place", ["separate", "trunk"])
def test_an_update_moves_policy_and_critic(lab: Any, folder: Path, model: PolicyModel, level: Any, place: Any) -> None:
    ppo = learner(folder, credit=GAEConfig(level=level), critic=CriticConfig(place=place))
    before = weights(ppo)
    metrics = ppo.update(lab.sample_batch(model, REWARDS)).metrics
    after = weights(ppo)
    assert not torch.equal(before["embed.weight"], after["embed.weight"])
    assert metrics["grad_norm"] > 0
    head = "value_head.weight" if place == "trunk" else "critic.value_head.weight"
    assert not torch.equal(before[head], after[head])


@pytest.mark.parametrize("place", ["separate", "trunk"])
def test_save_load_update_equals_update_bit_for_bit(
    lab: Any, folder: Path, model: PolicyModel, tmp_path: Path, place: Any
) -> None:
    batches = [lab.sample_batch(model, REWARDS, seed=seed) for seed in range(3)]
    options = EASY | {"critic": CriticConfig(place=place)}
    straight = learner(folder, **options)
    for batch in batches:
        straight.update(batch)
    first = learner(folder, **options)
    first.update(batches[0])
    first.save(tmp_path / "checkpoint")
    second = PPO(folder, **options)
    second.load(tmp_path / "checkpoint")
    for batch in batches[1:]:
        second.update(batch)
    assert same(weights(straight), weights(second))


def test_published_weights_fit_the_model_that_is_served(lab: Any, folder: Path, tmp_path: Path) -> None:
    ppo = learner(folder, critic=CriticConfig(place="trunk"))
    ppo.save_weights(tmp_path / "weights.safetensors")
    served = PolicyModel.load(folder)
    served.load_weights(tmp_path / "weights.safetensors")
    assert not served.config.value_head


def test_it_travels_by_pickle_before_it_is_loaded(folder: Path) -> None:
    assert pickle.loads(pickle.dumps(PPO(folder, updates=10))) == PPO(folder, updates=10)


@pytest.mark.parametrize("target", ["auto", "vtrace", "retrace", "one_step"])
def test_old_experience_teaches_the_critic_alone(lab: Any, folder: Path, model: PolicyModel, target: Any) -> None:
    replay = ReplayConfig(start_after=4, batch_trajectories=8, target=target)
    options: dict[str, Any] = {"critic": CriticConfig(action_values=target == "retrace")}
    with_replay, without = learner(folder, replay=replay, **options), learner(folder, **options)
    for seed in range(2):
        batch = lab.sample_batch(model, REWARDS, seed=seed)
        old = lab.sample_batch(model, [[1.0, 0.0]], seed=10 + seed)
        old = msgspec.structs.replace(old.groups[0], trajectories=renamed(old, f"old{seed}-"))
        metrics = with_replay.update(msgspec.structs.replace(batch, stale=(old,), policy_version=seed)).metrics
        without.update(msgspec.structs.replace(batch, policy_version=seed))
    used = {"auto": "vtrace"}.get(target, target)
    assert metrics[f"replay_target_{used}"] == 1.0
    assert metrics["replay_trajectories"] >= 8
    assert not torch.equal(weights(with_replay)["critic.embed.weight"], weights(without)["critic.embed.weight"])


def renamed(batch: Batch, prefix: str) -> tuple[Trajectory, ...]:
    return tuple(msgspec.structs.replace(t, id=prefix + t.id) for t in batch.groups[0].trajectories)
