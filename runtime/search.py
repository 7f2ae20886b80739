"""The accounts of a search tree over states: who was visited, what it paid, where to go next.

    StateNode -- draws of the policy --> ActionNode -- executions --> outcomes: StateNode, or the end

Pure bookkeeping, which no I/O happens in: `descend` says where a simulation leaves the tree, the caller plays on from
there, `grow` adds what was played, `backup` what it paid. `examples/search_shopping.py` is such a caller.

Equal actions share one node and their visits add up; totals are sums, divided by visits once. Executing an action
again may lead elsewhere: outcomes are kept apart, so that no single piece of luck stands for an action.
"""

import math
from collections.abc import Sequence
from random import Random
from typing import Generic, NamedTuple, TypeVar

from turngate.envs.base import Action
from turngate.runtime.guided_types import action_key

__all__ = [
    "ActionNode",
    "Leaf",
    "Outcome",
    "Played",
    "StateNode",
    "action_key",
    "backup",
    "descend",
    "uct_scores",
]

S = TypeVar("S")


def uct_scores(totals_A: Sequence[float], visits_A: Sequence[int], *, exploration: float = math.sqrt(2)) -> list[float]:
    """Return mean + c sqrt(ln N / n) of each action of a node, shape (A,); infinity for one never tried.

    Totals are sums of returns: they are divided by visits once, here. Equal actions share one entry, their visits add.
    N is the sum of all visits.
    Source: Kocsis & Szepesvári 2006, "Bandit based Monte-Carlo planning".
    """
    parent = sum(visits_A)
    return [
        total / visits + exploration * math.sqrt(math.log(parent) / visits) if visits else math.inf
        for total, visits in zip(totals_A, visits_A, strict=True)
    ]


class Played(NamedTuple, Generic[S]):
    """One step of a play-out."""

    action: Action
    reward: float
    key: bytes
    """Equal for equal states after it, such as the bytes of a snapshot."""
    state: S | None
    """To play on from after it; None when the episode ended, or is not to be gone on with."""


class Outcome(Generic[S]):
    """What executing an action led to, and how often. `node` is None where nothing follows."""

    __slots__ = ("count", "node", "reward")

    def __init__(self, reward: float, node: "StateNode[S] | None") -> None:
        self.reward, self.node = reward, node
        self.count = 0


class ActionNode(Generic[S]):
    """One action in one state, however often it was drawn.

    Mutable state: `draws` of the policy, `visits` of simulations, `total` of their returns from here on, `outcomes`.
    """

    __slots__ = ("action", "draws", "outcomes", "total", "visits")

    def __init__(self, action: Action) -> None:
        self.action = action
        self.draws = self.visits = 0
        self.total = 0.0
        self.outcomes: dict[tuple[float, bytes], Outcome[S]] = {}

    def __repr__(self) -> str:
        return f"<ActionNode {self.action.text!r:.40}, {self.visits} visits, mean {self.mean:.3f}>"

    @property
    def mean(self) -> float:
        """Mean return from here on: the sum, divided by visits once; NaN without a visit."""
        return self.total / self.visits if self.visits else math.nan

    @property
    def executions(self) -> int:
        """How often the environment executed it."""
        return sum(outcome.count for outcome in self.outcomes.values())

    def wants_execution(self, widening: float) -> bool:
        """Whether to execute it again, in place of going on from an outcome: when visits ** widening asks for more."""
        return self.executions < max(1.0, math.pow(self.visits, widening))

    def draw_outcome(self, random: Random) -> Outcome[S]:
        """Return an outcome as often as it came about."""
        outcomes = list(self.outcomes.values())
        (outcome,) = random.choices(outcomes, [outcome.count for outcome in outcomes])
        return outcome


class StateNode(Generic[S]):
    """A state that can be played on from, with the actions tried in it, by key, in the order they came."""

    __slots__ = ("actions", "state")

    def __init__(self, state: S) -> None:
        self.state = state
        self.actions: dict[object, ActionNode[S]] = {}

    def __repr__(self) -> str:
        return f"<StateNode {len(self.actions)} actions, {self.draws} draws, {self.visits} visits>"

    @property
    def visits(self) -> int:
        """Simulations that acted here."""
        return sum(node.visits for node in self.actions.values())

    @property
    def draws(self) -> int:
        """Actions that the policy has drawn here, duplicates counted."""
        return sum(node.draws for node in self.actions.values())

    def add(self, action: Action, *, draws: int = 1) -> ActionNode[S]:
        """Count draws of an action and return its node, the same for equal actions."""
        node = self.actions.setdefault(action_key(action), ActionNode(action))
        node.draws += draws
        return node

    def select(self, exploration: float) -> ActionNode[S]:
        """Return the action with the highest UCT score, ties to the one drawn more often, then to the first."""
        nodes = list(self.actions.values())
        scores = uct_scores([n.total for n in nodes], [n.visits for n in nodes], exploration=exploration)
        return max(zip(scores, nodes, strict=True), key=lambda pair: (pair[0], pair[1].draws))[1]

    def best(self) -> ActionNode[S]:
        """Return the most visited action, ties by mean: a high mean of few visits is mostly luck."""
        return max(self.actions.values(), key=lambda node: (node.visits, node.mean if node.visits else -math.inf))

    def grow(self, played: Sequence[Played[S]], *, first_is_drawn: bool = True) -> list[tuple[ActionNode[S], float]]:
        """Add a play-out from this state to the tree and return its path: actions, and what each was paid.

        Args: first_is_drawn: False when the search chose the first action; all others are draws of the policy.
        """
        path: list[tuple[ActionNode[S], float]] = []
        node: StateNode[S] | None = self
        for index, step in enumerate(played):
            if node is None:
                break
            action = node.add(step.action, draws=int(index > 0 or first_is_drawn))
            path.append((action, step.reward))
            key = step.reward, step.key
            if key not in action.outcomes:
                after = StateNode(step.state) if step.state is not None else None
                action.outcomes[key] = Outcome(step.reward, after)
            action.outcomes[key].count += 1
            node = action.outcomes[key].node
        return path


class Leaf(NamedTuple, Generic[S]):
    """Where a simulation leaves the tree."""

    path: list[tuple[ActionNode[S], float]]
    """Actions chosen on the way, and what each was paid."""
    node: StateNode[S] | None
    """The state to play on from; None when the episode came to its end inside the tree."""
    action: ActionNode[S] | None
    """What to execute there; None leaves it to the policy."""


def descend(
    root: StateNode[S],
    *,
    draws: int,
    random: Random,
    exploration: float = math.sqrt(2),
    widening: float = 0.5,
) -> Leaf[S]:
    """Walk down by UCT to where something is to be played.

    In a state with fewer than `draws` actions drawn the policy draws another one. An action is executed again while
    that was done less often than visits ** widening; between executions its outcomes are gone on from, as often as
    they came about. Args: widening: 0 executes once, which is right only where steps have no luck.
    Source of the widening: Couëtoux et al. 2011, "Continuous upper confidence trees".
    Raises: ValueError: nothing is to be drawn.
    """
    if draws < 1:
        raise ValueError(f"draws must be 1 or more: got {draws}; a state without actions leads nowhere")
    path: list[tuple[ActionNode[S], float]] = []
    node: StateNode[S] | None = root
    while node is not None:
        if node.draws < draws:
            return Leaf(path, node, None)
        action = node.select(exploration)
        if action.wants_execution(widening):
            return Leaf(path, node, action)
        outcome = action.draw_outcome(random)
        path.append((action, outcome.reward))
        node = outcome.node
    return Leaf(path, None, None)


def backup(path: Sequence[tuple[ActionNode[S], float]], *, last_value: float = 0.0, gamma: float = 1.0) -> float:
    """Count a visit of every action on a path, with the return from it on; return that from the first.

    Args: last_value: of the state after the path, when a limit cut the play-out short; 0 after a terminal end.
    Raises: ValueError: a reward or the last value is not finite; nothing is counted then.
    """
    if bad := [one for one in (last_value, *(reward for _, reward in path)) if not math.isfinite(one)]:
        raise ValueError(f"returns must be finite: got {bad[0]}; one that is not would spoil every mean above it")
    value = last_value
    for action, reward in reversed(path):
        value = reward + gamma * value
        action.visits += 1
        action.total += value
    return value
