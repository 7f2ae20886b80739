"""Small environments for tests: luck, an echo, and ones that break or hang where they are told to."""

import asyncio
import random

import msgspec

from turngate.envs.base import Action, End, Observation, Snapshot, Step, Task

__all__ = ["CoinFlipEnv", "EchoEnv", "HangingEnv", "RaisingEnv"]


class CoinFlipEnv:
    """Guess coins: `heads` or `tails`, `flips` times; `outcome` is 1 if the last guess is right. All luck, snapshots.

    Mutable state: `flipped` (coins so far), `_rng` (the future's luck), `closed` (calls of `aclose`).
    """

    kind = "turngate.testing.coin_flip"

    def __init__(self, flips: int = 3) -> None:
        self.flips = flips
        self.flipped: list[str] = []
        self.closed = 0
        self._rng = random.Random()

    async def reset(self, task: Task, seed: int) -> Observation:
        """Start over with luck from `seed`."""
        self.flipped, self._rng = [], random.Random(f"coin {seed}")
        return Observation(task.prompt or "Heads or tails?")

    async def step(self, action: Action) -> Step:
        """Flip a coin and compare."""
        if action.text not in ("heads", "tails"):
            return Step(Observation("Say heads or tails."), valid=False)
        coin = self._rng.choice(("heads", "tails"))
        self.flipped.append(coin)
        right = coin == action.text
        state = {"flipped": list(self.flipped)}
        if len(self.flipped) < self.flips:
            return Step(Observation(f"It was {coin}."), {"luck": float(right)}, state=state)
        end = End.success if right else End.failure
        return Step(Observation(f"It was {coin}."), {"outcome": float(right)}, end, state=state)

    async def aclose(self) -> None:
        """Count the call."""
        self.closed += 1

    async def snapshot(self) -> Snapshot:
        """Return the coins so far."""
        return Snapshot(self.kind, msgspec.json.encode((self.flips, self.flipped)))

    async def restore(self, snapshot: Snapshot, seed: int) -> None:
        """Return to `snapshot`; coming coins derive from `seed`."""
        if snapshot.kind != self.kind:
            raise ValueError(f"snapshot must be of kind {self.kind!r}: got {snapshot.kind!r}")
        self.flips, self.flipped = msgspec.json.decode(snapshot.data, type=tuple[int, list[str]])
        self._rng = random.Random(f"coin {seed}")


class EchoEnv:
    """Answers every action with its own text and ends in success after `turns` of them. `closed` counts `aclose`."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns
        self.steps = 0
        self.closed = 0

    async def reset(self, task: Task, seed: int) -> Observation:
        """Answer the task's prompt."""
        self.steps = 0
        return Observation(task.prompt or "Say something.")

    async def step(self, action: Action) -> Step:
        """Echo."""
        self.steps += 1
        last = self.steps >= self.turns
        return Step(Observation(action.text), {"outcome": 1.0} if last else {}, End.success if last else None)

    async def aclose(self) -> None:
        """Count the call."""
        self.closed += 1


class RaisingEnv(EchoEnv):
    """An echo that raises at `at`: "reset", "aclose", or the number of a step from 0."""

    def __init__(self, at: str | int = 0, turns: int = 3, error: Exception | None = None) -> None:
        super().__init__(turns)
        self.at = at
        self.error = error or RuntimeError("the environment broke")

    async def reset(self, task: Task, seed: int) -> Observation:
        """Answer or break."""
        await self._break_if(self.at == "reset")
        return await super().reset(task, seed)

    async def step(self, action: Action) -> Step:
        """Echo or break."""
        await self._break_if(self.at == self.steps)
        return await super().step(action)

    async def aclose(self) -> None:
        """Count the call, and break if told to."""
        await super().aclose()
        await self._break_if(self.at == "aclose")

    async def _break_if(self, due: bool) -> None:
        if due:
            raise self.error


class HangingEnv(RaisingEnv):
    """An echo that never answers at `at`, until cancelled."""

    async def _break_if(self, due: bool) -> None:
        if due:
            await asyncio.Event().wait()
