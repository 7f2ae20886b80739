"""Math RLVR is agent RL with one turn.

A small policy that forgets carries learns to add: the prompt is the first observation, its one action is the completion
with the work shown, and the verifier's answer ends the episode. Beside `examples/shopping_async.py` only the
environment differs: the same records, the same mask (1 on the completion, 0 on the prompt), the same loss, the same
asynchronous loop. The last line is one JSON object: success_before, success_after (held-out problems, temperature 1),
episodes, updates, seconds, run_dir.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path

from turngate.envs.arithmetic import ArithmeticEnv, held_out_tasks, train_tasks
from turngate.learners import GRPO
from turngate.learners.recipes.arithmetic import arithmetic_policy
from turngate.runtime import Limits, Runtime, show_progress, train
from turngate.runtime.engine import Engine


async def main(args: argparse.Namespace) -> dict[str, object]:
    """Warm up, measure, train, measure again."""
    began = time.monotonic()
    run_dir = Path(args.run_dir or f"runs/arithmetic-{time.strftime('%Y%m%d-%H%M%S')}")
    print("1. Warm start: cloning a worker who adds in writing and forgets three carries in five ...", flush=True)
    model = arithmetic_policy(run_dir / "warm-start", seed=args.seed)

    async with Engine.start(model) as engine:
        runtime = Runtime(engine.endpoint, limits=Limits(max_turns=1), max_concurrent=128)
        show_progress(runtime.events, every=10)

        print(f"2. Held-out problems before training, against {engine.url}", flush=True)
        held_out = held_out_tasks(args.evaluate, seed=0)
        before = await runtime.evaluate(ArithmeticEnv, held_out, name="before")

        print("3. Asynchronous GRPO", flush=True)
        report = await train(
            runtime,
            ArithmeticEnv,
            train_tasks(6000, seed=args.seed),
            learner=GRPO(model, updates=args.updates, preset="grpo", muon_lr=1.5e-3, adamw_lr=5e-4),
            updates=args.updates,
            run_dir=run_dir,
            group_size=16,
            groups_per_batch=16,
            max_staleness=args.max_staleness,
            seed=args.seed,
        )
        print("4. The same held-out problems after training", flush=True)
        after = await runtime.evaluate(ArithmeticEnv, held_out, name="after")

    for name, episode in (("before", before.trajectories[0]), ("after", after.trajectories[0])):
        print(f"{name:>6}: {episode.task.prompt} {episode.turns[0].text}")
    print(f"held-out success  before {before}   after {after}")
    return {
        "success_before": before.success,
        "success_after": after.success,
        "episodes": report.ledger.trained,
        "updates": report.updates,
        "seconds": time.monotonic() - began,
        "run_dir": str(run_dir),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--updates", type=int, default=160)
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--evaluate", type=int, default=512, help="number of held-out problems")
    parser.add_argument("--run-dir", help="where everything is written; default: runs/arithmetic-<time>")
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    figures = json.dumps(asyncio.run(main(arguments)))
    if arguments.json:
        Path(arguments.json).write_text(figures + "\n")
    print(figures)
