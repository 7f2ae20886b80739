"""Look several actions ahead: a frozen shopping policy, and the same policy with a tree search before every action.

Before each action the base policy draws a few candidates. Simulations then walk down a tree of saved states by UCT
(Upper Confidence bounds applied to Trees), let the base policy play on from where they leave it, and count what that
paid; states inside the tree get candidates of their own in the same way. The candidate with the highest mean is taken.

The last line is one JSON object: `base` and `search` with `success`, its 95 % interval `low` and `high` and `tokens`
sampled per episode (simulations included); `gain` with `gain_low` and `gain_high`; `rollouts`, `model_tokens` and
`env_steps` of the simulations per episode, by the ledger; `decisions`, and how many of them no value decided
(`fallbacks`); `tasks`, `simulations`, `draws`, `seconds`.
"""

import argparse
import asyncio
import math
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec

from turngate.envs import Action, EnvFactory, ShoppingEnv
from turngate.envs.shopping import held_out_tasks
from turngate.learners.recipes.shopping import shopping_policy
from turngate.runtime import Completion, Evaluation, Limits, RestartedFrom, RestartPoint, Runtime, Trajectory
from turngate.runtime.branch_budget import BranchLedger, BranchLimits
from turngate.runtime.branching import branch_point, play_on, spend
from turngate.runtime.engine import Engine
from turngate.runtime.errors import GuidanceError
from turngate.runtime.guidance import DecisionPoint, Guidance, QValues
from turngate.runtime.monte_carlo import newcombe_interval
from turngate.runtime.search import Played, StateNode, backup, descend
from turngate.runtime.seeds import derive_seed


class TreeSearch:
    """Values candidate actions by UCT from the live environment's snapshot; play-outs of the base policy are leaves."""

    name = "uct"

    def __init__(
        self, runtime: Runtime, env: EnvFactory, *, simulations: int, draws: int, exploration: float, cap: int | None
    ) -> None:
        self.runtime, self.env, self.ledger = runtime, env, BranchLedger(BranchLimits(rollouts=cap))
        self.simulations, self.draws, self.exploration = simulations, draws, exploration

    async def __call__(self, point: DecisionPoint, candidates: Sequence[Completion], /) -> QValues:
        """Return the mean return of each candidate over the simulations that began with it."""
        if point.snapshot is None or point.task is None:
            raise GuidanceError("search needs an environment with snapshots: there is none at this decision")
        # 1. The root: the state that the episode is in, and the candidates as its draws; equal ones share a node.
        reached = RestartedFrom(f"{point.task.id}.{point.seed:x}", point.turn, point.policy_version, "search")
        root = StateNode(RestartPoint(point.task, await point.snapshot(), tuple(point.history), reached))
        tried = [root.add(Action(candidate.text, candidate.tool_calls)) for candidate in candidates]
        # 2. Simulate, one after the other: each learns from those before. Other episodes search meanwhile.
        held = 0
        try:
            for index in range(self.simulations):
                held += await self._simulate(root, derive_seed(point.seed, "simulation", index))
        finally:
            self.ledger.release(held)
        # 3. Duplicates among the candidates get the value of their node.
        return QValues([node.mean for node in tried], point.policy_version)

    async def _simulate(self, root: StateNode[RestartPoint], seed: int) -> int:
        """Run one simulation and return how many bytes of snapshots it added to the tree."""
        leaf = descend(root, draws=self.draws, random=Random(seed), exploration=self.exploration)
        path, size = list(leaf.path), 0
        if leaf.node is not None:
            if not self.ledger.admit():
                return 0
            action = leaf.action.action if leaf.action is not None else None
            trajectory = await play_on(self.runtime, self.env, leaf.node.state, action, seed=seed, keep_snapshots=True)
            spend(self.ledger, trajectory)
            if trajectory.end.is_failure:
                return 0
            size = sum(len(turn.snapshot.data) for turn in trajectory.turns if turn.snapshot is not None)
            self.ledger.hold(size)
            path += leaf.node.grow(steps_of(trajectory), first_is_drawn=leaf.action is None)
        backup(path)
        return size


def steps_of(trajectory: Trajectory) -> list[Played[RestartPoint]]:
    """Return what a play-out did, with the state after each action; equal snapshots are equal states."""
    steps: list[Played[RestartPoint]] = []
    for turn, after in zip(trajectory.turns, (*trajectory.turns[1:], None), strict=True):
        action = Action(turn.text, turn.tool_calls)
        if after is None or after.snapshot is None:
            steps.append(Played(action, turn.reward, b"", None))
        else:
            steps.append(Played(action, turn.reward, after.snapshot.data, branch_point(trajectory, after.index)))
    return steps


def figures(evaluation: Evaluation, simulated_tokens: int) -> dict[str, float]:
    """Return success, and the tokens that an episode took, unchosen candidates and simulations included."""
    tokens = simulated_tokens
    for turn in (turn for trajectory in evaluation.trajectories for turn in trajectory.turns):
        drawn = turn.decision.candidates if turn.decision is not None else ()
        tokens += sum(len(one.token_ids) // 4 for one in drawn) or turn.length
    low, high = evaluation.interval
    return {"success": evaluation.success, "low": low, "high": high, "tokens": tokens / evaluation.scored}


async def compare(model: Path, args: argparse.Namespace) -> dict[str, object]:
    """Play the held-out tasks with the base alone, then with search."""
    tasks, began_s = held_out_tasks(args.tasks, seed=0), time.monotonic()
    limits = Limits(max_turns=16, turn_timeout_s=900, rollout_timeout_s=7200)
    async with Engine.start(model) as engine:
        runtime = Runtime(engine.endpoint, limits=limits)
        base = await runtime.evaluate(ShoppingEnv, tasks, seed=args.seed, name="base")
        print(f"base   held-out success {base}", flush=True)
        search = TreeSearch(
            runtime,
            ShoppingEnv,
            simulations=args.simulations,
            draws=args.draws,
            exploration=args.exploration,
            cap=args.max_rollouts,
        )
        print(f"search: {args.simulations} simulations before every action of {args.tasks} episodes", flush=True)
        guidance = Guidance(search, beta=math.inf, draws=args.draws, timeout_s=800)
        found = await runtime.evaluate(ShoppingEnv, tasks, seed=args.seed, guidance=guidance, name="search")
    ledger, told = search.ledger, guidance.statistics()
    gain = found.success - base.success
    low, high = newcombe_interval(found.successes, found.scored, base.successes, base.scored)
    print(f"search held-out success {found}")
    print(f"gain {gain:+.3f} [{low:+.3f}, {high:+.3f}]; {ledger!r} for {found.scored} episodes")
    return {
        "base": figures(base, 0),
        "search": figures(found, ledger.model_tokens),
        "gain": gain,
        "gain_low": low,
        "gain_high": high,
        "rollouts": ledger.rollouts / found.scored,
        "model_tokens": ledger.model_tokens / found.scored,
        "env_steps": ledger.env_steps / found.scored,
        "decisions": told.decisions,
        "fallbacks": sum(told.fallbacks.values()),
        "tasks": args.tasks,
        "simulations": args.simulations,
        "draws": args.draws,
        "seconds": time.monotonic() - began_s,
    }


def main(args: argparse.Namespace) -> None:
    """Find or make the warm start, compare, and print the figures."""
    model = Path(args.model) if args.model else Path(args.run_dir) / "warm-start"
    if not model.exists():
        if args.model:
            raise SystemExit(f"--model must be the folder of a model: {model} does not exist")
        print("warm start: cloning a careless scripted shopper", flush=True)
        shopping_policy(model.with_name("warm-start.partial"), seed=args.seed).rename(model)
    line = msgspec.json.encode(asyncio.run(compare(model, args))).decode()
    if args.json:
        Path(args.json).write_text(line + "\n")
    print(line)


def count(text: str) -> int:
    """Read an option that must be 1 or more."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more: got {text}")
    return value


def constant(text: str) -> float:
    """Read an option that must be a finite number of at least 0."""
    if not 0 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number of at least 0: got {text}")
    return value


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tasks", type=count, default=64, help="held-out tasks")
    parser.add_argument("--simulations", type=count, default=24, help="before each action")
    parser.add_argument("--draws", type=count, default=4, help="candidates of the base policy in each state")
    parser.add_argument("--exploration", type=constant, default=0.7, help="constant of UCT")
    parser.add_argument("--max-rollouts", type=count, help="hard cap on all simulations; default: none")
    parser.add_argument("--model", help="folder of the base policy; default: a warm start made in --run-dir")
    parser.add_argument("--run-dir", default="runs/search", help="where the warm start is kept")
    parser.add_argument("--json", help="also write the figures to this file")
    main(parser.parse_args())
