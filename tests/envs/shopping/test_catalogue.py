"""Catalogues: near misses of every kind around one or two items that meet the goal."""

import collections
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.envs.shopping.catalogue import Goal, Item, make_catalogue, make_goal, violations

GOAL = Goal("backpack", "hiking", "red", 80, 4, brand="Norda")
PERFECT = Item("item_1", "Norda", "hiking", "backpack", 79, 4.0, ("blue", "red"))


@pytest.mark.parametrize(
    ("change", "violated"),
    [
        ({}, ()),
        ({"price": 80}, ("price",)),
        ({"price": 99}, ("price",)),
        ({"price": 10}, ()),
        ({"rating": 3.9}, ("rating",)),
        ({"rating": 5.0}, ()),
        ({"colors": ("blue", "green")}, ("color",)),
        ({"brand": "Vesk"}, ("brand",)),
        ({"use": "school"}, ("use",)),
        ({"category": "tent"}, ("category",)),
        ({"colors": ("blue",), "price": 81, "rating": 1.5}, ("color", "price", "rating")),
    ],
)
def test_violations_are_exactly_the_constraints_not_met(change, violated):
    assert violations(GOAL, msgspec.structs.replace(PERFECT, **change)) == violated


def test_a_goal_without_brand_takes_any_brand():
    goal = msgspec.structs.replace(GOAL, brand=None)
    assert violations(goal, msgspec.structs.replace(PERFECT, brand="Vesk")) == ()


def draw(seed):
    rng = random.Random(seed)
    goal = make_goal(rng)
    return goal, make_catalogue(goal, rng)


@given(st.integers())
def test_every_catalogue_has_four_relevant_items_and_two_decoys(seed):
    goal, items = draw(seed)
    assert [item.id for item in items] == [f"item_{n}" for n in range(1, 7)]
    relevant = [item for item in items if (item.use, item.category) == (goal.use, goal.category)]
    decoys = [item for item in items if item not in relevant]
    assert len(relevant) == 4
    assert {violations(goal, item)[-1] for item in relevant if violations(goal, item)} <= {
        "price", "rating", "color", "brand"
    }  # fmt: skip
    assert sorted((item.use == goal.use, item.category == goal.category) for item in decoys) == [
        (False, True),
        (True, False),
    ]
    assert 1 <= sum(not violations(goal, item) for item in items) <= 2


@given(st.integers())
def test_numbers_stay_in_the_range_the_texts_promise(seed):
    goal, items = draw(seed)
    assert goal.max_price in range(30, 100, 10)
    assert goal.min_rating in (3, 4)
    for item in items:
        assert 10 <= item.price <= 99
        assert 1.5 <= item.rating <= 5.0
        assert round(item.rating, 1) == item.rating
        assert 1 <= len(item.colors) == len(set(item.colors)) <= 3


def test_most_unsuitable_items_are_near_misses_and_every_constraint_is_missed():
    counts, singles, unsuitable = collections.Counter[str](), 0, 0
    for seed in range(1000):
        goal, items = draw(seed)
        for item in items:
            violated = violations(goal, item)
            counts.update(violated)
            unsuitable += bool(violated)
            singles += len(violated) == 1
    assert set(counts) == {"color", "brand", "use", "category", "price", "rating"}
    assert min(counts.values()) > 100
    assert 0.6 < singles / unsuitable < 0.9
