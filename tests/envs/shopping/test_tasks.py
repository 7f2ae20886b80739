"""Sentences say the whole goal; the splits cannot overlap."""

import msgspec
import pytest

from turngate.envs.base import Task
from turngate.envs.shopping.catalogue import Goal, violations
from turngate.envs.shopping.tasks import (
    ShopTask,
    goal_sentence,
    held_out_tasks,
    make_task,
    parse_goal,
    running_example,
    split_of,
    train_tasks,
)


def test_a_sentence_names_every_constraint():
    assert goal_sentence(Goal("backpack", "hiking", "red", 80, 4)) == (
        "Find a red hiking backpack under $80, rated at least four stars."
    )
    assert goal_sentence(Goal("tent", "camping", "blue", 50, 3, "Norda")) == (
        "Find a blue Norda camping tent under $50, rated at least three stars."
    )


def test_sentences_read_back_as_the_goal():
    tasks = train_tasks(300, 0)
    goals = [msgspec.convert(task.data, ShopTask).goal for task in tasks]
    assert [parse_goal(task.prompt) for task in tasks] == goals
    assert 0.15 < sum(goal.brand is not None for goal in goals) / 300 < 0.35


@pytest.mark.parametrize("text", ["", "Find a hat.", "Find a red travel hat under $30, rated at least nine stars."])
def test_other_sentences_are_refused(text):
    with pytest.raises(ValueError, match="a shopping goal must read like"):
        parse_goal(text)


def test_the_running_example_is_the_one_of_the_documentation():
    task = running_example()
    shop = msgspec.convert(task.data, ShopTask)
    assert task.prompt == "Find a red hiking backpack under $80, rated at least four stars."
    assert [item.id for item in shop.items if not violations(shop.goal, item)] == ["item_3"]
    item = shop.items[2]
    assert (item.price, item.rating, item.colors) == (69, 4.5, ("red", "blue"))
    assert {violations(shop.goal, i) for i in shop.items} == {
        (), ("price",), ("use",), ("rating",), ("category",), ("color",)
    }  # fmt: skip


def test_splits_share_no_sentence_no_catalogue_and_no_id():
    train, held_out = train_tasks(5000, 0) + train_tasks(2000, 1), held_out_tasks(2000, 0) + held_out_tasks(500, 1)
    for key in (lambda task: task.prompt, lambda task: task.id, lambda task: msgspec.json.encode(task.data["items"])):
        assert {key(task) for task in train}.isdisjoint(key(task) for task in held_out)


def test_the_split_of_a_task_depends_on_its_sentence_alone():
    assert {split_of(task) for task in train_tasks(500, 3)} == {"train"}
    assert {split_of(task) for task in held_out_tasks(500, 3)} == {"held_out"}
    task = train_tasks(1, 3)[0]
    assert split_of(Task("other", task.prompt)) == "train"
    assert split_of(running_example()) == "held_out"


def test_about_a_fifth_of_the_sentences_is_held_out():
    sentences = [
        goal_sentence(Goal(category, use, color, price, stars))
        for category in ("tent", "hat", "lamp", "watch")
        for use in ("hiking", "school", "travel")
        for color in ("red", "blue", "white")
        for price in range(30, 100, 10)
        for stars in (3, 4)
    ]
    held_out = sum(split_of(Task("x", sentence)) == "held_out" for sentence in sentences)
    assert 0.15 < held_out / len(sentences) < 0.25


def test_tasks_are_distinct_and_follow_from_the_seed():
    tasks = train_tasks(1000, 0)
    assert len({task.id for task in tasks}) == 1000
    assert tasks == train_tasks(1000, 0)
    assert tasks[:100] == train_tasks(100, 0)
    assert {task.id for task in tasks}.isdisjoint(task.id for task in train_tasks(1000, 1))


def test_ids_do_not_change_between_versions():
    """A changed generator makes old results incomparable: change the splits' salt, and this test, on purpose."""
    assert running_example().id == "shop-da803b08881c9239"
    assert [task.id for task in train_tasks(2, 0)] == ["shop-b5aba742265b0764", "shop-3df7bbc290b10067"]


def test_the_turn_budget_is_the_tasks_own():
    assert train_tasks(1, 0)[0].data["max_turns"] == 15
    assert train_tasks(1, 0, max_turns=5)[0].data["max_turns"] == 5
    assert held_out_tasks(1, 0, max_turns=None)[0].data["max_turns"] is None


def test_equal_problems_have_equal_ids():
    task = msgspec.convert(running_example().data, ShopTask)
    assert make_task(task.goal, task.items).id == make_task(task.goal, task.items).id
    assert make_task(task.goal, task.items[::-1]).id != make_task(task.goal, task.items).id
