"""What branches cost on the embedded engine, with its prefix cache and without it.

One episode of T turns is recorded, and K continuations are played from each of its turns, all of them up to turn T:
first on an engine that keeps prefixes, then on one that computes every prompt anew (`max_cached_tokens=0`), in the same
process and with the same seeds. The policy is untrained, the environment says the same every turn: only tokens count.

Prints one JSON object, last line: for `cached` and `uncached` the `prompt_tokens_*` asked for per continuation, the
`new_tokens_*` computed of them, `cached_share_*`, `generated_tokens_*`, and `cpu_ms_*` per continuation (client
included); `new_tokens_ratio` and `cpu_ratio` (uncached / cached); `rollouts`, `model_turns` and `env_steps` as the
ledger counted them, `as_planned`: whether those are exactly what `branching_cost` says; and
`replay_steps_without_snapshots`, which snapshots saved.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path

from turngate.envs import Action, Observation, Snapshot, Step, Task
from turngate.runtime import Limits, Runtime, Sampling
from turngate.runtime.branch_budget import BranchLedger, branching_cost
from turngate.runtime.branching import branch
from turngate.runtime.engine import Engine
from turngate.runtime.engine.model import ModelConfig, PolicyModel
from turngate.runtime.engine.tokenizer import Tokenizer

TASK = Task("backpack", "Find a red hiking backpack under $80 with a rating of at least 4 stars.")
ANSWER = "item_7  waterproof hiking backpack  price 69  rating 4.5  colors red, blue, grey"


class Shelf:
    """Has no state and never ends: the runtime cuts episodes at their last turn."""

    kind = "benchmark.shelf"

    async def reset(self, task: Task, seed: int) -> Observation:
        return Observation(task.prompt)

    async def step(self, action: Action) -> Step:
        return Step(Observation(ANSWER))

    async def snapshot(self) -> Snapshot:
        return Snapshot(self.kind, b"")

    async def restore(self, snapshot: Snapshot, seed: int) -> None: ...

    async def aclose(self) -> None: ...


async def measure(
    model: PolicyModel, tokenizer: Tokenizer, max_cached_tokens: int, args: argparse.Namespace
) -> tuple[dict[str, float], BranchLedger]:
    """Return figures per continuation, and the ledger."""
    ledger = BranchLedger()
    async with Engine.start(model, tokenizer, mode="thread", seed=1, max_cached_tokens=max_cached_tokens) as engine:
        limits, sampling = Limits(max_turns=args.turns), Sampling(max_tokens=args.max_tokens)
        runtime = Runtime(engine.endpoint, limits=limits, sampling=sampling)
        trajectory = await runtime.rollout(Shelf, TASK, seed=args.seed, keep_snapshots=True)
        before, began_s = await engine.statistics(), time.process_time()
        found = await branch(runtime, Shelf, trajectory, continuations=args.continuations, ledger=ledger)
        cpu_s, after = time.process_time() - began_s, await engine.statistics()
    assert all(branches.failed == 0 for branches in found.q.values())
    prompt, cached, generated = (
        (after[name] - before[name]) / ledger.rollouts
        for name in ("prompt_tokens", "cached_tokens", "generated_tokens")
    )
    figures = {"prompt_tokens": prompt, "new_tokens": prompt - cached, "cached_share": cached / prompt}
    return figures | {"generated_tokens": generated, "cpu_ms": cpu_s / ledger.rollouts * 1e3}, ledger


def main(args: argparse.Namespace) -> dict[str, float | bool]:
    """Measure both engines and compare the ledgers with the plan."""
    tokenizer = Tokenizer.train([TASK.prompt, ANSWER])
    model = PolicyModel(ModelConfig(vocab_size=len(tokenizer)))
    plan = branching_cost(args.turns, args.continuations, "Q")
    figures: dict[str, float | bool] = {}
    as_planned = True
    for name, max_cached_tokens in (("cached", 262_144), ("uncached", 0)):
        found, ledger = asyncio.run(measure(model, tokenizer, max_cached_tokens, args))
        figures |= {f"{what}_{name}": round(value, 4) for what, value in found.items()}
        counted = (ledger.rollouts, ledger.model_turns, ledger.env_steps)
        as_planned &= counted == (plan.rollouts, plan.model_turns, plan.env_steps)
        figures |= dict(zip(("rollouts", "model_turns", "env_steps"), counted, strict=True))
        print(
            f"{name:8} {ledger.rollouts} continuations: {found['prompt_tokens']:.0f} prompt tokens each, "
            f"{found['new_tokens']:.0f} computed, {found['cpu_ms']:.1f} ms of CPU each"
        )
    for what in ("new_tokens", "cpu_ms"):
        ratio = figures[f"{what}_uncached"] / figures[f"{what}_cached"]
        figures[f"{what.removesuffix('_ms')}_ratio"] = round(ratio, 3)
    return figures | {
        "as_planned": as_planned,
        "replay_steps_without_snapshots": plan.replay_steps_without_snapshots,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20, help="of the episode, and decision points")
    parser.add_argument("--continuations", type=int, default=8, help="from each")
    parser.add_argument("--max-tokens", type=int, default=12, help="that the policy says in a turn at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    line = json.dumps(main(arguments))
    if arguments.json:
        Path(arguments.json).write_text(line + "\n")
    print(line)
