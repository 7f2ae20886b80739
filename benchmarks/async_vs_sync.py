"""What asynchrony buys on slow tools: wall time of the same number of updates at several staleness bounds.

Shopping with heavy-tailed tools (Lomax, mean 50 ms), real engine and learner processes. Every run starts from the same
warm-started model and takes the same number of updates of the same size; max_staleness 0 is synchronous training, the
baseline. The first batch is not timed: filling an empty pipeline costs the same under every bound.

Figures (last line, JSON): `eta0_s`, `eta1_s`, ...: seconds per update; `eta1_ratio`, ...: synchronous over asynchronous
time, above 1 is faster; `etaN_learner_busy`, `etaN_slots_busy`: mean shares of wall time.
"""

import argparse
import asyncio
import functools
import json
import statistics
import tempfile
from pathlib import Path

from turngate.envs.latency import HeavyTail
from turngate.envs.shopping import ShoppingEnv, demonstrations, train_tasks
from turngate.learners import GRPO, CloningConfig, clone
from turngate.runtime import Limits, Runtime, TrainReport, train
from turngate.runtime.engine import Engine


async def run(model: Path, folder: Path, eta: int, args: argparse.Namespace) -> TrainReport:
    """Take the updates once at staleness bound `eta`."""
    env = functools.partial(ShoppingEnv, latency_s=HeavyTail(mean_s=args.tool_ms / 1000, max_s=5.0))
    async with Engine.start(model) as engine:
        runtime = Runtime(engine.endpoint, limits=Limits(max_turns=16), max_concurrent=args.max_concurrent)
        return await train(
            runtime,
            env,
            train_tasks(1024, seed=1),
            # Two passes a batch: a learner with work to overlap with the rollouts. Fixed, so that figures compare.
            learner=GRPO(model, off_policy="decoupled", epochs=2, muon_lr=4e-3, adamw_lr=8e-4),
            updates=args.updates,
            run_dir=folder / f"eta-{eta}",
            group_size=8,
            groups_per_batch=8,
            max_staleness=eta,
            seed=1,
        )


async def main(args: argparse.Namespace) -> dict[str, float]:
    """Run every bound and compare."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = clone(demonstrations(1024, seed=1), folder / "model", config=CloningConfig(steps=args.cloning_steps))
        for eta in args.eta:
            report = await run(model, folder, eta, args)
            timed = report.history[1:]
            seconds = (timed[-1]["seconds"] - report.history[0]["seconds"]) / len(timed)
            figures[f"eta{eta}_s"] = seconds
            for share in ("learner_busy", "slots_busy"):
                figures[f"eta{eta}_{share}"] = statistics.fmean(row[f"{share}_share"] for row in timed)
            figures[f"eta{eta}_ratio"] = figures[f"eta{args.eta[0]}_s"] / seconds
            print(
                f"eta {eta}: {seconds:.2f} s per update, {figures[f'eta{eta}_ratio']:.2f}x, "
                f"learner busy {figures[f'eta{eta}_learner_busy']:.0%}, slots {figures[f'eta{eta}_slots_busy']:.0%}, "
                f"lag at most {max(row['lag_max'] for row in timed):.0f}",
                flush=True,
            )
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eta", type=int, nargs="+", default=[0, 1, 2, 4], help="bounds; the first is the baseline")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--tool-ms", type=float, default=50.0)
    parser.add_argument("--max-concurrent", type=int, default=128)
    parser.add_argument("--cloning-steps", type=int, default=150)
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    line = json.dumps(asyncio.run(main(arguments)))
    if arguments.json:
        Path(arguments.json).write_text(line + "\n")
    print(line)
