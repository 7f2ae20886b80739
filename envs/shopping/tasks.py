"""Shopping tasks as sentences, and two splits that cannot overlap.

The split is a function of the goal sentence alone, so a held-out sentence is never trained on, whatever the catalogue.
"""

import hashlib
import random
import re
from typing import Literal

import msgspec

from turngate.envs.base import Task
from turngate.envs.shopping.catalogue import STARS, Goal, Item, make_catalogue, make_goal

__all__ = [
    "MAX_TURNS",
    "ShopTask",
    "goal_sentence",
    "held_out_tasks",
    "make_task",
    "parse_goal",
    "running_example",
    "split_of",
    "train_tasks",
]

MAX_TURNS = 15
"""Trying the colour of four relevant items in turn and buying the last takes 13 turns; 2 are for slips."""

Split = Literal["train", "held_out"]

_STAR_WORDS = {stars: word for word, stars in STARS.items()}
_SENTENCE = re.compile(
    r"Find a (?P<color>\w+) (?:(?P<brand>[A-Z]\w+) )?(?P<use>\w+) (?P<category>\w+) "
    r"under \$(?P<price>\d+), rated at least (?P<stars>\w+) stars\."
)
_HELD_OUT_SHARE = 0.2
_SALT = b"turngate-shopping-3"
"""Changing it reshuffles the splits: results before and after are then not comparable."""


class ShopTask(msgspec.Struct, frozen=True):
    """What `Task.data` of a shopping task holds."""

    goal: Goal
    items: tuple[Item, ...]
    max_turns: int | None = MAX_TURNS
    """The task's own budget of actions; running out is `End.budget`, a failure. None leaves limits to the runtime."""


def goal_sentence(goal: Goal) -> str:
    """Say the goal in words."""
    brand = f"{goal.brand} " if goal.brand else ""
    return (
        f"Find a {goal.color} {brand}{goal.use} {goal.category} under ${goal.max_price}, "
        f"rated at least {_STAR_WORDS[goal.min_rating]} stars."
    )


def parse_goal(sentence: str) -> Goal:
    """Read a goal back from its sentence. Raises ValueError when it is not one."""
    found = _SENTENCE.fullmatch(sentence)
    if found is None or found["stars"] not in STARS:
        raise ValueError(f"a shopping goal must read like {goal_sentence(_EXAMPLE_GOAL)!r}: got {sentence!r}")
    return Goal(
        found["category"], found["use"], found["color"], int(found["price"]), STARS[found["stars"]], found["brand"]
    )


def make_task(goal: Goal, items: tuple[Item, ...], max_turns: int | None = MAX_TURNS) -> Task:
    """Build a task. Its id is a digest of the goal and the catalogue: equal problems have equal ids."""
    problem = msgspec.json.encode((goal, items))
    digest = hashlib.blake2b(problem, digest_size=8).hexdigest()
    data = msgspec.json.decode(msgspec.json.encode(ShopTask(goal, items, max_turns)))  # lists, as JSON has no tuples
    return Task(id=f"shop-{digest}", prompt=goal_sentence(goal), data=data)


def split_of(task: Task) -> Split:
    """Return which split a task belongs to, from its sentence alone."""
    digest = hashlib.blake2b(task.prompt.encode(), digest_size=8, key=_SALT).digest()
    return "held_out" if int.from_bytes(digest, "big") < _HELD_OUT_SHARE * 2**64 else "train"


def train_tasks(n: int, seed: int, *, max_turns: int | None = MAX_TURNS) -> list[Task]:
    """Return `n` distinct tasks to train on; more of the same seed extend fewer."""
    return _tasks("train", n, seed, max_turns)


def held_out_tasks(n: int, seed: int, *, max_turns: int | None = MAX_TURNS) -> list[Task]:
    """Return `n` distinct tasks whose sentences no training task ever uses."""
    return _tasks("held_out", n, seed, max_turns)


def _tasks(split: Split, n: int, seed: int, max_turns: int | None) -> list[Task]:
    rng = random.Random(f"shopping {split} {seed}")
    tasks: dict[str, Task] = {}
    while len(tasks) < n:
        goal = make_goal(rng)
        task = make_task(goal, make_catalogue(goal, rng), max_turns)
        if split_of(task) == split:
            tasks.setdefault(task.id, task)
    return list(tasks.values())


_EXAMPLE_GOAL = Goal("backpack", "hiking", "red", 80, 4)


def running_example() -> Task:
    """Return the task the documentation follows: only item_3 will do, and every other item fails in its own way."""
    items = (
        Item("item_1", "Kelvo", "hiking", "backpack", 95, 4.7, ("red", "black")),
        Item("item_2", "Norda", "school", "backpack", 45, 4.2, ("red",)),
        Item("item_3", "Tarnix", "hiking", "backpack", 69, 4.5, ("red", "blue")),
        Item("item_4", "Sumla", "hiking", "backpack", 52, 3.6, ("red", "green")),
        Item("item_5", "Vesk", "hiking", "jacket", 74, 4.4, ("red", "white")),
        Item("item_6", "Pirello", "hiking", "backpack", 58, 4.8, ("blue", "black")),
    )
    return make_task(_EXAMPLE_GOAL, items)
