"""The shop as a synchronous state machine: one call per action, no I/O. Both environments and the scripts share it."""

import random

import msgspec

from turngate.envs.base import End, Observation, Step, Task
from turngate.envs.shopping.catalogue import COLORS, Goal, Item, violations
from turngate.envs.shopping.grammar import Command, parse_command
from turngate.envs.shopping.tasks import ShopTask

__all__ = ["MAX_INVALID", "PAGE_SIZE", "Shop", "item_page"]

PAGE_SIZE = 4
MAX_INVALID = 3
"""Invalid actions that end the episode. Ending at the first teaches nothing about repairing; never ending, loops."""
RELEVANCE_NOISE = 0.35
"""Standard deviation beside 1 per matched title word: one pair in 45 of right and nearly right comes out reversed."""


def item_page(item: Item) -> str:
    """Return what an item's own page says."""
    return f"Price: ${item.price}. Rating: {item.rating:.1f}. Available colors: {', '.join(item.colors)}."


class _State(msgspec.Struct):
    """Everything that makes an episode resume exactly, except luck."""

    task: ShopTask
    ranking: list[str] = []
    """Ids the last search found, best first."""
    opened: list[str] = []
    """Ids opened so far, in order of first opening."""
    current: str | None = None
    """The item whose page is open."""
    color: str | None = None
    """The colour selected on the open page."""
    turns: int = 0
    invalid: int = 0
    end: End | None = None


class Shop:
    """One shopping episode.

    Mutable state: `_state` (what a snapshot holds) and `_rng` (the future's luck: the noise of search relevance).
    """

    def __init__(self, task: Task, seed: int) -> None:
        """Open the shop. Raises msgspec.ValidationError when `task.data` is not a shopping task."""
        self._reset(_State(msgspec.convert(task.data, ShopTask)), seed)

    def _reset(self, state: _State, seed: int) -> None:
        self._state = state
        self._items = {item.id: item for item in state.task.items}
        self._rng = random.Random(f"shopping luck {seed}")

    @classmethod
    def restored(cls, data: bytes, seed: int) -> "Shop":
        """Return a shop in the state `to_bytes` saved, with luck from `seed`."""
        shop = cls.__new__(cls)
        shop._reset(msgspec.msgpack.decode(data, type=_State), seed)
        return shop

    def to_bytes(self) -> bytes:
        """Return the state without its luck."""
        return msgspec.msgpack.encode(self._state)

    @property
    def goal(self) -> Goal:
        """What is to be bought."""
        return self._state.task.goal

    @property
    def end(self) -> End | None:
        """How the episode ended, None while it goes on."""
        return self._state.end

    @property
    def turns(self) -> int:
        """Actions taken so far."""
        return self._state.turns

    def listed(self) -> list[str]:
        """Return the ids on the results page. Opened items leave it until none other is left: no dead ends."""
        fresh = [item for item in self._state.ranking if item not in self._state.opened]
        return (fresh or self._state.ranking)[:PAGE_SIZE]

    def act(self, text: str) -> Step:
        """Execute an action given as text."""
        return self.do(parse_command(text))

    def do(self, command: Command | None) -> Step:
        """Execute a command; None stands for an action that could not be understood."""
        state = self._state
        if state.end is not None:
            return Step(Observation("The episode is over."), end=state.end, valid=False, state=self.describe())
        problem = self._refusal(command)
        state.turns += 1
        if command is None or problem is not None:
            state.invalid += 1
            answer = f"Invalid: {problem}."
            if state.invalid >= MAX_INVALID:
                state.end = End.failure
        else:
            answer = self._execute(command)
        if state.end is None and state.task.max_turns is not None and state.turns >= state.task.max_turns:
            state.end = End.budget
        rewards = {} if state.end is None else {"outcome": 1.0 if state.end is End.success else 0.0}
        return Step(Observation(answer), rewards, state.end, valid=problem is None, state=self.describe())

    def describe(self) -> dict[str, object]:
        """Return the hidden state in words: the open item, its violated constraints, and the progress so far."""
        state = self._state
        item = self._items[state.current] if state.current else None
        return {
            "open": state.current,
            "violates": [] if item is None else list(violations(self.goal, item)),
            "selected": state.color,
            "opened": list(state.opened),
            "wrong_opened": [i for i in state.opened if violations(self.goal, self._items[i])],
            "turns": state.turns,
            "invalid": state.invalid,
        }

    def _refusal(self, command: Command | None) -> str | None:
        """Return why a command makes no sense here, or None when it does."""
        state = self._state
        match command:
            case None:
                return "unknown action"
            case Command("search", query):
                return None if query else "empty search"
            case Command("back"):
                return None if state.current else "no page to go back to"
            case Command("click", item):
                if state.current:
                    return "go back first"
                return None if item in self.listed() or item in state.opened else "no such item listed"
            case Command("select", color):
                if state.current is None:
                    return "open an item first"
                return None if color in COLORS else "no such color"
            case Command("buy", item):
                if state.current is None:
                    return "open an item first"
                return None if item == state.current else "another item is open"
            case _:
                return "unknown action"

    def _execute(self, command: Command) -> str:
        state = self._state
        match command.verb:
            case "search":
                state.ranking = self._rank(command.argument)
                state.current = state.color = None
                return self._results()
            case "back":
                state.current = state.color = None
                return self._results()
            case "click":
                state.current = command.argument
                if command.argument not in state.opened:
                    state.opened.append(command.argument)
                return item_page(self._items[command.argument])
            case "select":
                return self._select(self._open_item(), command.argument)
            case _:
                return self._buy(self._open_item())

    def _open_item(self) -> Item:
        assert self._state.current is not None  # checked by _refusal
        return self._items[self._state.current]

    def _rank(self, query: str) -> list[str]:
        """Rank items by title words in the query, plus noise. Titles hold no colours or prices."""
        words = set(query.lower().split())
        matches = {item.id: len(words & set(item.title.lower().split())) for item in self._items.values()}
        scores = {item: hits + self._rng.gauss(0, RELEVANCE_NOISE) for item, hits in matches.items() if hits}
        return sorted(scores, key=lambda item: -scores[item])

    def _results(self) -> str:
        if not self._state.ranking:
            return "No results."
        return f"Results: {'; '.join(f'{item} {self._items[item].title}' for item in self.listed())}."

    def _select(self, item: Item, color: str) -> str:
        if color not in item.colors:
            return f"{color.capitalize()} is not available."
        self._state.color = color
        return f"{color.capitalize()} selected. Price: ${item.price}."

    def _buy(self, item: Item) -> str:
        """Grade sharply: every constraint, and the wanted colour selected."""
        right = not violations(self.goal, item) and self._state.color == self.goal.color
        self._state.end = End.success if right else End.failure
        return f"Bought {item.id}."
