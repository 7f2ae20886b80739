"""Did the agent recover from a mistake? Pure functions over the `Step.state` of each turn."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

__all__ = ["Recovery", "compute_recovery", "has_opened_wrong_item"]


class Recovery(msgspec.Struct, frozen=True):
    """How episodes went in which a mistake was made."""

    wrong: int
    """Episodes in which an item was opened that violates a constraint."""
    recovered: int
    """Those of them that still ended in success."""

    @property
    def rate(self) -> float:
        """Success after a wrong item; NaN when no episode opened one."""
        return self.recovered / self.wrong if self.wrong else float("nan")


def has_opened_wrong_item(states: Iterable[Mapping[str, Any] | None]) -> bool:
    """Return whether any step of an episode had an item open that violates a constraint."""
    return any(state is not None and bool(state.get("violates")) for state in states)


def compute_recovery(episodes: Iterable[tuple[Iterable[Mapping[str, Any] | None], float]]) -> Recovery:
    """Count recoveries over (states of the steps, outcome) pairs; an outcome above 0 is a success."""
    outcomes = [outcome for states, outcome in episodes if has_opened_wrong_item(states)]
    return Recovery(len(outcomes), sum(1 for outcome in outcomes if outcome > 0))
