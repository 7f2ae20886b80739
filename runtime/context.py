"""Context functions c_t = f(h_t): what of the history the model sees next.

A context function is given the history and returns the messages of the next request. It never changes the history,
and whatever it writes (a summary, say) is part of the environment's transition, not an action: no loss falls on it.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

from turngate.runtime.errors import ConfigError
from turngate.runtime.types import Message

__all__ = ["Context", "FullHistory", "History", "Summariser", "full", "last_turns", "summarise", "token_budget"]


class History:
    """All messages of an episode so far; read it, do not change it. One per rollout.

    The head (system prompt and task) comes first, then the turns: each an assistant message and what the environment
    answered. The newest answer is part of the last turn.
    """

    # Changed by the rollout alone: _messages, _starts. Changed by context functions: notes.
    __slots__ = ("_messages", "_starts", "notes")

    def __init__(self, head: Iterable[Message]) -> None:
        """Start with the messages before the first action."""
        self._messages = list(head)
        self._starts = [len(self._messages)]
        self.notes: dict[object, Any] = {}
        """What a context function wants to remember within this rollout, keyed by itself."""

    @classmethod
    def of(cls, messages: Sequence[Message]) -> "History":
        """Return the history that `messages` came from: each assistant message is an action, and starts a turn."""
        starts = [index for index, message in enumerate(messages) if message.role == "assistant"]
        history = cls(messages[: starts[0]] if starts else messages)
        for start, stop in pairwise([*starts, len(messages)]):
            history.append_turn(messages[start], messages[start + 1 : stop])
        return history

    def __repr__(self) -> str:
        return f"<History {len(self._messages)} messages, {self.turns} turns>"

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def turns(self) -> int:
        """Number of actions taken so far."""
        return len(self._starts) - 1

    @property
    def messages(self) -> Sequence[Message]:
        """All messages; a live view, not a copy."""
        return self._messages

    @property
    def head(self) -> Sequence[Message]:
        """The messages before the first action."""
        return self._messages[: self._starts[0]]

    def turn_messages(self, start: int, stop: int | None = None) -> Sequence[Message]:
        """The messages of turns `start` to `stop` (exclusive; to the newest message when None)."""
        last = len(self._messages) if stop is None else self._starts[stop]
        return self._messages[self._starts[start] : last]

    def append_turn(self, action: Message, answer: Iterable[Message]) -> None:
        """Add an action and what the environment answered; for the rollout alone."""
        self._messages.append(action)
        self._messages.extend(answer)
        self._starts.append(len(self._messages))


class Context(Protocol):
    """A context function. One object serves many rollouts at once: it keeps what it must remember in the history's
    `notes`."""

    def __call__(self, history: History, /) -> Sequence[Message] | Awaitable[Sequence[Message]]:
        """Return the messages to send next; the head and the newest turn should be among them."""
        ...


class FullHistory:
    """What `full` returns."""

    def __call__(self, history: History, /) -> Sequence[Message]:
        return history.messages

    def __repr__(self) -> str:
        return "full()"


def full() -> Context:
    """Show everything; costs nothing per turn, and the whole episode stays one token sequence."""
    return FullHistory()


class _LastTurns:
    def __init__(self, turns: int) -> None:
        self._turns = turns

    def __call__(self, history: History, /) -> Sequence[Message]:
        first = history.turns - self._turns
        return history.messages if first <= 0 else [*history.head, *history.turn_messages(first)]

    def __repr__(self) -> str:
        return f"last_turns({self._turns})"


def last_turns(turns: int) -> Context:
    """Show the head and the newest `turns` turns.

    Raises: ConfigError: `turns` is less than 1.
    """
    if turns < 1:
        raise ConfigError(f"last_turns must keep at least one turn: expected >= 1, got {turns}")
    return _LastTurns(turns)


class _Budget:
    """What `token_budget` remembers of a rollout: the count of each message, summed per turn, and where it cut."""

    __slots__ = ("first", "head", "shown", "turns")

    def __init__(self, head: int) -> None:
        self.head = head
        self.turns: list[int] = []
        self.first = 0
        self.shown = head


class _TokenBudget:
    def __init__(self, max_tokens: int, count: Callable[[Message], int], cut_to: int) -> None:
        self._max_tokens, self._count, self._cut_to = max_tokens, count, cut_to

    def __call__(self, history: History, /) -> Sequence[Message]:
        budget: _Budget | None = history.notes.get(self)
        if budget is None:
            budget = history.notes[self] = _Budget(sum(map(self._count, history.head)))
        for turn in range(len(budget.turns), history.turns):
            tokens = sum(map(self._count, history.turn_messages(turn, turn + 1)))
            budget.turns.append(tokens)
            budget.shown += tokens
        if budget.shown > self._max_tokens:
            while budget.shown > self._cut_to and budget.first < history.turns - 1:
                budget.shown -= budget.turns[budget.first]
                budget.first += 1
        return history.messages if budget.first == 0 else [*history.head, *history.turn_messages(budget.first)]

    def __repr__(self) -> str:
        return f"token_budget({self._max_tokens}, {self._count!r}, cut_to={self._cut_to})"


def token_budget(max_tokens: int, count: Callable[[Message], int], *, cut_to: int | None = None) -> Context:
    """Show the head and as many of the newest turns as fit `max_tokens` by `count`; each message is counted once.

    Once over the budget the oldest turns go until at most `cut_to` tokens are shown (default: `max_tokens`). A lower
    `cut_to` cuts seldom and deep, which keeps the server's prefix cache warm and the trajectory in few segments. The
    head and the newest turn always stay, even when they alone are too long.

    Raises: ConfigError: a limit is not positive, or `cut_to` is above `max_tokens`.
    """
    target = max_tokens if cut_to is None else cut_to
    if not 0 < target <= max_tokens:
        raise ConfigError(f"token_budget needs 0 < cut_to <= max_tokens: got cut_to {target}, max_tokens {max_tokens}")
    return _TokenBudget(max_tokens, count, target)


Summariser: TypeAlias = Callable[[str, Sequence[Message]], "str | Awaitable[str]"]
"""(summary so far, messages to fold in) -> new summary; synchronous or not."""


class _Summary:
    """What `summarise` remembers of a rollout: the summary, and how many turns went into it."""

    __slots__ = ("folded", "text")

    def __init__(self) -> None:
        self.text = ""
        self.folded = 0


class _Summarise:
    def __init__(self, summariser: Summariser, after_turns: int, keep_turns: int) -> None:
        self._summariser, self._after_turns, self._keep_turns = summariser, after_turns, keep_turns

    async def __call__(self, history: History, /) -> Sequence[Message]:
        summary: _Summary = history.notes.get(self) or history.notes.setdefault(self, _Summary())
        if history.turns - summary.folded > self._after_turns:
            stop = history.turns - self._keep_turns
            text = self._summariser(summary.text, history.turn_messages(summary.folded, stop))
            # Stored only when complete, so that a cancelled or failed summary folds nothing away.
            summary.text = await text if inspect.isawaitable(text) else text
            summary.folded = stop
        if summary.folded == 0:
            return history.messages
        note = Message("user", f"Summary of the earlier turns:\n{summary.text}")
        return [*history.head, note, *history.turn_messages(summary.folded)]

    def __repr__(self) -> str:
        return f"summarise({self._summariser!r}, after_turns={self._after_turns}, keep_turns={self._keep_turns})"


def summarise(summariser: Summariser, *, after_turns: int, keep_turns: int = 1) -> Context:
    """Show the head, a summary of the older turns, and the newer turns word for word.

    Once more than `after_turns` turns stand unsummarised, all but the newest `keep_turns` of them are folded into the
    summary. `summariser(summary_so_far, messages)` may be a coroutine function; the turn deadline bounds it.

    Raises: ConfigError: not 1 <= keep_turns <= after_turns.
    """
    if not 1 <= keep_turns <= after_turns:
        raise ConfigError(
            f"summarise needs 1 <= keep_turns <= after_turns: got keep_turns {keep_turns}, after_turns {after_turns}"
        )
    return _Summarise(summariser, after_turns, keep_turns)
