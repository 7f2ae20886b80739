"""Scripted shoppers: they read what an agent would read and answer with action texts.

The expert makes no mistakes. The noisy one overlooks half of what is wrong, searches vaguely, clicks decoys, slips,
and repairs what the shop refuses: demonstrations for a warm start that leaves room, and reason, to improve.
"""

import random
import re

import msgspec

from turngate.envs.shopping.catalogue import COLORS, Goal
from turngate.envs.shopping.grammar import Command, format_command
from turngate.envs.shopping.tasks import parse_goal

__all__ = ["EXPERT", "NOISY", "Noise", "Shopper"]

_LISTED = re.compile(r"(item_\d+) (\w+) (\w+) (\w+)")
_PAGE = re.compile(r"Price: \$(\d+)\. Rating: ([\d.]+)\. Available colors: ([\w, ]+)\.")


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """Probabilities of each kind of mistake, per opportunity."""

    miss: float = 0.0
    """A violated constraint on an open page is overlooked."""
    vague: float = 0.0
    """A search leaves out words."""
    decoy: float = 0.0
    """Any listed item is opened, instead of the first that fits."""
    doubt: float = 0.0
    """A fitting item is left."""
    wrong_color: float = 0.0
    """Another colour is selected first, and then put right."""
    hasty: float = 0.0
    """An item is bought before a colour is selected."""
    invalid: float = 0.0
    """An action that makes no sense here comes first; the shop refuses it, and the right one follows."""


EXPERT = Noise()
NOISY = Noise(miss=0.5, vague=0.25, decoy=0.1, doubt=0.05, wrong_color=0.05, hasty=0.02, invalid=0.04)


class Shopper:
    """One scripted shopper for one episode: `act(observation text) -> action text`, the goal sentence first.

    Mutable state: `_item` (the item last opened), `_rejected`, `_liked` (fitting items it walked away from),
    `_command` (what it last meant to do, repeated when the shop refused something else).
    """

    def __init__(self, noise: Noise, rng: random.Random) -> None:
        self._noise = noise
        self._rng = rng
        self._goal: Goal | None = None
        self._item = ""
        self._rejected: set[str] = set()
        self._liked: list[str] = []
        self._command = Command("back")

    def act(self, observation: str) -> str:
        """Return the next action."""
        if self._goal is None:
            self._goal = parse_goal(observation)
            self._command = self._search(self._goal)
        elif not observation.startswith("Invalid:"):
            self._command = self._decide(self._goal, observation)
        if self._rng.random() < self._noise.invalid:
            return self._nonsense(observation)
        if self._command.verb == "click":
            self._item = self._command.argument
        return format_command(self._command)

    def _decide(self, goal: Goal, observation: str) -> Command:
        page = _PAGE.fullmatch(observation)
        if page is not None:
            return self._judge(goal, int(page[1]), float(page[2]), page[3].split(", "))
        if " selected." in observation:
            chosen = observation.split()[0].lower()
            return Command("buy", self._item) if chosen == goal.color else Command("select", goal.color)
        if observation.endswith("is not available."):
            self._rejected.add(self._item)
            return Command("back")
        listed = _LISTED.findall(observation)
        return self._choose(goal, listed) if listed else self._search(goal, precise=True)

    def _search(self, goal: Goal, precise: bool = False) -> Command:
        words: list[str | None] = [goal.color, goal.brand, goal.use, goal.category]
        if not precise and self._rng.random() < self._noise.vague:
            words = self._rng.choice(_vague_words(goal))
        return Command("search", " ".join(word for word in words if word))

    def _choose(self, goal: Goal, listed: list[tuple[str, str, str, str]]) -> Command:
        """Open the first listed item whose title fits."""
        if self._rng.random() < self._noise.decoy:
            return Command("click", self._rng.choice(listed)[0])
        for item, brand, use, category in listed:
            fits = use == goal.use and category == goal.category and goal.brand in (None, brand)
            if fits and item not in self._rejected:
                return Command("click", item)
        if self._liked:
            return Command("click", self._liked[0])
        # Nothing fits on this page: another search has other luck.
        return self._search(goal, precise=True)

    def _judge(self, goal: Goal, price: int, rating: float, colors: list[str]) -> Command:
        faults = [price >= goal.max_price, rating < goal.min_rating, goal.color not in colors]
        noticed = sum(1 for fault in faults if fault and self._rng.random() >= self._noise.miss)
        if noticed:
            self._rejected.add(self._item)
            return Command("back")
        if self._rng.random() < self._noise.doubt:
            self._liked.append(self._item)
            self._rejected.add(self._item)
            return Command("back")
        if self._rng.random() < self._noise.hasty:
            return Command("buy", self._item)
        if self._rng.random() < self._noise.wrong_color:
            return Command("select", self._rng.choice(colors))
        return Command("select", goal.color)

    def _nonsense(self, observation: str) -> str:
        """Return an action the shop refuses on this page."""
        some_item = f"item_{self._rng.randint(1, 6)}"
        color = self._rng.choice(COLORS)
        broken = [f"click {some_item}", f'buy["{color}"]', f'click["{color}"]', f'search["{color}', f"select {color}"]
        if _PAGE.fullmatch(observation):
            return self._rng.choice([*broken, f'click["{some_item}"]'])
        if observation.startswith("Results:"):
            return self._rng.choice([*broken, "back", f'select["{color}"]', f'buy["{some_item}"]'])
        return self._rng.choice(broken)


def _vague_words(goal: Goal) -> tuple[list[str | None], ...]:
    return [goal.category], [goal.color, goal.category], [goal.use], [goal.use, goal.category]
