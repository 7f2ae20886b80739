"""Signs of reward hacking: each on a run that shows it, and none on a run that simply learns."""

import json
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turngate.envs.base import End, Task
from turngate.learners.hacking import ALARMS, HackingConfig, HackingMonitor, hacking_signals, trend
from turngate.learners.reward_scheme import RewardScheme, TurnRewards
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.types import Trajectory, Turn

WINDOW = 8
SCHEME = RewardScheme(process="judge", process_form="sum")


def episode(
    outcome: float, *judged: float, task: str = "task", end: End | None = None, tokens: int = 1, same: bool = False
) -> Trajectory:
    """One turn per judgement; the last one earns the outcome."""
    turns = [
        Turn(
            index=i,
            segment=0,
            start=0,
            length=tokens,
            text="again" if same else f"act {i}",
            observation="saw",
            scores={"judge": score},
            rewards={"outcome": outcome} if i == len(judged) - 1 else {},
        )
        for i, score in enumerate(judged)
    ]
    end = end or (End.success if outcome > 0 else End.failure)
    return Trajectory(id="t", task=Task(task), turns=tuple(turns), end=end)


def learned(trajectories: list[Trajectory], scheme: RewardScheme = SCHEME) -> list[TurnRewards]:
    return [scheme.rewards(trajectory, gamma=1.0) for trajectory in trajectories]


def watch(
    make: Callable[[int], list[Trajectory]],
    *,
    updates: int = WINDOW,
    kl: Callable[[int], float] | None = None,
    **config: object,
) -> tuple[HackingMonitor, dict[str, float]]:
    """Run updates of the episodes that `make` gives for each, and return what came of it."""
    monitor = HackingMonitor(HackingConfig(**({"window": WINDOW} | config)))
    metrics: dict[str, float] = {}
    for update in range(updates):
        trajectories = make(update)
        metrics = monitor.update(trajectories, learned(trajectories), kl=kl(update) if kl else None)
    return monitor, metrics


def solid(update: int, wins: int = 4) -> list[Trajectory]:
    """Half the episodes succeed, judged a little better than the others; nothing moves."""
    wobble = 0.02 * (update % 2)
    return [episode(1.0, 0.3 + wobble, 0.2)] * wins + [episode(0.0, 0.1, 0.15 + wobble)] * (8 - wins)


# --- signals


def test_signals_of_one_update_worked_by_hand() -> None:
    trajectories = [episode(1.0, 0.5, 0.25), episode(0.0, 0.25, 0.25, tokens=3)]
    signals = hacking_signals(trajectories, learned(trajectories))
    assert signals is not None
    assert (signals.proxy, signals.gold) == (1.125, 0.5)  # returns 1.75 and 0.5
    assert signals.shares == {"outcome": 1 / 2.25, "process_judge": 1.25 / 2.25}
    assert (signals.on_failure, signals.on_success) == ({"process_judge": 0.5}, {"process_judge": 0.75})
    assert signals.correlation == pytest.approx(1.0)
    assert (signals.tokens, signals.turns, signals.repeat_rate) == (4.0, 2.0, 0.0)
    assert signals.entropy == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert (signals.kl, signals.canary) == (None, None)


def test_repeats_count_per_turn_over_all_turns() -> None:
    trajectories = [episode(1.0, 0.5, 0.5, 0.5, same=True), episode(1.0, 0.5)]
    signals = hacking_signals(trajectories, learned(trajectories))
    assert signals is not None
    assert signals.repeat_rate == 0.25  # the third is the second again; the first came before any observation


def test_costs_have_negative_shares() -> None:
    trajectories = [episode(1.0, 0.0, 0.0)]
    signals = hacking_signals(trajectories, learned(trajectories, RewardScheme(turn_cost=0.125)))
    assert signals is not None
    assert signals.shares == {"outcome": 0.8, "penalty_turn": -0.2}


def test_failed_and_unscorable_episodes_do_not_count() -> None:
    good = episode(1.0, 0.5)
    unscorable = episode(0.0, 0.5)
    unscorable.turns[0].scores.clear()
    trajectories = [good, episode(0.0, 0.5, end=End.env_error), unscorable]
    assert hacking_signals(trajectories, learned(trajectories)) == hacking_signals([good], learned([good]))
    assert hacking_signals(trajectories[1:], learned(trajectories[1:])) is None
    assert hacking_signals([], []) is None


def test_b7_5_gold_is_read_from_the_record_whatever_the_learner_is_paid() -> None:
    trajectories = [episode(1.0, 0.5)]
    signals = hacking_signals(trajectories, learned(trajectories, RewardScheme(weights={"outcome": 100.0})))
    assert signals is not None
    assert (signals.gold, signals.proxy) == (1.0, 100.0)
    trajectories[0].turns[0].rewards["bonus"] = 5.0
    signals = hacking_signals(trajectories, learned(trajectories))
    assert signals is not None
    assert (signals.gold, signals.proxy) == (1.0, 6.5)
    held_out = hacking_signals(trajectories, learned(trajectories), held_out=0.25)
    assert held_out is not None
    assert held_out.gold == 0.25


def test_rewards_must_be_one_per_trajectory() -> None:
    with pytest.raises(LearnerError, match="one per trajectory: expected 1, got 0"):
        hacking_signals([episode(1.0, 0.5)], [])


# --- trends


def test_trend_is_in_standard_errors() -> None:
    # Halves 0, 2 and 3, 5: means 1 and 4, variances 2 and 2, so an error of sqrt(4 / 2).
    assert trend([0.0, 2.0, 3.0, 5.0]) == pytest.approx(3 / math.sqrt(2))
    assert trend([0.0, 2.0, 9.0, 3.0, 5.0]) == pytest.approx(3 / math.sqrt(2))  # the middle one is in neither half


def test_trend_of_too_little_or_of_constants() -> None:
    assert trend([0.0, 1.0, 2.0]) == 0.0
    assert trend([0.5] * 8) == 0.0
    assert trend([0.1 + 0.2] * 4 + [0.3] * 4) == 0.0
    assert (trend([0.0] * 4 + [1.0] * 4), trend([1.0] * 4 + [0.0] * 4)) == (99.0, -99.0)


@given(st.lists(st.floats(-100, 100), min_size=4, max_size=20))
def test_trend_is_finite_and_turns_with_the_sign(values: list[float]) -> None:
    assert math.isfinite(trend(values))
    assert trend([-v for v in values]) == pytest.approx(-trend(values))


# --- alarms


def test_steady_run_gives_no_alarm() -> None:
    monitor, metrics = watch(solid)
    assert monitor.alarms == {}
    assert metrics["hacking_alarms"] == 0.0
    assert repr(monitor) == "<HackingMonitor 8 of 8 updates, no alarm>"


def test_run_that_learns_gives_no_alarm() -> None:
    monitor, _ = watch(lambda update: solid(update, wins=update))
    assert monitor.alarms == {}


def test_return_that_rises_beside_a_flat_outcome_is_an_alarm() -> None:
    def make(update: int) -> list[Trajectory]:
        return [episode(1.0, 0.1 * update, 0.1), episode(0.0, 0.05 * update, 0.1)]

    monitor, metrics = watch(make)
    assert "proxy_up_gold_flat" in monitor.alarms
    assert metrics["hacking_alarm_proxy_up_gold_flat"] == 1.0
    assert metrics["hacking_trend_proxy"] > 2
    assert metrics["hacking_trend_gold"] == 0.0


def test_component_that_is_most_of_the_return_is_an_alarm() -> None:
    monitor, _ = watch(lambda update: [episode(1.0, 0.9, 0.9, 0.9), episode(0.0, 0.5)])
    assert monitor.alarms["share"] == "process_judge 76%"


def test_component_that_pays_failures_more_than_successes_is_an_alarm() -> None:
    monitor, metrics = watch(lambda update: [episode(1.0, 0.1), episode(0.0, 0.25)])
    assert monitor.alarms["paid_on_failure"] == "process_judge 0.25 over 0.1"
    assert metrics["hacking_on_failure_process_judge"] == 0.25


def test_failures_without_any_success_beside_them_are_no_comparison() -> None:
    monitor, _ = watch(lambda update: [episode(0.0, 0.25)])
    assert "paid_on_failure" not in monitor.alarms


def test_scores_that_say_less_and_less_about_the_outcome_are_an_alarm() -> None:
    def make(update: int) -> list[Trajectory]:
        noise = 0.02 * update
        return [episode(1.0, 0.2), episode(1.0, 0.2 - noise), episode(0.0, 0.1 + noise), episode(0.0, 0.1)]

    monitor, metrics = watch(make)
    assert "correlation_falling" in monitor.alarms
    assert metrics["hacking_trend_correlation"] < -2


@pytest.mark.parametrize("what", ["tokens", "turns", "repeat_rate"])
def test_growth_at_a_constant_outcome_is_an_alarm(what: str) -> None:
    def make(update: int) -> list[Trajectory]:
        if what == "tokens":
            return [episode(1.0, 0.1, tokens=5 + update)]
        if what == "turns":
            return [episode(1.0, 0.1, *[0.0] * update)]
        return [episode(1.0, *[0.0] * 5, same=i < update) for i in range(WINDOW)]

    monitor, _ = watch(make)
    assert what in monitor.alarms["drift"]


def test_growth_with_a_rising_outcome_is_none() -> None:
    def make(update: int) -> list[Trajectory]:
        return [episode(float(i < update), 0.0, tokens=5 + update) for i in range(WINDOW)]

    assert "drift" not in watch(make)[0].alarms


def test_outcome_that_falls_while_the_policy_moves_away_is_an_alarm() -> None:
    def make(update: int) -> list[Trajectory]:
        return [episode(float(i >= update), 0.0) for i in range(WINDOW)]

    assert "frontier" in watch(make, kl=lambda update: 0.1 * update)[0].alarms
    assert "frontier" not in watch(make)[0].alarms
    assert "frontier" not in watch(solid, kl=lambda update: 0.1 * update)[0].alarms


def test_rewards_that_become_the_same_for_every_turn_are_an_alarm() -> None:
    def make(update: int) -> list[Trajectory]:
        spread = 0.2 if update < WINDOW // 2 else 0.001
        return [episode(1.0, 0.0, spread, 2 * spread, 3 * spread)]

    assert "entropy_collapse" in watch(make)[0].alarms


def test_good_score_on_a_canary_task_is_an_alarm_at_once() -> None:
    def make(update: int) -> list[Trajectory]:
        return [episode(1.0, 0.1), episode(0.0, 0.3, 0.3, task="impossible")]

    monitor, metrics = watch(make, updates=1, canaries=frozenset({"impossible"}))
    assert monitor.alarms == {"canary": "a canary task returned 0.6"}
    assert metrics["hacking_canary"] == pytest.approx(0.6)
    assert watch(make, updates=1)[0].alarms == {}


def test_alarms_wait_for_a_whole_window_and_go_when_their_cause_is_gone() -> None:
    def make(update: int) -> list[Trajectory]:
        return [episode(1.0, 0.1), episode(0.0, 0.25 if update < WINDOW else 0.0)]

    assert watch(make, updates=WINDOW - 1)[0].alarms == {}
    assert "paid_on_failure" in watch(make)[0].alarms
    assert "paid_on_failure" not in watch(make, updates=2 * WINDOW)[0].alarms


# --- metrics and state


def test_every_alarm_is_a_metric_and_all_metrics_are_finite() -> None:
    _, metrics = watch(solid, kl=lambda update: 0.1)
    assert {f"hacking_alarm_{name}" for name in ALARMS} < set(metrics)
    assert all(math.isfinite(value) for value in metrics.values())
    assert {"hacking_share_process_judge", "hacking_trend_gold", "hacking_kl", "hacking_entropy"} < set(metrics)


def test_what_an_update_says_nothing_about_is_left_out() -> None:
    trajectories = [episode(1.0, 0.0)]
    monitor = HackingMonitor()
    metrics = monitor.update(trajectories, learned(trajectories, RewardScheme()))
    assert {"hacking_correlation", "hacking_entropy", "hacking_kl", "hacking_canary"} & set(metrics) == set()


def test_update_without_a_scorable_episode_changes_nothing() -> None:
    monitor, _ = watch(solid)
    before = monitor.state_dict()
    metrics = monitor.update([], [])
    assert monitor.state_dict() == before
    assert "hacking_proxy" not in metrics
    assert metrics["hacking_alarms"] == 0.0


def test_monitor_goes_on_from_its_state_as_if_it_had_never_stopped() -> None:
    monitor, _ = watch(lambda update: [episode(1.0, 0.1), episode(0.0, 0.25)])
    restored = HackingMonitor(monitor.config)
    restored.load_state_dict(json.loads(json.dumps(monitor.state_dict())))
    pickled = pickle.loads(pickle.dumps(monitor))
    trajectories = solid(0)
    for other in (restored, pickled):
        assert other.alarms == monitor.alarms != {}
    expected = monitor.update(trajectories, learned(trajectories))
    for other in (restored, pickled):
        assert other.update(trajectories, learned(trajectories)) == expected


@pytest.mark.parametrize("state", [{}, {"window": 3}, {"window": [{"proxy": "high"}]}])
def test_state_that_is_none_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(LearnerError, match="window of a HackingMonitor"):
        HackingMonitor().load_state_dict(state)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": 3}, "window must be 4 or more"),
        ({"flat": 5.0}, "flat must be from 0 to significant"),
        ({"significant": math.nan}, "flat must be from 0 to significant"),
        ({"max_share": 0.0}, "max_share must be above 0"),
        ({"entropy_fraction": 1.5}, "entropy_fraction must be above 0"),
        ({"canary_return": math.inf}, "canary_return must be finite"),
    ],
)
def test_limits_that_cannot_work_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HackingConfig(**fields)


def test_rewards_of_a_learners_own_scheme_are_taken_as_they_are() -> None:
    rewards = TurnRewards(torch.tensor([2.0]), {"mine": torch.tensor([2.0])})
    signals = hacking_signals([episode(1.0, 0.0)], [rewards])
    assert signals is not None
    assert (signals.proxy, signals.shares, signals.on_success) == (2.0, {"mine": 1.0}, {"mine": 2.0})
