"""What a critic gains from replay: PPO on the shopping task with and without it, at equal environment steps.

Every run starts from the warm start of its seed and consumes the same number of episodes. `plain` learns values from
each batch once, `replay` also from a store of old episodes, and `epochs` takes as many optimizer steps as `replay`, on
the batch alone. `drop` throws away groups that finish too late for the policy; `drop_replay` shows them to the critic.
Both have tools with heavy tails, so that some do. Critics are measured on the episodes of each batch before they have
learned from them, over the second half of training.

Every finished run leaves `<out>/<setting>-seed<k>/result.json` and is not run again.

Figures (last line, JSON): for each setting, means over seeds: `<name>_success` of held-out tasks after training,
`<name>_success_at_equal_steps` of the training rollouts, `<name>_explained_variance`, `<name>_first_turn_auc`,
`<name>_brier`, `<name>_dropped` (episodes), `<name>_env_steps`, `<name>_seconds`; with replay also `<name>_lag`,
`<name>_ess` and the share of updates with each target. What no run defines is left out.
"""

import argparse
import asyncio
import functools
import json
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from turngate.envs.latency import HeavyTail
from turngate.envs.shopping import ShoppingEnv, held_out_tasks, train_tasks
from turngate.learners.critic import CriticConfig
from turngate.learners.recipes.shopping import shopping_policy, shopping_ppo
from turngate.learners.replay import ReplayConfig
from turngate.runtime import Limits, Runtime, train
from turngate.runtime.comparison import RunCurve, equal_steps
from turngate.runtime.engine import Engine

REPLAY = ReplayConfig(capacity_trajectories=1024, batch_trajectories=128, start_after=128)
"""As many old episodes an update as there are fresh ones: one pass more, where the critic makes two without."""

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "replay": {"learner": {"replay": REPLAY}},
    "epochs": {"learner": {"critic": CriticConfig(epochs=3)}},
    "drop": {"late": "drop"},
    "drop_replay": {"late": "drop", "learner": {"replay": REPLAY}},
}

QUALITY = {
    "explained_variance": "value_explained_variance",
    "first_turn_auc": "first_turn_auc",
    "brier": "value_brier",
    "lag": "replay_lag_mean",
    "ess": "replay_ess_turn_ratio",
}
"""Figures that are means over the second half of training, and the metrics they come from."""

SMOOTHING = 5
"""Updates whose success is averaged where runs are compared at equal steps."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What one finished run measured; kept in its result.json."""

    setting: str
    seed: int
    updates: int
    success: float
    """Of the held-out tasks after training."""
    curve: RunCurve
    dropped: int
    """Episodes thrown away as too old for the policy; they cost environment steps of their own, not counted."""
    seconds: float
    quality: dict[str, float]
    """Means over the second half of training, of the updates in which a number is defined."""
    targets: dict[str, float]
    """Share of the updates with replay that used each target."""


async def improve(name: str, seed: int, model: Path, folder: Path, args: argparse.Namespace) -> Result:
    """Train once and measure."""
    setting = SETTINGS[name]
    shutil.rmtree(folder / "run", ignore_errors=True)  # what an interrupted one left
    late = setting.get("late", "wait")
    tools = HeavyTail(mean_s=args.tool_ms / 1000, shape=1.2, max_s=args.tool_ms / 10) if late == "drop" else 0.0
    async with Engine.start(model) as engine:
        runtime = Runtime(engine.endpoint, limits=Limits(max_turns=16), max_concurrent=args.max_concurrent)
        report = await train(
            runtime,
            functools.partial(ShoppingEnv, latency_s=tools),
            train_tasks(4096, seed=seed),
            learner=shopping_ppo(model, args.updates, seed=seed, **setting.get("learner", {})),
            updates=args.updates,
            run_dir=folder / "run",
            group_size=8,
            groups_per_batch=args.groups,
            max_staleness=args.eta,
            late=late,
            checkpoint_every=args.updates,
            seed=seed,
        )
        evaluation = await runtime.evaluate(ShoppingEnv, held_out_tasks(args.evaluate, seed=0), name=name)
    history = report.history
    later = history[len(history) // 2 :]
    return Result(
        setting=name,
        seed=seed,
        updates=report.updates,
        success=evaluation.success,
        curve=RunCurve.of(history),
        dropped=report.ledger.dropped.get("stale", 0),
        seconds=report.seconds,
        quality={key: mean for key, metric in QUALITY.items() if (mean := mean_of(later, metric)) is not None},
        targets=target_shares(history),
    )


def mean_of(rows: Sequence[dict[str, Any]], metric: str) -> float | None:
    """Return the mean over the updates that report the metric; None when none does."""
    found = [float(row[metric]) for row in rows if metric in row]
    return statistics.fmean(found) if found else None


def target_shares(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return by which targets the critic learned from the store, as shares of the updates in which it did."""
    kinds = ("gae", "vtrace", "retrace", "one_step")
    used = [[kind for kind in kinds if row.get(f"replay_target_{kind}")] for row in rows]
    count = sum(map(bool, used))
    return {kind: sum(kind in row for row in used) / count for kind in kinds} if count else {}


def warm_start(seed: int, args: argparse.Namespace) -> Path:
    """Return the model of a seed, which is made when there is none."""
    folder: Path = args.warm_starts or args.out / "warm-starts"
    for name in (f"seed{seed}", str(seed)):
        if (folder / name).exists():
            return folder / name
    return shopping_policy(folder / f"seed{seed}", seed=seed)


def result_of(name: str, seed: int, args: argparse.Namespace) -> Result:
    """Return what a run measured, running it if that was not done yet."""
    folder: Path = args.out / f"{name}-seed{seed}"
    kept = folder / "result.json"
    if kept.exists():
        found = msgspec.json.decode(kept.read_bytes(), type=Result)
        if found.updates != args.updates:
            raise SystemExit(f"{kept} is of --updates {found.updates}, not {args.updates}: use another --out")
        return found
    result = asyncio.run(improve(name, seed, warm_start(seed, args), folder, args))
    kept.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    return result


def summary(results: Sequence[Result], cut: float) -> dict[str, float]:
    """Return the figures of one setting, means over its seeds."""
    figures = {
        "success": statistics.fmean(r.success for r in results),
        "success_at_equal_steps": statistics.fmean(r.curve.success_at(cut, updates=SMOOTHING) for r in results),
    }
    for key in QUALITY:
        if found := [r.quality[key] for r in results if key in r.quality]:
            figures[key] = statistics.fmean(found)
    figures["dropped"] = statistics.fmean(r.dropped for r in results)
    figures["env_steps"] = statistics.fmean(r.curve.steps[-1] for r in results)
    figures["seconds"] = statistics.fmean(r.seconds for r in results)
    for kind in results[0].targets:
        figures[f"target_{kind}"] = statistics.fmean(r.targets[kind] for r in results)
    return figures


def table(figures: dict[str, dict[str, float]], cut: float) -> str:
    """Return the figures as a markdown table."""
    columns = {
        "success": "held-out success", "success_at_equal_steps": f"success at {cut:,.0f} steps",
        "explained_variance": "explained variance", "first_turn_auc": "first-turn AUC", "brier": "Brier score",
        "lag": "replay lag", "ess": "ESS ratio", "dropped": "dropped", "env_steps": "environment steps",
        "seconds": "seconds",
    }  # fmt: skip
    rows = [["setting", *columns.values(), "targets"], ["---"] * (len(columns) + 2)]
    for name, of in figures.items():
        cells = [_cell(of.get(key)) for key in columns]
        used = [f"{key.removeprefix('target_')} {of[key]:.2f}" for key in of if key.startswith("target_") and of[key]]
        rows.append([name, *cells, ", ".join(used) or "-"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 20 else f"{value:.3f}"


def main(args: argparse.Namespace) -> dict[str, float]:
    """Run what has no result yet, print the table and return the figures."""
    results: dict[str, list[Result]] = {name: [] for name in args.settings}
    for seed in args.seeds:
        for name in args.settings:
            r = result_of(name, seed, args)
            results[name].append(r)
            of = ", ".join(f"{key} {value:.3f}" for key, value in r.quality.items())
            print(f"{name}, seed {seed}: held out {r.success:.3f}, {of}, {r.seconds:.0f} s", flush=True)
    cut = equal_steps(r.curve for found in results.values() for r in found)
    figures = {name: summary(found, cut) for name, found in results.items()}
    print(f"\n{table(figures, cut)}\n")
    return {f"{name}_{key}": value for name, of in figures.items() for key, value in of.items()} | {"equal_steps": cut}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/critic-replay"))
    parser.add_argument("--warm-starts", type=Path, help="folder with a model seed<k> or <k> per seed")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--groups", type=int, default=16, help="of 8 episodes, per update")
    parser.add_argument("--eta", type=int, default=1, help="staleness bound of the policy")
    parser.add_argument("--evaluate", type=int, default=512, help="number of held-out tasks")
    parser.add_argument("--tool-ms", type=float, default=300.0, help="mean latency of the tools where late groups drop")
    parser.add_argument("--max-concurrent", type=int, default=256)
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    line = json.dumps(main(arguments))
    if arguments.json:
        Path(arguments.json).write_text(line + "\n")
    print(line)
