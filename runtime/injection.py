"""Actions put into an episode by something other than the policy, to bring it into states it would seldom see."""

from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import TypeAlias

import msgspec

from turngate.envs.base import Action
from turngate.runtime.answers import check_action, writable
from turngate.runtime.errors import ConfigError, ToolError
from turngate.runtime.seeds import derive_seed
from turngate.runtime.types import Message

__all__ = ["Actor", "Injection"]

Actor: TypeAlias = Callable[[Sequence[Message], int], Awaitable[str | Action]]
"""(messages that the model would be shown, seed) -> what is done instead of asking it: a scripted or random agent, or
the same model at a higher temperature through an endpoint of its own. The turn deadline bounds it."""


class Injection(msgspec.Struct, frozen=True):
    """Lets `actor` act in the policy's place now and then. Its actions are context to the policy: no loss on them."""

    probability: float
    """Of each turn, while there may be more."""
    actor: Actor
    max_per_episode: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ConfigError(f"probability must be between 0 and 1: got {self.probability} (Injection)")
        if self.max_per_episode < 1:
            raise ConfigError(f"max_per_episode must be 1 or more: got {self.max_per_episode} (Injection)")

    def is_due(self, seed: int, turn: int, injected: int) -> bool:
        """Return whether turn `turn` of the rollout with this seed is injected, after `injected` were already."""
        if injected >= self.max_per_episode:
            return False
        return Random(derive_seed(seed, "injection", turn)).random() < self.probability

    async def act(self, shown: Sequence[Message], seed: int, turn: int) -> Action:
        """Return the actor's action. Raises: ToolError: it is none."""
        said = await self.actor(tuple(shown), derive_seed(seed, "injected action", turn))
        action = Action(writable(said)) if isinstance(said, str) else said
        if type(action) is not Action or type(action.text) is not str:
            raise ToolError(f"injected action must be a str or an Action: got {type(said).__name__} ({self.actor!r})")
        check_action(action, f"{self.actor!r}")
        return action
