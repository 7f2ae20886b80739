"""The warm start of shopping: what its lessons say, when it stops, and that it depends on the seed alone."""

import re

import torch

from turngate.envs.base import Task
from turngate.envs.shopping import parse_command
from turngate.envs.shopping.tasks import parse_goal, split_of
from turngate.learners.cloning import CloningConfig, CloningProgress
from turngate.learners.recipes import shopping
from turngate.learners.recipes.shopping import knowledge, lessons, shopping_policy
from turngate.runtime.engine.model import ModelConfig, PolicyModel

PAGE = re.compile(r"Price: \$(\d+)\. Rating: ([\d.]+)\. Available colors: (.+)\.")


def test_lessons_tell_the_truth_about_pages_and_hold_no_action():
    pages = 0
    for lesson in lessons(60, seed=3):
        goal = parse_goal(lesson[0][1])
        for (_, question), (_, verdict) in zip(lesson[1::2], lesson[2::2], strict=True):
            assert parse_command(verdict) is None
            page = PAGE.fullmatch(question)
            if page is None:
                continue
            pages += 1
            broken = {
                "price": int(page[1]) >= goal.max_price,
                "rating": float(page[2]) < goal.min_rating,
                "color": goal.color not in page[3].split(", "),
            }
            expected = {name for name, is_broken in broken.items() if is_broken} or {"yes"}
            assert set(verdict.split()) == expected
    assert pages > 100


def test_lessons_are_about_training_goals_only():
    assert {split_of(Task("goal", lesson[0][1])) for lesson in lessons(100, seed=4)} == {"train"}


def test_knowledge_of_a_random_model_is_nothing():
    tokenizer = shopping._tokenizer()
    model = PolicyModel(ModelConfig(vocab_size=len(tokenizer)), seed=0)
    assert set(knowledge(model, tokenizer, n=16)) == {"price", "rating", "nothing"}
    assert max(knowledge(model, tokenizer, n=16).values()) < 0.2


def test_the_warm_start_ends_when_everything_checked_is_known(tmp_path, monkeypatch):
    told = iter([{"price": 1.0, "rating": 0.9}, {"price": 0.95, "rating": 0.95}])
    monkeypatch.setattr(shopping, "knowledge", lambda model, tokenizer: next(told))
    heard: list[CloningProgress] = []
    shopping_policy(
        tmp_path / "policy",
        1,
        heard.append,
        config=CloningConfig(steps=50, gate_every=2),
        settling=CloningConfig(steps=3),
    )
    assert len(heard) == 4 + 3


def test_equal_seeds_give_equal_weights_and_one_vocabulary(tmp_path):
    short = CloningConfig(steps=2)
    folders = [
        shopping_policy(tmp_path / name, seed, config=short, settling=short)
        for name, seed in (("a", 5), ("b", 5), ("c", 6))
    ]
    weights, again, others = (PolicyModel.load(folder).state_dict() for folder in folders)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not all(torch.equal(weights[name], others[name]) for name in weights)
    assert len({(folder / "tokenizer.json").read_bytes() for folder in folders}) == 1
