"""What is left of guidance in the weights, once the policy has imitated what succeeded under it.

For every folder that `examples/guided_shopping.py` left (`<run-dir>/seed<k>`, with a `model` and its `critic`): the
policy plays training tasks alone, and guided by the critic; each time what succeeded is cloned, the policy going on
from itself; both clones, and the policy, then act alone on held-out tasks. Equal episodes; a guided one samples about
`--draws` times the tokens. Prints a line per folder and one JSON object, last line: means over folders of
`success_base`, `success_imitating_itself`, `success_imitating_guidance`, `success_guided` (on the training tasks), and
the gains over the base with their standard errors.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path

from turngate.envs import End
from turngate.envs.shopping import ShoppingEnv, held_out_tasks, train_tasks
from turngate.learners import CloningConfig, clone
from turngate.runtime import CriticQ, Evaluation, Guidance, Limits, Runtime
from turngate.runtime.engine import Engine

LIMITS = Limits(max_turns=16, turn_timeout_s=300)


async def acts_alone(model: Path, args: argparse.Namespace) -> float:
    """Return the held-out success of a policy."""
    async with Engine.start(model) as engine:
        runtime = Runtime(engine.endpoint, limits=LIMITS)
        return (await runtime.evaluate(ShoppingEnv, held_out_tasks(args.tasks, seed=0))).success


async def play(folder: Path, args: argparse.Namespace) -> tuple[Evaluation, Evaluation]:
    """Return training episodes of the policy alone, and guided; of the same tasks."""
    async with Engine.start(folder / "model", critic=folder / "critic") as engine, CriticQ.of(engine) as q:
        runtime, tasks = Runtime(engine.endpoint, limits=LIMITS), train_tasks(args.episodes, seed=2)
        alone = await runtime.evaluate(ShoppingEnv, tasks)
        guidance = Guidance(q, beta=args.beta, draws=args.draws, timeout_s=100)
        return alone, await runtime.evaluate(ShoppingEnv, tasks, guidance=guidance)


def imitate(model: Path, played: Evaluation, folder: Path, args: argparse.Namespace) -> Path:
    """Return a clone of what succeeded, the policy going on from itself."""
    chats = [trajectory.messages for trajectory in played.trajectories if trajectory.end is End.success]
    config = CloningConfig(steps=args.steps, muon_lr=5e-3, adamw_lr=2.5e-3, all_tokens_weight=0.0)
    return clone(chats, folder, model=model, config=config)


def measure(folder: Path, scratch: Path, args: argparse.Namespace) -> dict[str, float]:
    """Return the successes of one folder."""
    alone, guided = asyncio.run(play(folder, args))
    itself = imitate(folder / "model", alone, scratch / f"{folder.name}-itself", args)
    guidance = imitate(folder / "model", guided, scratch / f"{folder.name}-guidance", args)
    return {
        "base": asyncio.run(acts_alone(folder / "model", args)),
        "imitating_itself": asyncio.run(acts_alone(itself, args)),
        "imitating_guidance": asyncio.run(acts_alone(guidance, args)),
        "guided": guided.success,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="as left by examples/guided_shopping.py")
    parser.add_argument("--episodes", type=int, default=2048, help="of either kind, on training tasks")
    parser.add_argument("--tasks", type=int, default=512, help="held-out")
    parser.add_argument("--steps", type=int, default=100, help="of cloning")
    parser.add_argument("--beta", type=float, default=20.0)
    parser.add_argument("--draws", type=int, default=8)
    args = parser.parse_args()
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for folder in args.folders:
            rows.append(measure(folder, Path(scratch), args))
            print(folder, {name: round(value, 3) for name, value in rows[-1].items()}, flush=True)
    found = {f"success_{name}": statistics.fmean(row[name] for row in rows) for name in rows[0]}
    for name in ("imitating_itself", "imitating_guidance"):
        gains = [row[name] - row["base"] for row in rows]
        found[f"gain_{name}"] = statistics.fmean(gains)
        if len(gains) > 1:
            found[f"gain_{name}_standard_error"] = statistics.stdev(gains) / len(gains) ** 0.5
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))


if __name__ == "__main__":
    main()
