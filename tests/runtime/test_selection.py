"""How a guided policy chooses."""

import itertools
import math

import pytest

from turngate.runtime.errors import GuidanceError
from turngate.runtime.selection import (
    best_of_n_kl_bound,
    beta_for_kl,
    enumerated_probs,
    kl_to_base,
    log_selection_weight,
    pick,
    selection_probs,
    soft_q,
    soft_success,
)

PI = (0.6, 0.3, 0.1)
LOGS = [math.log(p) for p in PI]
Q = [0.2, 0.5, 0.9]


def marginal(n, choose):
    """The chosen action's distribution over all n draws from PI, and the weighted one."""
    plain, weighted = [0.0] * 3, [0.0] * 3
    for draws in itertools.product(range(3), repeat=n):
        probs = choose([Q[a] for a in draws])
        drawn = math.prod(PI[a] for a in draws)
        for index, action in enumerate(draws):
            plain[action] += drawn * probs[index]
            if probs[index] > 0:
                weight = math.exp(-log_selection_weight(probs, index))
                weighted[action] += drawn * probs[index] * weight
    return plain, weighted


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("beta", [0.0, 3.0, 20.0])
def test_p11_the_selection_weight_leads_back_to_the_base_exactly(n, beta):
    _, weighted = marginal(n, lambda q: selection_probs(q, beta))
    assert weighted == pytest.approx(PI, abs=1e-12)


def test_one_draw_is_the_base_and_more_draws_near_the_target():
    target = enumerated_probs(LOGS, Q, 3.0)
    distances = []
    for n in (1, 2, 4, 8):
        plain, _ = marginal(n, lambda q: selection_probs(q, 3.0))
        distances.append(max(abs(p - t) for p, t in zip(plain, target, strict=True)))
    assert distances == sorted(distances, reverse=True)
    assert marginal(1, lambda q: selection_probs(q, 3.0))[0] == pytest.approx(PI)


def test_b6_2_draws_are_not_weighted_by_the_base_again():
    assert selection_probs([0.5, 0.5], 3.0) == [0.5, 0.5]


def test_b6_3_duplicates_keep_their_weight():
    assert selection_probs([0.5, 0.2, 0.5, 0.9], 3.0)[0] == selection_probs([0.5, 0.2, 0.5, 0.9], 3.0)[2] > 0


def test_b6_4_actions_are_compared_by_their_whole_log_prob_not_per_token():
    short, long = -2.0, -8.0  # the same per token when the long one has four times as many
    assert enumerated_probs([short, long], [0.0, 0.0], 0.0)[0] == pytest.approx(1 / (1 + math.exp(-6)))


@pytest.mark.parametrize("beta", [1e3, 1e300])
def test_b6_5_large_betas_do_not_overflow(beta):
    assert sum(selection_probs([0.1, 0.9, 0.2], beta)) == pytest.approx(1.0)
    assert enumerated_probs(LOGS, Q, beta)[2] == 1.0


def test_infinite_beta_takes_the_best_and_breaks_ties_by_the_base():
    assert enumerated_probs(LOGS, [0.5, 0.5, 0.1], math.inf) == pytest.approx([2 / 3, 1 / 3, 0])
    assert selection_probs([0.5, 0.5, 0.1], math.inf) == [0.5, 0.5, 0.0]


def test_a_forbidden_candidate_is_never_chosen():
    assert selection_probs([0.5, -math.inf], 0.0, floor=0.5) == [1.0, 0.0]
    assert enumerated_probs(LOGS, [0.2, -math.inf, 0.9], 0.0)[1] == 0.0


def test_the_floor_keeps_every_draw_possible():
    probs = selection_probs([0.0, 1.0, 0.0, 0.0], math.inf, floor=0.2)
    assert probs == pytest.approx([0.05, 0.85, 0.05, 0.05])


@pytest.mark.parametrize(
    ("q", "message"),
    [
        ([math.nan, 1.0], "Q must be a number below infinity: got nan .candidate 0."),
        ([0.0, math.inf], "got inf .candidate 1."),
        ([-math.inf, -math.inf], "all are forbidden"),
        ([], "every candidate must have one Q"),
    ],
)
def test_values_that_nothing_can_be_chosen_from_are_errors(q, message):
    with pytest.raises(GuidanceError, match=message):
        selection_probs(q, 1.0)


def test_draws_of_another_proposal_are_corrected_by_it():
    shift = [math.log(0.6 / 0.2), math.log(0.2 / 0.6)]
    assert selection_probs([0.0, 0.0], 1.0, proposal_N=shift) == pytest.approx([0.9, 0.1])


def test_a_choice_that_was_impossible_has_no_weight():
    with pytest.raises(GuidanceError, match="must have been possible"):
        log_selection_weight([1.0, 0.0], 1)


@pytest.mark.parametrize("target", [0.0, 0.01, 0.1, 1.0, 2.0])
def test_beta_meets_its_kl_budget(target):
    beta = beta_for_kl(LOGS, Q, target)
    assert kl_to_base(enumerated_probs(LOGS, Q, beta), LOGS) == pytest.approx(target, abs=1e-9)


def test_a_kl_that_no_beta_reaches_is_infinite_beta():
    assert beta_for_kl(LOGS, Q, 100.0) == math.inf
    assert beta_for_kl(LOGS, [0.5] * 3, 0.1) == math.inf


def test_soft_q_lies_between_mean_and_maximum_and_tends_to_both():
    returns = [1.0, 0.0, 0.0, 0.0]
    assert soft_q(returns, 1e-6) == pytest.approx(0.25, abs=1e-6)
    assert soft_q(returns, 1e6) == pytest.approx(1.0, abs=1e-5)
    assert soft_q(returns, 5.0) == pytest.approx(soft_success(0.25, 5.0))
    assert soft_success(0.0, 5.0) == 0.0
    assert soft_success(1.0, 5.0) == 1.0


def test_b6_7_shifting_values_changes_nothing_and_scaling_them_does():
    assert enumerated_probs(LOGS, [q - 0.37 for q in Q], 3.0) == pytest.approx(enumerated_probs(LOGS, Q, 3.0))
    assert enumerated_probs(LOGS, [10 * q for q in Q], 3.0) != pytest.approx(enumerated_probs(LOGS, Q, 3.0))


def test_best_of_n_stays_within_its_bound():
    for n in (1, 2, 4):
        plain, _ = marginal(n, lambda q: selection_probs(q, math.inf))
        assert kl_to_base(plain, LOGS) <= best_of_n_kl_bound(n) + 1e-12


def test_no_size_of_values_or_of_beta_makes_anything_but_probabilities():
    for beta in (0.0, 1e-300, 1.0, 50.0, 1e308, math.inf):
        for q in ([1e308, -1e308, 0.0], [1e308] * 3, [-1e308, -math.inf, -1e308], [5e-324, 0.0, -5e-324]):
            for probs in (selection_probs(q, beta), enumerated_probs([-1.0, -2.0, -800.0], q, beta)):
                assert math.fsum(probs) == pytest.approx(1)
                assert all(p >= 0 for p in probs)
    assert selection_probs([1e308, 0.0], 50.0) == [1.0, 0.0]
    assert enumerated_probs([-math.inf, -1.0, -2.0], [9.0, 1.0, 1.0], math.inf)[0] == 0.0


def test_a_kl_budget_is_met_whatever_the_scale_of_the_values():
    for scale in (1e-300, 1e-6, 1.0, 1e6, 1e300, 8e307):
        q = [1.0 * scale, 0.3 * scale, -2.0 * scale]
        beta = beta_for_kl([0.0] * 3, q, 0.2)
        assert kl_to_base(selection_probs(q, beta), [0.0] * 3) == pytest.approx(0.2, abs=1e-9)


def test_soft_q_of_large_returns_is_a_number():
    assert soft_q([1e307, 1e307], 1e6) == pytest.approx(1e307)


def test_b6_7_beta_multiplies_values_as_they_are():
    assert selection_probs([0.0, math.log(2)], 1.0) == pytest.approx([1 / 3, 2 / 3])
    assert selection_probs([0.0, math.log(2)], 3.0) == pytest.approx([1 / 9, 8 / 9])
    assert enumerated_probs([math.log(0.5)] * 2, [0.0, math.log(2)], 2.0) == pytest.approx([0.2, 0.8])


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: selection_probs(Q, 1.0, floor=1.5), "floor must be between 0 and 1: got 1.5"),
        (lambda: selection_probs(Q, 1.0, floor=-0.1), "floor must be"),
        (lambda: selection_probs(Q, -1.0), "beta must be at least 0: got -1.0"),
        (lambda: enumerated_probs(LOGS, Q, math.nan), "beta must be at least 0: got nan"),
        (lambda: enumerated_probs(LOGS, Q[:2], 1.0), "every candidate must have one Q: got 2 for 3"),
        (lambda: selection_probs([], 1.0), "every candidate must have one Q"),
        (lambda: enumerated_probs([-math.inf, 0.0], [0.0, -math.inf], 1.0), "all are forbidden"),
        (lambda: beta_for_kl(LOGS, Q, -0.1), "target_kl must be at least 0"),
        (lambda: beta_for_kl(LOGS, Q, math.nan), "target_kl must be at least 0"),
        (lambda: soft_q([], 1.0), "soft Q needs returns"),
        (lambda: soft_q([1.0], 0.0), "a finite beta above 0"),
        (lambda: soft_q([1.0], math.inf), "a finite beta above 0"),
        (lambda: soft_success(1.5, 1.0), "success must be in"),
        (lambda: soft_success(0.5, 0.0), "success must be in"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(ask, says):
    with pytest.raises(GuidanceError, match=says):
        ask()


def test_budgets_at_the_ends_are_no_beta_and_every_beta():
    assert beta_for_kl(LOGS, Q, 0.0) == 0.0
    assert beta_for_kl(LOGS, Q, kl_to_base([0.0, 0.0, 1.0], LOGS)) == math.inf


def test_b6_5_a_soft_success_of_any_beta_is_a_number():
    assert soft_success(0.5, 5000.0) == pytest.approx(1 - math.log(2) / 5000)
    assert (soft_success(0.0, 5000.0), soft_success(1.0, 5000.0)) == (0.0, 1.0)


def test_a_kl_is_never_below_zero_by_rounding():
    for number in range(1, 200):
        logs = [math.log(number / 200), math.log(1 - number / 200)]
        assert kl_to_base([math.exp(lp) for lp in logs], logs) >= 0


def test_a_weight_of_nothing_is_never_picked_however_the_others_were_rounded():
    assert {pick([0.25, 0.0], seed) for seed in range(50)} == {0}
