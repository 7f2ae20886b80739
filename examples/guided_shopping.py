"""Look before you act: a frozen shopping policy, guided by values at the level of whole actions and of single tokens.

The base policy is the warm start and never changes. Its own episodes on training tasks teach a critic, offline. On
held-out tasks the base then acts alone; with several draws per action reranked by the critic; with every token tilted
by the critic; and, as the dear reference on fewer tasks, with draws reranked by Monte Carlo values from branches.

Everything finished is kept in `<run-dir>/seed<k>/` and not run again, a base policy that you put into `model` there
included: stop the script with Ctrl-C when you like, and call it again with the same options to go on. Writes table.md
and guided.png. The last line is one JSON object: run_dir, seeds, auc (of the critic behind actions, mean over seeds),
correlation (critic against Monte Carlo), split_half (of two halves of the continuations with each other) and cells: by
method and beta the mean, lowest and highest success over seeds, gain over the base, kl (to the base, nats per episode),
distinct (different actions among the draws of a decision), and tokens sampled per episode, unchosen draws and branches
included.
"""

import argparse
import asyncio
import math
import shutil
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from turngate.envs.shopping import ShoppingEnv, held_out_tasks, train_tasks
from turngate.learners.recipes.shopping import shopping_policy
from turngate.learners.value_fit import ValueFitConfig, fit_critic
from turngate.runtime import Completion, Evaluation, Limits, Runtime, Sampling, TokenGuidance
from turngate.runtime.branching import branch
from turngate.runtime.critic_q import CriticQ
from turngate.runtime.engine import Engine
from turngate.runtime.guidance import DecisionPoint, Guidance
from turngate.runtime.monte_carlo_q import MonteCarloQ
from turngate.runtime.plot import Curve, plot_bands

BASE, TURN, TOKEN, MONTE_CARLO = "base", "turn", "token", "monte carlo"
LIMITS = Limits(max_turns=16, turn_timeout_s=300)
MC_DRAWS, MC_CONTINUATIONS = 4, 4
"""With Monte Carlo values: actions drawn per decision, and continuations of each."""
SETTINGS = ("episodes", "tasks", "draws", "top_k", "mc_tasks", "compare")
"""Options that the figures of a seed depend on."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What one way of acting did on the held-out tasks."""

    method: str
    beta: float
    successes: int
    scored: int
    kl: float
    distinct: float | None = None
    tokens: float

    @property
    def success(self) -> float:
        """Share of episodes that ended in success."""
        return self.successes / self.scored


def teach_critic(model: Path, folder: Path, seed: int, args: argparse.Namespace) -> None:
    """Play training tasks with the base and fit a critic to what came of them."""

    async def play() -> Evaluation:
        async with Engine.start(model) as engine:
            runtime = Runtime(engine.endpoint, limits=LIMITS)
            return await runtime.evaluate(ShoppingEnv, train_tasks(args.episodes, seed=seed), seed=seed)

    print(f"seed {seed}: the base plays {args.episodes} training tasks", flush=True)
    episodes = asyncio.run(play())
    print(f"seed {seed}: success {episodes}; fitting a critic to them", flush=True)
    shutil.rmtree(folder / "critic", ignore_errors=True)  # of a run that was stopped before it wrote the report
    config = ValueFitConfig(epochs=6, action_weight=5.0, seed=seed)
    # Not in a coroutine: Ctrl-C would wait for its end.
    report = fit_critic(model, episodes.trajectories, folder / "critic", config=config)
    (folder / "critic.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    print(f"seed {seed}: critic AUC {report.auc} after epoch {report.epoch}, losses {report.losses}", flush=True)


async def measure(runtime: Runtime, method: str, beta: float, q: CriticQ, args: argparse.Namespace) -> Cell:
    """Play the held-out tasks in one way."""
    guidance, sampling, tasks = None, Sampling(), held_out_tasks(args.tasks, seed=0)
    branches = MonteCarloQ(runtime, ShoppingEnv, continuations=MC_CONTINUATIONS)
    if method == TURN:
        guidance = Guidance(q, beta=beta, draws=args.draws, timeout_s=120)
    elif method == TOKEN:
        sampling = Sampling(guidance=TokenGuidance(beta=beta, top_k=args.top_k, tail="zero"))
    elif method == MONTE_CARLO:
        guidance = Guidance(branches, beta=beta, draws=MC_DRAWS, timeout_s=280)
        tasks = held_out_tasks(args.mc_tasks, seed=0)
    name = f"{method} {beta:g}"
    found = await runtime.evaluate(ShoppingEnv, tasks, sampling=sampling, guidance=guidance, seed=1, name=name)
    kl, tokens = cost_of(found)
    return Cell(
        method=method,
        beta=beta,
        successes=found.successes,
        scored=found.scored,
        kl=kl / len(found.trajectories),
        distinct=guidance.statistics().distinct_mean if guidance is not None else None,
        tokens=(tokens + branches.ledger.model_tokens) / found.scored,
    )


def cost_of(evaluation: Evaluation) -> tuple[float, int]:
    """Return KL to the base, of reranking an upper bound, and tokens sampled, unchosen ones included: their sums."""
    kl, tokens = 0.0, 0
    for trajectory in evaluation.trajectories:
        for turn in trajectory.turns:
            drawn = 0
            if turn.decision is not None:
                kl += turn.decision.log_selection
                drawn = sum(len(one.logprobs) // 4 for one in turn.decision.candidates)
            if turn.guided_tokens is not None:
                guided = trajectory.segments[turn.segment].logprob_values()[turn.start : turn.start + turn.length]
                kl += sum(guided) - sum(turn.guided_tokens.base_values())
            tokens += drawn or turn.length
    return kl, tokens


async def compare_with_branches(runtime: Runtime, q: CriticQ, args: argparse.Namespace) -> dict[str, float | None]:
    """Compare the critic with branches from base episodes; two halves of these say what noise alone allows."""
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
    first, second = zip(*halves, strict=True)
    both = [statistics.fmean(pair) for pair in halves]
    return {"correlation": correlation(values, both), "split_half": correlation(first, second)}


def correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return Pearson's correlation; None when one of them does not vary."""
    try:
        return statistics.correlation(x, y)
    except statistics.StatisticsError:
        return None


async def measure_all(model: Path, folder: Path, seed: int, args: argparse.Namespace) -> None:
    """Measure the cells that are missing for one seed, each kept as soon as it is there."""
    grid = [(BASE, 0.0), *((method, beta) for method in (TURN, TOKEN) for beta in args.betas)]
    grid += [(MONTE_CARLO, max(args.betas))] if args.mc_tasks > 0 else []
    done = {(cell.method, cell.beta) for cell in cells_of(folder)}
    async with Engine.start(model, critic=folder / "critic") as engine, CriticQ.of(engine) as q:
        runtime = Runtime(engine.endpoint, limits=LIMITS)
        for method, beta in [one for one in grid if one not in done]:
            cell = await measure(runtime, method, beta, q, args)
            with (folder / "cells.jsonl").open("ab") as file:
                file.write(msgspec.json.encode(cell) + b"\n")
            print(f"seed {seed}: {method} beta {beta:g}: {cell.success:.3f} (n = {cell.scored})", flush=True)
        if args.compare > 0 and not (folder / "agreement.json").exists():
            agreement = await compare_with_branches(runtime, q, args)
            (folder / "agreement.json").write_bytes(msgspec.json.encode(agreement))
            print(f"seed {seed}: critic against continuations: {agreement}", flush=True)


def run_seed(seed: int, folder: Path, args: argparse.Namespace) -> None:
    """Do what is not done yet for one seed."""
    model = folder / "model"
    if not model.exists():
        print(f"seed {seed}: warm start, cloning a careless scripted shopper", flush=True)
        shopping_policy(folder / "model.partial", seed=seed).rename(model)
    if not (folder / "critic.json").exists():
        teach_critic(model, folder, seed, args)
    asyncio.run(measure_all(model, folder, seed, args))


def require_same_settings(folder: Path, args: argparse.Namespace) -> None:
    """Keep what the figures of a seed depend on, and stop rather than mix them with figures of other settings."""
    asked = {name: value for name in SETTINGS if (value := getattr(args, name))}  # what 0 leaves out may come later
    path = folder / "settings.json"
    kept: dict[str, Any] = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
    differ = [f"{name} {kept[name]}, not {asked[name]}" for name in asked if kept.get(name, asked[name]) != asked[name]]
    if differ:
        raise SystemExit(f"{folder} holds figures of other settings: {'; '.join(differ)}. Choose another --run-dir")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(kept | asked))


def cells_of(folder: Path) -> list[Cell]:
    """Return what was measured for a seed so far, the base first."""
    lines = path.read_bytes().splitlines() if (path := folder / "cells.jsonl").exists() else []
    return sorted((msgspec.json.decode(line, type=Cell) for line in lines), key=lambda cell: cell.method != BASE)


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of what is known; None when nothing is."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def summarise(seeds: Sequence[Sequence[Cell]]) -> list[dict[str, Any]]:
    """Return one row per method and beta, over seeds."""
    found: dict[tuple[str, float], list[tuple[Cell, float]]] = {}
    for cell, base in [(cell, cells[0]) for cells in seeds for cell in cells]:
        found.setdefault((cell.method, cell.beta), []).append((cell, cell.success - base.success))
    return [
        {
            "method": method,
            "beta": beta,
            "seeds": len(pairs),
            "success": statistics.fmean(cell.success for cell, _ in pairs),
            "success_min": min(cell.success for cell, _ in pairs),
            "success_max": max(cell.success for cell, _ in pairs),
            "gain": statistics.fmean(gain for _, gain in pairs),
            "gain_se": statistics.stdev(gain for _, gain in pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else None,
            "kl": statistics.fmean(cell.kl for cell, _ in pairs),
            "distinct": mean(cell.distinct for cell, _ in pairs),
            "tokens": statistics.fmean(cell.tokens for cell, _ in pairs),
        }
        for (method, beta), pairs in found.items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a markdown table."""
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [["-" if v is None else f"{v:.3f}" if isinstance(v, float) else str(v) for v in r.values()] for r in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def curves(seeds: Sequence[Sequence[Cell]]) -> dict[str, list[Curve]]:
    """Return success over beta, a curve per seed, by method; flat where there is only one beta."""
    found: dict[str, list[Curve]] = {}
    most = max(cell.beta for cells in seeds for cell in cells)
    for base, *others in seeds:
        found.setdefault(BASE, []).append(([0.0, most], [base.success] * 2))
        for method in (TURN, TOKEN):
            if line := sorted((cell.beta, cell.success) for cell in others if cell.method == method):
                betas, success = zip((0.0, base.success), *line, strict=True)
                found.setdefault(method, []).append((betas, success))
        for cell in [cell for cell in others if cell.method == MONTE_CARLO]:
            found.setdefault(f"{MONTE_CARLO}, beta {cell.beta:g}", []).append(([0.0, most], [cell.success] * 2))
    return found


def main(args: argparse.Namespace) -> None:
    """Run what is missing and compare all there is."""
    run_dir = Path(args.run_dir)
    folders = [run_dir / f"seed{seed}" for seed in args.seeds]
    if not args.plot_only:
        for folder in folders:
            require_same_settings(folder, args)
        try:
            for seed, folder in zip(args.seeds, folders, strict=True):
                run_seed(seed, folder, args)
        except KeyboardInterrupt:
            raise SystemExit("\nstopped; the same command goes on from here") from None
    seeds = [cells for folder in folders if (cells := cells_of(folder))]
    if not seeds:
        raise SystemExit(f"nothing is measured yet in {run_dir} for seeds {args.seeds}; run without --plot-only first")
    summary: dict[str, Any] = {"run_dir": str(run_dir), "seeds": args.seeds}
    for name, file in (("auc", "critic.json"), ("correlation", "agreement.json"), ("split_half", "agreement.json")):
        kept = [folder / file for folder in folders if (folder / file).exists()]
        summary[name] = mean(msgspec.json.decode(path.read_bytes())[name] for path in kept)
    summary["cells"] = rows = summarise(seeds)
    (run_dir / "table.md").write_text(table(rows))
    title = "critic AUC " + ("not defined" if summary["auc"] is None else f"{summary['auc']:.2f}")
    panels = {"beta": curves(seeds)}
    plot = plot_bands(run_dir / "guided.png", panels, unit="held-out success", title=title, y_range=(0, 1))
    print(f"\n{title}\n{table(rows)}\n{run_dir / 'table.md'}, {plot}")
    line = msgspec.json.encode(summary).decode()
    if args.json:
        Path(args.json).write_text(line + "\n")
    print(line)


def positive(text: str) -> float:
    """Read an option that must be a finite number above 0: an hour passes before some are used."""
    if not 0 < (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0: got {text}")
    return value


def count(text: str) -> int:
    """Read an option that must be 1 or more."""
    positive(text)
    return int(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--episodes", type=count, default=8192, help="of the base, to teach the critic")
    parser.add_argument("--tasks", type=count, default=256, help="held-out tasks")
    parser.add_argument("--betas", nargs="+", type=positive, default=[1.0, 2.0, 5.0, 10.0, 20.0])
    parser.add_argument("--draws", type=count, default=8, help="actions drawn per decision")
    parser.add_argument("--top-k", type=count, default=6, help="tokens whose values are looked up")
    parser.add_argument("--mc-tasks", type=int, default=48, help="held-out tasks for Monte Carlo values; 0 for none")
    parser.add_argument("--compare", type=int, default=48, help="actions to compare with branches; 0 for none")
    parser.add_argument("--run-dir", default="runs/guided", help="where everything is written and found again")
    parser.add_argument("--plot-only", action="store_true", help="run nothing, compare what is there")
    parser.add_argument("--json", help="also write the figures to this file")
    main(parser.parse_args())
