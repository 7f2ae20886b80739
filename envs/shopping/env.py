"""The shop as an environment whose actions are text."""

import asyncio
from collections.abc import Awaitable, Callable

from turngate.envs.base import Action, Observation, Snapshot, Step, Task
from turngate.envs.latency import HeavyTail, compute_latency_s
from turngate.envs.shopping.shop import Shop

__all__ = ["INSTRUCTIONS", "ShoppingEnv"]

INSTRUCTIONS = (
    "You are shopping. Answer with exactly one action per turn and nothing else:\n"
    'search["words"] lists items whose title matches; click["item_1"] opens a listed item; select["red"] chooses a '
    'color of the open item; back returns to the list; buy["item_1"] buys the open item in the selected color and '
    "ends the task. Prices, ratings and colors are shown only on an item's own page."
)
"""System prompt for models that have not been trained on the grammar."""


class ShoppingEnv:
    """Search, open, go back, select a colour, buy. `outcome` is 1 only if everything the task asks for is met.

    Mutable state: `_shop` (the episode) and `_seed` (its luck, also the latency's).
    """

    kind = "turngate.shopping"

    def __init__(
        self,
        *,
        latency_s: float | HeavyTail = 0.0,
        instructions: bool = False,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Make an environment for one episode.

        Args:
            latency_s: seconds each step takes, fixed or drawn per step from the episode's seed.
            instructions: whether the first observation explains the grammar in a system prompt.
            sleep: how to wait; replaced in tests.
        """
        self._latency_s = latency_s
        self._instructions = instructions
        self._sleep = sleep
        self._shop: Shop | None = None
        self._seed = 0

    @property
    def shop(self) -> Shop:
        """The running episode. Raises RuntimeError before `reset`."""
        if self._shop is None:
            raise RuntimeError("step and snapshot must come after reset: no episode is running; call reset first")
        return self._shop

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode; the first observation is the task's sentence."""
        self._shop, self._seed = Shop(task, seed), seed
        return Observation(task.prompt, system=INSTRUCTIONS if self._instructions else "")

    async def step(self, action: Action) -> Step:
        """Execute one action. When cancelled while waiting, the shop is as it was before."""
        await self._wait()
        return self.shop.act(action.text)

    async def aclose(self) -> None:
        """Release the episode."""
        self._shop = None

    async def snapshot(self) -> Snapshot:
        """Return the state as bytes."""
        return Snapshot(self.kind, self.shop.to_bytes())

    async def restore(self, snapshot: Snapshot, seed: int) -> None:
        """Return to `snapshot` with luck from `seed`."""
        if snapshot.kind != self.kind:
            raise ValueError(
                f"snapshot must be of kind {self.kind!r}: got {snapshot.kind!r}; restore it where it is from"
            )
        self._shop, self._seed = Shop.restored(snapshot.data, seed), seed

    async def _wait(self) -> None:
        seconds = compute_latency_s(self._latency_s, self._seed, self.shop.turns)
        if seconds > 0:
            await self._sleep(seconds)
