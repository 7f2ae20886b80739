"""GRPO as a whole: what one update does to the weights, what it refuses, and that it resumes exactly."""

import logging
import math
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from turngate.envs.base import End
from turngate.learners import policy_state
from turngate.learners.advantages.group import GroupScheme
from turngate.learners.grpo import GRPO
from turngate.learners.off_policy_choice import OffPolicy
from turngate.learners.offpolicy import Correction
from turngate.learners.reward_scheme import RewardScheme
from turngate.learners.step_credit import StepGroups
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.engine.packing import pack
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.types import Batch, Group, Sampling, Segment, Trajectory

REWARDS = [[0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]]
ONE_STEP = {"epochs": 1, "minibatches": 1}
EASY = {"parity": "report", "off_policy": "decoupled"}


def learner(folder: Path, **options: Any) -> GRPO:
    grpo = GRPO(
        folder, **({"epochs": 2, "off_policy": "decoupled"} | options)
    )  # two passes, so that data is reused and clipped
    grpo.load(None)
    return grpo


def weights(grpo: GRPO) -> dict[str, Tensor]:
    assert grpo._state is not None
    return {name: tensor.clone() for name, tensor in grpo._state.model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def with_logprobs(trajectory: Trajectory, change: float, token: int = 0) -> Trajectory:
    """Return the trajectory with `change` added to one behaviour log-prob of its first segment."""
    segment = trajectory.segments[0]
    logprobs = list(segment.logprob_values())
    logprobs[[i for i, m in enumerate(segment.policy_mask) if m][token]] += change
    plain = (segment.ids(), segment.policy_mask, logprobs, segment.version_values(), segment.turn_values())
    return msgspec.structs.replace(trajectory, segments=(Segment.of(*plain), *trajectory.segments[1:]))


def changed(batch: Batch, change: float, token: int = 0) -> Batch:
    """Return the batch with every trajectory's log-prob of one token changed."""
    groups = [
        msgspec.structs.replace(g, trajectories=tuple(with_logprobs(t, change, token) for t in g.trajectories))
        for g in batch.groups
    ]
    return msgspec.structs.replace(batch, groups=tuple(groups))


def test_the_gradient_is_that_of_a_loop_over_trajectories(lab: Any, folder: Path, model: PolicyModel) -> None:
    batch = lab.sample_batch(model, REWARDS)
    metrics = learner(folder, **ONE_STEP).update(batch).metrics
    # The reference: each trajectory on its own, the advantage on every generated token, one mean over all of them.
    losses, count = [], 0
    for group in batch.groups:
        mean = sum(t.reward for t in group.trajectories) / len(group.trajectories)
        for t in group.trajectories:
            logp = model.score(pack([t.segments[0].ids()], [t.segments[0].policy_mask])).logprobs_M
            losses.append(-(t.reward - mean) * (logp - logp.detach()).exp().sum())
            count += len(logp)
    (torch.stack(losses).sum() / count).backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["loss"] == pytest.approx((torch.stack(losses).sum() / count).item(), rel=1e-4, abs=1e-7)


def test_sampled_actions_with_a_positive_advantage_become_likelier(lab: Any, folder: Path, model: PolicyModel) -> None:
    batch = lab.sample_batch(model, REWARDS)
    grpo = learner(folder, **EASY)
    for _ in range(3):
        grpo.update(batch)
    assert grpo._state is not None
    moves = []
    for group in (batch.groups[0], batch.groups[2]):
        mean = sum(t.reward for t in group.trajectories) / 4
        for t in group.trajectories:
            after = grpo._state.model.score(pack([t.segments[0].ids()], [t.segments[0].policy_mask])).logprobs_M
            moves.append((t.reward - mean) * float(after.detach().sum() - sum(t.segments[0].logprob_values())))
    assert sum(moves) > 0


def test_save_load_update_equals_update_bit_for_bit(lab: Any, folder: Path, model: PolicyModel, tmp_path: Path) -> None:
    batches = [lab.sample_batch(model, REWARDS, seed=seed) for seed in range(3)]
    straight = learner(folder, **EASY)
    for batch in batches:
        straight.update(batch)

    first = learner(folder, **EASY)
    first.update(batches[0])
    first.save(tmp_path / "checkpoint")
    second = GRPO(folder, epochs=2, **EASY)
    second.load(tmp_path / "checkpoint")
    reports = [second.update(batch) for batch in batches[1:]]
    assert same(weights(straight), weights(second))
    assert second._state is not None
    assert second._state.updates == 3
    assert reports[0].metrics["optimizer_steps"] == 4


def test_a_checkpoint_holds_a_whole_model_folder(lab: Any, folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    grpo = learner(folder)
    grpo.save(tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint" / "model" / "tokenizer.json").read_text() == "{}"
    assert same(weights(grpo), PolicyModel.load(tmp_path / "checkpoint" / "model").state_dict())


def test_a_broken_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    learner(folder).save(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "learner.pt").unlink()
    with pytest.raises(LearnerError, match="checkpoint must be readable"):
        GRPO(folder).load(tmp_path / "checkpoint")


@pytest.mark.parametrize("content", [b"", b"no checkpoint at all"])
def test_a_checkpoint_of_other_content_is_refused(folder: Path, tmp_path: Path, content: bytes) -> None:
    learner(folder).save(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "learner.pt").write_bytes(content)
    with pytest.raises(LearnerError, match="checkpoint must be readable"):
        GRPO(folder).load(tmp_path / "checkpoint")


def test_a_save_that_fails_half_way_keeps_the_old_checkpoint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grpo = learner(folder)
    grpo.save(tmp_path / "checkpoint")

    def fail(saved: object, target: Any) -> None:
        (target.write_bytes if isinstance(target, Path) else target.write)(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        grpo.save(tmp_path / "checkpoint")
    GRPO(folder).load(tmp_path / "checkpoint")


def test_published_weights_are_the_learners(lab: Any, folder: Path, model: PolicyModel, tmp_path: Path) -> None:
    grpo = learner(folder)
    grpo.update(lab.sample_batch(model, REWARDS))
    grpo.save_weights(tmp_path / "w.safetensors")
    other = lab.make_model(seed=5)
    other.load_weights(tmp_path / "w.safetensors")
    assert same(weights(grpo), other.state_dict())
    assert not same(weights(grpo), model.state_dict())


def test_it_is_light_and_picklable_until_loaded(folder: Path) -> None:
    sent = pickle.dumps(GRPO(folder, updates=10))
    assert len(sent) < 4096
    received = pickle.loads(sent)
    assert received.schedule.total_updates == 10
    with pytest.raises(LearnerError, match=r"load\(\) must come first"):
        received.update(Batch(groups=(), policy_version=0))


@pytest.mark.parametrize("cap", [16, 64])
def test_p1_micro_batches_change_nothing(lab: Any, folder: Path, model: PolicyModel, cap: int) -> None:
    batch = lab.sample_batch(model, REWARDS)
    whole, cut = learner(folder), learner(folder, microbatch_tokens=cap)
    a, b = whole.update(batch).metrics, cut.update(batch).metrics
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    assert a["loss"] == pytest.approx(b["loss"], rel=1e-3, abs=1e-7)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(tensor, weights(cut)[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("surrogate", "clip"),
    [("cispo", (1.0, 4.0)), ("turn_prod", (0.1, 0.1)), ("turn_geo", (0.02, 0.02)), ("sequence_geo", (0.01, 0.01))],
)
@pytest.mark.parametrize("drop", [False, True])
def test_every_surrogate_trains_and_micro_batches_change_nothing(
    lab: Any, folder: Path, model: PolicyModel, surrogate: str, clip: tuple[float, float], drop: bool
) -> None:
    batch = changed(lab.sample_batch(model, REWARDS, policy_version=2, drop_early_turns=drop), -0.25)
    options = {"surrogate": surrogate, "clip": clip, "off_policy": "decoupled", "epochs": 2}
    whole, cut = learner(folder, **options), learner(folder, **options, microbatch_tokens=16)
    a, b = whole.update(batch).metrics, cut.update(batch).metrics
    assert a["optimizer_steps"] == 4
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(tensor, weights(cut)[name], rtol=1e-3, atol=1e-4)


def test_p1_the_order_of_groups_and_members_changes_nothing(lab: Any, folder: Path, model: PolicyModel) -> None:
    batch = lab.sample_batch(model, REWARDS)
    turned = [msgspec.structs.replace(g, trajectories=g.trajectories[::-1]) for g in batch.groups[::-1]]
    one = learner(folder, **ONE_STEP).update(batch).metrics
    other = learner(folder, **ONE_STEP).update(msgspec.structs.replace(batch, groups=tuple(turned))).metrics
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_p3_rewritten_contexts_train_each_token_once(lab: Any, folder: Path, model: PolicyModel) -> None:
    batch = lab.sample_batch(model, REWARDS, drop_early_turns=True)
    metrics = learner(folder).update(batch).metrics
    assert metrics["policy_tokens"] == sum(t.policy_tokens for g in batch.groups for t in g.trajectories)
    assert metrics["parity_max_abs"] < 1e-5


@pytest.mark.parametrize("mode", ["decoupled", "bypass", "reinforce", "none"])
def test_p4_on_policy_all_corrections_are_reinforce(lab: Any, folder: Path, model: PolicyModel, mode: str) -> None:
    batch = lab.sample_batch(model, REWARDS)
    norm = learner(folder, **ONE_STEP, off_policy=mode).update(batch).metrics["grad_norm"]
    assert norm == pytest.approx(learner(folder, **ONE_STEP).update(batch).metrics["grad_norm"], rel=1e-4)


def test_a_batch_of_degenerate_groups_leaves_the_weights_alone(lab: Any, folder: Path, model: PolicyModel) -> None:
    grpo = learner(folder)
    grpo.update(lab.sample_batch(model, REWARDS))  # now there is momentum that a step would follow
    before = weights(grpo)
    metrics = grpo.update(lab.sample_batch(model, [[1.0] * 4, [0.0] * 4], policy_version=9)).metrics
    assert same(before, weights(grpo))
    assert metrics["degenerate_fraction"] == 1.0
    assert metrics["optimizer_steps"] == 0


@pytest.mark.parametrize("place", ["reward", "loss_k2", "loss_ratio_k3"])
def test_b1_13_kl_does_not_act_on_degenerate_groups(lab: Any, folder: Path, model: PolicyModel, place: str) -> None:
    grpo = learner(folder, kl_coef=10.0, kl_in=place, **EASY)
    mixed = lab.sample_batch(model, REWARDS)
    grpo.update(mixed)
    before = weights(grpo)
    grpo.update(msgspec.structs.replace(mixed, groups=mixed.groups[1:2]))
    assert same(before, weights(grpo))
    grpo.update(mixed)
    assert not same(before, weights(grpo))


def test_kl_in_the_reward_penalises_what_left_the_reference(lab: Any, folder: Path, model: PolicyModel) -> None:
    # One rewarded member against one that is not: what leaves the reference costs more than the reward is worth.
    batch = lab.sample_batch(model, [[0.0, 1e-3]])
    free, bound = learner(folder, **EASY), learner(folder, kl_coef=100.0, **EASY)
    assert bound.update(batch).metrics["reference_kl_k1"] == pytest.approx(0.0, abs=1e-6)
    free.update(batch)
    drifts = []
    for _ in range(4):
        drifts.append(bound.update(batch).metrics["reference_kl_k1"])
        free.update(batch)
    assert drifts[-1] != 0.0
    assert not same(weights(free), weights(bound))


def test_b1_13_kl_noise_among_equals_is_not_blown_up_to_advantages(lab: Any, folder: Path, model: PolicyModel) -> None:
    grpo = learner(folder, preset="grpo", kl_coef=1e-3, **EASY)
    batch = lab.sample_batch(model, REWARDS)
    assert grpo.update(batch).metrics["degenerate_fraction"] == pytest.approx(1 / 3)
    metrics = grpo.update(msgspec.structs.replace(batch, groups=batch.groups[1:2])).metrics
    assert metrics["reference_kl_k1"] != 0.0
    assert metrics["degenerate_fraction"] == 1.0
    assert metrics["optimizer_steps"] == 0


def test_a_lone_member_that_keeps_its_reward_trains_beside_an_entropy_bonus(
    lab: Any, folder: Path, model: PolicyModel
) -> None:
    grpo = learner(folder, preset=GroupScheme(singleton="raw"), entropy_coef=1e-3, **ONE_STEP)
    assert grpo.update(lab.sample_batch(model, [[1.0]])).metrics["optimizer_steps"] == 1


def test_an_entropy_bonus_raises_entropy(lab: Any, folder: Path, model: PolicyModel) -> None:
    batch = lab.sample_batch(model, [[0.0, 1e-3, 0.0, 1e-3]])
    grpo = learner(folder, entropy_coef=5.0, **EASY)
    entropies = [grpo.update(batch).metrics["entropy"] for _ in range(4)]
    assert entropies == sorted(entropies)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_training_and_sampling_log_probs_agree_at_lag_0(
    lab: Any, folder: Path, model: PolicyModel, drop: bool, temperature: float
) -> None:
    batch = lab.sample_batch(model, REWARDS, drop_early_turns=drop, temperature=temperature)
    metrics = learner(folder, sampling=Sampling(temperature=temperature)).update(batch).metrics
    assert metrics["parity_tokens"] == metrics["policy_tokens"]
    assert metrics["parity_max_abs"] < 1e-5


def test_b2_6_another_temperature_is_noticed_before_the_first_step(lab: Any, folder: Path, model: PolicyModel) -> None:
    batch = lab.sample_batch(model, REWARDS, temperature=0.6)
    grpo = learner(folder)
    before = weights(grpo)
    with pytest.raises(LearnerError, match="must match the sampler's at lag 0"):
        grpo.update(batch)
    assert same(before, weights(grpo))


def test_a_parity_failure_names_trajectory_turn_and_token(lab: Any, folder: Path, model: PolicyModel) -> None:
    batch = lab.sample_batch(model, REWARDS)
    wrong = with_logprobs(batch.groups[0].trajectories[2], -0.25, token=3)
    first = msgspec.structs.replace(batch.groups[0], trajectories=(*batch.groups[0].trajectories[:2], wrong))
    with pytest.raises(LearnerError, match=r"got 0\.25 at worst.*trajectory t2, turn 1, token \d+ of its segment"):
        learner(folder).update(msgspec.structs.replace(batch, groups=(first,)))


def test_parity_can_be_only_reported(lab: Any, folder: Path, model: PolicyModel) -> None:
    metrics = learner(folder, parity="report").update(changed(lab.sample_batch(model, REWARDS), -0.25)).metrics
    assert metrics["parity_max_abs"] == pytest.approx(0.25, rel=1e-3)


def test_parity_is_an_error_on_the_first_batches_only(lab: Any, folder: Path, model: PolicyModel) -> None:
    grpo = learner(folder, parity_batches=1, muon_lr=0.0, adamw_lr=0.0)
    grpo.update(lab.sample_batch(model, REWARDS))
    grpo.update(changed(lab.sample_batch(model, REWARDS), -0.25))


def test_stale_tokens_are_no_parity_failure(lab: Any, folder: Path, model: PolicyModel) -> None:
    stale = changed(lab.sample_batch(model, REWARDS, policy_version=2), -0.25)
    metrics = learner(folder).update(stale).metrics
    assert metrics["parity_tokens"] == 0
    assert metrics["trained_lag_max"] == 2
    assert metrics["sampler_kl_k3"] > 0


def test_truncated_importance_weights_are_counted_before_truncation(lab: Any, folder: Path, model: PolicyModel) -> None:
    stale = changed(lab.sample_batch(model, REWARDS, policy_version=2), -1.5)
    metrics = learner(folder).update(stale).metrics
    assert metrics["tis_truncated_fraction"] == pytest.approx(12 / metrics["policy_tokens"])
    assert metrics["log_ratio_abs_max"] == pytest.approx(1.5, rel=1e-3)


def test_the_clip_is_anchored_at_the_start_of_the_update_not_at_the_sampler(
    lab: Any, folder: Path, model: PolicyModel
) -> None:
    stale = changed(lab.sample_batch(model, REWARDS, policy_version=2), -1.5)
    decoupled = learner(folder, **ONE_STEP).update(stale).metrics
    bypass = learner(folder, **ONE_STEP, off_policy="bypass").update(stale).metrics
    assert decoupled["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert decoupled["clip_high_fraction"] == 0.0
    assert bypass["ratio_max"] == pytest.approx(math.exp(1.5), rel=1e-3)
    assert bypass["clip_high_fraction"] > 0.0


def test_the_weight_of_a_stale_token_reaches_its_gradient_once(lab: Any, folder: Path, model: PolicyModel) -> None:
    # Every behaviour log-prob lies log(1.5) below: all weights are 1.5, so the whole gradient is.
    batch = lab.sample_batch(model, REWARDS, policy_version=2)
    stale = batch
    for token in range(12):
        stale = msgspec.structs.replace(stale, groups=tuple(_shifted(g, token) for g in stale.groups))
    one, other = (learner(folder, **ONE_STEP).update(b).metrics["grad_norm"] for b in (batch, stale))
    assert other == pytest.approx(1.5 * one, rel=1e-4)


def test_weights_of_1_leave_out_the_correction_and_keep_the_clip(lab: Any, folder: Path, model: PolicyModel) -> None:
    batch = lab.sample_batch(model, REWARDS, policy_version=2)
    stale = changed(batch, -1.5)
    uncorrected = {"off_policy": OffPolicy.decoupled(Correction(lower=1.0, upper=1.0)), "clip": (1e-4, 1e-4)}
    fresh, blind, corrected = (learner(folder, **o) for o in (uncorrected, uncorrected, {"clip": (1e-4, 1e-4)}))
    fresh.update(batch)
    metrics = blind.update(stale).metrics
    corrected.update(stale)
    assert same(weights(blind), weights(fresh))  # what the sampler thought of its tokens does not matter
    assert not same(weights(blind), weights(corrected))
    assert metrics["clip_high_fraction"] > 0.1
    assert metrics["clip_low_fraction"] > 0.1


def test_off_policy_none_is_reinforce_without_weight_ratio_or_clip(lab: Any, folder: Path, model: PolicyModel) -> None:
    batch = lab.sample_batch(model, REWARDS, policy_version=2)
    narrow, wide = (learner(folder, off_policy="none", clip=clip) for clip in ((1e-4, 1e-4), (0.2, 0.28)))
    metrics = narrow.update(changed(batch, -1.5)).metrics
    wide.update(batch)
    assert same(weights(narrow), weights(wide))
    assert metrics["clip_high_fraction"] == metrics["clip_low_fraction"] == 0.0


def _shifted(group: Group, token: int) -> Group:
    members = tuple(
        with_logprobs(t, -math.log(1.5), token) if t.policy_tokens > token else t for t in group.trajectories
    )
    return msgspec.structs.replace(group, trajectories=members)


def test_data_that_says_nothing_any_more_stops_the_run(lab: Any, folder: Path, model: PolicyModel) -> None:
    stale = lab.sample_batch(model, REWARDS, policy_version=2)
    one = with_logprobs(stale.groups[0].trajectories[0], -18.0)
    group = msgspec.structs.replace(stale.groups[0], trajectories=(one, *stale.groups[0].trajectories[1:]))
    useless = msgspec.structs.replace(stale, groups=(group, *stale.groups[1:]))
    grpo = learner(folder)
    grpo.update(useless)
    grpo.update(stale)  # a good batch in between: one outlier stops nothing
    grpo.update(useless)
    grpo.update(useless)
    with pytest.raises(LearnerError, match=r"effective sample size .* after 2 batches as low"):
        grpo.update(useless)


def test_tokens_too_old_are_masked(lab: Any, folder: Path, model: PolicyModel) -> None:
    batch = msgspec.structs.replace(lab.sample_batch(model, REWARDS, policy_version=3), min_version=2)
    metrics = learner(folder).update(batch).metrics
    assert metrics["policy_tokens"] == 0
    assert metrics["optimizer_steps"] == 0


def test_truncated_members_are_neither_baseline_nor_gradient(lab: Any, folder: Path, model: PolicyModel) -> None:
    batch = lab.sample_batch(model, [[1.0, 0.0, 1.0, 0.0]])
    members = batch.groups[0].trajectories
    cut = lab.make_batch([[*members, msgspec.structs.replace(members[0], id="cut", end=End.turn_limit)]])
    one, other = (learner(folder, **ONE_STEP).update(b).metrics for b in (batch, cut))
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
    assert other["excluded_truncated"] == 1


def test_p17_a_gradient_that_is_not_finite_leaves_the_weights_untouched(
    lab: Any, folder: Path, model: PolicyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    grpo = learner(folder)
    before = weights(grpo)
    monkeypatch.setattr(policy_state.MuonAdamW, "clip_grad_norm", lambda self, max_norm: math.nan)
    with pytest.raises(LearnerError, match=r"finite: got .* norm nan.*weights are those of the last complete"):
        grpo.update(lab.sample_batch(model, REWARDS))
    assert same(before, weights(grpo))
    assert grpo._state is not None
    assert all(p.grad is None for p in grpo._state.model.parameters())


def test_p17_broken_weights_are_noticed_and_located(lab: Any, folder: Path, model: PolicyModel) -> None:
    grpo = learner(folder)
    assert grpo._state is not None
    with torch.no_grad():
        grpo._state.model.embed.weight[3] = math.nan
    with pytest.raises(LearnerError, match=r"log-probs must be finite: got nan \(trajectory t"):
        grpo.update(lab.sample_batch(model, REWARDS))


def test_segments_longer_than_the_model_are_refused(lab: Any, model: PolicyModel, tmp_path: Path) -> None:
    short = lab.make_model(max_context=8)
    short.save(tmp_path / "short")
    with pytest.raises(LearnerError, match="expected at most 8 tokens"):
        learner(tmp_path / "short").update(lab.sample_batch(model, REWARDS))


def test_rare_choices_run(lab: Any, folder: Path, model: PolicyModel) -> None:
    batch = lab.sample_batch(model, REWARDS, drop_early_turns=True)
    units = Correction("unit_prod", "mask", upper=5.0, lower=0.2, normalise=True)
    for options in (
        {"preset": "batch_std", "aggregation": "turn_mean", "off_policy": OffPolicy.decoupled(units)},
        {"preset": "rloo", "aggregation": "seq_mean_token_sum_norm", "length_constant": 64.0},
        {
            "preset": "grpo",
            "aggregation": "prompt_mean",
            "off_policy": OffPolicy.reinforce(Correction(upper=1.0)),
        },
    ):
        assert learner(folder, **options).update(batch).metrics["optimizer_steps"] == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "ppo"}, "preset must be one of"),
        ({"epochs": 0}, "epochs must be positive"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"aggregation": "mean"}, "aggregation must be"),
        ({"aggregation": "seq_mean_token_sum_norm"}, "length_constant"),
        ({"off_policy": "maybe"}, "off_policy"),
        ({"kl_in": "loss_k1"}, "kl_in"),
        ({"parity": "off"}, "parity must be error or report"),
        ({"clip": (-0.2, 0.2)}, "clip offsets"),
        ({"sampling": Sampling(top_p=0.9)}, "whole vocabulary"),
        ({"sampling": Sampling(top_k=5)}, "whole vocabulary"),
        ({"sampling": Sampling(temperature=0.0)}, "temperature"),
        ({"credit": StepGroups(gamma=0.9), "rewards": RewardScheme(potential="p")}, "share one discount per turn"),
        ({"credit": "turn_index", "kl_coef": 0.1}, "a KL penalty must be part of the loss"),
        ({"credit": "turn_index", "preset": "grpo"}, "preset must be left alone"),
        ({"preset": None}, "preset must be a name or a GroupScheme"),
        ({"anchor": len}, r"anchor must go with credit=StepGroups\(...\)"),
        ({"rewards": {"outcome": 1.0}}, r"rewards must be RewardScheme\(...\): got {'outcome': 1.0} \(GRPO\)"),
        ({"hacking": 3}, r"hacking must be HackingConfig\(...\)"),
        ({"clip": 0.2}, "a pair of offsets: got 0.2"),
        ({"kl_coef": -0.1}, "kl_coef must be 0 or more"),
        ({"seed": 2**63}, r"seed must be a signed 64-bit integer: got 9223372036854775808 \(GRPO\)"),
    ],
)
def test_what_cannot_work_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GRPO("anywhere", **options)


def test_truncated_sampling_trains_when_asked_to() -> None:
    assert GRPO("anywhere", sampling=Sampling(top_p=0.9), allow_truncated_sampling=True).sampling.top_p == 0.9


def test_rewards_that_name_what_nobody_gives_are_told(
    lab: Any, folder: Path, model: PolicyModel, caplog: pytest.LogCaptureFixture
) -> None:
    batch = lab.sample_batch(model, REWARDS)
    misspelt = learner(folder, parity="report", rewards=RewardScheme(weights={"outcome": 1.0, "fromat": 0.1}))
    with caplog.at_level(logging.WARNING, logger="turngate.learner"):
        misspelt.update(batch)
        misspelt.update(batch)
    assert [r.getMessage() for r in caplog.records if "nobody was paid" in r.getMessage()] == [
        "rewards rely on components that nobody was paid in a batch with successes: fromat; paid were outcome; correct "
        "the names, unless they are rare"
    ]
    with pytest.raises(ConfigError, match="one called judge, they have no scores at all; the scorer failed every time"):
        learner(folder, rewards=RewardScheme(process="judge")).update(batch)
