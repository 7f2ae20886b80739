"""How a scheme combines rewards, penalties and scores into what is learned from. Numbers worked by hand."""

import math
import pickle
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from turngate.envs.base import End, Task
from turngate.envs.detectors import ObservedAction
from turngate.learners.reward_scheme import RewardScheme, TurnRewards
from turngate.runtime.errors import ConfigError, LearnerError, RecordError
from turngate.runtime.evaluation import summarise_episodes
from turngate.runtime.types import RestartedFrom, Trajectory, Turn


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def turn(index: int, text: str = "act", **fields: object) -> Turn:
    return Turn(index=index, segment=0, start=0, **({"length": 1, "text": text} | fields))


def episode(
    rewards: Sequence[dict[str, float]],
    scores: Sequence[dict[str, float]] = (),
    *,
    end: End = End.success,
    **columns: Sequence[object],
) -> Trajectory:
    """One turn per dict of rewards; columns are further fields of the turns."""
    turns = []
    for t, paid in enumerate(rewards):
        fields = {name: values[t] for name, values in columns.items()}
        turns.append(turn(t, rewards=paid, scores=scores[t] if scores else {}, **fields))
    return Trajectory(id="t", task=Task("task"), turns=tuple(turns), end=end)


def learned(scheme: RewardScheme, trajectory: Trajectory, gamma: float = 1.0) -> TurnRewards:
    return scheme.rewards(trajectory, gamma=gamma)


def is_once_flag(steps: Sequence[ObservedAction]) -> list[bool]:
    return [step.observation != "" for step in steps]


def short_detector(steps: Sequence[ObservedAction]) -> list[bool]:
    del steps
    return [True]


def test_a_scheme_knows_which_turns_the_policy_took() -> None:
    trajectory = episode([{}, {}, {}], [{"p": 0.5}, {"p": 0.25}, {"p": 0.75}], end=End.turn_limit)
    turns = tuple(msgspec.structs.replace(t, length=int(t.index != 1)) for t in trajectory.turns)
    trajectory = msgspec.structs.replace(trajectory, turns=turns)
    for scheme in (RewardScheme(potential="p"), RewardScheme(process="p", process_form="progress")):
        # 0.5 * 0.5 - 0, then 0.5 * (0.25 - 0.5), then 0.5 * 0.75 - 0.25
        assert learned(scheme, trajectory, gamma=0.5).total_T.tolist() == [0.25, -0.125, 0.125]


def test_b7_2_no_process_form_pays_a_potential_as_it_stands_unless_asked_for_by_name() -> None:
    """The sum form is there, for comparisons, and pays for turns; neither default nor progress does."""
    short = episode([{}, {"outcome": 1.0}], [{"p": 0.9}, {"p": 1.0}])
    long = episode([{}, {}, {}, {"outcome": 1.0}], [{"p": 0.9}, {"p": 0.9}, {"p": 0.9}, {"p": 1.0}])
    for scheme in (RewardScheme(potential="p"), RewardScheme(process="p", process_form="progress")):
        gain = learned(scheme, long).total_T.sum() - learned(scheme, short).total_T.sum()
        assert float(gain) == pytest.approx(0.0)
    paid = RewardScheme(process="p", process_form="sum")
    assert float(learned(paid, long).total_T.sum() - learned(paid, short).total_T.sum()) == pytest.approx(1.8)


def test_default_scheme_gives_what_the_environment_gave() -> None:
    trajectory = episode([{"format": 0.5}, {"outcome": 1.0, "luck": -0.25}])
    rewards = learned(RewardScheme(), trajectory)
    assert rewards.total_T.tolist() == [t.reward for t in trajectory.turns] == [0.5, 0.75]
    assert {name: values.tolist() for name, values in rewards.components.items()} == {
        "format": [0.5, 0.0],
        "outcome": [0.0, 1.0],
        "luck": [0.0, -0.25],
    }
    assert RewardScheme().is_plain
    assert not RewardScheme(turn_cost=0.1).is_plain


def test_weights_choose_and_scale_components() -> None:
    rewards = learned(RewardScheme(weights={"outcome": 2.0}), episode([{"format": 0.5}, {"outcome": 1.0, "luck": 3.0}]))
    assert rewards.total_T.tolist() == [0.0, 2.0]
    assert list(rewards.components) == ["outcome"]


def test_every_part_is_a_component_of_its_own_and_they_add_up() -> None:
    scheme = RewardScheme(
        turn_cost=0.01,
        invalid_penalty=0.1,
        repeat_penalty=0.05,
        potential="progress",
        process="judge",
        overlong_tokens=3,
        overlong_cache_tokens=2,
    )
    judged = [{"progress": 0.5, "judge": 0.5}, {"progress": 0.75, "judge": 1.0}]
    rewards = learned(scheme, episode([{}, {"outcome": 1.0}], judged, valid=[True, False]))
    assert set(rewards.components) == {
        "outcome",
        "penalty_turn",
        "penalty_invalid",
        "penalty_repeat",
        "penalty_overlong",
        "shaping_progress",
        "process_judge",
    }
    assert torch.allclose(sum(rewards.components.values(), torch.zeros(2)), rewards.total_T)
    assert rewards.components["penalty_overlong"].tolist() == [0.0, -0.5]
    assert rewards.components["penalty_invalid"].tolist() == [0.0, -0.1]
    assert rewards.components["shaping_progress"].tolist() == [0.5, -0.5]


def test_repeats_are_told_from_the_observation_before_the_action() -> None:
    trajectory = episode([{}] * 4, text=["look"] * 4, observation=["a", "a", "b", "a"])
    paid = learned(RewardScheme(repeat_penalty=0.125), trajectory).components["penalty_repeat"]
    assert paid.tolist() == [0.0, 0.0, -0.125, 0.0]


def test_injected_turns_pay_no_penalty_but_repeating_them_does() -> None:
    trajectory = episode(
        [{}, {}, {}], text=["look"] * 3, observation=["a", "a", "a"], injected=[True, True, False], valid=[False] * 3
    )
    rewards = learned(RewardScheme(repeat_penalty=0.125, invalid_penalty=0.25), trajectory)
    assert rewards.components["penalty_repeat"].tolist() == [0.0, 0.0, -0.125]
    assert rewards.components["penalty_invalid"].tolist() == [0.0, 0.0, -0.25]


def test_an_environment_brings_detectors_of_its_own() -> None:
    scheme = RewardScheme(repeat_penalty=0.25, repeat_detector=is_once_flag)
    assert learned(scheme, episode([{}, {}], observation=["a", "b"])).total_T.tolist() == [0.0, -0.25]


def test_shaping_of_a_restarted_episode_starts_from_what_the_state_was_worth() -> None:
    scheme = RewardScheme(potential="progress")
    stayed = episode([{}, {}], [{"progress": 0.8}, {"progress": 0.8}], end=End.turn_limit)
    restarted = msgspec.structs.replace(
        stayed, restarted_from=RestartedFrom("t", 3, 0, "invalid", scores=(("progress", 0.8),))
    )
    assert learned(scheme, stayed).total_T.tolist() == pytest.approx([0.8, 0.0])
    assert learned(scheme, restarted).total_T.tolist() == pytest.approx([0.0, 0.0])


def test_detector_that_leaves_actions_out_is_an_error() -> None:
    scheme = RewardScheme(repeat_penalty=0.25, repeat_detector=short_detector)
    with pytest.raises(LearnerError, match="repeat_detector must answer for each action: expected 2 flags, got 1"):
        learned(scheme, episode([{}, {}]))


def test_b7_4_reward_of_form_counts_once_per_episode_however_often_it_is_earned() -> None:
    """ziyuwan/ReMA-public#2: a format reward on every turn was farmed by taking more turns."""
    scheme = RewardScheme(once=("format",))
    short = learned(scheme, episode([{"format": 0.1}, {"outcome": 1.0}]))
    long = learned(scheme, episode([{"format": 0.1}] * 9 + [{"format": 0.1, "outcome": 1.0}]))
    assert float(short.total_T.sum()) == float(long.total_T.sum()) == pytest.approx(1.1)


def test_reward_of_form_counts_where_it_is_first_earned() -> None:
    trajectory = episode([{"format": 0.0}, {"format": 0.25}, {"format": 0.25}])
    assert learned(RewardScheme(once=("format",)), trajectory).total_T.tolist() == [0.0, 0.25, 0.0]


def test_coefficients_and_starts_are_those_of_the_scheme() -> None:
    trajectory = episode([{}, {}], [{"p": 0.5}, {"p": 0.75}], end=End.timeout)
    shaped = RewardScheme(potential="p", potential_coef=2.0, potential_start=0.25)
    assert learned(shaped, trajectory).total_T.tolist() == [0.5, 0.5]
    progress = RewardScheme(process="p", process_form="progress", process_coef=4.0, process_start=0.25)
    assert learned(progress, trajectory).total_T.tolist() == [1.0, 1.0]
    summed = RewardScheme(process="p", process_form="sum", process_coef=2.0)
    assert learned(summed, trajectory).total_T.tolist() == [1.0, 1.5]


def test_shaping_is_paid_with_the_discount_of_the_learner() -> None:
    trajectory = episode([{}, {}], [{"p": 0.5}, {"p": 1.0}], end=End.timeout)
    assert learned(RewardScheme(potential="p"), trajectory, gamma=0.5).total_T.tolist() == [0.25, 0.0]
    progress = RewardScheme(process="p", process_form="progress")
    assert learned(progress, trajectory, gamma=0.5).total_T.tolist() == [0.25, 0.0]


def test_min_form_has_the_temperature_of_the_scheme() -> None:
    trajectory = episode([{}, {}], [{"p": 1.0}, {"p": 0.0}])
    rewards = learned(RewardScheme(process="p", min_temperature=1.0), trajectory)
    assert rewards.total_T.tolist() == [pytest.approx(0.2689414213699951), 0.0]


def test_penalties_stop_at_the_cap_of_the_scheme() -> None:
    rewards = learned(RewardScheme(turn_cost=0.25, penalty_cap=0.625), episode([{}] * 4))
    assert rewards.total_T.tolist() == [-0.25, -0.25, -0.125, 0.0]


def test_overlong_counts_the_policys_tokens() -> None:
    scheme = RewardScheme(overlong_tokens=10, overlong_cache_tokens=10, overlong_coef=0.5)
    assert learned(scheme, episode([{}, {}], length=[2, 3])).total_T.tolist() == [0.0, -0.25]


def test_b7_5_gold_return_and_evaluation_never_see_what_a_learner_adds() -> None:
    """The record keeps outcome and scores apart; a scheme gives new numbers and changes nothing."""
    trajectory = episode([{"outcome": 0.0}, {"outcome": 1.0}], [{"judge": 0.9}, {"judge": 0.9}])
    before = pickle.dumps(trajectory)
    rewards = learned(RewardScheme(process="judge", process_form="sum", turn_cost=0.1), trajectory)
    assert float(rewards.total_T.sum()) > 2.0
    assert (trajectory.outcome, trajectory.reward) == (1.0, 1.0)
    assert summarise_episodes([trajectory]).mean_reward == 1.0
    assert pickle.dumps(trajectory) == before
    assert rewards.components["outcome"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("form", ["min", "progress", "sum"])
def test_a_missing_score_makes_a_trajectory_unscorable_never_zero(form: str) -> None:
    trajectory = episode([{}, {}, {"outcome": 1.0}], [{"judge": 0.5}, {}, {"judge": 0.5}])
    rewards = learned(RewardScheme(process="judge", process_form=form), trajectory)
    assert not rewards.is_scorable
    assert math.isnan(float(rewards.total_T.sum()))


def test_score_after_the_terminal_turn_is_not_needed_as_a_potential() -> None:
    judged = [{"p": 0.5}, {}]
    assert learned(RewardScheme(potential="p"), episode([{}, {}], judged)).is_scorable
    assert not learned(RewardScheme(potential="p"), episode([{}, {}], judged, end=End.turn_limit)).is_scorable


def test_truncated_episodes_keep_their_last_potential() -> None:
    trajectory = episode([{}, {}], [{"p": 0.5}, {"p": 0.75}], end=End.timeout)
    assert learned(RewardScheme(potential="p"), trajectory).total_T.tolist() == [0.5, 0.25]


def test_an_episode_without_turns_earns_nothing() -> None:
    scheme = RewardScheme(turn_cost=0.1, process="judge", potential="p", overlong_tokens=1)
    rewards = learned(scheme, episode([]))
    assert rewards.total_T.shape == (0,)
    assert rewards.is_scorable


def test_infinite_rewards_and_scores_are_errors_that_name_the_trajectory() -> None:
    with pytest.raises(RecordError, match=r"reward must be finite.*trajectory t"):
        learned(RewardScheme(), episode([{"outcome": math.inf}]))
    with pytest.raises(RecordError, match=r"scores must be finite.*trajectory t"):
        learned(RewardScheme(process="judge"), episode([{}], [{"judge": -math.inf}]))


def test_environment_must_not_use_a_learners_name() -> None:
    with pytest.raises(RecordError, match="penalty_turn"):
        learned(RewardScheme(turn_cost=0.1), episode([{"penalty_turn": -1.0}]))


def test_names_that_nobody_gives_are_told() -> None:
    scheme = RewardScheme(weights={"outcome": 1.0, "fromat": 0.1}, process="judge")
    assert scheme.absent([episode([{}]), episode([{"outcome": 1.0}])]) == ("fromat", "judge")
    assert scheme.absent([episode([{"outcome": 1.0, "fromat": 0.0}], [{"judge": 0.5}])]) == ()
    assert RewardScheme(potential="p").absent([episode([{"reward": 1.0}], [{"p": 0.5}])]) == ("outcome",)
    assert RewardScheme(once=("format",)).absent([episode([{"outcome": 1.0}])]) == ("format",)
    assert RewardScheme().absent([episode([{}])]) == ()


def test_components_are_not_missed_while_no_episode_has_succeeded() -> None:
    scheme = RewardScheme(weights={"outcome": 1.0}, process="judge")
    assert scheme.absent([episode([{}], end=End.turn_limit), episode([{}], end=End.failure)]) == ("judge",)


def test_shaping_by_potential_is_told_to_be_idle_for_credit_per_trajectory() -> None:
    assert "adds up to the same number" in RewardScheme(potential="p").trajectory_noop
    assert "as progress" in RewardScheme(process="p", process_form="progress").trajectory_noop
    assert RewardScheme(process="p").trajectory_noop == ""
    assert RewardScheme(turn_cost=0.1).trajectory_noop == ""


def test_schemes_survive_pickling() -> None:
    scheme = RewardScheme(weights={"outcome": 1.0}, repeat_penalty=0.1, process="judge")
    assert pickle.loads(pickle.dumps(scheme)) == scheme


@pytest.mark.parametrize("form", ["min", "progress", "sum"])
@pytest.mark.parametrize("weights", [{}, {"outcome": 0.0}, {"format": 1.0}])
def test_scores_without_the_outcome_are_refused(form: str, weights: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="PURE"):
        RewardScheme(weights=weights, process="judge", process_form=form)
    with pytest.raises(ConfigError, match="mixed with the verified outcome"):
        RewardScheme(weights=weights, potential="p")


def test_products_of_scores_are_refused_with_the_reason() -> None:
    """openai/prm800k#8: a product punishes long solutions."""
    with pytest.raises(ConfigError, match="a product of scores punishes every turn"):
        RewardScheme(process="judge", process_form="product")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"turn_cost": -0.1}, "turn_cost must be 0 or more"),
        ({"penalty_cap": math.nan}, "penalty_cap must be finite"),
        ({"weights": {"outcome": math.inf}}, r"weights\['outcome'\] must be finite"),
        ({"min_temperature": 0.0}, "min_temperature must be positive"),
        ({"overlong_tokens": 10, "overlong_cache_tokens": 11}, "overlong_cache_tokens must be from 0"),
        ({"process": ""}, "must name a score"),
    ],
)
def test_schemes_that_cannot_work_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RewardScheme(**fields)


def test_ten_thousand_turns_are_no_problem() -> None:
    trajectory = episode([{}] * 9_999 + [{"outcome": 1.0}], [{"p": 0.5}] * 10_000, observation=["a"] * 10_000)
    scheme = RewardScheme(repeat_penalty=0.1, potential="p", process="p")
    assert learned(scheme, trajectory).is_scorable


def test_a_scheme_knows_whether_it_pays_more_than_the_environment() -> None:
    selecting = (RewardScheme(), RewardScheme(weights={"outcome": 2.0}), RewardScheme(once=("format",)))
    assert not any(scheme.adds_rewards for scheme in (*selecting, RewardScheme(potential="p", potential_coef=0.0)))
    paying: list[dict[str, Any]] = [{"turn_cost": 0.1}, {"overlong_tokens": 9}, {"potential": "p"}, {"process": "p"}]
    assert all(RewardScheme(**options).adds_rewards for options in paying)
