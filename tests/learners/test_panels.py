"""Panels by hand: one small batch whose every number can be counted."""

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from turngate.envs.base import End, Task, ToolCall
from turngate.learners.batch import lay_out
from turngate.learners.episode_credit import GAEConfig, compute_episode_credit
from turngate.learners.grpo import GRPO
from turngate.learners.hacking import HackingConfig, HackingMonitor
from turngate.learners.panels import PanelInput, compute_panels, watch_rewards
from turngate.learners.panels_batch import (
    group_panel,
    lag_panel,
    outcome_panel,
    pass_at_k,
    policy_panel,
    quantiles_of,
    starts_turn,
)
from turngate.learners.panels_credit import (
    credit_panel,
    sign_agreement,
    turn_gap_panel,
    turn_kinds,
    valued_turns_panel,
)
from turngate.learners.reward_scheme import RewardScheme
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.errors import LearnerError
from turngate.runtime.types import Batch, Group, RestartedFrom, Segment, Trajectory, Turn

TASK = Task("t")


def episode(
    name: str,
    versions: list[list[int]],
    *,
    outcome: float = 0.0,
    end: End | None = None,
    segmented: bool = False,
    **turns: dict[int, Any],
) -> Trajectory:
    """Return an episode with one turn per list of token versions; `turns` holds fields of turns by index.

    Every token has log-prob -1. An observation of one token stands before each turn.
    """
    columns: list[tuple[list[int], list[int], list[float], list[int], list[int]]] = []
    made: list[Turn] = []
    for index, of_turn in enumerate(versions):
        if not columns or segmented:
            columns.append(([], [], [], [], []))
        ids, mask, logprobs, token_versions, turn_ids = columns[-1]
        ids += [1] * (1 + len(of_turn))
        mask += [0] + [1] * len(of_turn)
        logprobs += [0.0] + [-1.0] * len(of_turn)
        token_versions += [-1, *of_turn]
        turn_ids += [-1] + [index] * len(of_turn)
        fields = {field: values[index] for field, values in turns.items() if index in values}
        if index == len(versions) - 1:
            fields["rewards"] = {"outcome": outcome} | fields.get("rewards", {})
        defaults = {"text": f"act {index}", "injected": not of_turn}
        made.append(Turn(index=index, segment=len(columns) - 1, start=0, length=len(of_turn), **(defaults | fields)))
    ended = (End.success if outcome > 0 else End.failure) if end is None else end
    segments = tuple(Segment.of(*column) for column in columns)
    return Trajectory(id=name, task=TASK, turns=tuple(made), segments=segments, end=ended)


def panel_input(
    groups: list[list[Trajectory]],
    *,
    keep: list[list[bool]] | None = None,
    version: int = 3,
    min_version: int = 0,
    **arrays: Tensor,
) -> PanelInput:
    made = tuple(Group(id=f"g{i}", task=TASK, order=i, trajectories=tuple(g)) for i, g in enumerate(groups))
    batch = Batch(groups=made, policy_version=version, min_version=min_version)
    kept = keep or [[not t.end.is_failure for t in group] for group in groups]
    tokens = lay_out(batch, kept, vocabulary_size=4)
    n = len(tokens.mask_N)
    everything = [t for group in groups for t in group]
    return PanelInput(
        batch,
        kept,
        tokens,
        proximal_N=arrays.get("proximal", torch.full((n,), -1.0)),
        entropy_N=arrays.get("entropy", torch.zeros(n)),
        advantages_N=arrays.get("advantages", torch.zeros(n)),
        rewards=[None if t.end.is_failure else RewardScheme().rewards(t, gamma=1.0) for t in everything],
    )


def on_policy_tokens(data: PanelInput, values: list[float]) -> Tensor:
    """Return an (N,) array with `values` on the policy tokens and something else everywhere it must not be read."""
    array = torch.full((len(data.tokens.mask_N),), 1e6)
    array[data.tokens.mask_N] = torch.tensor(values)
    return array


def test_outcomes_leave_out_what_the_policy_did_not_play_alone_from_the_start() -> None:
    restart = RestartedFrom(origin="x", turn=1, policy_version=0, reason="invalid")
    data = panel_input(
        [
            [
                episode("a", [[3]], outcome=1.0),
                episode("b", [[3]], outcome=0.5, end=End.failure),
                episode("c", [[3]], end=End.env_error),
                msgspec.structs.replace(episode("d", [[3]], outcome=1.0), restarted_from=restart),
                episode("e", [[], [3]], outcome=1.0),
            ]
        ]
    )
    metrics = outcome_panel(data)
    assert metrics["outcome_trajectories"] == 3
    assert metrics["end_success"] == metrics["end_failure"] == metrics["end_env_error"] == pytest.approx(1 / 3)
    assert sum(value for name, value in metrics.items() if name.startswith("end_")) == pytest.approx(1)
    assert (metrics["gold_return"], metrics["gold_trajectories"]) == (0.75, 2)
    assert (metrics["pass_at_2"], metrics["pass_at_2_groups"]) == (1.0, 1)
    assert "pass_at_4" not in metrics


def test_components_are_as_learned_from_while_gold_stays_as_recorded() -> None:
    """B7.5: a shaped reward in place of the outcome hides what was asked for."""
    extra = {0: {"form": 0.25}}
    data = panel_input([[episode("a", [[3], [3]], outcome=1.0, rewards=extra), episode("b", [[3]], outcome=0.0)]])
    scheme = RewardScheme(weights={"outcome": 0.5, "form": 2.0}, turn_cost=0.125)
    metrics = outcome_panel(replace(data, rewards=[scheme.rewards(t, gamma=1.0) for t in data.trajectories]))
    assert metrics["gold_return"] == 0.5
    assert metrics["reward_outcome"] == 0.25
    assert metrics["reward_form"] == 0.25  # 0.5 in one of two
    assert metrics["reward_penalty_turn"] == -0.1875
    assert metrics["reward_trajectories"] == 2


def test_an_unknown_reward_is_in_no_mean() -> None:
    metrics = outcome_panel(panel_input([[episode("a", [[3]], outcome=math.nan), episode("b", [[3]], outcome=1.0)]]))
    assert (metrics["gold_return"], metrics["gold_trajectories"]) == (1.0, 1)
    assert (metrics["reward_outcome"], metrics["reward_trajectories"]) == (1.0, 1)


@pytest.mark.parametrize(
    ("successes", "tries", "k", "chance"), [(0, 4, 2, 0.0), (4, 4, 2, 1.0), (1, 4, 2, 0.5), (2, 4, 2, 5 / 6)]
)
def test_pass_at_k_counts_subsets(successes: int, tries: int, k: int, chance: float) -> None:
    assert pass_at_k(successes, tries, k) == pytest.approx(chance)


def test_groups_are_told_apart_by_who_trains() -> None:
    good, bad, broken = (
        [episode("a", [[3]], outcome=1.0), episode("b", [[3]], outcome=2.0)],
        [episode("c", [[3]]), episode("d", [[3]], end=End.tool_error)],
        [episode("e", [[3]], end=End.env_error), episode("f", [[3]], end=End.env_error)],
    )
    metrics = group_panel(panel_input([good, bad, broken, [good[0], bad[0]]]))
    assert (metrics["groups"], metrics["trajectories"]) == (4, 8)
    assert metrics["trained_trajectories_fraction"] == 5 / 8
    assert metrics["groups_all_succeeded_fraction"] == metrics["groups_all_failed_fraction"] == 0.25
    assert [metrics[f"groups_valid_{n}"] for n in range(3)] == [1, 1, 2]
    assert "groups_valid_3" not in metrics
    assert metrics["group_reward_std_within"] == pytest.approx(math.sqrt(0.5))
    assert metrics["groups_compared"] == 2


def test_large_groups_share_a_bin() -> None:
    metrics = group_panel(panel_input([[episode(f"t{i}", [[3]]) for i in range(n)] for n in (8, 9, 12)]))
    assert (metrics["groups_valid_8"], metrics["groups_valid_9_plus"]) == (1, 2)


def test_stale_tokens_count_against_what_the_trained_episodes_generated() -> None:
    metrics = group_panel(panel_input([[episode("a", [[0, 0], [1, 3]]), episode("b", [[3]])]], min_version=1))
    assert metrics["excluded_stale_tokens"] == 2
    assert metrics["excluded_stale_tokens_fraction"] == 0.4


def test_lag_counts_tokens_and_trajectories_by_their_oldest_token() -> None:
    data = panel_input([[episode("a", [[9, 9], [8]]), episode("b", [[2], [9]]), episode("c", [[], []])]], version=9)
    data = replace(data, proximal_N=on_policy_tokens(data, [-1.5, -1.0, -2.0, 2.0, -1.0]))
    metrics = lag_panel(data)
    assert [metrics[f"lag_tokens_{n}"] for n in ("0", "1", "2", "3", "4", "5_plus")] == [3, 1, 0, 0, 0, 1]
    assert [metrics[f"lag_trajectories_{n}"] for n in ("0", "1", "2", "3", "4", "5_plus")] == [0, 1, 0, 0, 0, 1]
    assert metrics["log_ratio_abs_fresh"] == pytest.approx(0.5 / 3)
    assert metrics["log_ratio_abs_stale"] == 2.0


@pytest.mark.parametrize("segmented", [False, True])
def test_entropy_is_told_by_place_in_the_turn(segmented: bool) -> None:
    data = panel_input([[episode("a", [[3, 3, 3], [3]], segmented=segmented), episode("b", [[3, 3]])]])
    metrics = policy_panel(replace(data, entropy_N=on_policy_tokens(data, [2.0, 0.5, 0.25, 1.0, 3.0, 0.75])))
    assert (metrics["entropy_first_token"], metrics["first_tokens"]) == (2.0, 3)
    assert metrics["entropy_later_tokens"] == 0.5


def test_a_turn_whose_first_token_is_too_old_has_no_first_policy_token() -> None:
    data = panel_input([[episode("a", [[0, 3, 3]])]], min_version=1)
    metrics = policy_panel(replace(data, entropy_N=on_policy_tokens(data, [0.25, 0.75])))
    assert metrics["first_tokens"] == 0
    assert "entropy_first_token" not in metrics
    assert metrics["entropy_later_tokens"] == 0.5


def test_turns_that_touch_begin_where_their_id_changes() -> None:
    turns = [Turn(index=i, segment=0, start=1, length=2, text="") for i in range(2)]
    segment = Segment.of([1] * 5, [0, 1, 1, 1, 1], [0.0, -1.0, -1.0, -1.0, -1.0], [-1, 3, 3, 3, 3], [-1, 0, 0, 1, 1])
    touching = Trajectory(id="a", task=TASK, turns=tuple(turns), segments=(segment,), end=End.success)
    assert starts_turn(panel_input([[touching]]).tokens).tolist() == [False, True, False, True, False]


def test_quantiles_are_members_of_the_sample() -> None:
    values = torch.arange(201.0).flip(0)
    assert quantiles_of(values, "x") == {"x_q01": 2.0, "x_q50": 100.0, "x_q99": 198.0}
    assert quantiles_of(torch.zeros(0), "x") == {}


def test_credit_is_told_over_tokens_and_by_turn_over_turns() -> None:
    data = panel_input([[episode("a", [[3, 3, 3], [3]]), episode("b", [[3]])]])
    metrics = credit_panel(replace(data, advantages_N=on_policy_tokens(data, [3.0, 0.0, 0.0, -1.0, -2.0])))
    assert metrics["advantage_mean"] == 0.0
    assert metrics["advantage_std"] == pytest.approx(math.sqrt(14 / 5))
    assert (metrics["advantage_abs_mean"], metrics["advantage_abs_max"]) == (1.2, 3.0)
    assert metrics["advantage_zero_fraction"] == 0.4
    assert (metrics["advantage_turn_0"], metrics["advantage_turns_at_0"]) == (-0.5, 2)  # means 1 and -2
    assert (metrics["advantage_turn_1"], metrics["advantage_turns_at_1"]) == (-1.0, 1)


def test_credit_is_shared_out_by_kind_of_turn() -> None:
    made = episode("a", [[3], [3, 3], [3], [3]], valid={1: False}, text={0: "x", 1: "y", 2: "z", 3: "x"})
    made = msgspec.structs.replace(made, first_observation="the task")
    data = panel_input([[made, episode("b", [[3]], end=End.env_error)]])
    metrics = credit_panel(replace(data, advantages_N=on_policy_tokens(data, [1.0, -2.0, -2.0, 3.0, 0.0])))
    assert (metrics["advantage_share_invalid"], metrics["tokens_share_invalid"]) == (0.5, 0.4)
    assert (metrics["advantage_share_recovery"], metrics["tokens_share_recovery"]) == (3 / 8, 0.2)
    # "x" was done after the task was told, then after "", which is another situation.
    assert (metrics["advantage_share_repeated"], metrics["tokens_share_repeated"]) == (0.0, 0.0)


def test_without_any_advantage_there_are_no_shares_of_it() -> None:
    metrics = credit_panel(panel_input([[episode("a", [[3]], valid={0: False})]]))
    assert metrics["tokens_share_invalid"] == metrics["advantage_zero_fraction"] == 1.0
    assert "advantage_share_invalid" not in metrics


def test_kinds_of_turns_spare_what_something_else_chose() -> None:
    call = (ToolCall("c1", "find", '{"a": 1}'),)
    same_call = (ToolCall("c2", "find", '{"a":1}'),)
    made = episode(
        "a",
        [[3], [3], [], [3], [3], [3]],
        valid={0: False, 1: False},
        tool_calls={3: call, 4: same_call},
        observation={2: "page", 3: "page", 4: "page"},
    )
    invalid, repeated, recovery = turn_kinds(made)
    assert invalid == [True, True, False, False, False, False]
    assert repeated == [False, False, False, False, True, False]
    assert recovery == [False, False, False, True, False, False]


def test_an_injected_turn_is_of_no_kind_whatever_it_does() -> None:
    says = {0: "look", 1: "take", 2: "take", 3: "take"}
    made = episode("a", [[3], [3], [], [3]], text=says, valid={2: False}, observation=dict.fromkeys(range(4), "page"))
    assert turn_kinds(made) == ([False] * 4, [False, False, False, True], [False, False, False, True])


def test_signs_agree_where_neither_is_zero() -> None:
    assert sign_agreement(torch.tensor([1.0, -1.0, 2.0, 0.0]), torch.tensor([2.0, 1.0, 0.0, 1.0])) == 0.5
    assert sign_agreement(torch.zeros(3), torch.ones(3)) is None
    assert sign_agreement(torch.zeros(0), torch.zeros(0)) is None


def test_values_of_turns_tell_recovery_and_agreement() -> None:
    made = episode("a", [[3], [], [3], [3]], outcome=1.0)
    metrics = valued_turns_panel(
        [made],
        [(0, 2, 3)],
        [torch.tensor([0.5, 0.125, 0.75])],
        [torch.tensor([1.0, 1.0, 1.0])],
        [torch.tensor([-1.0, 1.0, 1.0])],
        tau=0.25,
    )
    assert metrics["advantage_sign_agreement"] == pytest.approx(2 / 3)
    # V is 0.5, 0.5 over the injected turn, 0.125, 0.75, then the outcome 1: one fall, over the injected turn.
    assert metrics["value_mistake_rate"] == 0.25
    assert metrics["value_mistake_rate_self_inflicted"] == 0.0
    assert metrics["value_state_recovery_rate"] == 1.0
    assert "value_clean_success" not in metrics  # there is no episode without a mistake
    assert valued_turns_panel([], [], [], [], [], tau=0.25) == {}


@pytest.mark.parametrize("bootstrap", [None, 0.3])
def test_the_two_levels_of_credit_have_one_q_at_the_end_of_an_action(bootstrap: float | None) -> None:
    values = [torch.tensor([0.5, 0.25]), torch.tensor([0.75]), torch.tensor([0.125, 1.0, 0.5])]
    rewards_T = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    made = compute_episode_credit(
        rewards_T, values, bootstrap=bootstrap, config=GAEConfig(level="bilevel", gamma=0.9, lam=0.5, lam_token=0.3)
    )
    assert turn_gap_panel([made])["token_turn_gap"] == pytest.approx(0.0, abs=1e-6)
    wrong = replace(made, targets=(made.targets[0] + 0.5, *made.targets[1:]))
    assert turn_gap_panel([made, wrong])["token_turn_gap"] == pytest.approx(0.5)
    assert turn_gap_panel([]) == {}


def test_a_batch_without_anything_has_finite_panels() -> None:
    metrics = compute_panels(panel_input([]))
    assert metrics["groups"] == metrics["outcome_trajectories"] == 0
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_batch_of_failures_alone_has_finite_panels() -> None:
    metrics = compute_panels(panel_input([[episode("a", [[3]], end=End.env_error)]]))
    assert metrics["trained_trajectories_fraction"] == 0
    assert metrics["end_env_error"] == 1
    assert all(math.isfinite(value) for value in metrics.values())


def test_padding_and_masked_tokens_are_in_no_mean() -> None:
    data = panel_input([[episode("a", [[0, 3], [3]], outcome=1.0), episode("b", [[3]])]], min_version=1)
    values = [1.0, -2.0, 0.5]
    one = replace(data, advantages_N=on_policy_tokens(data, values), entropy_N=on_policy_tokens(data, values))
    zeros = one.tokens.mask_N.logical_not()
    other = replace(
        one,
        advantages_N=one.advantages_N.masked_fill(zeros, math.nan),
        entropy_N=one.entropy_N.masked_fill(zeros, math.nan),
        proximal_N=one.proximal_N.masked_fill(zeros, math.nan),
    )
    assert compute_panels(one) == compute_panels(other)


def test_a_new_alarm_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    monitor = HackingMonitor(HackingConfig(canaries=frozenset({"t"})))
    data = panel_input([[episode("a", [[3]], outcome=1.0), episode("b", [[3]], end=End.env_error)]])
    with caplog.at_level(logging.WARNING, logger="turngate.learner"):
        metrics = [watch_rewards(monitor, data, kl=None) for _ in range(2)]
    assert [m["hacking_alarm_canary"] for m in metrics] == [1, 1]
    assert len(caplog.records) == 1
    assert "canary" in caplog.text


def test_the_watch_for_hacking_goes_on_from_a_checkpoint(
    lab: Any, folder: Path, model: PolicyModel, tmp_path: Path
) -> None:
    batches = [lab.sample_batch(model, [[0.0, 1.0, 0.0, 1.0]], seed=seed) for seed in range(5)]
    options: dict[str, Any] = {"parity": "report", "off_policy": "decoupled"}
    straight, resumed = GRPO(folder, **options), GRPO(folder, **options)
    straight.load(None)
    for batch in batches[:-1]:
        straight.update(batch)
    straight.save(tmp_path / "checkpoint")
    resumed.load(tmp_path / "checkpoint")
    one, other = (learner.update(batches[-1]).metrics for learner in (straight, resumed))
    assert one == other
    assert "hacking_trend_gold" in one


def test_a_checkpoint_from_before_there_was_a_watch_starts_one(folder: Path, tmp_path: Path) -> None:
    learner = GRPO(folder)
    learner.load(None)
    learner.save(tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "learner.pt"
    saved = torch.load(path, weights_only=True)
    del saved["hacking"]
    torch.save(saved, path)
    learner.load(tmp_path / "checkpoint")
    assert repr(learner._loaded.monitor) == "<HackingMonitor 0 of 20 updates, no alarm>"


def test_a_checkpoint_whose_watch_is_broken_is_refused(folder: Path, tmp_path: Path) -> None:
    learner = GRPO(folder)
    learner.load(None)
    learner.save(tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "learner.pt"
    torch.save(torch.load(path, weights_only=True) | {"hacking": {"window": [{"proxy": "high"}]}}, path)
    with pytest.raises(LearnerError, match="HackingMonitor"):
        learner.load(tmp_path / "checkpoint")
