"""Critics fitted to records: what they are trained towards, on what they are judged, and that they learn."""

import logging
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.learners.test_value_rows import branched, episode, rows_of, segment
from tests.learners.tiny_transformers import make_folder
from turngate.envs.base import End, Task
from turngate.learners import policy_model, value_fit
from turngate.learners.huggingface import HuggingFaceModel
from turngate.learners.policy_model import model_source
from turngate.learners.value_fit import ValueFitConfig, ValueFitProgress, fit_critic
from turngate.learners.value_rows import read_rows
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.engine.packing import pack
from turngate.runtime.errors import ConfigError, LearnerError, RecordError
from turngate.runtime.types import Segment, Trajectory, Turn

SCALAR = ValueFitConfig(kind="scalar")
FAST = ValueFitConfig(epochs=6, batch_trajectories=8, muon_lr=0.02, adamw_lr=0.02)


def test_branches_are_found_by_id_and_counted_and_the_critic_is_judged_by_what_happened(
    folder: Path, tmp_path: Path
) -> None:
    episodes = toy(64)
    found = [branched(t, {0: [0.5, 0.5]}, {}) for t in episodes[:10]] + [branched(episodes[0], {}, {0: [0.5]})]
    report = fit_critic(folder, episodes, tmp_path / "c", config=FAST, branches=found)
    assert report.branched == 10
    everything = [branched(t, {0: [0.5, 0.5]}, {0: [0.5, 0.5]}) for t in episodes]
    flat = fit_critic(folder, episodes, tmp_path / "d", config=FAST, branches=everything)
    assert flat.losses[-1] == pytest.approx(math.log(2), abs=0.02)  # trained towards 1/2 everywhere
    assert flat.auc_by_turn.keys() == {0}  # and yet ranked against successes
    assert flat.brier == pytest.approx(0.25, abs=0.03)


def test_branches_of_ids_that_two_trajectories_share_are_refused(folder: Path, tmp_path: Path) -> None:
    episodes = toy(8)
    twins = [*episodes, msgspec.structs.replace(episodes[0], task=Task("other"))]
    with pytest.raises(LearnerError, match=r"ids of their own.*got 2 called t0"):
        fit_critic(folder, twins, tmp_path / "c", branches=[branched(episodes[0], {0: [1.0]}, {})])


def test_branches_of_episodes_that_are_not_there_are_told(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    episodes = toy(40)
    found = [branched(t, {0: [0.5]}, {}) for t in episodes[:3]]
    with caplog.at_level(logging.WARNING, "turngate.value_fit"):
        report = fit_critic(folder, episodes[1:], tmp_path / "c", config=fast(epochs=1), branches=found)
    assert report.branched == 2
    assert "1 of 3 are of some that were not given or have no return, such as t0" in caplog.text


def test_branches_do_not_go_with_other_rewards(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="environment's own rewards"):
        fit_critic(
            folder, toy(8), tmp_path / "c", rewards=lambda t: [0.0], branches=[branched(toy(1)[0], {0: [1.0]}, {})]
        )


# --- fitting


def toy(count: int, *, luck: float = 0.0) -> list[Trajectory]:
    """Return episodes of one action of one token, 2 or 3, which alone decides; tasks have four episodes each."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        good = int(torch.randint(2, (1,), generator=generator))
        seen = int(torch.randint(4, 20, (1,), generator=generator))
        paid = float(torch.rand(1, generator=generator)) < luck if luck else bool(good)
        only = Segment.of([1, seen, 2 + good], [0, 0, 1], [0.0, 0.0, -0.7], [-1, -1, 0], [-1, -1, 0])
        fields = {"id": f"t{number}", "task": Task(f"task{number // 4}")}
        made.append(episode([only], [float(paid)], end=End.success if paid else End.failure, **fields))
    return made


def test_a_critic_that_can_learn_does(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    episodes = toy(160)
    report = fit_critic(folder, episodes, tmp_path / "critic", config=FAST)
    assert report.auc is not None
    assert report.auc > 0.99
    assert report.brier is not None
    assert report.brier < 0.05
    assert report.explained_variance is not None
    assert report.explained_variance > 0.8
    assert (report.excluded, report.branched) == (0, 0)
    assert report.episodes + report.held_out == 160
    assert report.success == pytest.approx(0.5, abs=0.1)
    critic = PolicyModel.load(tmp_path / "critic")
    assert critic.value_head is not None
    assert (tmp_path / "critic" / "tokenizer.json").exists()  # it can be served
    rows = [row for t in episodes for row in rows_of(t)]
    values = read_rows(critic, rows, FAST.microbatch_tokens).sigmoid().reshape(-1, 2)
    wins = torch.tensor([t.reward > 0 for t in episodes])
    assert float(values[wins, 1].min()) > 0.7 > 0.3 > float(values[~wins, 1].max())  # Q knows the action
    assert float((values[:, 0] - 0.5).abs().max()) < 0.35  # V before it does not


def test_a_layer_more_computes_what_the_model_did_until_it_is_trained(folder: Path) -> None:
    start = model_source(folder).load(None, value_head=True)
    assert isinstance(start, PolicyModel)
    deeper = value_fit._deepened(start, 2, seed=1)
    assert deeper.config.layers == start.config.layers + 2
    packed = pack([[1, 5, 2, 9]])
    torch.testing.assert_close(deeper.score(packed).logprobs_M, start.score(packed).logprobs_M)
    assert value_fit._deepened(start, 0, seed=1) is start


@pytest.mark.parametrize("extra", [0, 1])
def test_critics_of_any_depth_are_written_as_models_of_that_depth(folder: Path, tmp_path: Path, extra: int) -> None:
    fit_critic(folder, toy(40), tmp_path / "critic", config=fast(extra_layers=extra, epochs=1))
    layers = PolicyModel.read_config(folder).layers + extra
    assert PolicyModel.load(tmp_path / "critic").config.layers == layers


def test_places_behind_actions_may_weigh_more() -> None:
    made = episode([segment((None, 2), (0, 2), (None, 1), (1, 2))], [0.0, 1.0])
    (row,) = rows_of(made)
    weights = value_fit._weights([row], ValueFitConfig(action_weight=5.0)).tolist()
    assert weights == [1.0, 1.0, 5.0, 1.0, 1.0, 5.0]


def test_a_scalar_critic_learns_returns_beyond_one(folder: Path, tmp_path: Path) -> None:
    episodes = [msgspec.structs.replace(t, turns=(scaled(t.turns[0], 3.0),)) for t in toy(160)]
    with pytest.raises(LearnerError, match=r"returns must lie in \[0, 1\] for kind success: got 3\.0"):
        fit_critic(folder, episodes, tmp_path / "c", config=FAST)
    report = fit_critic(folder, episodes, tmp_path / "c", config=fast(kind="scalar"))
    assert report.explained_variance is not None
    assert report.explained_variance > 0.8
    assert report.brier is None


def paid_nan(trajectory: Trajectory) -> Trajectory:
    """Return the episode with a reward that nobody can tell."""
    turns = (msgspec.structs.replace(trajectory.turns[0], rewards={"outcome": math.nan}),)
    return msgspec.structs.replace(trajectory, id="unknown", turns=turns)


def scaled(turn: Turn, factor: float) -> Turn:
    return msgspec.structs.replace(turn, rewards={name: factor * r for name, r in turn.rewards.items()})


def fast(**changes: Any) -> ValueFitConfig:
    """Return FAST with changes."""
    fields = {"epochs": 6, "batch_trajectories": 8, "muon_lr": 0.02, "adamw_lr": 0.02} | changes
    return ValueFitConfig(**fields)


def test_no_task_is_on_both_sides_and_the_seed_decides() -> None:
    known = [rows_of(t) for t in toy(200)]
    train, held = value_fit._split(known, SCALAR)
    tasks = [{own[0].task for own in side} for side in (train, held)]
    assert not tasks[0] & tasks[1]
    assert 0.05 < len(held) / 200 < 0.3
    other = value_fit._split(known, ValueFitConfig(kind="scalar", seed=1))
    assert {own[0].task for own in other[1]} != tasks[1]


def test_the_best_epoch_is_kept(folder: Path, tmp_path: Path) -> None:
    # Luck cannot be learned: what later epochs learn by heart costs on held-out tasks.
    config = fast(epochs=8, batch_trajectories=4)
    episodes = toy(48, luck=0.5)
    report = fit_critic(folder, episodes, tmp_path / "critic", config=config)
    best = min(report.losses)
    assert report.epoch == report.losses.index(best) + 1 < 8
    assert best < report.losses[-1]
    critic = model_source(tmp_path / "critic").load(None, value_head=True)
    _, held = value_fit._split([rows_of(t) for t in episodes], config)
    flat = [row for own in held for row in own]
    loss = value_fit._loss(read_rows(critic, flat, config.microbatch_tokens), value_fit._targets(flat), config).mean()
    assert float(loss) == pytest.approx(best, abs=1e-5)


def test_episodes_without_a_return_or_ids_are_left_out_and_counted(folder: Path, tmp_path: Path) -> None:
    episodes = toy(40)
    cut = msgspec.structs.replace(episodes[0], id="cut", end=End.turn_limit)
    failed = msgspec.structs.replace(episodes[0], id="failed", end=End.env_error)
    blind = msgspec.structs.replace(episodes[0], id="blind", trainable=False)
    late = Segment.of([1] * 200 + [3], [0] * 200 + [1], [0.0] * 201, [-1] * 200 + [0], [-1] * 200 + [0])
    beyond = episode([late], [1.0], id="beyond", task=Task("task0"))
    odd = [cut, failed, blind, paid_nan(episodes[0]), beyond]
    report = fit_critic(folder, [*episodes, *odd], tmp_path / "c", config=fast(epochs=1))
    assert report.excluded == 5
    assert report.episodes + report.held_out == 40


def test_what_the_model_cannot_read_is_told_with_the_episode(folder: Path, tmp_path: Path) -> None:
    foreign = episode([Segment.of([1, 99, 3], [0, 0, 1], [0, 0, -0.7], [-1, -1, 0], [-1, -1, 0])], [1.0], id="foreign")
    with pytest.raises(LearnerError, match=r"model's own vocabulary: expected ids in \[0, 24\), got 0 to 99.*foreign"):
        fit_critic(folder, [*toy(8), foreign], tmp_path / "c")
    sampled = episode([Segment.of([3], [1], [-0.7], [0], [0])], [1.0], id="sampled")
    with pytest.raises(RecordError, match=r"first token of a segment must be context.*sampled"):
        fit_critic(folder, [*toy(8), sampled], tmp_path / "c")
    rich = [msgspec.structs.replace(t, turns=(scaled(t.turns[0], 1e300),)) for t in toy(40)]
    with pytest.raises(LearnerError, match="returns must fit a float32"):
        fit_critic(folder, rich, tmp_path / "c", config=SCALAR)


def test_a_folder_that_holds_something_is_never_written_to(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for taken in (folder, tmp_path / "notes", tmp_path / "notes" / "mine.txt"):  # the policy itself, for one
        with pytest.raises(ConfigError, match="a critic's folder must be new"):
            fit_critic(folder, toy(40), taken, config=fast(epochs=1))
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    (tmp_path / "empty").mkdir()
    fit_critic(folder, toy(40), str(tmp_path / "empty"), config=fast(epochs=1))
    assert PolicyModel.load(tmp_path / "empty").value_head is not None


def test_a_critic_that_cannot_be_written_whole_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "tokenizer.json").write_text("{}")

    def full(*_: object) -> None:
        assert not (tmp_path / "made" / "critic").exists()  # what a process killed here would leave
        raise OSError("no space left")

    monkeypatch.setattr(policy_model, "write_atomically", full)
    with pytest.raises(OSError, match="no space left"):
        fit_critic(folder, toy(40), tmp_path / "made" / "critic", config=fast(epochs=1))
    assert list((tmp_path / "made").iterdir()) == []


@pytest.mark.parametrize("kind", ["success", "scalar"])
def test_the_folder_says_what_the_head_puts_out(folder: Path, tmp_path: Path, kind: Any) -> None:
    fit_critic(folder, toy(40), tmp_path / "c", config=fast(epochs=1, kind=kind))
    assert PolicyModel.read_config(tmp_path / "c").value_kind == kind


def test_equal_seeds_write_equal_critics(folder: Path, tmp_path: Path) -> None:
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        fit_critic(folder, toy(40), tmp_path / name, config=fast(epochs=2, seed=seed))
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


@pytest.mark.parametrize("paid", [0.0, 1.0])
def test_episodes_that_all_end_alike_make_a_critic_without_a_ranking(folder: Path, tmp_path: Path, paid: float) -> None:
    alike = [
        msgspec.structs.replace(t, turns=(msgspec.structs.replace(t.turns[0], rewards={"o": paid}),)) for t in toy(40)
    ]
    report = fit_critic(folder, alike, tmp_path / "c", config=FAST)
    assert (report.auc, report.auc_by_turn, report.explained_variance, report.success) == (None, {}, None, paid)
    assert report.brier is not None
    assert report.brier < 0.1


def test_one_task_is_too_little(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match=r"several tasks: got .* to train on"):
        fit_critic(folder, toy(3), tmp_path / "c")


def test_a_loss_that_explodes_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match="must be finite"):
        fit_critic(folder, toy(40), tmp_path / "c", config=fast(muon_lr=None, adamw_lr=1e30))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "logit"),
        ("epochs", 0),
        ("extra_layers", -1),
        ("action_weight", 0.0),
        ("action_weight", math.inf),
        ("batch_trajectories", 0),
        ("held_out", 0.0),
        ("max_grad_norm", 0.0),
        ("seed", 2**63),
    ],
)
def test_settings_that_cannot_work_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        ValueFitConfig(**{field: value})


def test_a_model_of_transformers_can_be_the_critic(tmp_path: Path) -> None:
    start = make_folder(tmp_path / "start", "llama")
    report = fit_critic(HuggingFaceModel(start), toy(160), tmp_path / "critic", config=fast(muon_lr=None))
    assert report.auc is not None
    assert report.auc > 0.9
    again = HuggingFaceModel(tmp_path / "critic").load(tmp_path / "critic", value_head=True)
    values = read_rows(again, [row for t in toy(8) for row in rows_of(t)], FAST.microbatch_tokens)
    assert float(values.std()) > 0.1  # the head came along


def test_the_loss_is_a_mean_over_places_however_the_memory_cuts_them(folder: Path, tmp_path: Path) -> None:
    episodes = toy(80, luck=0.3)
    whole = fit_critic(folder, episodes, tmp_path / "whole", config=fast(epochs=2))
    cut = fit_critic(folder, episodes, tmp_path / "cut", config=fast(epochs=2, microbatch_tokens=16))
    assert cut.losses == pytest.approx(whole.losses, rel=1e-3)


def test_progress_is_told_after_every_epoch(folder: Path, tmp_path: Path) -> None:
    told: list[ValueFitProgress] = []
    report = fit_critic(folder, toy(40), tmp_path / "c", config=fast(epochs=3), progress=told.append)
    assert [one.epoch for one in told] == [1, 2, 3]
    assert tuple(one.held_out_loss for one in told) == report.losses
    assert 0 < told[0].seconds < told[2].seconds


def test_weights_say_what_is_learned_and_what_the_held_out_loss_is_of(folder: Path, tmp_path: Path) -> None:
    # Before the action nothing can be told, log 2 at best; behind it everything.
    actions = fit_critic(folder, toy(160), tmp_path / "actions", config=fast(action_weight=1e4))
    tokens = fit_critic(folder, toy(160), tmp_path / "tokens", config=fast(action_weight=1e-4))
    assert min(actions.losses) < 0.3
    assert min(tokens.losses) > 0.6
    assert actions.explained_variance is not None
    assert tokens.explained_variance is not None
    assert tokens.explained_variance < 0.5 < actions.explained_variance
