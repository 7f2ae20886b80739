"""The warm start of arithmetic leaves a policy that answers in the worker's form."""

from pathlib import Path

import pytest
import torch

from turngate.envs.arithmetic import demonstrations
from turngate.learners.cloning import CloningConfig, CloningProgress, score_chats
from turngate.learners.recipes.arithmetic import arithmetic_policy
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.engine.tokenizer import Tokenizer

TINY = CloningConfig(steps=50, batch_size=16)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return arithmetic_policy(tmp_path_factory.mktemp("arithmetic") / "policy", 1, config=TINY)


def test_fifty_steps_teach_the_form_of_the_answer_but_not_the_sums(policy):
    model, tokenizer = PolicyModel.load(policy), Tokenizer.load(policy / "tokenizer.json")
    scores = score_chats(model, tokenizer, demonstrations(200, seed=9))
    share_right = sum(score.correct for score in scores) / sum(score.tokens for score in scores)
    assert 0.5 < share_right < 0.9  # separators and copied digits are most of a completion; random weights: below 0.1


def test_every_word_of_the_task_is_one_token(policy):
    tokenizer = Tokenizer.load(policy / "tokenizer.json")
    assert len(tokenizer.encode("Compute 57+68.")) == 7
    assert len(tokenizer.encode("7+8=15, 5+6+1=12. Answer: 125")) == 21


def test_equal_seeds_give_equal_weights_and_progress_counts_the_steps(tmp_path):
    heard: list[CloningProgress] = []
    short = CloningConfig(steps=3, batch_size=4)
    first = arithmetic_policy(tmp_path / "a", 5, heard.append, config=short)
    second = arithmetic_policy(tmp_path / "b", 5, config=short)
    other = arithmetic_policy(tmp_path / "c", 6, config=short)
    weights, again, others = (PolicyModel.load(folder).state_dict() for folder in (first, second, other))
    assert [p.step for p in heard] == [0, 1, 2]
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not all(torch.equal(weights[name], others[name]) for name in weights)
