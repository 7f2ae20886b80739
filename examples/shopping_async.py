"""Agents learn to shop, asynchronously, from one script.

A small policy is warmed up on demonstrations of a sloppy scripted shopper, served by the embedded OpenAI-compatible
engine, and trained by asynchronous GRPO while its rollouts go on. The last line is one JSON object: success_before,
success_after (held-out tasks, temperature 1), recovery_before, recovery_after, updates, episodes, seconds, run_dir.
"""

import argparse
import asyncio
import time
from pathlib import Path

import msgspec

from turngate.envs.shopping import ShoppingEnv, compute_recovery, held_out_tasks, train_tasks
from turngate.learners.recipes.shopping import shopping_grpo, shopping_policy
from turngate.runtime import Limits, Runtime, plot_run, show_progress, train
from turngate.runtime.engine import Engine
from turngate.runtime.evaluation import Evaluation
from turngate.runtime.transcript import render_transcript


def recovery(evaluation: Evaluation) -> float:
    """Success among the episodes that opened an item which violates a constraint."""
    return compute_recovery(([turn.state for turn in t.turns], t.outcome) for t in evaluation.trajectories).rate


async def improve(args: argparse.Namespace, run_dir: Path, model: Path) -> dict[str, object]:
    """Measure, train, measure again."""
    began = time.monotonic()
    async with Engine.start(model) as engine:
        runtime = Runtime(engine.endpoint, limits=Limits(max_turns=16, turn_timeout_s=30), max_concurrent=128)
        show_progress(runtime.events, every=5)

        print(f"2. Held-out tasks before training, against {engine.url}", flush=True)
        held_out = held_out_tasks(args.evaluate, seed=0)
        before = await runtime.evaluate(ShoppingEnv, held_out, name="before")

        print("3. Asynchronous GRPO", flush=True)
        report = await train(
            runtime,
            ShoppingEnv,
            train_tasks(4096, seed=args.seed),
            learner=shopping_grpo(model, args.updates, seed=args.seed),
            updates=args.updates,
            run_dir=run_dir,
            group_size=8,
            groups_per_batch=16,
            max_staleness=args.max_staleness,
            resume=args.resume and (run_dir / "metrics.jsonl").exists(),  # there is one after the first update
            seed=args.seed,
        )
        print("4. The same held-out tasks after training", flush=True)
        after = await runtime.evaluate(ShoppingEnv, held_out, name="after")

    measured = {"before": before, "after": after}
    for name, evaluation in measured.items():
        print(f"\n--- one episode {name} training ---\n{render_transcript(evaluation.trajectories[0])}")
    print()
    for name, evaluation in measured.items():
        print(f"{name:6} held-out success {evaluation}, after opening a wrong item {recovery(evaluation):.2f}")
    plot = plot_run(run_dir, marks={f"held-out {name}": e.success for name, e in measured.items()})
    print(f"{report.ledger.trained} episodes in {report.seconds:.0f} s; run folder {run_dir}, plot {plot}")
    figures: dict[str, object] = {f"success_{name}": e.success for name, e in measured.items()}
    figures |= {f"recovery_{name}": recovery(e) for name, e in measured.items()}
    figures |= {"updates": report.updates, "episodes": report.ledger.trained}
    return figures | {"seconds": time.monotonic() - began, "run_dir": str(run_dir)}


def main(args: argparse.Namespace) -> None:
    """Warm up, improve, and print the figures."""
    run_dir = Path(args.run_dir or f"runs/shopping-{time.strftime('%Y%m%d-%H%M%S')}")
    model = run_dir / "warm-start"
    go_on = "of a warm start nothing is kept, begin again"
    try:
        if not args.resume:
            print("1. Warm start: cloning a scripted shopper that overlooks most of an item's faults", flush=True)
            shopping_policy(model, seed=args.seed)
        go_on = f"go on with --resume --run-dir {run_dir}"
        figures = msgspec.json.encode(asyncio.run(improve(args, run_dir, model))).decode()
    except KeyboardInterrupt:
        raise SystemExit(f"\nstopped; {go_on}") from None
    if args.json:
        Path(args.json).write_text(figures + "\n")
    print(figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--evaluate", type=int, default=512, help="number of held-out tasks")
    parser.add_argument("--run-dir", help="where everything is written; default: runs/shopping-<time>")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --run-dir")
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    if arguments.resume and not arguments.run_dir:
        parser.error("--resume needs the --run-dir to go on with")
    main(arguments)
