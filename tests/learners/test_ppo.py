"""PPO as a whole: what its critic learns, how episodes that were cut short continue, and that it resumes exactly."""

import math
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from turngate.envs.base import End, Task
from turngate.learners.batch import TokenBatch, lay_out
from turngate.learners.critic import CriticConfig, ValueReader, ValueTargets, after_actions
from turngate.learners.episode_credit import GAEConfig, compute_episode_credit
from turngate.learners.grpo import GRPO
from turngate.learners.policy_learner import Credit, Scored
from turngate.learners.ppo import PPO
from turngate.learners.replay import ReplayConfig
from turngate.learners.reward_scheme import RewardScheme
from turngate.learners.turns import turn_tokens
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.engine.packing import pack
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.types import Batch, Segment, Trajectory, Turn

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


@pytest.mark.parametrize("place", ["separate", "trunk"])
def test_a_checkpoint_whose_head_says_something_else_is_refused(folder: Path, tmp_path: Path, place: Any) -> None:
    learner(folder, critic=CriticConfig(place=place, kind="success")).save(tmp_path / "checkpoint")
    other = PPO(folder, critic=CriticConfig(place=place, kind="scalar"))
    with pytest.raises(ConfigError, match="must be of the checkpoint's kind: expected success, got scalar"):
        other.load(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "values.json").write_bytes(b"{")
    with pytest.raises(LearnerError, match="checkpoint must be readable"):
        other.load(tmp_path / "checkpoint")


@pytest.mark.parametrize(("place", "part"), [("separate", "critic"), ("trunk", "model")])
def test_a_checkpoints_model_says_what_its_head_puts_out(folder: Path, tmp_path: Path, place: Any, part: str) -> None:
    learner(folder, critic=CriticConfig(place=place, kind="scalar")).save(tmp_path / "checkpoint")
    assert PolicyModel.read_config(tmp_path / "checkpoint" / part).value_kind == "scalar"


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
    metrics: dict[str, float] = {}
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


# --- credit


def credited(
    ppo: PPO, batch: Batch, *, kl: float = 0.0
) -> tuple[TokenBatch, Credit, list[dict[tuple[str, int], float]]]:
    """Return the tokens, the credit that `update` would give them, and what a critic of its own was taught."""
    keep, _ = ppo._select(batch)
    tokens = lay_out(batch, keep, vocabulary_size=24)
    zeros_N = torch.zeros(len(tokens.mask_N))
    kl_N = torch.where(tokens.mask_N, torch.arange(len(zeros_N)) * kl, 0.0) if kl else None
    lessons: list[dict[tuple[str, int], float]] = []

    def listen(tokens: TokenBatch, targets: ValueTargets, **_: Any) -> dict[str, float]:
        lessons.append(taught(tokens, targets))
        return {}

    if ppo._critic is not None:
        ppo._critic.learn = listen
    credit = ppo._credit(Scored(batch, keep, tokens, zeros_N, zeros_N, kl_N))
    if credit.values is not None:
        lessons.append(taught(tokens, credit.values))
    return tokens, credit, lessons


def taught(tokens: TokenBatch, targets: ValueTargets) -> dict[tuple[str, int], float]:
    """Return targets by trajectory and place in the token batch."""
    at_P = targets.mask_N.nonzero().squeeze(-1).tolist()
    return {
        (tokens.trajectory_names[int(tokens.trajectory_ids_N[at])], at): float(targets.targets_N[at]) for at in at_P
    }


def outspoken(folder: Path, **options: Any) -> PPO:
    """Return a learner whose critic says something already."""
    ppo = learner(folder, **options)
    assert ppo._state is not None
    head = (ppo._critic.model if ppo._critic is not None else ppo._state.model).value_head
    assert head is not None
    with torch.no_grad():
        head.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(4))
    return ppo


def direct(ppo: PPO, ids: Sequence[int]) -> float:
    """Return V after these ids, in a pass of its own."""
    assert ppo._state is not None
    model = ppo._critic.model if ppo._critic is not None else ppo._state.model
    values_M = model.score(pack([[*ids, 0]], [[0] * len(ids) + [1]])).values_M
    assert values_M is not None
    return float(ppo.critic.to_value(values_M.detach()))


def values_by_hand(ppo: PPO, trajectory: Trajectory) -> list[Tensor]:
    """Return per turn V before each of its tokens, from the record."""
    found: list[Tensor] = []
    for turn in trajectory.turns:
        if turn.length:
            ids = list(trajectory.segments[turn.segment].ids())
            read = [direct(ppo, ids[:s]) for s in range(turn.start, turn.start + turn.length)]
            found.append(torch.tensor(read, dtype=torch.float64))
    return found


LEVELS = [GAEConfig(level="turn"), GAEConfig(level="token", lam=0.9), GAEConfig(level="bilevel", lam_token=0.5)]


@pytest.mark.parametrize("config", LEVELS, ids=["turn", "token", "bilevel"])
@pytest.mark.parametrize("place", ["separate", "trunk"])
@pytest.mark.parametrize("is_rewritten", [False, True])
def test_advantages_and_targets_are_those_of_one_evaluation_of_the_critic_as_it_was(
    lab: Any, folder: Path, model: PolicyModel, config: GAEConfig, place: Any, is_rewritten: bool
) -> None:
    ppo = outspoken(folder, credit=config, critic=CriticConfig(place=place), whiten=False)
    batch = lab.sample_batch(model, REWARDS, drop_early_turns=is_rewritten)
    tokens, credit, lessons = credited(ppo, batch)
    (lesson,) = lessons
    where = turn_tokens(tokens)
    number = 0
    for group in batch.groups:
        for trajectory in group.trajectories:
            values = values_by_hand(ppo, trajectory)
            rewards_T = torch.tensor([t.reward for t in trajectory.turns], dtype=torch.float64)
            expected = compute_episode_credit(rewards_T, values, bootstrap=None, config=config)
            for turn, at in where[number].items():
                assert credit.advantages_N[at].tolist() == pytest.approx(expected.advantages[turn].tolist(), abs=1e-5)
                learned = at[:1].tolist() if config.level == "turn" else at.tolist()
                found = [lesson[trajectory.id, position] for position in learned]
                assert found == pytest.approx(expected.targets[turn][: len(learned)].tolist(), abs=1e-5)
            number += 1
    learned_at = [at[:1] if config.level == "turn" else at for turns in where.values() for at in turns.values()]
    assert {at for _, at in lesson} == set(torch.cat(learned_at).tolist())


def cut(trajectory: Trajectory, context: Sequence[int], end: End = End.turn_limit) -> Trajectory:
    return msgspec.structs.replace(trajectory, end=end, last_context=np.asarray(context, np.int32).tobytes())


def changed(batch: Batch, change: Callable[[Trajectory], Trajectory]) -> Batch:
    """Return the batch with its very first trajectory changed."""
    group, *others = batch.groups
    first, *members = group.trajectories
    group = msgspec.structs.replace(group, trajectories=(change(first), *members))
    return msgspec.structs.replace(batch, groups=(group, *others))


@pytest.mark.parametrize("place", ["separate", "trunk"])
@pytest.mark.parametrize("level", ["turn", "token", "bilevel"])
def test_b3_4_b3_5_a_cut_episode_bootstraps_from_its_last_context(
    lab: Any, folder: Path, model: PolicyModel, place: Any, level: Any
) -> None:
    # DexForce/EmbodiChain#612: the value of the last context, not of the state before the last action.
    ppo = outspoken(folder, credit=GAEConfig(level=level, lam=0.0), critic=CriticConfig(place=place), whiten=False)
    batch, context = lab.sample_batch(model, REWARDS), [1, 5, 9, 3]
    ended, _, plain = credited(ppo, batch)
    _, credit, (lesson,) = credited(ppo, changed(batch, lambda t: cut(t, context)))
    first = batch.groups[0].trajectories[0]
    last = turn_tokens(ended)[0][len(first.turns) - 1]
    # With lambda 0 the last turn's target is its reward and the bootstrap, 0 + V(last context).
    assert lesson["t0", int(last[-1 if level != "turn" else 0])] == pytest.approx(direct(ppo, context), abs=1e-6)
    # Nothing of another episode moves.
    assert {k: y for k, y in lesson.items() if k[0] != "t0"} == {k: y for k, y in plain[0].items() if k[0] != "t0"}
    other = credited(ppo, changed(batch, lambda t: cut(t, [8, 8])))[2][0]
    assert other != lesson
    assert credit.metrics["bootstrap_share"] == pytest.approx(1 / 12)


def test_cut_episodes_that_bootstrap_without_the_last_answer_are_counted(
    lab: Any, folder: Path, model: PolicyModel
) -> None:
    ppo, batch = outspoken(folder), lab.sample_batch(model, REWARDS)
    assert "bootstrap_prefix_fraction" not in credited(ppo, batch)[1].metrics
    group, *others = batch.groups
    first, second, third, *members = group.trajectories
    answered = msgspec.structs.replace(cut(second, [8, 8]), last_context_is_whole=True)
    members = [cut(first, [1, 5, 9]), answered, cut(third, [2, 4], End.timeout), *members]
    group = msgspec.structs.replace(group, trajectories=tuple(members))
    _, credit, _ = credited(ppo, msgspec.structs.replace(batch, groups=(group, *others)))
    assert credit.metrics["bootstrap_prefix_fraction"] == pytest.approx(2 / 3)


def _with_context(context: list[int], trajectory: Trajectory) -> Trajectory:
    return cut(trajectory, context, end=trajectory.end)


def test_b3_8_the_last_context_of_a_finished_episode_is_never_looked_at(
    lab: Any, folder: Path, model: PolicyModel
) -> None:
    ppo = outspoken(folder)
    batch = lab.sample_batch(model, REWARDS)
    reference = credited(ppo, batch)
    for context in ([1, 5, 9, 3], [8, 8], [23] * 127):
        other = credited(ppo, changed(batch, partial(_with_context, context)))
        assert torch.equal(reference[1].advantages_N, other[1].advantages_N)
        assert reference[2] == other[2]


@pytest.mark.parametrize("context", [[], [1] * 128])
def test_a_cut_episode_whose_continuation_is_unknown_is_left_out(
    lab: Any, folder: Path, model: PolicyModel, context: list[int]
) -> None:
    ppo = learner(folder)
    metrics = ppo.update(changed(lab.sample_batch(model, REWARDS), lambda t: cut(t, context))).metrics
    whole = learner(folder).update(lab.sample_batch(model, REWARDS)).metrics
    assert metrics["excluded_no_last_context"] == 1.0
    assert metrics["policy_tokens"] < whole["policy_tokens"]
    assert metrics["bootstrap_share"] == 0.0


def test_failed_empty_and_unscorable_episodes_are_left_out_by_reason(
    lab: Any, folder: Path, model: PolicyModel
) -> None:
    batch = lab.sample_batch(model, [[0.0, 1.0, 0.0, 1.0, 1.0]])
    good, failed, unknown, silent, other = batch.groups[0].trajectories
    turns = (*unknown.turns[:-1], msgspec.structs.replace(unknown.turns[-1], rewards={"outcome": float("nan")}))
    members = (
        good,
        msgspec.structs.replace(failed, end=End.env_error),
        msgspec.structs.replace(unknown, turns=turns),
        msgspec.structs.replace(silent, turns=(), segments=()),
        other,
    )
    batch = msgspec.structs.replace(batch, groups=(msgspec.structs.replace(batch.groups[0], trajectories=members),))
    keep, metrics = learner(folder)._select(batch)
    assert keep == [[True, False, False, False, True]]
    expected = {"failed": 1, "unscorable": 1, "no_last_context": 0, "empty": 1}
    assert metrics == {f"excluded_{name}": n for name, n in expected.items()}


def test_b3_2_what_an_injected_turn_earns_belongs_to_the_action_before(
    lab: Any, folder: Path, model: PolicyModel
) -> None:
    ppo = outspoken(folder)
    batch = lab.sample_batch(model, REWARDS)

    def paid_directly(trajectory: Trajectory) -> Trajectory:
        first, *others = trajectory.turns
        return msgspec.structs.replace(
            trajectory, turns=(msgspec.structs.replace(first, rewards={"outcome": 0.5}), *others)
        )

    def paid_by_injection(trajectory: Trajectory) -> Trajectory:
        # Turn 1 becomes an injected one without tokens; the policy's second turn is turn 2.
        first, *others = trajectory.turns
        injected = Turn(
            index=1, segment=0, start=others[0].start, length=0, text="", rewards={"outcome": 0.5}, injected=True
        )
        later = [msgspec.structs.replace(t, index=t.index + 1) for t in others]
        (segment,) = trajectory.segments
        ids = [t + 1 if t > 0 else t for t in segment.turn_values()]
        moved = Segment.of(segment.ids(), segment.policy_mask, segment.logprob_values(), segment.version_values(), ids)
        return msgspec.structs.replace(trajectory, turns=(first, injected, *later), segments=(moved,))

    direct_, injected = (credited(ppo, changed(batch, how)) for how in (paid_directly, paid_by_injection))
    assert torch.equal(direct_[1].advantages_N, injected[1].advantages_N)
    assert direct_[2] == injected[2]
    assert not torch.equal(direct_[1].advantages_N, credited(ppo, batch)[1].advantages_N)


def test_rewards_before_the_first_action_are_counted_and_nobodys(lab: Any, folder: Path, model: PolicyModel) -> None:
    ppo = outspoken(folder)
    batch = lab.sample_batch(model, REWARDS)

    def with_start(trajectory: Trajectory) -> Trajectory:
        injected = Turn(index=0, segment=0, start=1, length=0, text="", rewards={"outcome": 0.75}, injected=True)
        turns = [msgspec.structs.replace(t, index=t.index + 1) for t in trajectory.turns]
        (segment,) = trajectory.segments
        ids = [t + 1 if t >= 0 else t for t in segment.turn_values()]
        moved = Segment.of(segment.ids(), segment.policy_mask, segment.logprob_values(), segment.version_values(), ids)
        return msgspec.structs.replace(trajectory, turns=(injected, *turns), segments=(moved,))

    _, plain, _ = credited(ppo, batch)
    _, credit, _ = credited(ppo, changed(batch, with_start))
    assert torch.equal(plain.advantages_N, credit.advantages_N)
    assert (plain.metrics["orphaned_reward"], credit.metrics["orphaned_reward"]) == (0.0, 0.75)


@pytest.mark.parametrize("place", ["separate", "trunk"])
def test_b3_10_targets_are_taken_before_whitening(lab: Any, folder: Path, model: PolicyModel, place: Any) -> None:
    batch = lab.sample_batch(model, REWARDS)
    options: dict[str, Any] = {"critic": CriticConfig(place=place)}
    tokens, white, lessons = credited(outspoken(folder, **options), batch)
    _, plain, plain_lessons = credited(outspoken(folder, whiten=False, **options), batch)
    assert lessons == plain_lessons
    inside_P = white.advantages_N[tokens.mask_N]
    assert float(inside_P.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(inside_P.std()) == pytest.approx(1.0, abs=1e-3)
    reference_P = plain.advantages_N[tokens.mask_N]
    assert torch.allclose(inside_P, (reference_P - reference_P.mean()) / reference_P.std(), atol=1e-3)


@pytest.mark.parametrize("config", LEVELS, ids=["turn", "token", "bilevel"])
def test_a_kl_penalty_is_a_reward_of_each_token(lab: Any, folder: Path, model: PolicyModel, config: GAEConfig) -> None:
    options: dict[str, Any] = {"credit": config, "whiten": False, "critic": CriticConfig(kind="scalar")}
    ppo = outspoken(folder, kl_coef=0.1, **options)
    batch = lab.sample_batch(model, [[1.0]])
    (trajectory,) = batch.groups[0].trajectories
    tokens, credit, _ = credited(ppo, batch, kl=0.01)
    where = turn_tokens(tokens)[0]
    expected = compute_episode_credit(
        torch.tensor([t.reward for t in trajectory.turns], dtype=torch.float64),
        values_by_hand(ppo, trajectory),
        bootstrap=None,
        config=config,
        token_rewards=[-0.1 * 0.01 * at.to(torch.float64) for at in where.values()],
    )
    found = [credit.advantages_N[at] for at in where.values()]
    assert torch.cat(found).tolist() == pytest.approx(torch.cat(list(expected.advantages)).tolist(), abs=1e-5)
    in_loss = outspoken(folder, kl_coef=0.1, kl_in="loss_ratio_k3", **options)
    without = outspoken(folder, **options)
    assert torch.equal(credited(in_loss, batch, kl=0.01)[1].advantages_N, credited(without, batch)[1].advantages_N)
    assert not torch.equal(credit.advantages_N, credited(without, batch)[1].advantages_N)


@pytest.mark.parametrize("place", ["separate", "trunk"])
def test_old_tokens_have_values_and_teach_them_but_do_not_train(
    lab: Any, folder: Path, model: PolicyModel, place: Any
) -> None:
    # The first turn of the first episode is of version 0, everything else of version 3.
    def older(trajectory: Trajectory) -> Trajectory:
        (segment,) = trajectory.segments
        versions = [0 if t == 0 else v for t, v in zip(segment.turn_values(), segment.version_values(), strict=True)]
        moved = Segment.of(
            segment.ids(), segment.policy_mask, segment.logprob_values(), versions, segment.turn_values()
        )
        return msgspec.structs.replace(trajectory, segments=(moved,))

    young = lab.sample_batch(model, REWARDS, version=3, policy_version=3)
    batch = msgspec.structs.replace(changed(young, older), min_version=2)
    options: dict[str, Any] = {"whiten": False, "critic": CriticConfig(place=place), "credit": GAEConfig(level="token")}
    tokens, credit, lessons = credited(outspoken(folder, **options), batch)
    all_young, reference, plain_lessons = credited(outspoken(folder, **options), young)
    first = batch.groups[0].trajectories[0].turns[0].length
    assert all_young.policy_tokens - tokens.policy_tokens == first
    assert lessons == plain_lessons  # one evaluation of the whole episode, whatever may train
    assert torch.equal(credit.advantages_N[tokens.mask_N], reference.advantages_N[tokens.mask_N])
    metrics = outspoken(folder, **options).update(batch).metrics
    assert metrics["policy_tokens"] == tokens.policy_tokens


def test_a_rewritten_context_is_no_end_of_an_episode(
    lab: Any, folder: Path, model: PolicyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # B3.1 and 3.4: the same actions in one segment and in three, under a critic that says the same of them.
    one, many = (lab.sample_batch(model, [[1.0], [0.0]], drop_early_turns=is_many) for is_many in (False, True))
    for config in LEVELS:
        made: list[list[list[float]]] = []
        for batch in (one, many):
            ppo = learner(folder, credit=config, whiten=False)

            def agreed(_: ValueReader, tokens: TokenBatch) -> Tensor:
                values_N = torch.zeros(len(tokens.mask_N))
                for number, turns in turn_tokens(tokens).items():
                    for turn, at in turns.items():
                        values_N[at] = 0.1 * (1 + number) + 0.2 * turn + 0.03 * torch.arange(len(at))
                return values_N

            monkeypatch.setattr(ValueReader, "values", agreed)
            tokens, credit, _ = credited(ppo, batch)
            where = turn_tokens(tokens)
            made.append([credit.advantages_N[at].tolist() for turns in where.values() for at in turns.values()])
        assert made[0] == made[1]
    assert len(one.groups[0].trajectories[0].segments) == 1
    assert len(many.groups[0].trajectories[0].segments) == 2


# --- the loss


@pytest.mark.parametrize("level", ["turn", "token"])
def test_the_loss_of_a_trunk_is_the_policys_and_a_mean_over_value_targets(
    lab: Any, folder: Path, model: PolicyModel, level: Any
) -> None:
    options: dict[str, Any] = {
        "credit": GAEConfig(level=level), "critic": CriticConfig(place="trunk", coef=0.25), "whiten": False,
        "minibatches": 1, "epochs": 1,
    }  # fmt: skip
    batch = lab.sample_batch(model, REWARDS)
    ppo = outspoken(folder, **options)
    assert ppo._state is not None
    tokens, credit, _ = credited(ppo, batch)
    assert credit.values is not None
    metrics = ppo.update(batch).metrics
    # The reference: each row on its own, two sums and their own counts.
    reference = outspoken(folder, **options)
    assert reference._state is not None
    network = reference._state.model
    policy_losses: list[Tensor] = []
    value_losses: list[Tensor] = []
    for start, length in zip(tokens.row_starts().tolist(), tokens.row_lengths, strict=True):
        row = slice(start, start + length)
        mask = tokens.mask_N[row]
        scores = network.score(pack([tokens.token_ids_N[row].numpy()], [mask.numpy()]))
        assert scores.values_M is not None
        ratio = (scores.logprobs_M - scores.logprobs_M.detach()).exp()
        policy_losses.append(-credit.advantages_N[row][mask] * ratio)
        has_target = credit.values.mask_N[row][mask]
        targets = credit.values.targets_N[row][mask][has_target].clamp(0, 1)
        v = scores.values_M[has_target].sigmoid()
        value_losses.append(-targets * v.log() - (1 - targets) * (1 - v).log())
    loss = torch.cat(policy_losses).mean() + 0.25 * torch.cat(value_losses).mean()
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in network.parameters() if p.grad is not None))
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("place", ["separate", "trunk"])
@pytest.mark.parametrize("level", ["turn", "bilevel"])
def test_microbatches_change_an_update_by_rounding_alone(
    lab: Any, folder: Path, model: PolicyModel, place: Any, level: Any
) -> None:
    batch = lab.sample_batch(model, REWARDS)
    names = ["loss", "grad_norm", "grad_norm_max", "value_loss", "value_grad_norm", "value_explained_variance"]
    found = []
    for microbatch_tokens in (1, 50, 8192):
        ppo = outspoken(
            folder, credit=GAEConfig(level=level), critic=CriticConfig(place=place, epochs=1, minibatches=1),
            epochs=1, minibatches=1, microbatch_tokens=microbatch_tokens,
        )  # fmt: skip
        metrics = ppo.update(batch).metrics
        found.append({name: metrics[name] for name in names if name in metrics})
    assert len(found[0]) == (6 if place == "separate" else 5)
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("force", [{"entropy_coef": 0.01}, {"kl_coef": 0.1, "kl_in": "loss_ratio_k3"}, {}])
def test_while_the_critic_warms_up_nothing_moves_the_policy(
    lab: Any, folder: Path, model: PolicyModel, force: dict[str, Any]
) -> None:
    ppo = learner(folder, critic_updates=2, **force)
    assert ppo._state is not None
    start = weights(ppo)
    for seed in range(2):
        metrics = ppo.update(lab.sample_batch(model, REWARDS, seed=seed)).metrics
        assert metrics["optimizer_steps"] == 0
    after = weights(ppo)
    assert all(torch.equal(start[name], after[name]) for name in start if not name.startswith("critic."))
    assert not torch.equal(start["critic.embed.weight"], after["critic.embed.weight"])
    ppo.update(lab.sample_batch(model, REWARDS, seed=2))
    assert not torch.equal(start["embed.weight"], weights(ppo)["embed.weight"])


def test_action_values_are_numbers_of_their_own_with_the_targets_of_the_actions(
    lab: Any, folder: Path, model: PolicyModel
) -> None:
    for config in LEVELS:
        ppo = outspoken(folder, credit=config, critic=CriticConfig(action_values=True), whiten=False)
        batch = lab.sample_batch(model, REWARDS)
        tokens, _, (of_values, of_actions) = credited(ppo, batch)
        ends = after_actions(tokens, max_length=128)
        assert len(of_actions) == sum(len(t.turns) for g in batch.groups for t in g.trajectories)
        at_ends = ends.mask_N.nonzero().squeeze(-1).tolist()
        assert [at for _, at in of_actions] == at_ends
        if config.level == "turn":  # both are A_t + V_t
            assert list(of_values.values()) == list(of_actions.values())
            continue
        where = [at for turns in turn_tokens(tokens).values() for at in turns.values()]
        named = {at: y for (_, at), y in of_values.items()}
        last = [named[int(at[-1])] for at in where]
        assert last == pytest.approx(list(of_actions.values()), abs=1e-6)  # token-Q is turn-Q (I1)


# --- what cannot work


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"critic": CriticConfig(place="trunk"), "critic_updates": 1}, "critic_updates must have a critic of its own"),
        ({"critic": CriticConfig(place="trunk"), "replay": ReplayConfig()}, "replay must have a critic of its own"),
        ({"credit": GAEConfig(level="token", gamma=0.9), "replay": ReplayConfig()}, "must have a discount per turn"),
        (
            {"credit": GAEConfig(level="bilevel", gamma_token=0.9), "replay": ReplayConfig()},
            "must have a discount per turn",
        ),
        ({"kl_coef": 0.1, "replay": ReplayConfig()}, "without a KL penalty"),
        ({"rewards": RewardScheme(turn_cost=0.1)}, "within .0, 1."),
        ({"rewards": RewardScheme(weights={"outcome": 1.0}, repeat_penalty=0.1)}, "within .0, 1."),
        ({"rewards": RewardScheme(weights={"outcome": 1.0}, potential="phi")}, "within .0, 1."),
        ({"rewards": RewardScheme(weights={"outcome": 1.0}, process="judge")}, "within .0, 1."),
        ({"credit": "bilevel"}, r"credit must be GAEConfig\(...\): got 'bilevel' \(PPO\)"),
        ({"critic": "trunk"}, r"critic must be CriticConfig\(...\): got 'trunk'"),
        ({"replay": True}, r"replay must be ReplayConfig\(...\): got True"),
        (
            {
                "rewards": RewardScheme(potential="phi"), "critic": CriticConfig(kind="scalar"),
                "credit": GAEConfig(level="token", gamma=0.9),
            },
            "potentials must share a discount per turn",
        ),
    ],
)  # fmt: skip
def test_parts_that_cannot_work_together_are_refused(folder: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        PPO(folder, **options)


@pytest.mark.parametrize("place", ["separate", "trunk"])
def test_a_batch_in_which_nobody_counts_changes_no_weight(
    lab: Any, folder: Path, model: PolicyModel, place: Any
) -> None:
    ppo = learner(folder, critic=CriticConfig(place=place))
    before = weights(ppo)
    batch = lab.sample_batch(model, REWARDS, end=End.env_error)
    metrics = ppo.update(batch).metrics
    assert metrics["excluded_failed"] == 12
    assert metrics["policy_tokens"] == metrics["optimizer_steps"] == 0
    assert same(before, weights(ppo))


@pytest.mark.parametrize("level", ["turn", "token", "bilevel"])
def test_one_episode_of_one_token_is_enough(lab: Any, folder: Path, level: Any) -> None:
    segment = Segment.of([1, 2], [0, 1], [0.0, -3.0], [-1, 0], [-1, 0])
    turn = Turn(index=0, segment=0, start=1, length=1, text="", rewards={"outcome": 1.0})
    trajectory = Trajectory(id="a", task=Task("t"), turns=(turn,), segments=(segment,), end=End.success)
    ppo = learner(folder, credit=GAEConfig(level=level), min_ess_ratio=0.0)
    metrics = ppo.update(lab.make_batch([[trajectory]])).metrics
    assert metrics["policy_tokens"] == 1
    assert all(bool(tensor.isfinite().all()) for tensor in weights(ppo).values())


def test_the_watch_for_hacking_goes_on_after_a_restart(
    lab: Any, folder: Path, model: PolicyModel, tmp_path: Path
) -> None:
    ppo = learner(folder)
    for seed in range(2):
        ppo.update(lab.sample_batch(model, REWARDS, seed=seed))
    ppo.save(tmp_path / "checkpoint")
    again = PPO(folder, **EASY)
    again.load(tmp_path / "checkpoint")
    assert ppo._state is not None
    assert again._state is not None
    assert again._state.monitor.state_dict() == ppo._state.monitor.state_dict() != {"window": []}
    batch = lab.sample_batch(model, REWARDS, seed=5)
    assert ppo.update(batch).metrics == again.update(batch).metrics


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (PPO, {"credit": GAEConfig(level="bilevel"), "surrogate": "turn_geo"}),
        (PPO, {"surrogate": "sequence_geo"}),
        (GRPO, {"credit": "turn_index", "surrogate": "sequence_geo"}),
    ],
)
def test_one_ratio_for_two_advantages_is_refused_at_once(make: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="one ratio cannot serve two advantages"):
        make("anywhere", clip=(0.01, 0.01), **options)


def test_tokens_too_old_to_train_pay_their_kl_penalty_too(
    lab: Any, folder: Path, model: PolicyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ppo = learner(folder, kl_coef=0.1)
    ppo.update(lab.sample_batch(model, REWARDS))  # so that policy and reference differ
    seen: list[Scored] = []
    credit = ppo._credit

    def listen(scored: Scored) -> Credit:
        seen.append(scored)
        return credit(scored)

    monkeypatch.setattr(ppo, "_credit", listen)
    batch = lab.sample_batch(model, REWARDS, seed=1, policy_version=1)
    ppo.update(msgspec.structs.replace(batch, min_version=1))  # all of it is too old
    (scored,) = seen
    assert not scored.tokens.mask_N.any()
    assert scored.kl_N is not None
    assert int((scored.kl_N[scored.tokens.generated_N] != 0).sum()) > 0.9 * int(scored.tokens.generated_N.sum())


def test_a_head_on_the_trunk_says_how_its_loss_goes(lab: Any, folder: Path, model: PolicyModel) -> None:
    one, twice = (
        learner(folder, minibatches=1, critic=CriticConfig(place="trunk", coef=coef)).update(
            lab.sample_batch(model, REWARDS)
        )
        for coef in (0.5, 1.0)
    )
    # All values are 1/2 at first, so the cross-entropy is log 2 whatever the targets.
    assert one.metrics["value_loss"] == pytest.approx(0.5 * math.log(2), rel=1e-5)
    assert twice.metrics["value_loss"] == pytest.approx(math.log(2), rel=1e-5)
