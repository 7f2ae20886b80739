"""Values are those of the state before a token; a critic learns towards its targets, and resumes exactly."""

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from turngate.envs.base import End, Task
from turngate.learners.batch import TokenBatch, lay_out
from turngate.learners.critic import (
    Critic,
    CriticConfig,
    ValueReader,
    ValueTargets,
    after_actions,
    last_values,
    read_values,
    with_value_head,
)
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.engine.packing import pack
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.types import Segment, Trajectory, Turn

SUCCESS, SCALAR = CriticConfig(), CriticConfig(kind="scalar")


def headed(model: PolicyModel, seed: int = 5) -> PolicyModel:
    """Return the model with a value head that says something."""
    made = with_value_head(model)
    assert made.value_head is not None
    with torch.no_grad():
        made.value_head.weight.normal_(generator=torch.Generator().manual_seed(seed))
    return made


def direct(model: PolicyModel, ids: list[int]) -> float:
    """Return what the head reads off the last of `ids`, in a forward pass of its own."""
    values_M = model.score(pack([[*ids, 0]], [[0] * len(ids) + [1]])).values_M
    assert values_M is not None
    return float(values_M.detach())


def spoken(*parts: tuple[int, int], name: str = "a") -> Trajectory:
    """Return a one-segment trajectory of (context tokens, action tokens) per turn; ids count up from 1."""
    mask: list[int] = []
    turn_ids: list[int] = []
    turns: list[Turn] = []
    for index, (context, length) in enumerate(parts):
        mask += [0] * context
        turn_ids += [-1] * context
        turns.append(Turn(index=index, segment=0, start=len(mask), length=length, text=""))
        mask += [1] * length
        turn_ids += [index] * length
    n = len(mask)
    ids = [1 + i % 20 for i in range(n)]
    segment = Segment.of(ids, mask, [-0.5 * m for m in mask], [m - 1 for m in mask], turn_ids)
    return Trajectory(id=name, task=Task("t"), turns=tuple(turns), segments=(segment,), end=End.success)


def tokens_of(lab: Any, *trajectories: Trajectory) -> TokenBatch:
    return lay_out(lab.make_batch([[t] for t in trajectories]), [[True]] * len(trajectories), vocabulary_size=24)


def targets_of(tokens: TokenBatch, value: float, mask_N: Tensor | None = None, old: float = 0.0) -> ValueTargets:
    n = len(tokens.mask_N)
    return ValueTargets(torch.full((n,), value), tokens.mask_N if mask_N is None else mask_N, torch.full((n,), old))


# --- values


@pytest.mark.parametrize("config", [SUCCESS, SCALAR])
@pytest.mark.parametrize("microbatch_tokens", [1, 40, 8192])
def test_the_value_of_a_token_is_that_of_the_state_before_it(
    lab: Any, model: PolicyModel, config: CriticConfig, microbatch_tokens: int
) -> None:
    critic = headed(model)
    batch = lab.sample_batch(model, [[0.0, 1.0], [1.0, 0.0]])
    tokens = lay_out(batch, [[True] * 2] * 2, vocabulary_size=24)
    values_N = read_values(critic, tokens, config, microbatch_tokens=microbatch_tokens)
    starts = tokens.row_starts()
    for position, is_read in enumerate(tokens.mask_N.tolist()):
        start = int(starts[int(tokens.row_ids_N[position])])
        output = direct(critic, tokens.token_ids_N[start:position].tolist()) if is_read else 0.0
        expected = 1 / (1 + math.exp(-output)) if config.kind == "success" and is_read else output
        assert float(values_N[position]) == pytest.approx(expected, abs=1e-5)


def test_a_value_does_not_see_the_token_it_belongs_to(lab: Any, model: PolicyModel) -> None:
    critic, trajectory = headed(model), spoken((3, 2), (2, 3))
    one = tokens_of(lab, trajectory)
    other = one.masked(one.mask_N)
    changed_N = one.token_ids_N.clone()
    changed_N[-1] = 23  # the last token of the last action: nothing is read behind it
    object.__setattr__(other, "token_ids_N", changed_N)
    before = read_values(critic, one, SCALAR, microbatch_tokens=100)
    assert torch.equal(before, read_values(critic, other, SCALAR, microbatch_tokens=100))


def test_a_new_head_says_one_half_or_zero(lab: Any, model: PolicyModel) -> None:
    tokens = tokens_of(lab, spoken((2, 3)))
    fresh = with_value_head(model)
    assert read_values(fresh, tokens, SUCCESS, microbatch_tokens=9).tolist() == [0, 0, 0.5, 0.5, 0.5]
    assert read_values(fresh, tokens, SCALAR, microbatch_tokens=9).tolist() == [0] * 5


def test_a_head_is_added_to_a_copy_and_kept_where_there_is_one(model: PolicyModel) -> None:
    critic = headed(model)
    again = with_value_head(critic)
    assert again.value_head is not None
    assert critic.value_head is not None
    assert torch.equal(again.value_head.weight, critic.value_head.weight)
    assert again.embed.weight.data_ptr() != critic.embed.weight.data_ptr()
    assert torch.equal(again.embed.weight, model.embed.weight)
    assert model.value_head is None


def test_a_model_without_a_head_is_refused(lab: Any, model: PolicyModel) -> None:
    with pytest.raises(LearnerError, match="must have a value head"):
        read_values(model, tokens_of(lab, spoken((2, 1))), SUCCESS, microbatch_tokens=9)


def test_only_cut_episodes_are_given_a_bootstrap_and_each_its_own(model: PolicyModel) -> None:
    reader = ValueReader(headed(model), SCALAR, 100)

    def ending(end: End, *context: int) -> Trajectory:
        ids = np.asarray(context, np.int32).tobytes()
        return msgspec.structs.replace(spoken((2, 1)), end=end, last_context=ids)

    episodes = [
        ending(End.turn_limit, 4, 5), ending(End.success, 6, 7), ending(End.budget), ending(End.timeout, 8, 9, 3)
    ]  # fmt: skip
    cut, ended, budget, late = reader.bootstraps(episodes)
    assert (ended, budget) == (None, None)
    assert (cut, late) == pytest.approx((direct(reader.model, [4, 5]), direct(reader.model, [8, 9, 3])), abs=1e-5)
    assert reader.bootstraps([]) == []


@pytest.mark.parametrize("read", ["values", "last_values"])
def test_values_that_are_not_finite_are_refused(lab: Any, model: PolicyModel, read: str) -> None:
    critic = headed(model)
    assert critic.value_head is not None
    with torch.no_grad():
        critic.value_head.weight.fill_(math.nan)
    calls = {
        "values": lambda: read_values(critic, tokens_of(lab, spoken((2, 1))), SUCCESS, microbatch_tokens=9),
        "last_values": lambda: last_values(critic, [[1, 2]], SUCCESS, microbatch_tokens=9),
    }
    with pytest.raises(LearnerError, match="values must be finite"):
        calls[read]()


# --- last contexts


@pytest.mark.parametrize("microbatch_tokens", [1, 8192])
def test_the_value_of_a_last_context_is_read_behind_its_last_id(model: PolicyModel, microbatch_tokens: int) -> None:
    critic = headed(model)
    contexts = [[3], [4, 5, 6, 7, 8], [9, 10, 11], list(range(1, 21))]
    values_K = last_values(critic, contexts, SCALAR, microbatch_tokens=microbatch_tokens)
    expected = [direct(critic, ids) for ids in contexts]
    assert values_K.tolist() == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == 4


def test_a_last_context_has_the_value_of_the_turn_that_would_follow(lab: Any, model: PolicyModel) -> None:
    critic, trajectory = headed(model), spoken((3, 2), (2, 3))
    tokens = tokens_of(lab, trajectory)
    values_N = read_values(critic, tokens, SUCCESS, microbatch_tokens=100)
    context = tokens.token_ids_N[:7].tolist()  # everything before the second action
    (value,) = last_values(critic, [context], SUCCESS, microbatch_tokens=100).tolist()
    assert value == pytest.approx(float(values_N[7]), abs=1e-6)


def test_no_contexts_have_no_values(model: PolicyModel) -> None:
    assert last_values(headed(model), [], SUCCESS, microbatch_tokens=10).shape == (0,)


@pytest.mark.parametrize(
    ("context", "why"),
    [([], "1 to 127 tokens: got 0"), ([1] * 128, "got 128"), ([1, 24], "vocabulary of 24"), ([-1], "vocabulary of 24")],
)
def test_contexts_that_cannot_be_read_are_refused(model: PolicyModel, context: list[int], why: str) -> None:
    with pytest.raises(LearnerError, match=why):
        last_values(headed(model), [context], SUCCESS, microbatch_tokens=10)


def test_the_longest_context_with_room_for_a_token_is_read(model: PolicyModel) -> None:
    assert last_values(headed(model), [[1] * 127], SUCCESS, microbatch_tokens=10).isfinite().all()


# --- after actions


def positions_after(tokens: TokenBatch, max_length: int = 128) -> list[tuple[int, int, int]]:
    """Return (row, place in the row, turn) of everything masked in."""
    ends = after_actions(tokens, max_length=max_length)
    starts = ends.row_starts()
    found = ends.mask_N.nonzero().squeeze(-1).tolist()
    rows = [int(ends.row_ids_N[at]) for at in found]
    return [(row, at - int(starts[row]), int(ends.turn_ids_N[at])) for row, at in zip(rows, found, strict=True)]


def test_an_action_is_complete_at_the_token_after_it(lab: Any) -> None:
    # 3 context, 2 action | 2 context, 3 action: the first is complete at 5, the second at 10, a token that is new.
    assert positions_after(tokens_of(lab, spoken((3, 2), (2, 3)))) == [(0, 5, 0), (0, 10, 1)]


def test_rows_are_told_apart(lab: Any) -> None:
    tokens = tokens_of(lab, spoken((1, 1), name="a"), spoken((2, 4), (1, 1), name="b"), spoken((1, 2), name="c"))
    assert positions_after(tokens) == [(0, 2, 0), (1, 6, 0), (1, 8, 1), (2, 3, 0)]
    ends = after_actions(tokens, max_length=128)
    assert ends.row_lengths == (3, 9, 4)
    assert ends.trajectory_ids_N[ends.mask_N].tolist() == [0, 1, 1, 2]
    assert len(ends.token_ids_N) == len(ends.versions_N) == len(ends.group_ids_N) == 16


def test_an_action_right_before_another_has_no_token_of_its_own_after_it(lab: Any) -> None:
    assert positions_after(tokens_of(lab, spoken((3, 2), (0, 3), (1, 1)))) == [(0, 8, 1), (0, 10, 2)]


def test_an_action_that_fills_the_row_is_left_out(lab: Any) -> None:
    tokens = tokens_of(lab, spoken((3, 2), (2, 3), name="full"), spoken((2, 2), name="short"))
    assert positions_after(tokens, max_length=10) == [(0, 5, 0), (1, 4, 0)]
    assert positions_after(tokens, max_length=11) == [(0, 5, 0), (0, 10, 1), (1, 4, 0)]
    assert after_actions(tokens, max_length=10).row_lengths == (10, 5)


def test_a_batch_without_rows_stays_empty(lab: Any) -> None:
    tokens = lay_out(lab.make_batch([[spoken((1, 1))]]), [[False]], vocabulary_size=24)
    assert len(after_actions(tokens, max_length=10).mask_N) == 0


def test_the_value_after_an_action_sees_all_of_it_and_nothing_behind(lab: Any, model: PolicyModel) -> None:
    critic, trajectory = headed(model), spoken((3, 2), (2, 3))
    tokens = tokens_of(lab, trajectory)
    ends = after_actions(tokens, max_length=128)
    values_N = read_values(critic, ends, SCALAR, microbatch_tokens=100)
    ids = tokens.token_ids_N.tolist()
    expected = [direct(critic, ids[:5]), direct(critic, ids[:10])]
    assert values_N[ends.mask_N].tolist() == pytest.approx(expected, abs=1e-5)
    # It is no value that the tokens have: those end before the action's last token, and go on after the observation.
    known_N = read_values(critic, tokens, SCALAR, microbatch_tokens=100)
    assert min(abs(float(v) - e) for v in known_N for e in expected) > 1e-4


def test_actions_of_several_segments_end_in_their_own(lab: Any, model: PolicyModel) -> None:
    trajectory = lab.sample_trajectory(model, torch.Generator().manual_seed(1), turns=3, drop_early_turns=True)
    tokens = tokens_of(lab, trajectory)
    ends = after_actions(tokens, max_length=128)
    assert ends.turn_ids_N[ends.mask_N].tolist() == [0, 1, 2]
    assert ends.row_ids_N[ends.mask_N].tolist() == [0, 1, 2]
    values_N = read_values(headed(model), ends, SCALAR, microbatch_tokens=100)
    contexts = [list(segment.ids()) for segment in trajectory.segments]
    assert values_N[ends.mask_N].tolist() == pytest.approx([direct(headed(model), c) for c in contexts], abs=1e-5)


# --- learning


def test_a_critic_moves_towards_its_targets(lab: Any, model: PolicyModel) -> None:
    tokens = tokens_of(lab, spoken((3, 2), (2, 3)))
    critic = Critic(with_value_head(model), CriticConfig(epochs=80, minibatches=1), seed=0, microbatch_tokens=100)
    metrics = critic.learn(tokens, targets_of(tokens, 0.9))
    assert critic.values(tokens)[tokens.mask_N].tolist() == pytest.approx([0.9] * 5, abs=0.1)
    assert critic.version == 1
    assert metrics["value_loss"] > 0
    assert metrics["value_grad_norm"] > 0


def test_only_positions_with_a_target_teach(lab: Any, model: PolicyModel) -> None:
    tokens = tokens_of(lab, spoken((3, 2)), spoken((4, 1), name="b"))
    made = []
    for elsewhere in (0.0, 1.0, math.nan):
        critic = Critic(headed(model), CriticConfig(minibatches=1), seed=0, microbatch_tokens=100)
        targets_N = torch.full((len(tokens.mask_N),), elsewhere)
        mask_N = torch.zeros_like(tokens.mask_N)
        targets_N[3], mask_N[3] = 0.25, True
        _ = critic.learn(tokens, ValueTargets(targets_N, mask_N, torch.zeros(len(targets_N))))
        made.append(critic.model.state_dict())
    assert all(torch.equal(made[0][name], other[name]) for other in made[1:] for name in made[0])


@pytest.mark.parametrize("kind", ["success", "scalar"])
def test_one_step_is_that_of_the_mean_loss_of_the_minibatch(lab: Any, model: PolicyModel, kind: Any) -> None:
    config = CriticConfig(kind=kind, epochs=1, minibatches=1, value_clip=0.1, max_grad_norm=1e9)
    tokens = tokens_of(lab, spoken((3, 2), (2, 3)), spoken((2, 1), name="b"))
    critic = Critic(headed(model), config, seed=0, microbatch_tokens=4)
    norm = critic.learn(tokens, targets_of(tokens, 0.3, old=0.2))["value_grad_norm"]
    # The reference: one forward pass per token, the loss written out, one mean over the six of them.
    reference = headed(model)
    losses: list[Tensor] = []
    starts = tokens.row_starts()
    for at in tokens.mask_N.nonzero().squeeze(-1).tolist():
        start = int(starts[int(tokens.row_ids_N[at])])
        ids = tokens.token_ids_N[start : at + 1].tolist()
        values_1 = reference.score(pack([ids], [[0] * (len(ids) - 1) + [1]])).values_M
        assert values_1 is not None
        if kind == "success":
            losses.append(-0.3 * values_1.sigmoid().log() - 0.7 * (1 - values_1.sigmoid()).log())
        else:
            clipped_1 = 0.2 + (values_1 - 0.2).clamp(-0.1, 0.1)
            losses.append(0.5 * torch.maximum((values_1 - 0.3) ** 2, (clipped_1 - 0.3) ** 2))
    (torch.cat(losses).sum() / 6).backward()
    expected = math.sqrt(sum(float(p.grad.square().sum()) for p in reference.parameters() if p.grad is not None))
    assert norm == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", ["success", "scalar"])
def test_microbatches_change_a_critic_by_rounding_alone(lab: Any, model: PolicyModel, kind: Any) -> None:
    batch = lab.sample_batch(model, [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    tokens = lay_out(batch, [[True] * 3] * 2, vocabulary_size=24)
    norms = []
    for microbatch_tokens in (1, 60, 8192):
        critic = Critic(
            headed(model), CriticConfig(kind=kind, epochs=1, minibatches=2), seed=3, microbatch_tokens=microbatch_tokens
        )
        norms.append(critic.learn(tokens, targets_of(tokens, 0.4)))
    for other in norms[1:]:
        assert other == pytest.approx(norms[0], rel=1e-4)


def test_targets_far_outside_0_to_1_do_not_blow_a_success_critic_up(lab: Any, model: PolicyModel) -> None:
    tokens = tokens_of(lab, spoken((3, 2)))
    critic = Critic(headed(model), CriticConfig(epochs=5), seed=0, microbatch_tokens=100)
    metrics = critic.learn(tokens, targets_of(tokens, 50.0))
    assert math.isfinite(metrics["value_loss"])
    assert metrics["value_loss"] >= 0


def test_nothing_to_learn_changes_nothing(lab: Any, model: PolicyModel) -> None:
    tokens = tokens_of(lab, spoken((3, 2)))
    critic = Critic(headed(model), SUCCESS, seed=0, microbatch_tokens=100)
    before = {name: tensor.clone() for name, tensor in critic.model.state_dict().items()}
    metrics = critic.learn(tokens, targets_of(tokens, 1.0, mask_N=torch.zeros_like(tokens.mask_N)))
    assert metrics == {"value_loss": 0.0, "value_grad_norm": 0.0}
    assert all(torch.equal(before[name], tensor) for name, tensor in critic.model.state_dict().items())


def test_targets_that_are_not_finite_are_refused_before_a_step(lab: Any, model: PolicyModel) -> None:
    tokens = tokens_of(lab, spoken((3, 2)))
    critic = Critic(headed(model), SUCCESS, seed=0, microbatch_tokens=100)
    before = critic.model.embed.weight.clone()
    with pytest.raises(LearnerError, match="must be finite"):
        critic.learn(tokens, targets_of(tokens, math.nan))
    assert torch.equal(before, critic.model.embed.weight)


def test_a_gradient_that_is_not_finite_takes_no_step(lab: Any, model: PolicyModel) -> None:
    tokens = tokens_of(lab, spoken((3, 2)))
    critic = Critic(headed(model), CriticConfig(kind="scalar", value_clip=None), seed=0, microbatch_tokens=100)
    before = critic.model.embed.weight.clone()
    with pytest.raises(LearnerError, match="loss and gradient must be finite"):
        critic.learn(tokens, targets_of(tokens, 1e30))
    assert torch.equal(before, critic.model.embed.weight)
    assert all(p.grad is None or not p.grad.any() for p in critic.model.parameters())


def test_save_restore_learn_equals_learn_bit_for_bit(lab: Any, model: PolicyModel, tmp_path: Path) -> None:
    batch = lab.sample_batch(model, [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    tokens = lay_out(batch, [[True] * 3] * 2, vocabulary_size=24)
    straight = Critic(headed(model), SUCCESS, seed=3, microbatch_tokens=60)
    _ = straight.learn(tokens, targets_of(tokens, 0.4))
    straight.save(tmp_path / "critic")
    again = Critic(PolicyModel.load(tmp_path / "critic"), SUCCESS, seed=99, microbatch_tokens=60)
    again.restore(tmp_path / "critic")
    for critic in (straight, again):
        _ = critic.learn(tokens, targets_of(tokens, 0.7))
    theirs = straight.model.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in again.model.state_dict().items())
    assert again.version == straight.version == 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"place": "beside"}, "separate or trunk"),
        ({"place": "trunk", "action_values": True}, "critic of its own"),
        ({"kind": "quantile"}, "success or scalar"),
        ({"epochs": 0}, "epochs must be positive"),
        ({"minibatches": 0}, "minibatches must be positive"),
        ({"coef": 0.0}, "coef must be positive"),
        ({"max_grad_norm": math.nan}, "max_grad_norm must be positive"),
        ({"value_clip": 0.0}, "value_clip must be positive"),
    ],
)
def test_configs_that_make_no_sense_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        CriticConfig(**options)
