"""What stops a learner says so, in time and no earlier."""

import logging
from typing import Any

import msgspec
import pytest
import torch

from turngate.learners.batch import lay_out
from turngate.learners.checks import (
    require_ess,
    require_fresh,
    require_scores,
    require_whole_vocabulary,
    warn_of_unpaid,
)
from turngate.learners.optimizers import MuonAdamW
from turngate.learners.policy_state import PolicyState
from turngate.learners.reward_scheme import RewardScheme
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.types import Batch, Sampling


def played(lab: Any, model: PolicyModel, **turn: Any) -> Batch:
    """Return a batch of one episode whose turns hold `turn`."""
    batch = lab.sample_batch(model, [[1.0]])
    (trajectory,) = batch.groups[0].trajectories
    turns = tuple(msgspec.structs.replace(t, **turn) for t in trajectory.turns)
    changed = msgspec.structs.replace(trajectory, turns=turns)
    return lab.make_batch([[changed]])


def test_scores_that_nobody_gave_are_missed_and_others_named(lab: Any, model: PolicyModel) -> None:
    scheme, batch = RewardScheme(potential="near"), played(lab, model, scores={"far": 0.5})
    with pytest.raises(ConfigError, match=r"one called near, they have far; the scorer failed"):
        require_scores(scheme, batch)
    require_scores(RewardScheme(potential="far"), batch)
    require_scores(scheme, lab.make_batch([[]]))  # nobody ended: nothing is known


def test_components_that_nobody_was_paid_are_told(
    lab: Any, model: PolicyModel, caplog: pytest.LogCaptureFixture
) -> None:
    batch = played(lab, model, rewards={"outcome": 1.0, "style": 0.5})
    with caplog.at_level(logging.WARNING, logger="turngate.learner"):
        assert not warn_of_unpaid(RewardScheme(weights={"outcome": 1.0, "style": 1.0}), batch)
        assert not caplog.records
        assert warn_of_unpaid(RewardScheme(weights={"outcome": 1.0, "stile": 1.0}), batch)
    assert "successes: stile; paid were outcome, style" in caplog.text


def test_old_tokens_need_a_choice_and_young_ones_none(lab: Any, model: PolicyModel) -> None:
    tokens = lay_out(lab.sample_batch(model, [[1.0]], policy_version=2), [[True]], vocabulary_size=24)
    require_fresh(None, tokens, 0)
    require_fresh("bypass", tokens, 2)
    with pytest.raises(ConfigError, match="staleness of up to 2"):
        require_fresh(None, tokens, 2)
    require_fresh(None, tokens.masked(torch.zeros_like(tokens.mask_N)), 2)  # they teach the policy nothing


def test_data_that_says_nothing_is_borne_for_a_few_batches_in_a_row(model: PolicyModel) -> None:
    state = PolicyState(model, MuonAdamW(model, muon_lr=1e-3, adamw_lr=1e-3), seed=0, reference=None)
    for ess_ratio in (0.01, 0.01, 0.05, 0.01, 0.01):  # 0.05 is enough, and the count begins anew
        require_ess(state, ess_ratio, at_least=0.05, batches=3)
    with pytest.raises(LearnerError, match=r"at least 0.05 of the tokens: got 0.010 after 2 batches as low"):
        require_ess(state, 0.01, at_least=0.05, batches=3)


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.9), Sampling(top_k=5)])
def test_ratios_need_the_whole_vocabulary(sampling: Sampling) -> None:
    with pytest.raises(ConfigError, match="sampling must keep the whole vocabulary"):
        require_whole_vocabulary(sampling)
    require_whole_vocabulary(Sampling(temperature=0.7))
