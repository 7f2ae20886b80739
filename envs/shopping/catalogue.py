"""What is for sale and what is wanted: items, goals, and catalogues full of near misses.

Everything here is a pure function of its arguments and of the `random.Random` it is given.
"""

import random
from collections.abc import Sequence
from typing import TypeVar

import msgspec

__all__ = [
    "BRANDS",
    "CATEGORIES",
    "COLORS",
    "STARS",
    "USES",
    "Goal",
    "Item",
    "make_catalogue",
    "make_goal",
    "violations",
]

CATEGORIES = ("backpack", "jacket", "bottle", "lamp", "watch", "tent", "hat", "blanket")
USES = ("hiking", "running", "cycling", "camping", "travel", "school")
COLORS = ("red", "blue", "green", "black", "white", "yellow")
BRANDS = ("Norda", "Kelvo", "Tarnix", "Sumla", "Pirello", "Vesk")
STARS = {"three": 3, "four": 4}
"""Minimum ratings as the task spells them: enough that the same 3.5 is fine for one task and not for another."""

RELEVANT = 4
DECOYS = 2
BRAND_SHARE = 0.25
"""Share of goals that also name a brand."""
TWO_FAULTS_SHARE = 0.3
"""Share of unsuitable items for which two faults are drawn, often different ones; one is a near miss to be noticed."""

TWO_GOOD_SHARE = 0.3
"""Share of catalogues with two items that meet the goal instead of one."""
FAULT_WEIGHTS = {"price": 2, "rating": 2, "color": 1, "brand": 1}
"""How often each fault occurs. Brands show in titles and selecting tells of colours, so those are easier to notice."""

T = TypeVar("T")


class Item(msgspec.Struct, frozen=True):
    """One thing for sale. Title words are visible in search results; the rest only on its own page."""

    id: str
    brand: str
    use: str
    category: str
    price: int
    """Whole dollars, two digits."""
    rating: float
    """Stars from 1.5 to 5.0 in tenths."""
    colors: tuple[str, ...]

    @property
    def title(self) -> str:
        """The words a search sees and shows."""
        return f"{self.brand} {self.use} {self.category}"


class Goal(msgspec.Struct, frozen=True):
    """What to buy."""

    category: str
    use: str
    color: str
    max_price: int
    """Dollars; the price must be strictly lower."""
    min_rating: int
    """Stars; the rating must not be lower."""
    brand: str | None = None


def violations(goal: Goal, item: Item) -> tuple[str, ...]:
    """Return the names of the constraints `item` does not meet, in the order the task names them."""
    met = {
        "color": goal.color in item.colors,
        "brand": goal.brand is None or item.brand == goal.brand,
        "use": item.use == goal.use,
        "category": item.category == goal.category,
        "price": item.price < goal.max_price,
        "rating": item.rating >= goal.min_rating,
    }
    return tuple(name for name, holds in met.items() if not holds)


def make_goal(rng: random.Random) -> Goal:
    """Draw a goal. Budgets are tens and prices have two digits: the tens digit decides."""
    return Goal(
        category=rng.choice(CATEGORIES),
        use=rng.choice(USES),
        color=rng.choice(COLORS),
        max_price=10 * rng.randint(3, 9),
        min_rating=rng.choice(tuple(STARS.values())),
        brand=rng.choice(BRANDS) if rng.random() < BRAND_SHARE else None,
    )


def make_catalogue(goal: Goal, rng: random.Random) -> tuple[Item, ...]:
    """Return four relevant items, one or two of which meet the goal, and two decoys, in random order."""
    good = 2 if rng.random() < TWO_GOOD_SHARE else 1
    faults = [frozenset[str]()] * good + [_draw_faults(goal, rng) for _ in range(RELEVANT - good)]
    kinds = [(goal.use, goal.category, fault) for fault in faults]
    kinds.append((_other(USES, goal.use, rng), goal.category, _maybe_faults(goal, rng)))
    kinds.append((goal.use, _other(CATEGORIES, goal.category, rng), _maybe_faults(goal, rng)))
    rng.shuffle(kinds)
    return tuple(
        _make_item(f"item_{n}", use, category, goal, fault, rng) for n, (use, category, fault) in enumerate(kinds, 1)
    )


def _draw_faults(goal: Goal, rng: random.Random) -> frozenset[str]:
    weights = {kind: weight for kind, weight in FAULT_WEIGHTS.items() if kind != "brand" or goal.brand}
    faults = rng.choices(list(weights), list(weights.values()), k=2 if rng.random() < TWO_FAULTS_SHARE else 1)
    return frozenset(faults)


def _maybe_faults(goal: Goal, rng: random.Random) -> frozenset[str]:
    """Half of the decoys are perfect apart from what they are: only the title gives them away."""
    return _draw_faults(goal, rng) if rng.random() < 0.5 else frozenset()


def _make_item(item_id: str, use: str, category: str, goal: Goal, faults: frozenset[str], rng: random.Random) -> Item:
    price = rng.randint(goal.max_price, 99) if "price" in faults else rng.randint(10, goal.max_price - 1)
    worst, best = ((goal.min_rating - 1.5) * 10, goal.min_rating * 10 - 1) if "rating" in faults else (
        goal.min_rating * 10, 50)  # fmt: skip
    colors = rng.sample([c for c in COLORS if c != goal.color], rng.choice((1, 2)))
    if "color" in faults:
        colors += rng.sample([c for c in COLORS if c != goal.color and c not in colors], rng.choice((0, 1)))
    else:
        colors.insert(rng.randint(0, len(colors)), goal.color)
    if goal.brand is None:
        brand = rng.choice(BRANDS)
    else:
        brand = _other(BRANDS, goal.brand, rng) if "brand" in faults else goal.brand
    return Item(item_id, brand, use, category, price, rng.randint(int(worst), int(best)) / 10, tuple(colors))


def _other(options: Sequence[T], excluded: T, rng: random.Random) -> T:
    return rng.choice([option for option in options if option != excluded])
