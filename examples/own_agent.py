"""An agent that somebody already has, on the openai client, trained as it is: its code knows nothing of us.

Each animal's lock has its own digit; the agent may try twice.
"""

import asyncio
import random
import tempfile
from pathlib import Path

from openai import AsyncOpenAI

from turngate.envs import Task
from turngate.learners import GRPO, CloningConfig, clone
from turngate.runtime import Agent, Runtime, Session, show_progress, train
from turngate.runtime.engine import Engine

ANIMALS = ["fox", "owl", "bear", "wolf"]


async def open_lock(client: AsyncOpenAI, animal: str, digit: str) -> bool:
    messages = [{"role": "user", "content": animal}]
    for _ in range(2):
        reply = await client.chat.completions.create(model="gpt-4o", messages=messages)
        said = reply.choices[0].message.content
        if said == digit:
            return True
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "no"}]
    return False


async def agent(session: Session, task: Task) -> float:
    return float(await open_lock(session.openai, task.prompt, task.data["digit"]))


async def main(folder: Path) -> None:
    tasks = [Task(f"{a}/{n}", a, {"digit": str(1 + i)}) for i, a in enumerate(ANIMALS) for n in range(32)]
    script = (("user", ANIMALS), ("assistant", "1234"), ("user", ["no"]), ("assistant", "1234"))
    demos = [[(role, random.choice(words)) for role, words in script] for _ in range(500)]
    model = clone(demos, folder / "model", config=CloningConfig(steps=60))  # it can write a digit, any digit
    async with Engine.start(model) as engine:
        runtime = Runtime(engine.endpoint)
        show_progress(runtime.events, every=10)
        learner = GRPO(model, off_policy="decoupled", updates=40, muon_lr=6e-3, adamw_lr=3e-3)
        run_dir = folder / "run"
        await train(runtime, Agent(agent), tasks, learner=learner, updates=40, run_dir=run_dir, groups_per_batch=8)
        print(await runtime.evaluate(Agent(agent), tasks))


if __name__ == "__main__":
    asyncio.run(main(Path(tempfile.mkdtemp())))
