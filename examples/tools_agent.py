"""An agent with two tools, on the embedded engine or on any server.

A robot fetches two things: it asks which shelves they lie on, both at once, and fetches from the shelves it was told.
Without `--url` a small policy is cloned from scripted robots first, of which many forget a shelf, and trained until it
does better than they did; with it, the model served there is measured.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import random
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec

from turngate.envs import EnvFactory, Finish, Task, ToolCall, ToolEnv, tool
from turngate.runtime import Endpoint, Limits, Message, Runtime, Sampling, render_transcript

THINGS = ["lamp", "rope", "drill", "tent", "kettle", "ladder", "radio", "spade"]


class Warehouse(ToolEnv):
    """Two things lie on shelves 1 to 9; `outcome` is 1 when exactly their shelves are fetched."""

    async def start(self, task: Task, seed: int) -> str:
        """Fill the shelves."""
        self.shelves: dict[str, int] = task.data["shelves"]
        return task.prompt

    @tool(timeout_s=5)
    async def find(self, thing: Annotated[str, msgspec.Meta(description="one thing")]) -> int | None:
        """Say which shelf a thing lies on."""
        return self.shelves.get(thing)

    @tool
    def fetch(self, shelves: list[int]) -> Finish:
        """Fetch what lies on these shelves. Ends the task."""
        return Finish(float(sorted(shelves) == sorted(self.shelves.values())), text=f"fetched {shelves}")


def make_task(number: int) -> Task:
    """Return a task; equal numbers give equal tasks."""
    rng = random.Random(f"warehouse {number}")
    shelves = {thing: rng.randint(1, 9) for thing in rng.sample(THINGS, 2)}
    return Task(f"warehouse-{number}", f"fetch the {' and the '.join(shelves)}", {"shelves": shelves})


def demonstration(task: Task, *, careless: float = 0.0) -> list[Message]:
    """Return an episode of somebody who knows how, but fetches from one of the shelves alone in a share `careless`."""
    shelves: dict[str, int] = task.data["shelves"]
    finds = [ToolCall(f"c{i}", "find", json.dumps({"thing": thing})) for i, thing in enumerate(shelves)]
    rng, both = random.Random(f"demonstration {task.id}"), list(shelves.values())
    one = rng.choice(both)
    fetched = rng.choice([[one], [one, one]]) if rng.random() < careless else both
    fetch = ToolCall("c2", "fetch", json.dumps({"shelves": fetched}))
    answers = [Message("tool", str(shelf), (), f"c{i}") for i, shelf in enumerate(shelves.values())]
    return [
        Message("user", task.prompt),
        Message("assistant", "", tuple(finds)),
        *answers,
        Message("assistant", "", (fetch,)),
    ]


def clone_policy(folder: Path, steps: int, seed: int) -> Path:
    """Return a folder with a small policy that has seen how it is done, more or less."""
    from turngate.learners import CloningConfig, clone
    from turngate.runtime.engine.tokenizer import Tokenizer

    tools = Warehouse().tools.specs
    demonstrations = [demonstration(make_task(number), careless=0.6) for number in range(1000, 1000 + 16 * steps)]
    texts = [msgspec.json.encode(tools).decode()]
    texts += [
        text for chat in demonstrations for m in chat for text in (m.content, *(c.arguments for c in m.tool_calls))
    ]
    return clone(
        demonstrations,
        folder / "model",
        tokenizer=Tokenizer.train(texts),
        tools=tools,
        config=CloningConfig(steps=steps, muon_lr=6e-3, adamw_lr=2e-3),
        seed=seed,
    )


async def learn(runtime: Runtime, env: EnvFactory, model: Path, run_dir: Path, updates: int) -> None:
    """Train the policy on tasks of its own."""
    from turngate.learners import GRPO
    from turngate.runtime import show_progress, train

    tasks = [make_task(number) for number in range(100_000, 104_096)]
    learner = GRPO(model, off_policy="decoupled", updates=updates)
    show_progress(runtime.events, every=10)
    await train(runtime, env, tasks, learner=learner, updates=updates, run_dir=run_dir)


async def main(args: argparse.Namespace) -> None:
    """Play, train if asked to and play again; print what happened."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model: Path | None = None
        if args.url:
            endpoint = await stack.enter_async_context(Endpoint(args.url, model=args.model, api_key=args.api_key))
        else:
            from turngate.runtime.engine import Engine

            model = clone_policy(folder, args.steps, args.seed)
            endpoint = (await stack.enter_async_context(Engine.start(model))).endpoint
        runtime = Runtime(endpoint, limits=Limits(max_turns=6), sampling=Sampling(max_tokens=128))
        env, tasks = functools.partial(Warehouse, max_turns=4), [make_task(number) for number in range(args.episodes)]
        evaluation = await runtime.evaluate(env, tasks)
        print(render_transcript(evaluation.trajectories[0]))
        print(f"success {evaluation}")
        if args.updates and model is not None:
            await learn(runtime, env, model, folder / "run", args.updates)
            print(f"success after {args.updates} updates {await runtime.evaluate(env, tasks)}")
    print(f"tools { ({name: n for name, n in Warehouse.statistics().items() if n}) }")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="an OpenAI-compatible server, as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="policy", help="the model's name there")
    parser.add_argument("--api-key")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--steps", type=int, default=600, help="cloning steps of the small policy")
    parser.add_argument("--seed", type=int, default=0, help="of the small policy")
    parser.add_argument(
        "--updates", type=int, default=40, help="train the small policy by so many; 0 measures it alone"
    )
    asyncio.run(main(parser.parse_args()))
