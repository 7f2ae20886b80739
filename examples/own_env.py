"""A new environment, and an agent trained in it: guess a number from 1 to 8 in three tries, told higher or lower."""

import asyncio
import random
import tempfile
from pathlib import Path

from turngate.envs import Action, End, Observation, Step, Task
from turngate.learners import GRPO, CloningConfig, clone
from turngate.runtime import Runtime, show_progress, train
from turngate.runtime.engine import Engine


class Guess:
    async def reset(self, task: Task, seed: int) -> Observation:
        self.secret, self.left = task.data["secret"], 3
        return Observation("guess")

    async def step(self, action: Action) -> Step:
        self.left -= 1
        if action.text == str(self.secret):
            return Step(Observation("right"), {"outcome": 1.0}, End.success)
        answer = Observation("higher" if action.text < str(self.secret) else "lower")
        return Step(answer, end=None if self.left else End.failure)

    async def aclose(self) -> None: ...


async def main(folder: Path) -> None:
    tasks = [Task(id=f"{n}/{copy}", data={"secret": n}) for n in range(1, 9) for copy in range(32)]
    script = (("user", ["guess", "higher", "lower"]), ("assistant", "12345678")) * 3
    demos = [[(role, random.choice(words)) for role, words in script] for _ in range(500)]
    model = clone(demos, folder / "model", config=CloningConfig(steps=60))  # it can write a number, any number
    async with Engine.start(model) as engine:
        runtime = Runtime(engine.endpoint)
        show_progress(runtime.events, every=10)
        await train(runtime, Guess, tasks, learner=GRPO(model, updates=60), updates=60, run_dir=folder / "run")
        print(await runtime.evaluate(Guess, tasks))


if __name__ == "__main__":
    asyncio.run(main(Path(tempfile.mkdtemp())))
