"""What staleness costs: learning curves at several bounds, at equal episodes, and one without any correction.

Every run starts from the same warm-started shopping policy and consumes the same number of episodes. The curves are the
success of the training batches; the table adds held-out success after training. Slow tools keep the backlog full, so
the bound bites.

Figures (last line, JSON): for each setting its held-out success `<name>_success`, mean staleness `<name>_lag` and
`<name>_seconds`.
"""

import argparse
import asyncio
import functools
import json
import statistics
from pathlib import Path
from typing import Any

from turngate.envs.shopping import ShoppingEnv, held_out_tasks, train_tasks
from turngate.learners.off_policy_choice import OffPolicy
from turngate.learners.offpolicy import Correction
from turngate.learners.recipes.shopping import shopping_grpo, shopping_policy
from turngate.runtime import Limits, Runtime, train
from turngate.runtime.engine import Engine

SETTINGS: dict[str, dict[str, Any]] = {
    "eta0": {"eta": 0},
    "eta1": {"eta": 1},
    "eta4": {"eta": 4},
    # The clip stays; only the weight of the sampler's policy against the proximal one is taken away.
    "eta4_uncorrected": {"eta": 4, "learner": {"off_policy": OffPolicy.decoupled(Correction(lower=1.0, upper=1.0))}},
}


async def run(name: str, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train once and evaluate; returns the curve and the figures."""
    setting = SETTINGS[name]
    env = functools.partial(ShoppingEnv, latency_s=args.tool_ms / 1000)
    async with Engine.start(model) as engine:
        runtime = Runtime(engine.endpoint, limits=Limits(max_turns=16), max_concurrent=args.max_concurrent)
        report = await train(
            runtime,
            env,
            train_tasks(4096, seed=args.seed),
            learner=shopping_grpo(model, args.updates, seed=args.seed, **setting.get("learner", {})),
            updates=args.updates,
            run_dir=args.out / name,
            group_size=8,
            groups_per_batch=16,
            max_staleness=setting["eta"],
            seed=args.seed,
        )
        evaluation = await runtime.evaluate(ShoppingEnv, held_out_tasks(512, seed=0), name=name)
    return {
        "success": [row["success"] for row in report.history],
        "held_out": evaluation.success,
        "lag": statistics.fmean(row["lag_mean"] for row in report.history),
        "seconds": report.seconds,
    }


def draw(results: dict[str, dict[str, Any]], target: Path) -> None:
    """Draw the curves, each a running mean over 5 updates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, result in results.items():
        curve = result["success"]
        smooth = [statistics.fmean(curve[max(0, i - 4) : i + 1]) for i in range(len(curve))]
        axes.plot(range(1, len(curve) + 1), smooth, label=f"{name}: held out {result['held_out']:.2f}")
    axes.set(xlabel="policy update", ylabel="success of the training batch", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target, dpi=110)


async def main(args: argparse.Namespace) -> dict[str, float]:
    """Run every setting, draw the curves, and return the figures."""
    model = args.model or shopping_policy(args.out / "model", seed=args.seed)
    results: dict[str, dict[str, Any]] = {}
    for name in args.settings:
        results[name] = await run(name, model, args)
        r = results[name]
        print(f"{name}: held out {r['held_out']:.3f}, mean lag {r['lag']:.2f}, {r['seconds']:.0f} s", flush=True)
    draw(results, args.out / "staleness.png")
    return {
        f"{name}_{key}": value
        for name, r in results.items()
        for key, value in (("success", r["held_out"]), ("lag", r["lag"]), ("seconds", r["seconds"]))
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/staleness"))
    parser.add_argument("--model", type=Path, help="warm-started model folder; default: make one")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--tool-ms", type=float, default=20.0)
    parser.add_argument("--max-concurrent", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    line = json.dumps(asyncio.run(main(arguments)))
    if arguments.json:
        Path(arguments.json).write_text(line + "\n")
    print(line)
