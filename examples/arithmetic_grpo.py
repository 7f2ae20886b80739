"""Math RLVR is agent RL with one turn.

A small policy that forgets carries learns to add. The prompt is the first observation, the completion with its shown
work is the only action, and a verifier ends the episode. Beside `examples/shopping_async.py` only the environment
differs: the same records, the same mask (1 on the completion, 0 on the prompt), the same loss, the same loop. The last
line is one JSON object: success_before, success_after (held-out problems, temperature 1), episodes, updates, seconds,
run_dir.
"""

import argparse
import asyncio
import time
from pathlib import Path

import msgspec

from turngate.envs.arithmetic import ArithmeticEnv, held_out_tasks, train_tasks
from turngate.learners import GRPO
from turngate.learners.recipes.arithmetic import arithmetic_policy
from turngate.runtime import Limits, Runtime, show_progress, train
from turngate.runtime.engine import Engine
from turngate.runtime.transcript import render_transcript


async def improve(args: argparse.Namespace, run_dir: Path, model: Path) -> dict[str, object]:
    """Measure, train, measure again."""
    async with Engine.start(model) as engine:
        runtime = Runtime(engine.endpoint, limits=Limits(max_turns=1), max_concurrent=128)
        show_progress(runtime.events, every=10)
        held_out = held_out_tasks(args.evaluate, seed=0)
        before = await runtime.evaluate(ArithmeticEnv, held_out, name="before")
        report = await train(
            runtime,
            ArithmeticEnv,
            train_tasks(6000, seed=args.seed),
            # GRPO's own rates, fit for shopping, are too large here: at staleness 2 success fell to 0.1.
            learner=GRPO(
                model,
                off_policy="decoupled",
                preset="grpo",
                epochs=2,
                muon_lr=1.5e-3,
                adamw_lr=5e-4,
                updates=args.updates,
                seed=args.seed,
            ),
            updates=args.updates,
            run_dir=run_dir,
            group_size=16,
            groups_per_batch=16,
            max_staleness=args.max_staleness,
            seed=args.seed,
        )
        after = await runtime.evaluate(ArithmeticEnv, held_out, name="after")

    figures: dict[str, object] = {}
    for name, evaluation in (("before", before), ("after", after)):
        print(f"\n--- {name} training: held-out success {evaluation}\n{render_transcript(evaluation.trajectories[0])}")
        figures[f"success_{name}"] = evaluation.success
    return figures | {"episodes": report.ledger.trained, "updates": report.updates}


def main(args: argparse.Namespace) -> None:
    """Warm up, improve, and print the figures."""
    began = time.monotonic()
    run_dir = Path(args.run_dir or f"runs/arithmetic-{time.strftime('%Y%m%d-%H%M%S')}")
    print("warm start: cloning a worker who adds in writing and forgets two carries in three", flush=True)
    model = arithmetic_policy(run_dir / "warm-start", seed=args.seed)
    figures = asyncio.run(improve(args, run_dir, model))
    figures |= {"seconds": time.monotonic() - began, "run_dir": str(run_dir)}
    last_line = msgspec.json.encode(figures).decode()
    if args.json:
        Path(args.json).write_text(last_line + "\n")
    print(last_line)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--updates", type=int, default=160)
    # Episodes of one turn are short: one update of slack keeps the learner as busy as two, on fresher data.
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--evaluate", type=int, default=512, help="number of held-out problems")
    parser.add_argument("--run-dir", help="where everything is written; default: runs/arithmetic-<time>")
    parser.add_argument("--json", help="also write the figures to this file")
    main(parser.parse_args())
