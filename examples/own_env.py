"""A new environment and an agent trained in it: each animal's lock has its own digit, and two tries are allowed."""

import asyncio
import random
import tempfile
from pathlib import Path

from turngate.envs import Action, End, Observation, Step, Task
from turngate.learners import GRPO, CloningConfig, clone
from turngate.runtime import Runtime, show_progress, train
from turngate.runtime.engine import Engine

ANIMALS = ["fox", "owl", "bear", "wolf", "hare", "deer", "seal", "crow"]


class Lock:
    async def reset(self, task: Task, seed: int) -> Observation:
        self.digit, self.left = task.data["digit"], 2
        return Observation(task.prompt)

    async def step(self, action: Action) -> Step:
        self.left -= 1
        if action.text == self.digit:
            return Step(Observation("open"), {"outcome": 1.0}, End.success)
        return Step(Observation("no"), end=None if self.left else End.failure)

    async def aclose(self) -> None: ...


async def main(folder: Path) -> None:
    tasks = [Task(f"{a}/{n}", a, {"digit": str(1 + i)}) for i, a in enumerate(ANIMALS) for n in range(32)]
    script = (("user", ANIMALS), ("assistant", "12345678"), ("user", ["no"]), ("assistant", "12345678"))
    demos = [[(role, random.choice(words)) for role, words in script] for _ in range(500)]
    model = clone(demos, folder / "model", config=CloningConfig(steps=60))  # it can write a digit, any digit
    async with Engine.start(model) as engine:
        runtime = Runtime(engine.endpoint)
        show_progress(runtime.events, every=10)
        learner = GRPO(model, off_policy="decoupled", updates=100)
        await train(runtime, Lock, tasks, learner=learner, updates=100, run_dir=folder / "run")
        print(await runtime.evaluate(Lock, tasks))


if __name__ == "__main__":
    asyncio.run(main(Path(tempfile.mkdtemp())))
