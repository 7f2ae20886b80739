"""The digit game: say the digit that is asked for, a few times in a row."""

import asyncio
from random import Random

from turngate.envs import Action, End, Observation, Step, Task

__all__ = ["DigitGame", "tasks"]


def tasks(count: int, *, turns: int = 3, seed: int = 0) -> list[Task]:
    """Return games of `turns` questions."""
    rng = Random(seed)
    return [Task(f"digits-{seed}-{i}", data={"digits": rng.choices(range(10), k=turns)}) for i in range(count)]


class DigitGame:
    """Asks for one digit a turn, and answers after a pause of its own length, so that episodes interleave."""

    def __init__(self, max_pause_s: float = 0.02) -> None:
        self._max_pause_s = max_pause_s

    async def reset(self, task: Task, seed: int) -> Observation:
        self._left: list[int] = list(task.data["digits"])
        self._share = 1 / len(self._left)
        self._right = 0
        self._rng = Random(seed)
        return self._ask()

    async def step(self, action: Action) -> Step:
        await asyncio.sleep(self._rng.random() * self._max_pause_s)
        is_right = action.text.strip() == str(self._left.pop(0))
        self._right += is_right
        rewards = {"outcome": self._share * is_right}
        if self._left:
            return Step(self._ask(), rewards)
        return Step(Observation(), rewards, End.success if self._right * self._share > 0.99 else End.failure)

    async def aclose(self) -> None:
        pass

    def _ask(self) -> Observation:
        return Observation(f"Say the digit {self._left[0]}.")
