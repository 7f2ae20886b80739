"""Which target old experience gets, and what is kept with it."""

import math
from typing import Any

import pytest
import torch

from turngate.learners.batch import lay_out
from turngate.learners.policy_state import score_tokens
from turngate.learners.replay import ReplayConfig, ReplayStore, as_batch
from turngate.learners.replay_targets import ReplayTargets, choose_target, state_value_targets
from turngate.learners.targets import TurnSteps, turn_log_ratios
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.errors import ConfigError, LearnerError


def logs(*trajectories: tuple[float, ...]) -> list[torch.Tensor]:
    return [torch.tensor(t, dtype=torch.float64) for t in trajectories]


def test_fresh_experience_gets_gae() -> None:
    choice = choose_target(logs((0.0, 0.0), (0.0,)), ReplayConfig(), lag_max=0)
    assert (choice.kind, choice.because, choice.trace_mean) == ("gae", "on_policy", 1.0)
    assert choice.ess_ratio == pytest.approx(1.0)


def test_usable_ratios_give_vtrace_for_state_values_and_retrace_for_action_values() -> None:
    ratios = logs((0.1, -0.2), (0.3,))
    assert choose_target(ratios, ReplayConfig(), lag_max=2).kind == "vtrace"
    assert choose_target(ratios, ReplayConfig(), lag_max=2, is_action_value=True).kind == "retrace"


def test_ratios_of_which_few_count_look_one_step_ahead() -> None:
    # One of 20 turns has nearly all the weight: an ESS ratio of 0.05.
    ratios = logs(*[(0.0,)] * 19, (15.0,))
    choice = choose_target(ratios, ReplayConfig(), lag_max=2)
    assert (choice.kind, choice.because) == ("one_step", "low_ess")
    assert choice.ess_ratio == pytest.approx(0.05, abs=1e-4)
    assert choose_target(ratios, ReplayConfig(min_ess_ratio=0.04), lag_max=2).kind == "vtrace"


def test_an_unknown_behaviour_policy_looks_one_step_ahead_even_at_lag_zero_and_against_the_config() -> None:
    for config in (ReplayConfig(), ReplayConfig(target="vtrace")):
        choice = choose_target([], config, lag_max=0, is_behaviour_known=False)
        assert (choice.kind, choice.because, choice.ess_ratio) == ("one_step", "unknown_behaviour", None)


def test_a_configured_target_is_used_and_the_numbers_still_told() -> None:
    ratios = logs(*[(0.0,)] * 19, (15.0,))
    choice = choose_target(ratios, ReplayConfig(target="vtrace"), lag_max=3)
    assert (choice.kind, choice.because) == ("vtrace", "configured")
    assert choice.ess_ratio == pytest.approx(0.05, abs=1e-4)


def test_the_level_decides_whose_ratios_are_judged() -> None:
    # Turn ratios of e^1 or e^-1 are usable, their products over 12 turns are not: one trajectory in 16 has all weight.
    ratios = logs(*[(-1.0,) * 12] * 15, (1.0,) * 12)
    by_turn = choose_target(ratios, ReplayConfig(ess_level="turn"), lag_max=2)
    by_trajectory = choose_target(ratios, ReplayConfig(ess_level="trajectory"), lag_max=2)
    assert (by_turn.kind, by_trajectory.kind) == ("vtrace", "one_step")
    assert by_turn.ess_turn_ratio == by_trajectory.ess_turn_ratio == by_turn.ess_ratio
    assert by_trajectory.ess_ratio == pytest.approx(1 / 16, abs=1e-4)


def test_ratios_that_are_tiny_alike_show_in_the_trace_mean_alone() -> None:
    choice = choose_target(logs((-9.0,), (-9.0,)), ReplayConfig(), lag_max=5)
    assert choice.ess_ratio == pytest.approx(1.0)
    assert choice.trace_mean == pytest.approx(math.exp(-9))


def test_actions_nobody_would_take_now_are_worth_no_sample() -> None:
    choice = choose_target(logs((-math.inf,), (-math.inf,)), ReplayConfig(), lag_max=5)
    assert (choice.kind, choice.ess_ratio, choice.trace_mean) == ("one_step", 0.0, 0.0)


def test_metrics_name_the_target_used() -> None:
    metrics = choose_target(logs((0.0,)), ReplayConfig(), lag_max=1).metrics()
    assert metrics == {
        "replay_target_gae": 0.0,
        "replay_target_vtrace": 1.0,
        "replay_target_retrace": 0.0,
        "replay_target_one_step": 0.0,
        "replay_ess_turn_ratio": pytest.approx(1.0),
        "replay_ess_trajectory_ratio": pytest.approx(1.0),
        "replay_trace_mean": 1.0,
    }
    unknown = choose_target([], ReplayConfig(), lag_max=1, is_behaviour_known=False).metrics()
    assert set(unknown) == {f"replay_target_{kind}" for kind in ("gae", "vtrace", "retrace", "one_step")}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_log_ratios_that_are_none_are_refused(bad: float) -> None:
    with pytest.raises(LearnerError, match="below infinity"):
        choose_target(logs((0.0, bad)), ReplayConfig(), lag_max=1)
    with pytest.raises(LearnerError, match="must hold a turn"):
        choose_target([], ReplayConfig(), lag_max=1)


def steps(*, log_ratio: float, bootstrap: float | None) -> TurnSteps:
    rewards, values, log_ratios = logs((0.0, 1.0), (0.4, 0.6), (log_ratio, log_ratio))
    return TurnSteps(rewards, values, log_ratios, bootstrap)


def test_targets_of_state_values_by_hand() -> None:
    cut, ended = steps(log_ratio=math.log(0.5), bootstrap=0.2), steps(log_ratio=0.0, bootstrap=None)
    config = ReplayConfig(lam=0.5)
    # Cut: errors 0.2 and 0.6, halved; the second is believed by 0.5 * 0.5. Ended: errors 0.2 and 0.4.
    vtrace_cut, vtrace_ended = state_value_targets([cut, ended], "vtrace", config)
    assert vtrace_cut.tolist() == pytest.approx([0.4 + 0.1 + 0.25 * 0.3, 0.6 + 0.3])
    assert vtrace_ended.tolist() == pytest.approx([0.4 + 0.2 + 0.5 * 0.4, 1.0])
    one_step_cut, one_step_ended = state_value_targets([cut, ended], "one_step", config)
    assert one_step_cut.tolist() == pytest.approx([0.6, 1.2])
    assert one_step_ended.tolist() == pytest.approx([0.6, 1.0])


def test_gae_and_vtrace_agree_on_fresh_experience() -> None:
    fresh = [steps(log_ratio=0.0, bootstrap=b) for b in (None, 0.7)]
    for config in (ReplayConfig(), ReplayConfig(lam=1.0)):
        for a, b in zip(*(state_value_targets(fresh, k, config, gamma=0.9) for k in ("gae", "vtrace")), strict=True):
            assert a.tolist() == pytest.approx(b.tolist())


def test_retrace_is_for_action_values() -> None:
    with pytest.raises(ConfigError, match="action values"):
        state_value_targets([], "retrace", ReplayConfig())


def test_a_trajectory_without_turns_has_no_targets() -> None:
    empty = TurnSteps(torch.zeros(0), torch.zeros(0), torch.zeros(0), 1.0)
    for kind in ("gae", "vtrace", "one_step"):
        assert [t.shape for t in state_value_targets([empty], kind, ReplayConfig())] == [(0,)]


def test_recorded_rollouts_have_ratio_one_under_their_policy_and_not_under_another(
    lab: Any, model: PolicyModel
) -> None:
    store, luck = ReplayStore(ReplayConfig(start_after=1)), torch.Generator().manual_seed(0)
    whole = [lab.sample_trajectory(model, luck, name=f"whole{i}") for i in range(3)]
    store.put([*whole, lab.sample_trajectory(model, luck, name="rewritten", drop_early_turns=True)], 0)
    drawn = store.sample(4, luck, policy_version=1)
    tokens = lay_out(as_batch(drawn, policy_version=1), [[True]] * 4, vocabulary_size=model.config.vocab_size)

    def ratios(policy: PolicyModel) -> list[torch.Tensor]:
        logprobs_N, _ = score_tokens(policy, tokens, temperature=1.0, microbatch_tokens=256)
        mine = [tokens.trajectory_ids_N == i for i in range(4)]
        return [
            turn_log_ratios(logprobs_N[at], tokens.behaviour_logprobs_N[at], tokens.turn_ids_N[at], turns=len(t.turns))
            for at, t in zip(mine, drawn, strict=True)
        ]

    assert torch.cat(ratios(model)).abs().max() < 1e-4
    assert choose_target(ratios(model), store.config, lag_max=1).ess_ratio == pytest.approx(1.0, abs=1e-6)
    assert torch.cat(ratios(lab.make_model(seed=1))).abs().min() > 1e-4


def targets(*tensors: torch.Tensor) -> ReplayTargets:
    return ReplayTargets(
        targets=tensors, target="vtrace", policy_version=7, target_version=3, ess_ratio=0.5, lag_mean=2.5, lag_max=4
    )


def test_targets_keep_the_versions_they_hold_for() -> None:
    made = targets(torch.zeros(2), torch.zeros(3))
    assert (made.policy_version, made.target_version) == (7, 3)
    assert made.metrics(critic_version=5) == {
        "replay_drawn_trajectories": 2.0,
        "replay_turns": 5.0,
        "replay_lag_mean": 2.5,
        "replay_lag_max": 4.0,
        "replay_target_version_lag": 2.0,
    }


def test_targets_with_a_gradient_are_refused() -> None:
    with pytest.raises(LearnerError, match="targets must be detached"):
        targets(torch.zeros(2, requires_grad=True))
