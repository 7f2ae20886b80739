"""Which actions of an episode were invalid or repeated: pure functions over what the agent saw and did.

An environment may bring detectors of its own, any callable of the same form: one whose observations hold a step counter
never shows the same observation twice, and another may count near misses as repeats.
"""

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from turngate.envs.base import Action

__all__ = ["Detector", "ObservedAction", "action_key", "invalid_actions", "repeated_actions", "repeated_pairs"]


class ObservedAction(NamedTuple):
    """One turn, as far as a detector needs it."""

    observation: str
    """What the environment had said last when the agent acted."""
    action: Action
    valid: bool = True
    """The environment's own word (`Step.valid`)."""


Detector: TypeAlias = Callable[[Sequence[ObservedAction]], Sequence[bool]]
"""Says for each action of one episode whether it is one of those looked for. Must be a function of its argument alone;
learners run in a process of their own, so it must be importable there too."""


def invalid_actions(steps: Sequence[ObservedAction]) -> list[bool]:
    """Return for each action whether the environment could make nothing of it."""
    return [not step.valid for step in steps]


def repeated_actions(steps: Sequence[ObservedAction]) -> list[bool]:
    """Return for each action whether the same was done after the same observation before, within this episode.

    The same action after a different observation is no repeat: searching again on another page is progress.
    """
    return repeated_pairs((step.observation, action_key(step.action)) for step in steps)


def repeated_pairs(pairs: Iterable[tuple[Hashable, Hashable]]) -> list[bool]:
    """Return for each (observation before, action) pair whether it occurred before."""
    seen: set[tuple[Hashable, Hashable]] = set()
    flags: list[bool] = []
    for pair in pairs:
        flags.append(pair in seen)
        seen.add(pair)
    return flags


def action_key(action: Action) -> Hashable:
    """Return what two spellings of one action share.

    When there are tool calls they are the action, and the text beside them is talk. Call ids are left out, and JSON
    arguments are compared by value: otherwise one more space would make any repeat look new.
    """
    if action.tool_calls:
        return tuple((call.name, _canonical(call.arguments)) for call in action.tool_calls)
    return action.text.strip()


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):  # a model wrote it
        return arguments.strip()
