"""The cost of branching, and its cap."""

import math

import pytest

from turngate.runtime.branch_budget import BranchLedger, BranchLimits, branching_cost
from turngate.runtime.errors import ConfigError


def test_eight_continuations_at_twenty_turns_are_160_rollouts():
    cost = branching_cost(20, 8, "Q")
    assert (cost.rollouts, cost.model_turns, cost.env_steps) == (160, 1520, 1680)
    assert cost.replay_steps_without_snapshots == 1520
    assert branching_cost(20, 8, "Q", resample_outcome=False).env_steps == 1520
    assert branching_cost(20, 8, "V").model_turns == 1680


def test_the_cap_refuses_new_branches_and_counts_the_refusals():
    ledger = BranchLedger(BranchLimits(rollouts=2, model_tokens=100))
    assert ledger.admit()
    assert ledger.admit()
    assert not ledger.admit()
    assert (ledger.rollouts, ledger.refused, ledger.exhausted()) == (2, 1, "rollouts")


def test_snapshots_are_held_up_to_the_cap_and_given_back():
    ledger = BranchLedger(BranchLimits(snapshot_bytes=10))
    assert ledger.hold(8)
    assert not ledger.hold(3)
    ledger.release(8)
    assert ledger.hold(10)
    assert (ledger.snapshot_bytes, ledger.most_snapshot_bytes, ledger.refused) == (10, 10, 1)


def test_limits_of_another_kind_are_refused():
    with pytest.raises(ConfigError, match=r"limits must be BranchLimits\(\.\.\.\) or None: got 5 \(BranchLedger\)"):
        BranchLedger(5)


def test_a_negative_cap_is_refused():
    with pytest.raises(ConfigError, match="env_steps must be None or at least 0"):
        BranchLimits(env_steps=-1)
    with pytest.raises(ConfigError, match="model_tokens must be None or at least 0: got nan"):
        BranchLimits(model_tokens=math.nan)


@pytest.mark.parametrize("name", ["rollouts", "model_tokens", "env_steps"])
def test_each_cap_stops_branches_when_it_is_reached_and_not_before(name):
    ledger = BranchLedger(BranchLimits(**{name: 3}))
    for _ in range(3):
        assert ledger.exhausted() == ""
        assert ledger.admit()
        ledger.spend(model_turns=5, model_tokens=int(name == "model_tokens"), env_steps=int(name == "env_steps"))
    assert ledger.exhausted() == name
    assert not ledger.admit()
    assert (ledger.rollouts, ledger.refused) == (3, 1)


def test_a_cost_of_fewer_than_no_turns_is_refused():
    for turns, continuations in ((-1, 8), (20, -1)):
        with pytest.raises(ValueError, match="must not be negative"):
            branching_cost(turns, continuations, "Q")


def test_the_most_that_was_held_is_remembered():
    ledger = BranchLedger()
    assert ledger.hold(8)
    ledger.release(8)
    assert ledger.hold(3)
    assert (ledger.snapshot_bytes, ledger.most_snapshot_bytes) == (3, 8)
