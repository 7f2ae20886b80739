"""Learners under data that is missing, broken or extreme: exact zeros or clear errors, never weights that are NaN."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from turngate.envs.base import End, Task
from turngate.learners.critic import CriticConfig
from turngate.learners.episode_credit import GAEConfig
from turngate.learners.grpo import GRPO
from turngate.learners.policy_learner import PolicyLearner
from turngate.learners.ppo import PPO
from turngate.learners.reward_scheme import RewardScheme
from turngate.learners.step_credit import StepGroups
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.engine.packing import pack
from turngate.runtime.errors import LearnerError, RecordError
from turngate.runtime.types import Batch, Segment, Trajectory, Turn

LEARNERS: dict[str, tuple[type[PolicyLearner], dict[str, Any]]] = {
    "GRPO": (GRPO, {}),
    "GRPO turn index": (GRPO, {"credit": "turn_index"}),
    "GRPO step groups": (GRPO, {"credit": StepGroups()}),
    **{
        f"PPO {level} {place}": (PPO, {"credit": GAEConfig(level=level), "critic": CriticConfig(place=place)})
        for level in ("turn", "token", "bilevel")
        for place in ("separate", "trunk")
    },
}
every_learner = pytest.mark.parametrize("name", LEARNERS)
every_ppo = pytest.mark.parametrize("name", [name for name in LEARNERS if name.startswith("PPO")])

REWARDS = [[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]]


def loaded(name: str, folder: Path, **options: Any) -> Any:
    kind, own = LEARNERS[name]
    learner = kind(folder, **({"off_policy": "decoupled", "parity_tolerance": 1e-3} | own | options))
    learner.load(None)
    return learner


def weights(learner: Any) -> dict[str, Tensor]:
    """Return copies of the policy's weights, and of the critic's when it has its own."""
    state = {name: tensor.clone() for name, tensor in learner._state.model.state_dict().items()}
    critic = getattr(learner, "_critic", None)
    if critic is not None:
        state |= {f"critic.{name}": tensor.clone() for name, tensor in critic.model.state_dict().items()}
    return state


def policy_only(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if not name.startswith("critic.")}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def is_finite(learner: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in weights(learner).values())


def not_finite(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not math.isfinite(value)}


def update(learner: Any, batch: Batch) -> dict[str, float]:
    """Update, and check what must hold after any update."""
    metrics: dict[str, float] = learner.update(batch).metrics
    # Where nothing could be compared, an error of 0 would be a lie.
    assert not_finite(metrics).keys() <= (set() if metrics["parity_tokens"] else {"parity_max_abs"})
    assert is_finite(learner)
    return metrics


def played(
    model: PolicyModel,
    lengths: Sequence[int],
    *,
    name: str,
    reward: float = 0.0,
    seed: int = 0,
    seen: int = 2,
    end: End = End.success,
) -> Trajectory:
    """Return an episode in one segment with turns of so many tokens, scored by the model; 0 makes an injected turn."""
    generator = torch.Generator().manual_seed(seed)

    def some(count: int) -> list[int]:
        return torch.randint(2, model.config.vocab_size, (count,), generator=generator).tolist()

    ids, mask, turn_ids = [1, *some(2)], [0] * 3, [-1] * 3
    turns: list[Turn] = []
    for index, length in enumerate(lengths):
        rewards = {"outcome": reward} if index == len(lengths) - 1 else {}
        start = len(ids)
        turns.append(
            Turn(index=index, segment=0, start=start, length=length, text="", rewards=rewards, injected=not length)
        )
        ids += some(length + seen)
        mask += [1] * length + [0] * seen
        turn_ids += [index] * length + [-1] * seen
    logprobs = [0.0] * len(ids)
    if any(mask):
        with torch.no_grad():
            scored = model.score(pack([ids], [mask])).logprobs_M.tolist()
        for at, logprob in zip([i for i, m in enumerate(mask) if m], scored, strict=True):
            logprobs[at] = logprob
    segment = Segment.of(ids, mask, logprobs, [0 if m else -1 for m in mask], turn_ids)
    return Trajectory(id=name, task=Task("task"), turns=tuple(turns), segments=(segment,), end=end)


def group_of(model: PolicyModel, shapes: Sequence[Sequence[int]], **options: Any) -> list[Trajectory]:
    """Return one group; every other member succeeds."""
    return [
        played(model, shape, name=f"t{i}", reward=float(i % 2), seed=i, **options) for i, shape in enumerate(shapes)
    ]


def with_reward(batch: Batch, reward: float) -> Batch:
    """Return the batch with the last turn of its second trajectory paid so much."""
    first, *others = batch.groups
    chosen = first.trajectories[1]
    last = msgspec.structs.replace(chosen.turns[-1], rewards={"outcome": reward})
    members = list(first.trajectories)
    members[1] = msgspec.structs.replace(chosen, turns=(*chosen.turns[:-1], last))
    return msgspec.structs.replace(batch, groups=(msgspec.structs.replace(first, trajectories=tuple(members)), *others))


def with_rewards(batch: Batch, rewards: Sequence[dict[str, float]]) -> Batch:
    """Return the batch of one group with each member's last turn paid so."""
    (group,) = batch.groups
    members: list[Trajectory] = []
    for trajectory, paid in zip(group.trajectories, rewards, strict=True):
        last = msgspec.structs.replace(trajectory.turns[-1], rewards=paid)
        members.append(msgspec.structs.replace(trajectory, turns=(*trajectory.turns[:-1], last)))
    return msgspec.structs.replace(batch, groups=(msgspec.structs.replace(group, trajectories=tuple(members)),))


def without_second(batch: Batch) -> Batch:
    first, *others = batch.groups
    members = (first.trajectories[0], *first.trajectories[2:])
    return msgspec.structs.replace(batch, groups=(msgspec.structs.replace(first, trajectories=members), *others))


def with_end(batch: Batch, end: End) -> Batch:
    """Return the batch with every episode ended so."""
    groups = tuple(
        msgspec.structs.replace(g, trajectories=tuple(msgspec.structs.replace(t, end=end) for t in g.trajectories))
        for g in batch.groups
    )
    return msgspec.structs.replace(batch, groups=groups)


@every_learner
def test_an_unscorable_episode_is_counted_and_changes_nothing(
    lab: Any, folder: Path, model: PolicyModel, name: str
) -> None:
    batch = lab.sample_batch(model, REWARDS)
    learner, other = loaded(name, folder), loaded(name, folder)
    metrics = update(learner, with_reward(batch, math.nan))
    update(other, without_second(batch))
    assert metrics["excluded_unscorable"] == 1
    assert same(weights(learner), weights(other))


@every_learner
def test_an_unknown_outcome_that_is_not_learned_from_spoils_no_metric(
    lab: Any, folder: Path, model: PolicyModel, name: str
) -> None:
    batch = lab.make_batch([group_of(model, [[2, 2]] * 4)])
    batch = with_rewards(batch, [{"outcome": math.nan, "form": float(i % 2)} for i in range(4)])
    options = {"critic": replace(LEARNERS[name][1]["critic"], kind="scalar")} if name.startswith("PPO") else {}
    metrics = update(loaded(name, folder, rewards=RewardScheme(weights={"form": 1.0}), **options), batch)
    assert metrics["policy_tokens"] == 16
    assert "hacking_gold" not in metrics


@every_learner
@pytest.mark.parametrize("reward", [math.inf, -math.inf])
def test_an_infinite_reward_names_its_trajectory(
    lab: Any, folder: Path, model: PolicyModel, name: str, reward: float
) -> None:
    learner = loaded(name, folder)
    before = weights(learner)
    with pytest.raises(RecordError, match=r"reward must be finite.*trajectory t1\b"):
        learner.update(with_reward(lab.sample_batch(model, REWARDS), reward))
    assert same(weights(learner), before)


@every_learner
def test_a_batch_without_groups_changes_no_weight(folder: Path, lab: Any, name: str) -> None:
    learner = loaded(name, folder)
    before = weights(learner)
    metrics = update(learner, lab.make_batch([]))
    assert metrics["optimizer_steps"] == metrics["policy_tokens"] == 0
    assert same(weights(learner), before)


@pytest.mark.parametrize("preset", ["grpo", "rloo", "batch_std"])
def test_no_group_is_no_group_to_every_preset(folder: Path, lab: Any, preset: str) -> None:
    learner = loaded("GRPO", folder, preset=preset)
    before = weights(learner)
    update(learner, lab.make_batch([]))
    assert same(weights(learner), before)


@every_learner
def test_a_batch_of_failures_changes_no_weight(lab: Any, folder: Path, model: PolicyModel, name: str) -> None:
    learner = loaded(name, folder)
    before = weights(learner)
    metrics = update(learner, with_end(lab.sample_batch(model, REWARDS), End.env_error))
    assert metrics["excluded_failed"] == 8
    assert metrics["optimizer_steps"] == 0
    assert same(weights(learner), before)


@every_learner
def test_a_batch_too_old_to_train_on_moves_no_policy(lab: Any, folder: Path, model: PolicyModel, name: str) -> None:
    batch = msgspec.structs.replace(lab.sample_batch(model, REWARDS), policy_version=3, min_version=2)
    learner = loaded(name, folder)
    before = weights(learner)
    metrics = update(learner, batch)
    assert metrics["policy_tokens"] == metrics["optimizer_steps"] == 0
    assert metrics["excluded_stale_tokens_fraction"] == 1
    assert same(policy_only(weights(learner)), policy_only(before))


@every_learner
def test_actions_of_one_token_train(lab: Any, folder: Path, model: PolicyModel, name: str) -> None:
    learner = loaded(name, folder)
    before = weights(learner)
    batch = lab.make_batch([group_of(model, [[1], [1, 1], [1, 1, 1], [1]])])
    metrics = update(learner, batch)
    assert metrics["policy_tokens"] == metrics["first_tokens"] == 7
    assert not same(policy_only(weights(learner)), policy_only(before))


@every_learner
def test_groups_of_one_member_train_or_stay_silent(lab: Any, folder: Path, model: PolicyModel, name: str) -> None:
    batch = lab.make_batch([[trajectory] for trajectory in group_of(model, [[2, 3], [3, 2], [4]])])
    metrics = update(loaded(name, folder), batch)
    assert metrics["policy_tokens"] == 14
    assert metrics["groups_valid_1"] == 3


@pytest.mark.parametrize(
    ("name", "turns"),
    [*((name, (100,) * 100) for name in LEARNERS), ("GRPO", (10_000,)), ("PPO bilevel separate", (10_000,))],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} turns",
)
def test_a_trajectory_of_10000_tokens_trains(lab: Any, tmp_path: Path, name: str, turns: tuple[int, ...]) -> None:
    model = lab.make_model(width=8, layers=1, heads=1, mlp_width=8, max_context=10_300)
    model.save(tmp_path / "long")
    critic = LEARNERS[name][1].get("critic", CriticConfig())
    options = {"critic": replace(critic, epochs=1, minibatches=1)} if name.startswith("PPO") else {}
    learner = loaded(name, tmp_path / "long", epochs=1, minibatches=1, **options)
    before = weights(learner)
    metrics = update(learner, lab.make_batch([group_of(model, [turns, [3, 3]])]))
    assert metrics["policy_tokens"] == 10_006
    assert not same(policy_only(weights(learner)), policy_only(before))


@every_learner
@pytest.mark.parametrize("shape", [(0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 1, 0)], ids=str)
def test_turns_without_tokens_of_the_policy_are_part_of_the_world(
    lab: Any, folder: Path, model: PolicyModel, name: str, shape: tuple[int, ...]
) -> None:
    batch = lab.make_batch([group_of(model, [shape, shape, (2, 2), (2, 2)])])
    metrics = update(loaded(name, folder), batch)
    assert metrics["policy_tokens"] == 2 * sum(shape) + 8
    assert metrics["grad_norm"] > 0


@every_learner
def test_an_episode_that_something_else_played_teaches_nothing(
    lab: Any, folder: Path, model: PolicyModel, name: str
) -> None:
    learner = loaded(name, folder)
    before = weights(learner)
    metrics = update(learner, lab.make_batch([group_of(model, [(0, 0), (0,), (0,), (0, 0, 0)])]))
    assert metrics["policy_tokens"] == 0
    assert same(weights(learner), before)


@every_learner
def test_truncations_without_a_last_context_are_counted_and_left_out(
    lab: Any, folder: Path, model: PolicyModel, name: str
) -> None:
    learner = loaded(name, folder)
    before = weights(learner)
    metrics = update(learner, with_end(lab.sample_batch(model, REWARDS), End.turn_limit))
    assert metrics["excluded_no_last_context" if name.startswith("PPO") else "excluded_truncated"] == 8
    assert same(weights(learner), before)


@every_ppo
@pytest.mark.parametrize("length", [127, 128, 500])
def test_last_contexts_of_any_length_bootstrap_or_are_left_out(
    lab: Any, folder: Path, model: PolicyModel, name: str, length: int
) -> None:
    context = array("i", [1] * length).tobytes()
    made = with_end(lab.sample_batch(model, [[0.0, 1.0]]), End.token_limit)
    members = tuple(msgspec.structs.replace(t, last_context=context) for t in made.groups[0].trajectories)
    batch = msgspec.structs.replace(made, groups=(msgspec.structs.replace(made.groups[0], trajectories=members),))
    metrics = update(loaded(name, folder), batch)
    assert metrics["excluded_no_last_context"] == (0 if length < 128 else 2)


@every_learner
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.5])
def test_a_behaviour_logprob_that_is_none_names_its_trajectory(
    lab: Any, folder: Path, model: PolicyModel, name: str, bad: float
) -> None:
    batch = lab.sample_batch(model, REWARDS)
    chosen = batch.groups[1].trajectories[2]
    segment = chosen.segments[0]
    logprobs = list(segment.logprob_values())
    logprobs[segment.policy_mask.index(1)] = bad
    plain = (segment.ids(), segment.policy_mask, logprobs, segment.version_values(), segment.turn_values())
    broken = msgspec.structs.replace(chosen, segments=(Segment.of(*plain), *chosen.segments[1:]))
    members = [*batch.groups[1].trajectories]
    members[2] = broken
    learner = loaded(name, folder)
    before = weights(learner)
    with pytest.raises(RecordError, match=r"behaviour log-prob must be finite.*trajectory t6\b"):
        learner.update(lab.make_batch([batch.groups[0].trajectories, members]))
    assert same(weights(learner), before)


@every_ppo
def test_a_critic_that_is_nan_stops_the_update_before_the_policy_moves(
    lab: Any, folder: Path, model: PolicyModel, name: str
) -> None:
    learner = loaded(name, folder)
    before = weights(learner)
    critic = learner._critic.model if learner._critic is not None else learner._state.model
    with torch.no_grad():
        critic.value_head.weight.fill_(math.nan)
    with pytest.raises(LearnerError, match=r"values must be finite.*trajectory t0"):
        learner.update(lab.sample_batch(model, REWARDS))
    head = {key: tensor for key, tensor in weights(learner).items() if not key.endswith("value_head.weight")}
    assert same(policy_only(head), policy_only({key: before[key] for key in head}))


@pytest.mark.parametrize("level", ["turn", "token", "bilevel"])
def test_a_critic_that_explodes_while_it_learns_leaves_the_policy_alone(
    lab: Any, folder: Path, model: PolicyModel, level: Any
) -> None:
    wild = CriticConfig(kind="scalar", muon_lr=1e30, adamw_lr=1e30)
    learner = loaded(f"PPO {level} separate", folder, critic=wild)
    before = weights(learner)
    with pytest.raises(LearnerError, match="critic's loss and gradient must be finite"):
        learner.update(lab.sample_batch(model, REWARDS))
    assert same(policy_only(weights(learner)), policy_only(before))


@every_learner
def test_the_size_of_forward_passes_changes_no_number(lab: Any, folder: Path, model: PolicyModel, name: str) -> None:
    batch = lab.sample_batch(model, REWARDS, drop_early_turns=True)
    found: list[tuple[dict[str, float], dict[str, Tensor]]] = []
    for limit in (8192, 64, 1):
        learner = loaded(name, folder, microbatch_tokens=limit)
        metrics = update(learner, batch)
        found.append((metrics, weights(learner)))
    for metrics, state in found[1:]:
        assert metrics == pytest.approx(found[0][0], rel=1e-3, abs=1e-5)
        for key, tensor in state.items():
            torch.testing.assert_close(tensor, found[0][1][key], rtol=1e-4, atol=2e-5, msg=key)
