"""Old experience: which targets it gets, from which policy and network, and that the policy never sees any of it."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from turngate.envs.base import End
from turngate.learners.batch import TokenBatch
from turngate.learners.critic import Critic, CriticConfig, ValueTargets, last_values, with_value_head
from turngate.learners.critic_replay import CriticReplay
from turngate.learners.hindsight import RELABELLED
from turngate.learners.ppo import PPO
from turngate.learners.replay import ReplayConfig
from turngate.learners.targets import q_one_step, retrace, vtrace
from turngate.learners.turns import recorded_rewards
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.engine.packing import pack
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.types import Batch, Message, Trajectory

GAMMA, LAM = 0.9, 0.8
EVERYTHING = ReplayConfig(start_after=1, batch_trajectories=64, lam=LAM, rho_bar=1.5, c_bar=1.0, max_lag=50)


def headed(model: PolicyModel, seed: int = 5) -> PolicyModel:
    """Return the model with a value head that says something."""
    made = with_value_head(model)
    assert made.value_head is not None
    with torch.no_grad():
        made.value_head.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(seed))
    return made


class Watched(Critic):
    """Keeps what it was taught, and learns nothing if told so."""

    def __init__(self, model: PolicyModel, config: CriticConfig) -> None:
        super().__init__(model, config, seed=0, microbatch_tokens=200)
        self.lessons: list[tuple[TokenBatch, ValueTargets]] = []
        self.is_deaf = False

    def learn(self, tokens: TokenBatch, targets: ValueTargets, *, epochs: int | None = None) -> dict[str, float]:
        self.lessons.append((tokens, targets))
        return {} if self.is_deaf else super().learn(tokens, targets, epochs=epochs)

    def taught(self, lesson: int = -1) -> dict[tuple[str, int], float]:
        """Return the targets of one lesson by trajectory and turn; each is one position."""
        tokens, targets = self.lessons[lesson]
        at_P = targets.mask_N.nonzero().squeeze(-1).tolist()
        names = [(tokens.trajectory_names[int(tokens.trajectory_ids_N[at])], int(tokens.turn_ids_N[at])) for at in at_P]
        assert len(set(names)) == len(names)
        return dict(zip(names, targets.targets_N[at_P].tolist(), strict=True))


def replaying(model: PolicyModel, *, config: ReplayConfig = EVERYTHING, **options: Any) -> tuple[CriticReplay, Watched]:
    critic = Watched(headed(model), CriticConfig(kind="scalar", **options))
    replay = CriticReplay(
        config, critic, rewards=recorded_rewards, gamma=GAMMA, temperature=1.0, microbatch_tokens=200, seed=1
    )
    return replay, critic


@pytest.fixture
def policy(lab: Any, model: PolicyModel) -> PolicyModel:
    """A policy that has moved away from the one that sampled."""
    moved: PolicyModel = lab.make_model()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return moved


def sampled(lab: Any, model: PolicyModel) -> list[Trajectory]:
    """Return episodes of several shapes: one segment or many, finished or cut short."""
    generator = torch.Generator().manual_seed(7)
    made = [
        lab.sample_trajectory(model, generator, name="plain", reward=1.0, turns=3),
        lab.sample_trajectory(model, generator, name="single", reward=0.5, turns=1),
        lab.sample_trajectory(model, generator, name="rewritten", reward=1.0, turns=3, drop_early_turns=True),
        lab.sample_trajectory(model, generator, name="cut", turns=2, end=End.turn_limit),
    ]
    context = np.asarray([1, 5, 9, 3], np.int32).tobytes()
    return [msgspec.structs.replace(t, last_context=context) if t.end is End.turn_limit else t for t in made]


def direct(model: PolicyModel, ids: Sequence[int]) -> float:
    """Return V after the ids, in a pass of its own."""
    values_M = model.score(pack([[*ids, 0]], [[0] * len(ids) + [1]])).values_M
    assert values_M is not None
    return float(values_M.detach())


def steps_by_hand(
    trajectory: Trajectory, policy: PolicyModel, values: PolicyModel, *, at_end: bool = False
) -> tuple[Tensor, Tensor, Tensor, float | None]:
    """Return rewards, values, log-ratios and bootstrap of an episode, turn by turn from the record."""
    found: list[float] = []
    ratios: list[float] = []
    for turn in trajectory.turns:
        segment = trajectory.segments[turn.segment]
        ids, end = list(segment.ids()), turn.start + turn.length
        mask = [turn.start <= s < end for s in range(end)]
        logprobs = policy.score(pack([ids[:end]], [mask])).logprobs_M.detach()
        ratios.append(float(logprobs.to(torch.float64).sum()) - math.fsum(segment.logprob_values()[turn.start : end]))
        found.append(direct(values, ids[: end if at_end else turn.start]))
    context = np.frombuffer(trajectory.last_context, np.int32).tolist()
    is_cut = trajectory.end.is_truncation
    rewards = torch.tensor([t.reward for t in trajectory.turns], dtype=torch.float64)
    return (
        rewards,
        torch.tensor(found, dtype=torch.float64),
        torch.tensor(ratios, dtype=torch.float64),
        (direct(values, context) if is_cut else None),
    )


def by_name(trajectories: Sequence[Trajectory], of: Callable[[Trajectory], Tensor]) -> dict[tuple[str, int], float]:
    return {(t.id, i): y for t in trajectories for i, y in enumerate(of(t).tolist())}


# --- targets


def test_vtrace_targets_come_from_ratios_of_the_policy_as_it_is_and_values_of_the_target_network(
    lab: Any, model: PolicyModel, policy: PolicyModel
) -> None:
    replay, critic = replaying(model)
    old = sampled(lab, model)
    with torch.no_grad():  # the critic has moved on; its target network has not
        critic.model.embed.weight += 0.1
    metrics = replay.learn(policy, old, policy_version=4)
    assert metrics["replay_target_vtrace"] == 1.0

    def expected(trajectory: Trajectory) -> Tensor:
        rewards_T, values_T, ratios_T, bootstrap = steps_by_hand(trajectory, policy, headed(model))
        assert ratios_T.abs().max() > 0.01
        return vtrace(
            rewards_T, values_T, ratios_T, bootstrap=bootstrap, gamma=GAMMA, lam=LAM, rho_bar=1.5, c_bar=1.0
        ).targets_T

    assert critic.taught() == pytest.approx(by_name(old, expected), abs=2e-5)


def test_retrace_and_vtrace_teach_action_values_and_values_together(
    lab: Any, model: PolicyModel, policy: PolicyModel
) -> None:
    replay, critic = replaying(model, action_values=True)
    old = sampled(lab, model)
    assert replay.learn(policy, old, policy_version=4)["replay_target_retrace"] == 1.0
    network = headed(model)

    def of_actions(trajectory: Trajectory) -> Tensor:
        rewards_T, values_T, ratios_T, bootstrap = steps_by_hand(trajectory, policy, network)
        q_T = steps_by_hand(trajectory, policy, network, at_end=True)[1]
        return retrace(rewards_T, q_T, values_T, ratios_T, bootstrap=bootstrap, gamma=GAMMA, lam=LAM).targets_T

    def of_states(trajectory: Trajectory) -> Tensor:
        rewards_T, values_T, ratios_T, bootstrap = steps_by_hand(trajectory, policy, network)
        return vtrace(
            rewards_T, values_T, ratios_T, bootstrap=bootstrap, gamma=GAMMA, lam=LAM, rho_bar=1.5, c_bar=1.0
        ).targets_T

    assert critic.taught(0) == pytest.approx(by_name(old, of_actions), abs=2e-5)
    assert critic.taught(1) == pytest.approx(by_name(old, of_states), abs=2e-5)
    # Q is read where an action is complete, V where a turn begins.
    ends, starts = critic.lessons[0], critic.lessons[1]
    assert not (ends[0].mask_N & ~ends[1].mask_N).any()
    assert int(ends[1].mask_N.sum()) == int(starts[1].mask_N.sum()) == 9


def test_one_step_targets_need_no_ratio_and_with_action_values_leave_v_alone(
    lab: Any, model: PolicyModel, policy: PolicyModel
) -> None:
    config = msgspec_replace(EVERYTHING, target="one_step")
    replay, critic = replaying(model, config=config, action_values=True)
    old = sampled(lab, model)
    metrics = replay.learn(policy, old, policy_version=4)
    network = headed(model)

    def expected(trajectory: Trajectory) -> Tensor:
        rewards_T, values_T, _, bootstrap = steps_by_hand(trajectory, policy, network)
        following_T = torch.cat([values_T[1:], torch.tensor([bootstrap or 0.0], dtype=torch.float64)])
        return q_one_step(rewards_T, following_T, gamma=GAMMA)

    assert critic.taught() == pytest.approx(by_name(old, expected), abs=2e-5)
    assert len(critic.lessons) == 1  # V would learn what the policy of then was worth
    assert "replay_value_loss" not in metrics
    assert "replay_action_value_loss" in metrics
    # What the targets hold for is told of action values alone, too.
    assert (metrics["replay_target_one_step"], metrics["replay_lag_max"]) == (1.0, 4.0)
    assert metrics["replay_drawn_trajectories"] == len(old)
    assert metrics["replay_target_version_lag"] == 0.0


def msgspec_replace(config: ReplayConfig, **changes: Any) -> ReplayConfig:
    return ReplayConfig(**({name: getattr(config, name) for name in config.__slots__} | changes))


def test_fresh_experience_gets_gae_and_one_step_without_action_values_teaches_v(
    lab: Any, model: PolicyModel, policy: PolicyModel
) -> None:
    replay, critic = replaying(model)
    old = sampled(lab, model)
    assert replay.learn(policy, old, policy_version=0)["replay_target_gae"] == 1.0

    # At lag 0 the sampler was the policy: what V-trace says at log-ratio 0.
    def expected(trajectory: Trajectory) -> Tensor:
        rewards_T, values_T, _, bootstrap = steps_by_hand(trajectory, policy, headed(model))
        zeros_T = torch.zeros_like(rewards_T)
        return vtrace(rewards_T, values_T, zeros_T, bootstrap=bootstrap, gamma=GAMMA, lam=LAM).targets_T

    assert critic.taught() == pytest.approx(by_name(old, expected), abs=2e-5)
    replay, critic = replaying(model, config=msgspec_replace(EVERYTHING, target="one_step"))
    assert replay.learn(policy, old, policy_version=4)["replay_target_one_step"] == 1.0
    assert len(critic.lessons) == 1


def test_targets_follow_policy_and_target_network_and_not_the_critic(
    lab: Any, model: PolicyModel, policy: PolicyModel
) -> None:
    def targets(change: str) -> dict[tuple[str, int], float]:
        replay, critic = replaying(model)
        changed = {"critic": critic.model, "network": replay.target.module}.get(change)
        if changed is not None:
            assert changed.value_head is not None
            with torch.no_grad():
                changed.value_head.weight.mul_(2.0)
        _ = replay.learn(model if change == "policy" else policy, sampled(lab, model), policy_version=4)
        return critic.taught()

    reference = targets("nothing")
    assert targets("nothing") == reference
    assert targets("critic") == reference
    for change in ("policy", "network"):
        other = targets(change)
        assert max(abs(other[key] - reference[key]) for key in reference) > 1e-3


def test_targets_are_made_anew_at_every_draw(lab: Any, model: PolicyModel, policy: PolicyModel) -> None:
    replay, critic = replaying(model)
    old = sampled(lab, model)
    first = replay.learn(model, old, policy_version=2)
    second = replay.learn(policy, [], policy_version=3)
    assert critic.taught(0).keys() == critic.taught(1).keys()
    assert critic.taught(0) != critic.taught(1)
    assert (first["replay_lag_max"], second["replay_lag_max"]) == (2.0, 3.0)
    assert first["replay_ess_turn_ratio"] == pytest.approx(1.0)
    assert second["replay_ess_turn_ratio"] < 0.9999


def test_b4_1_nothing_leaks_between_trajectories_drawn_together(
    lab: Any, model: PolicyModel, policy: PolicyModel
) -> None:
    # pytorch/rl#4209: with a shifted flat array the last turn of a cut episode gets the next one's first target.
    old = sampled(lab, model)
    together, critic = replaying(model)
    _ = together.learn(policy, old, policy_version=4)
    for trajectory in old:
        alone, lone_critic = replaying(model)
        _ = alone.learn(policy, [trajectory], policy_version=4)
        mine = {key: y for key, y in critic.taught().items() if key[0] == trajectory.id}
        assert lone_critic.taught() == pytest.approx(mine, abs=1e-6)


def test_b3_5_cut_episodes_bootstrap_from_their_last_context_and_finished_ones_from_nothing(
    lab: Any, model: PolicyModel, policy: PolicyModel
) -> None:
    # DexForce/EmbodiChain#612: not from the state before the last action.
    made = []
    for context in ([1, 5, 9, 3], [8, 8, 2]):
        last = np.asarray(context, np.int32).tobytes()
        old = [msgspec.structs.replace(t, last_context=last) for t in sampled(lab, model)]
        replay, critic = replaying(model)
        _ = replay.learn(policy, old, policy_version=4)
        made.append(critic.taught())
    moved = {name for name, _ in made[0] if any(made[0][k] != made[1][k] for k in made[0] if k[0] == name)}
    assert moved == {"cut"}


def test_rows_without_room_for_the_end_of_an_action_teach_v_alone(lab: Any, policy: PolicyModel) -> None:
    # The two-turn episode is 3 + 2 + 2 + 3 tokens long: a model of that context has no place behind its last action.
    small = lab.make_model(max_context=11)
    trajectory = lab.sample_trajectory(small, torch.Generator().manual_seed(0), name="full", turns=2, reward=1.0)
    length = len(trajectory.segments[0])
    exact = lab.make_model(max_context=length)
    replay, critic = replaying(exact, action_values=True)
    _ = replay.learn(exact, [trajectory], policy_version=3)
    assert critic.taught(0) == {}
    assert len(critic.taught(1)) == 2


# --- the store and the network


def test_what_says_nothing_about_values_never_enters(lab: Any, model: PolicyModel) -> None:
    replay, _ = replaying(model)
    good, *_ = sampled(lab, model)
    bad = [
        msgspec.structs.replace(good, id="relabelled", trainable=False, untrainable_because=RELABELLED),
        msgspec.structs.replace(good, id="untrainable", trainable=False, untrainable_because="no log-probs"),
        msgspec.structs.replace(good, id="failed", end=End.env_error),
        msgspec.structs.replace(good, id="cancelled", end=End.cancelled),
    ]
    metrics = replay.learn(model, [*bad, good], policy_version=1)
    assert len(replay.store) == 1
    assert metrics["replay_taken"] == 1
    assert metrics["replay_refused_untrainable"] == metrics["replay_refused_failed"] == 2


def test_nothing_is_drawn_before_there_is_enough_but_the_target_network_follows(lab: Any, model: PolicyModel) -> None:
    replay, critic = replaying(model, config=ReplayConfig(start_after=5, batch_trajectories=2, target_tau=0.5))
    before = replay.target.module.embed.weight.clone()
    with torch.no_grad():
        critic.model.embed.weight += 1.0
    critic.version = 3
    metrics = replay.learn(model, sampled(lab, model), policy_version=1)
    assert critic.lessons == []
    assert metrics["replay_trajectories"] == 4
    assert torch.allclose(replay.target.module.embed.weight, before + 0.5, atol=1e-6)
    assert replay.target.version == 3


def test_the_target_network_moves_by_its_share_and_knows_its_version(
    lab: Any, model: PolicyModel, policy: PolicyModel
) -> None:
    replay, critic = replaying(model, config=msgspec_replace(EVERYTHING, target_tau=0.25))
    start = headed(model).state_dict()
    metrics = replay.learn(policy, sampled(lab, model), policy_version=4)
    moved = critic.model.state_dict()
    for name, tensor in replay.target.module.named_parameters():
        assert torch.allclose(tensor, torch.lerp(start[name], moved[name], 0.25), atol=1e-6)
    assert replay.target.version == critic.version == 1
    assert metrics["replay_target_version_lag"] == 0.0  # when the targets were made
    critic.version += 2  # fresh experience came in between
    assert replay.learn(policy, [], policy_version=5)["replay_target_version_lag"] == 2.0


def test_too_old_experience_is_forgotten(lab: Any, model: PolicyModel) -> None:
    replay, critic = replaying(model, config=msgspec_replace(EVERYTHING, max_lag=3))
    _ = replay.learn(model, sampled(lab, model), policy_version=3)
    metrics = replay.learn(model, [], policy_version=4)
    assert (metrics["replay_evicted_old"], len(critic.lessons)) == (4.0, 1)
    assert len(replay.store) == 0


def test_the_policy_is_only_read(lab: Any, model: PolicyModel, policy: PolicyModel) -> None:
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    replay, _ = replaying(model, action_values=True)
    _ = replay.learn(policy, sampled(lab, model), policy_version=4)
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.state_dict().items())
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert all(parameter.grad is None for parameter in replay.target.module.parameters())


def test_save_restore_learn_equals_learn_bit_for_bit(
    lab: Any, model: PolicyModel, policy: PolicyModel, tmp_path: Path
) -> None:
    config = ReplayConfig(start_after=1, batch_trajectories=2)
    straight, critic = replaying(model, config=config)
    _ = straight.learn(policy, sampled(lab, model), policy_version=2)
    straight.save(tmp_path)
    critic.save(tmp_path)
    again, other = replaying(model, config=config)
    other.model.load_state_dict(PolicyModel.load(tmp_path).state_dict())
    other.restore(tmp_path)
    again.restore(tmp_path)
    metrics = [replay.learn(policy, [], policy_version=v) for v in (3, 4) for replay in (straight, again)]
    assert metrics[0] == metrics[1]
    assert metrics[2] == metrics[3]
    for one, two in ((critic.model, other.model), (straight.target.module, again.target.module)):
        theirs = two.state_dict()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())
    assert critic.taught() == other.taught()
    assert straight.target.version == again.target.version


def test_what_no_target_is_made_of_is_not_kept_and_need_not_be_plain_data(
    lab: Any, model: PolicyModel, policy: PolicyModel, tmp_path: Path
) -> None:
    replay, _ = replaying(model, config=ReplayConfig(start_after=1, batch_trajectories=2))

    def with_objects(trajectory: Trajectory) -> Trajectory:
        turns = tuple(msgspec.structs.replace(turn, state={"at": object()}) for turn in trajectory.turns)
        task = msgspec.structs.replace(trajectory.task, data={"huge": 2**80})
        return msgspec.structs.replace(trajectory, task=task, turns=turns, messages=(Message("user", "hello"),))

    replay.learn(policy, [with_objects(t) for t in sampled(lab, model)], policy_version=2)
    replay.save(tmp_path)
    kept = replay.store.sample(99, torch.Generator(), policy_version=2)
    assert kept
    assert all(not t.messages and not t.task.data and all(u.state is None for u in t.turns) for t in kept)


def test_retrace_without_action_values_is_refused(model: PolicyModel) -> None:
    with pytest.raises(ConfigError, match="target retrace must have action values"):
        replaying(model, config=ReplayConfig(target="retrace"))


def test_a_broken_checkpoint_is_refused(model: PolicyModel, tmp_path: Path) -> None:
    replay, _ = replaying(model)
    replay.save(tmp_path)
    (tmp_path / "replay.pt").write_bytes(b"half")
    with pytest.raises(LearnerError, match=r"replay\.pt"):
        replay.restore(tmp_path)


# --- within PPO


REWARDS = [[0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]]


def ppo(folder: Path, **options: Any) -> PPO:
    made = PPO(folder, off_policy="decoupled", parity="report", **options)
    made.load(None)
    return made


def with_stale(lab: Any, model: PolicyModel, batch: Batch, *, seed: int = 9) -> Batch:
    """Return the batch with a group beside it that came too late."""
    late = lab.sample_batch(model, [[1.0, 0.0, 1.0]], seed=seed).groups[0]
    members = tuple(msgspec.structs.replace(t, id=f"late{seed}-{t.id}") for t in late.trajectories)
    return msgspec.structs.replace(batch, stale=(msgspec.structs.replace(late, trajectories=members),))


def policy_of(learner: PPO) -> dict[str, Tensor]:
    assert learner._state is not None
    return learner._state.model.state_dict()


def test_stale_groups_never_reach_the_policy(lab: Any, folder: Path, model: PolicyModel) -> None:
    replay = ReplayConfig(start_after=1, batch_trajectories=32)
    batch = msgspec.structs.replace(lab.sample_batch(model, REWARDS), policy_version=6)
    learners = [ppo(folder, replay=replay), ppo(folder, replay=replay), ppo(folder)]
    reports = [
        learner.update(b).metrics
        for learner, b in zip(learners, [with_stale(lab, model, batch), batch, batch], strict=True)
    ]
    states = [policy_of(learner) for learner in learners]
    assert all(torch.equal(states[0][name], other[name]) for other in states[1:] for name in states[0])
    # Every number about the policy is the same; only the critic saw more.
    policys = ["loss", "grad_norm", "policy_tokens", "ratio_max", "entropy", "value_explained_variance"]
    assert all(reports[0][name] == reports[1][name] == reports[2][name] for name in policys)
    assert (reports[0]["replay_taken"], reports[1]["replay_taken"]) == (11, 8)
    critics = [learner._critic.model.state_dict() for learner in learners if learner._critic is not None]
    assert not torch.equal(critics[0]["embed.weight"], critics[1]["embed.weight"])


def test_stale_groups_need_no_correction_of_the_policys_loss(lab: Any, folder: Path, model: PolicyModel) -> None:
    # Without a choice of off_policy old tokens are refused: those of the policy's batch, not the critic's.
    learner = PPO(folder, replay=ReplayConfig(start_after=1))
    learner.load(None)
    batch = lab.sample_batch(model, REWARDS, version=6, policy_version=6)
    metrics = learner.update(with_stale(lab, model, batch)).metrics
    assert metrics["parity_tokens"] == metrics["policy_tokens"]
    assert metrics["replay_lag_max"] == 6.0
    assert metrics["replay_oldest_version"] == 0.0
    assert metrics["replay_newest_version"] == 6.0


def test_only_episodes_with_known_values_enter_from_stale_groups(lab: Any, folder: Path, model: PolicyModel) -> None:
    learner = ppo(folder, replay=ReplayConfig(start_after=1, batch_trajectories=32))
    batch = with_stale(lab, model, lab.sample_batch(model, REWARDS))
    group = batch.stale[0]
    good, *_ = group.trajectories
    members = [
        good,
        msgspec.structs.replace(good, id="cut without context", end=End.turn_limit),
        msgspec.structs.replace(good, id="wrecked", end=End.env_error),
        msgspec.structs.replace(good, id="relabelled", trainable=False, untrainable_because=RELABELLED),
        msgspec.structs.replace(
            good, id="cut", end=End.turn_limit, last_context=np.asarray([1, 2], np.int32).tobytes()
        ),
    ]
    group = msgspec.structs.replace(group, trajectories=tuple(members))
    metrics = learner.update(msgspec.structs.replace(batch, stale=(group,), policy_version=2)).metrics
    assert metrics["replay_taken"] == 8 + 2
    assert learner._replay is not None
    assert {"cut", good.id} == {t.id for t in learner._replay.store.sample(99, torch.Generator(), policy_version=2)} - {
        t.id for g in batch.groups for t in g.trajectories
    }


@pytest.mark.parametrize("target", ["auto", "one_step", "retrace"])
def test_a_learner_with_replay_resumes_bit_for_bit(
    lab: Any, folder: Path, model: PolicyModel, tmp_path: Path, target: Any
) -> None:
    options: dict[str, Any] = {
        "replay": ReplayConfig(start_after=1, batch_trajectories=5, target=target, target_tau=0.3),
        "critic": CriticConfig(action_values=target == "retrace"),
    }
    batches = [
        msgspec.structs.replace(
            with_stale(lab, model, renamed(lab.sample_batch(model, REWARDS, seed=s), s), seed=20 + s), policy_version=s
        )
        for s in range(4)
    ]
    straight = ppo(folder, **options)
    for batch in batches[:2]:
        straight.update(batch)
    straight.save(tmp_path / "checkpoint")
    again = PPO(folder, off_policy="decoupled", parity="report", **options)
    again.load(tmp_path / "checkpoint")
    for batch in batches[2:]:
        assert straight.update(batch).metrics == again.update(batch).metrics
    assert_same(straight, again)


def renamed(batch: Batch, number: int) -> Batch:
    groups = [
        msgspec.structs.replace(
            g, trajectories=tuple(msgspec.structs.replace(t, id=f"{number}-{t.id}") for t in g.trajectories)
        )
        for g in batch.groups
    ]
    return msgspec.structs.replace(batch, groups=tuple(groups))


def assert_same(one: PPO, other: PPO) -> None:
    assert one._critic is not None
    assert other._critic is not None
    assert one._replay is not None
    assert other._replay is not None
    pairs = [
        (policy_of(one), policy_of(other)),
        (one._critic.model.state_dict(), other._critic.model.state_dict()),
        (one._replay.target.module.state_dict(), other._replay.target.module.state_dict()),
    ]
    for ours, theirs in pairs:
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert one._replay.store.statistics() == other._replay.store.statistics()


def test_a_bootstrap_of_replay_is_the_target_networks(lab: Any, model: PolicyModel) -> None:
    replay, critic = replaying(model)
    critic.is_deaf = True
    cut = sampled(lab, model)[-1]
    (value,) = last_values(
        replay.target.module, [np.frombuffer(cut.last_context, np.int32)], critic.config, microbatch_tokens=9
    ).tolist()
    _ = replay.learn(model, [cut], policy_version=1)
    rewards_T, values_T, ratios_T, bootstrap = steps_by_hand(cut, model, headed(model))
    assert bootstrap == pytest.approx(value, abs=1e-5)
    expected = vtrace(rewards_T, values_T, ratios_T, bootstrap=value, gamma=GAMMA, lam=LAM, rho_bar=1.5)
    assert list(critic.taught().values()) == pytest.approx(expected.targets_T.tolist(), abs=2e-5)
