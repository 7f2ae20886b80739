"""Four ways to assign credit, compared on the shopping task at equal environment steps.

Trajectory GRPO gives one number to a whole episode; step groups (GiGPO) add one per step, from siblings in the same
situation; PPO takes it from a critic, per turn or on two levels, turns and then tokens. All start from one warm start
per seed, see the same tasks, take optimizer steps of the same size, and play equally many episodes. Episodes differ in
length, so the curves are cut where the run with the fewest environment steps ended, and compared there.

Every finished run leaves `<run-dir>/<method>-seed<k>/result.json` and is not run again: stop the script when you like,
and call it again to go on. With several `--jobs` the runs share the machine, and their seconds mean little.

Writes table.md and credit.png. The last line is one JSON object: run_dir, updates, equal_steps (where the curves are
cut), missing (runs without a result), and methods, each with seeds, success, success_min, success_max and recovery (of
the held-out tasks after training), success_at_equal_steps and area (success of the training rollouts, at the cut and as
a mean over all steps before it), steps (of a whole run) and seconds (of its training); means over seeds, null when
there is nothing to average.
"""

import argparse
import asyncio
import multiprocessing
import os
import shutil
import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from turngate.envs.shopping import ShoppingEnv, compute_recovery, held_out_tasks, train_tasks
from turngate.learners.recipes.shopping import SHOPPING_METHODS, shopping_learner, shopping_policy
from turngate.runtime import Limits, Runtime, show_progress, train
from turngate.runtime.comparison import RunCurve, equal_steps, training_seconds
from turngate.runtime.engine import Engine
from turngate.runtime.errors import LearnerError
from turngate.runtime.plot import plot_success

SMOOTHING = 5
"""Updates whose success is averaged for the curves: 640 episodes, a standard error of at most 0.02."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What one finished run measured; kept in its result.json."""

    method: str
    seed: int
    updates: int
    success: float
    """Of the held-out tasks after training."""
    recovery: float | None
    """Success among those of them in which an item was opened that violates a constraint; None when there were none."""
    seconds: float
    curve: RunCurve


async def improve(method: str, seed: int, model: Path, folder: Path, args: argparse.Namespace) -> Result:
    """Train one agent, going on from its newest checkpoint if there is one, and measure it."""
    with (folder / "progress.log").open("a") as log:
        async with Engine.start(model) as engine:
            runtime = Runtime(engine.endpoint, limits=Limits(max_turns=16, turn_timeout_s=30), max_concurrent=128)
            show_progress(runtime.events, every=10, file=log)
            report = await train(
                runtime,
                ShoppingEnv,
                train_tasks(4096, seed=seed),
                learner=shopping_learner(method, model, args.updates, seed=seed),
                updates=args.updates,
                run_dir=folder,
                group_size=8,
                groups_per_batch=16,
                resume=(folder / "metrics.jsonl").exists(),
                seed=seed,
            )
            evaluation = await runtime.evaluate(ShoppingEnv, held_out_tasks(args.evaluate, seed=0), name="held out")
    recovery = compute_recovery(([turn.state for turn in t.turns], t.outcome) for t in evaluation.trajectories)
    return Result(
        method=method,
        seed=seed,
        updates=report.updates,
        success=evaluation.success,
        recovery=recovery.rate if recovery.wrong else None,
        seconds=training_seconds(report.history),
        curve=RunCurve.of(report.history),
    )


def run(method: str, seed: int, model: Path, folder: Path, args: argparse.Namespace) -> None:
    """Make one result, and say how it went; a run whose learner gives up leaves none, and the others go on."""
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{folder.name}: training, see {folder / 'progress.log'}", flush=True)
    try:
        result = asyncio.run(improve(method, seed, model, folder, args))
    except LearnerError as error:
        print(f"{folder.name}: no result: {error}", flush=True)
        return
    partial = folder / "result.json.partial"
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    partial.rename(folder / "result.json")
    print(f"{folder.name}: held-out success {result.success:.3f} after {result.seconds:.0f} s", flush=True)


def warm_up(seed: int, folder: Path) -> None:
    """Make the model that all methods start from with this seed, whole or not at all."""
    print(f"warm start of seed {seed}: {folder}", flush=True)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shopping_policy(partial, seed=seed).rename(folder)


def each(function: Callable[..., None], items: Sequence[tuple[Any, ...]], jobs: int) -> None:
    """Call the function with every tuple of arguments: one after another, or so many at a time, a process each."""
    if jobs == 1:
        for item in items:
            function(*item)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the new processes: more would fight over the cores
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(function, *item) for item in items]:
            future.result()


def load(folders: Iterable[Path], updates: int) -> list[Result]:
    """Return the results there are. Raises: SystemExit: one is of a run of another length."""
    paths = [folder / "result.json" for folder in folders if (folder / "result.json").exists()]
    results = [msgspec.json.decode(path.read_bytes(), type=Result) for path in paths]
    for path, result in zip(paths, results, strict=True):
        if result.updates != updates:
            raise SystemExit(f"{path} is of --updates {result.updates}, not {updates}: use another --run-dir")
    return results


def compare(runs: list[Result], cut: float) -> dict[str, float | None]:
    """Return the figures of one method, its runs compared after `cut` environment steps."""
    recovery = [run.recovery for run in runs if run.recovery is not None]
    return {
        "seeds": len(runs),
        "success": statistics.fmean(run.success for run in runs),
        "success_min": min(run.success for run in runs),
        "success_max": max(run.success for run in runs),
        "success_at_equal_steps": statistics.fmean(run.curve.success_at(cut, updates=SMOOTHING) for run in runs),
        "area": statistics.fmean(run.curve.area(cut) for run in runs),
        "recovery": statistics.fmean(recovery) if recovery else None,
        "steps": statistics.fmean(run.curve.steps[-1] for run in runs),
        "seconds": statistics.fmean(run.seconds for run in runs),
    }


def table(figures: dict[str, dict[str, float | None]], cut: float) -> str:
    """Return the figures as a markdown table."""
    heads = ["credit", "seeds", "held-out success", "lowest", "highest", f"success at {cut:,.0f} steps"]
    heads += ["mean until then", "recovery", "environment steps", "seconds"]
    whole = ("seeds", "steps", "seconds")

    def cell(name: str, value: float | None) -> str:
        return "-" if value is None else f"{value:,.0f}" if name in whole else f"{value:.3f}"

    rows = [[SHOPPING_METHODS[m], *(cell(*figure) for figure in of_m.items())] for m, of_m in figures.items()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, ["---"] * len(heads), *rows))


def main(args: argparse.Namespace) -> None:
    """Run what has no result yet, and compare all that has."""
    run_dir = Path(args.run_dir)
    models = {seed: Path(args.warm_starts or run_dir / "warm-starts") / f"seed{seed}" for seed in args.seeds}
    folders = {(m, seed): run_dir / f"{m}-seed{seed}" for seed in args.seeds for m in args.methods}
    done = {(result.method, result.seed) for result in load(folders.values(), args.updates)}
    if not args.plot_only:
        todo = [(m, seed, models[seed], folder, args) for (m, seed), folder in folders.items() if (m, seed) not in done]
        needed = sorted({seed for _, seed, *_ in todo})
        try:
            each(warm_up, [(seed, models[seed]) for seed in needed if not models[seed].exists()], args.jobs)
            each(run, todo, args.jobs)
        except KeyboardInterrupt:
            raise SystemExit("\nstopped; the same command goes on from here") from None

    results = load(folders.values(), args.updates)
    cut = equal_steps(result.curve for result in results)
    runs_of = {m: found for m in args.methods if (found := [r for r in results if r.method == m])}
    figures = {method: compare(found, cut) for method, found in runs_of.items()}
    curves = {SHOPPING_METHODS[method]: [r.curve for r in found] for method, found in runs_of.items()}
    plot = plot_success(run_dir / "credit.png", curves, updates=SMOOTHING)
    (run_dir / "table.md").write_text(table(figures, cut))
    print(f"\n{table(figures, cut)}\n{plot}: mean and range over seeds")
    missing = sorted({folder.name for folder in folders.values()} - {f"{r.method}-seed{r.seed}" for r in results})
    summary: dict[str, Any] = {"run_dir": str(run_dir), "updates": args.updates, "equal_steps": cut, "missing": missing}
    line = msgspec.json.encode(summary | {"methods": figures}).decode()
    if args.json:
        Path(args.json).write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(SHOPPING_METHODS), choices=list(SHOPPING_METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--updates", type=int, default=120, help="of 16 groups of 8 episodes")
    parser.add_argument("--evaluate", type=int, default=512, help="number of held-out tasks")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--run-dir", default="runs/credit", help="where everything is written and found again")
    parser.add_argument("--warm-starts", help="folder with a model seed<k> per seed; default: in --run-dir")
    parser.add_argument("--plot-only", action="store_true", help="run nothing, compare what is there")
    parser.add_argument("--json", help="also write the figures to this file")
    main(parser.parse_args())
