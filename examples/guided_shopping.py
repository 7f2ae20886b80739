"""Look before you act: a frozen shopping policy, guided by values at the level of whole actions and of single tokens.

The base policy is the warm start and never changes. Its own episodes on training tasks teach a critic, offline. On
held-out tasks the base then acts alone; with 8 draws per action reranked by the critic; with every token tilted by the
critic; and, as the dear reference on fewer tasks, with draws reranked by Monte Carlo values from branches.

Everything finished is kept in `<run-dir>/seed<k>/` and not run again: stop the script with Ctrl-C when you like, and
call it again with the same options to go on. Writes table.md and guided.png. The last line is one JSON object: run_dir,
seeds, auc (of the critic behind actions, mean over seeds), correlation (critic against Monte Carlo), split_half (of two
halves of the continuations with each other) and cells: by method and beta the mean, lowest and highest success over
seeds, gain over the base, kl (to the base, nats per episode), distinct (different actions among the draws of a
decision), and tokens sampled per episode, unchosen draws and branches included.
"""

import argparse
import asyncio
import shutil
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from turngate.envs.shopping import ShoppingEnv, held_out_tasks, train_tasks
from turngate.learners.recipes.shopping import shopping_policy
from turngate.learners.value_fit import ValueFitConfig, ValueFitReport, fit_critic
from turngate.runtime import Completion, Evaluation, Limits, Runtime, Sampling, TokenGuidance
from turngate.runtime.branching import branch
from turngate.runtime.critic_q import CriticQ
from turngate.runtime.engine import Engine
from turngate.runtime.guidance import DecisionPoint, Guidance
from turngate.runtime.monte_carlo_q import MonteCarloQ

LIMITS = Limits(max_turns=16, turn_timeout_s=300)
TURN, TOKEN, MONTE_CARLO, BASE = "turn", "token", "monte carlo", "base"
SETTINGS = (
    *("episodes", "epochs", "action_weight", "tasks", "draws", "top_k"),
    *("mc_tasks", "mc_draws", "continuations", "compare"),
)
"""Options that figures depend on."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What one way of acting did on the held-out tasks."""

    method: str
    beta: float
    successes: int
    scored: int
    kl: float
    distinct: float | None = None
    tokens: float
    fallbacks: int = 0

    @property
    def success(self) -> float:
        """Share of episodes that ended in success."""
        return self.successes / self.scored


class Agreement(msgspec.Struct, frozen=True):
    """How critic and Monte Carlo values agree, over actions of base episodes."""

    actions: int
    correlation: float | None
    split_half: float | None
    """Between the means of two halves of the continuations: what noise alone allows."""


def kl_of(evaluation: Evaluation) -> float:
    """Return KL to the base per episode, estimated on what was sampled; for reranking it is an upper bound."""
    total = 0.0
    for trajectory in evaluation.trajectories:
        for turn in trajectory.turns:
            if turn.decision is not None:
                total += turn.decision.log_selection
            if turn.guided_tokens is not None:
                guided = trajectory.segments[turn.segment].logprob_values()[turn.start : turn.start + turn.length]
                total += sum(guided) - sum(turn.guided_tokens.base_values())
    return total / len(evaluation.trajectories)


def sampled_tokens(evaluation: Evaluation) -> int:
    """Return the tokens sampled for all episodes, those of unchosen draws included."""
    total = 0
    for turn in (turn for trajectory in evaluation.trajectories for turn in trajectory.turns):
        candidates = turn.decision.candidates if turn.decision is not None else ()
        total += sum(len(one.logprobs) // 4 for one in candidates) or turn.length
    return total


async def measure(runtime: Runtime, method: str, beta: float, q: CriticQ, args: argparse.Namespace) -> Cell:
    """Play the held-out tasks in one way."""
    guidance: Guidance | None = None
    sampling, count, branched = Sampling(), args.tasks, 0
    if method == TURN:
        guidance = Guidance(q, beta=beta, draws=args.draws, timeout_s=120)
    elif method == TOKEN:
        sampling = Sampling(guidance=TokenGuidance(beta=beta, top_k=args.top_k, tail="zero"))
    elif method == MONTE_CARLO:
        source = MonteCarloQ(runtime, ShoppingEnv, continuations=args.continuations)
        guidance = Guidance(source, beta=beta, draws=args.mc_draws, timeout_s=280)
        count = args.mc_tasks
    evaluation = await runtime.evaluate(
        ShoppingEnv,
        held_out_tasks(count, seed=0),
        sampling=sampling,
        guidance=guidance,
        seed=1,
        name=f"{method} {beta}",
    )
    if method == MONTE_CARLO:
        branched = source.ledger.model_tokens
    told = guidance.statistics() if guidance is not None else None
    return Cell(
        method=method,
        beta=beta,
        successes=evaluation.successes,
        scored=evaluation.scored,
        kl=kl_of(evaluation),
        distinct=told.distinct_mean if told is not None else None,
        tokens=(sampled_tokens(evaluation) + branched) / evaluation.scored,
        fallbacks=sum(told.fallbacks.values()) if told is not None else 0,
    )


async def compare_with_branches(runtime: Runtime, q: CriticQ, args: argparse.Namespace) -> Agreement:
    """Estimate Q of some actions of the base by branching, and ask the critic about the same."""
    values: list[float] = []
    halves: list[tuple[float, float]] = []
    for index, task in enumerate(held_out_tasks(args.compare, seed=3)):
        trajectory = await runtime.rollout(ShoppingEnv, task, seed=index, keep_snapshots=True)
        turn = trajectory.turns[index % len(trajectory.turns)]
        found = await branch(runtime, ShoppingEnv, trajectory, turns=[turn.index], continuations=16, seed=index)
        returns = [one.reward for one in found.q[turn.index].trajectories if not one.end.is_failure]
        ids = trajectory.segments[turn.segment].ids().tolist()
        action = Completion(turn.text, ids[turn.start : turn.start + turn.length], prompt_token_ids=ids[: turn.start])
        values.append(float((await q(DecisionPoint(messages=()), [action])).values[0]))
        halves.append((statistics.fmean(returns[::2]), statistics.fmean(returns[1::2])))
    means = [statistics.fmean(pair) for pair in halves]
    first, second = zip(*halves, strict=True)
    return Agreement(len(values), correlation(values, means), correlation(first, second))


def correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return Pearson's correlation; None when one of them does not vary."""
    try:
        return statistics.correlation(x, y)
    except statistics.StatisticsError:
        return None


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of what is known; None when nothing is."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


async def play_training_tasks(model: Path, seed: int, args: argparse.Namespace) -> Evaluation:
    """Play with the base what the critic learns from."""
    async with Engine.start(model) as engine:
        runtime = Runtime(engine.endpoint, limits=LIMITS)
        return await runtime.evaluate(ShoppingEnv, train_tasks(args.episodes, seed=seed), seed=seed)


def teach_critic(model: Path, folder: Path, seed: int, args: argparse.Namespace) -> None:
    """Play training tasks with the base and fit a critic to what came of them."""
    print(f"seed {seed}: the base plays {args.episodes} training tasks", flush=True)
    episodes = asyncio.run(play_training_tasks(model, seed, args))
    print(f"seed {seed}: success {episodes}; fitting a critic to them", flush=True)
    config = ValueFitConfig(epochs=args.epochs, action_weight=args.action_weight, seed=seed)
    shutil.rmtree(folder / "critic", ignore_errors=True)  # of a run that was stopped before it wrote the report
    # Not in a coroutine: Ctrl-C would wait for its end.
    report = fit_critic(model, episodes.trajectories, folder / "critic", config=config)
    (folder / "critic.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    print(f"seed {seed}: critic AUC {report.auc} after epoch {report.epoch}, losses {report.losses}", flush=True)


async def measure_all(model: Path, folder: Path, seed: int, args: argparse.Namespace) -> None:
    """Measure the cells that are missing for one seed, each kept as soon as it is there."""
    grid = [(BASE, 0.0), *((TURN, b) for b in args.betas), *((TOKEN, b) for b in args.betas)]
    grid += [(MONTE_CARLO, max(args.betas))] if args.mc_tasks else []
    done = {(cell.method, cell.beta) for cell in cells_of(folder)}
    async with Engine.start(model, critic=folder / "critic") as engine, CriticQ.of(engine) as q:
        runtime = Runtime(engine.endpoint, limits=LIMITS)
        for method, beta in [one for one in grid if one not in done]:
            cell = await measure(runtime, method, beta, q, args)
            with (folder / "cells.jsonl").open("ab") as file:
                file.write(msgspec.json.encode(cell) + b"\n")
            print(f"seed {seed}: {method} beta {beta:g}: {cell.success:.3f} (n = {cell.scored})", flush=True)
        if args.compare and not (folder / "agreement.json").exists():
            agreement = await compare_with_branches(runtime, q, args)
            (folder / "agreement.json").write_bytes(msgspec.json.encode(agreement))
            print(f"seed {seed}: critic against continuations: {agreement}", flush=True)


def run_seed(seed: int, folder: Path, args: argparse.Namespace) -> None:
    """Do what is not done yet for one seed."""
    model = model_of(seed, folder, args)
    if not model.exists():
        print(f"seed {seed}: warm start, cloning a careless scripted shopper", flush=True)
        shopping_policy(folder / "model.partial", seed=seed).rename(model)
    if not (folder / "critic.json").exists():
        teach_critic(model, folder, seed, args)
    asyncio.run(measure_all(model, folder, seed, args))


def model_of(seed: int, folder: Path, args: argparse.Namespace) -> Path:
    """Return the folder of the base policy, made or not."""
    return Path(args.warm_starts) / f"seed{seed}" if args.warm_starts else folder / "model"


def require_same_settings(folder: Path, args: argparse.Namespace) -> None:
    """Keep what the figures of a seed depend on, and stop rather than mix them with figures of other settings."""
    # Part of what 0 leaves out may come later.
    asked = {name: value for name in SETTINGS if (value := getattr(args, name))}
    asked["warm_starts"] = str(Path(args.warm_starts).resolve()) if args.warm_starts else "made here"
    path = folder / "settings.json"
    kept: dict[str, Any] = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
    if differ := [
        f"{name} {kept[name]}, not {asked[name]}" for name in asked if kept.get(name, asked[name]) != asked[name]
    ]:
        raise SystemExit(f"{folder} holds figures of other settings: {'; '.join(differ)}. Choose another --run-dir")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(kept | asked))


def cells_of(folder: Path) -> list[Cell]:
    """Return what was measured for a seed so far."""
    path = folder / "cells.jsonl"
    return [msgspec.json.decode(line, type=Cell) for line in path.read_bytes().splitlines()] if path.exists() else []


def summarise(folders: list[Path]) -> list[dict[str, Any]]:
    """Return one row per method and beta, over seeds."""
    by_key: dict[tuple[str, float], list[tuple[Cell, float]]] = {}
    for folder in folders:
        cells = cells_of(folder)
        base = next((cell.success for cell in cells if cell.method == BASE), float("nan"))
        for cell in cells:
            by_key.setdefault((cell.method, cell.beta), []).append((cell, cell.success - base))
    rows = []
    for (method, beta), found in by_key.items():
        cells = [cell for cell, _ in found]
        success = [cell.success for cell in cells]
        rows.append(
            {
                "method": method,
                "beta": beta,
                "seeds": len(cells),
                "success": statistics.fmean(success),
                "success_min": min(success),
                "success_max": max(success),
                "gain": statistics.fmean(gain for _, gain in found),
                "gain_se": statistics.stdev(g for _, g in found) / len(found) ** 0.5 if len(found) > 1 else None,
                "kl": statistics.fmean(cell.kl for cell in cells),
                "distinct": mean(cell.distinct for cell in cells),
                "tokens": statistics.fmean(cell.tokens for cell in cells),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a markdown table."""
    heads = list(rows[0])
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        lines.append(["-" if v is None else f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plot(path: Path, rows: list[dict[str, Any]], title: str) -> None:
    """Draw success over beta, mean and range over seeds."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    base = next(row for row in rows if row["method"] == BASE)
    for method, color in ((TURN, "tab:blue"), (TOKEN, "tab:orange")):
        line = [base, *sorted((row for row in rows if row["method"] == method), key=lambda row: float(row["beta"]))]
        at = range(len(line))
        axes.plot(at, [row["success"] for row in line], marker="o", label=method, color=color)
        low, high = [row["success_min"] for row in line], [row["success_max"] for row in line]
        axes.fill_between(at, low, high, alpha=0.15, color=color)
        axes.set_xticks(at, [f"{row['beta']:g}" for row in line])
    for row in rows:
        if row["method"] == MONTE_CARLO:
            axes.axhline(row["success"], linestyle=":", color="gray", label=f"{MONTE_CARLO}, beta {row['beta']:g}")
    axes.set(xlabel="beta", ylabel="held-out success", title=title, ylim=(0, 1))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def run_all(seeds: Sequence[int], folders: Sequence[Path], args: argparse.Namespace) -> None:
    """Run what is missing; what cannot work is refused before the first minute is spent."""
    for seed, folder in zip(seeds, folders, strict=True):
        if args.warm_starts and not (found := model_of(seed, folder, args)).exists():
            raise SystemExit(f"--warm-starts must hold a model for every seed: {found} is missing")
        require_same_settings(folder, args)
    try:
        for seed, folder in zip(seeds, folders, strict=True):
            run_seed(seed, folder, args)
    except KeyboardInterrupt:
        raise SystemExit("\nstopped; the same command goes on from here") from None


def main(args: argparse.Namespace) -> None:
    """Run what is missing and compare all there is."""
    run_dir = Path(args.run_dir)
    folders = [run_dir / f"seed{seed}" for seed in args.seeds]
    if not args.plot_only:
        run_all(args.seeds, folders, args)
    reports = [f / "critic.json" for f in folders if (f / "critic.json").exists()]
    found = [msgspec.json.decode(path.read_bytes(), type=ValueFitReport).auc for path in reports]
    aucs = [auc for auc in found if auc is not None]
    compared = [f / "agreement.json" for f in folders if (f / "agreement.json").exists()]
    agreements = [msgspec.json.decode(path.read_bytes(), type=Agreement) for path in compared]
    rows = summarise(folders)
    if not rows or rows[0]["method"] != BASE:
        raise SystemExit(f"nothing is measured yet in {run_dir} for seeds {args.seeds}; run without --plot-only first")
    title = "critic AUC not defined"
    if aucs:
        title = f"critic AUC {statistics.fmean(aucs):.2f} ({min(aucs):.2f} to {max(aucs):.2f})"
    plot(run_dir / "guided.png", rows, title)
    (run_dir / "table.md").write_text(table(rows))
    agreed, noise = mean(a.correlation for a in agreements), mean(a.split_half for a in agreements)
    print(f"\n{title}")
    if agreed is not None and noise is not None:
        print(f"correlation with Monte Carlo values {agreed:.2f}, of halves of those with each other {noise:.2f}")
    print(f"{table(rows)}\n{run_dir / 'table.md'}, {run_dir / 'guided.png'}")
    summary = {
        "run_dir": str(run_dir),
        "seeds": args.seeds,
        "auc": mean(aucs),
        "correlation": agreed,
        "split_half": noise,
        "cells": rows,
    }
    line = msgspec.json.encode(summary).decode()
    if args.json:
        Path(args.json).write_text(line + "\n")
    print(line)


def number(kind: type[int] | type[float], least: float, *, above: bool = False) -> Callable[[str], float]:
    """Return what reads an option: a finite number of at least `least`, or above it."""

    def read(text: str) -> float:
        value = kind(text)
        if not (value > least if above else value >= least) or value == float("inf"):
            raise argparse.ArgumentTypeError(f"must be {'above' if above else 'at least'} {least:g}: got {text}")
        return value

    read.__name__ = kind.__name__  # argparse says it of what is no number
    return read


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count, positive = number(int, 1), number(float, 0, above=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--episodes", type=count, default=8192, help="of the base, to teach the critic")
    parser.add_argument("--epochs", type=count, default=6, help="over those episodes")
    parser.add_argument(
        "--action-weight", type=positive, default=5.0, help="of places behind actions, in the critic's loss"
    )
    parser.add_argument("--tasks", type=count, default=256, help="held-out tasks")
    parser.add_argument("--betas", nargs="+", type=positive, default=[1.0, 2.0, 5.0, 10.0, 20.0])
    parser.add_argument("--draws", type=count, default=8, help="actions drawn per decision")
    parser.add_argument("--top-k", type=count, default=6, help="tokens whose values are looked up")
    parser.add_argument(
        "--mc-tasks", type=number(int, 0), default=48, help="held-out tasks for Monte Carlo values; 0 for none"
    )
    parser.add_argument("--mc-draws", type=count, default=4, help="actions drawn per decision with Monte Carlo values")
    parser.add_argument("--continuations", type=count, default=4, help="of each of them")
    parser.add_argument(
        "--compare", type=number(int, 0), default=48, help="actions whose value is compared with branches; 0 for none"
    )
    parser.add_argument("--run-dir", default="runs/guided", help="where everything is written and found again")
    parser.add_argument("--warm-starts", help="folder with a model seed<k> per seed; default: made in --run-dir")
    parser.add_argument("--plot-only", action="store_true", help="run nothing, compare what is there")
    parser.add_argument("--json", help="also write the figures to this file")
    main(parser.parse_args())
