"""A learner of your own, asynchronously trained: REINFORCE with a running mean of the rewards as its baseline.

The agent opens locks in two tries, from blind guesses on. The last line is one JSON object: success_before,
success_after (temperature 1), updates, run_dir. docs/custom-learner.md walks through it.
"""

import argparse
import asyncio
import json
import random
import shutil
import time
from pathlib import Path

import torch

from turngate.envs import Action, End, Observation, Step, Task
from turngate.learners import CloningConfig, clone
from turngate.learners.batch import lay_out, microbatches
from turngate.learners.losses import reinforce_loss
from turngate.learners.optimizers import MuonAdamW
from turngate.runtime import Batch, Runtime, UpdateReport, show_progress, train
from turngate.runtime.engine import Engine
from turngate.runtime.engine.model import PolicyModel

ANIMALS, DIGITS = ["fox", "owl", "bear", "wolf", "hare"], "12345"


class Reinforce:
    """Every token is weighted by its episode's reward minus the mean reward so far. Source: Williams 1992."""

    def __init__(self, model: Path, lr: float = 0.01) -> None:
        # Travels to the learner's process by pickle: nothing heavy before `load`.
        self.model, self.lr = model, lr

    def load(self, folder: Path | None) -> None:
        self.policy = PolicyModel.load(self.model if folder is None else folder / "model")
        self.optimizer = MuonAdamW(self.policy, muon_lr=self.lr, adamw_lr=self.lr / 2)
        self.baseline, self.updates = 0.0, 0
        if folder is not None:
            saved = torch.load(folder / "learner.pt", weights_only=True)
            self.baseline, self.updates = saved["baseline"], saved["updates"]
            self.optimizer.load_state_dict(saved["optimizer"])

    def update(self, batch: Batch) -> UpdateReport:
        # 1. Who trains, and what it was worth. An episode that was cut short has no known return.
        keep = [[t.end.is_terminal for t in group.trajectories] for group in batch.groups]
        rewards_I = torch.tensor([float(t.reward) for group in batch.groups for t in group.trajectories])
        tokens = lay_out(batch, keep, vocabulary_size=self.policy.config.vocab_size)
        advantages_N = (rewards_I - self.baseline)[tokens.trajectory_ids_N]
        # 2. One gradient over all trained tokens, a few thousand per forward pass.
        for micro in microbatches(tokens, range(len(tokens.row_lengths)), 8192):
            at_P, logprobs_P = micro.positions_P, self.policy.score(micro.packed).logprobs_M
            # An older policy may have sampled them: weigh each token by current over sampler, at most 2.
            weights_P = (logprobs_P.detach() - tokens.behaviour_logprobs_N[at_P]).exp().clamp(max=2.0)
            loss_P = reinforce_loss(logprobs_P, weights_P, advantages_N[at_P], torch.ones_like(at_P, dtype=torch.bool))
            (loss_P.sum() / tokens.policy_tokens).backward()
        # 3. One step.
        norm = self.optimizer.clip_grad_norm(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        # 4. The baseline, after the step: it must not depend on the actions that are compared with it.
        self.updates += 1
        if (kept_I := torch.tensor([is_kept for group in keep for is_kept in group])).any():
            self.baseline += max(0.1, 1 / self.updates) * (float(rewards_I[kept_I].mean()) - self.baseline)
        return UpdateReport({"baseline": self.baseline, "grad_norm": norm})

    def save_weights(self, path: Path) -> None:
        self.policy.save_weights(path)

    def save(self, folder: Path) -> None:
        self.policy.save(folder / "model")
        shutil.copy(self.model / "tokenizer.json", folder / "model")  # so that `turngate serve` can serve it
        state = {"optimizer": self.optimizer.state_dict(), "baseline": self.baseline, "updates": self.updates}
        torch.save(state, folder / "learner.pt")


class Lock:
    """Each animal's lock has its own digit, and two tries are allowed; the same as in examples/own_env.py."""

    async def reset(self, task: Task, seed: int) -> Observation:
        self.digit, self.left = task.data["digit"], 2
        return Observation(task.prompt)

    async def step(self, action: Action) -> Step:
        self.left -= 1
        if action.text == self.digit:
            return Step(Observation("open"), {"outcome": 1.0}, End.success)
        return Step(Observation("no"), end=None if self.left else End.failure)

    async def aclose(self) -> None: ...


async def improve(args: argparse.Namespace, run_dir: Path) -> dict[str, object]:
    """Measure, train, measure again."""
    tasks = [Task(f"{a}/{n}", a, {"digit": str(1 + i)}) for i, a in enumerate(ANIMALS) for n in range(64)]
    script = (("user", ANIMALS), ("assistant", DIGITS), ("user", ["no"]), ("assistant", DIGITS))
    rng = random.Random(0)
    demos = [[(role, rng.choice(words)) for role, words in script] for _ in range(500)]
    model = clone(demos, run_dir / "warm-start", config=CloningConfig(steps=60))  # it can write a digit, any digit
    async with Engine.start(model) as engine:
        runtime = Runtime(engine.endpoint)
        show_progress(runtime.events, every=10)
        before = await runtime.evaluate(Lock, tasks, name="before")
        report = await train(
            runtime,
            Lock,
            tasks,
            learner=Reinforce(model),
            updates=args.updates,
            run_dir=run_dir,
            group_size=1,  # a baseline that needs no siblings
            groups_per_batch=128,
        )
        after = await runtime.evaluate(Lock, tasks, name="after")
    print(f"success before {before}, after {after}")
    figures: dict[str, object] = {"success_before": before.success, "success_after": after.success}
    return figures | {"updates": report.updates, "run_dir": str(run_dir)}


def main(args: argparse.Namespace) -> None:
    """Improve, and print the figures."""
    run_dir = Path(args.run_dir or f"runs/custom-{time.strftime('%Y%m%d-%H%M%S')}")
    line = json.dumps(asyncio.run(improve(args, run_dir)))
    if args.json:
        Path(args.json).write_text(line + "\n")
    print(line)


if __name__ == "__main__":  # the learner's process imports this file
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--run-dir", help="where everything is written; default: runs/custom-<time>")
    parser.add_argument("--json", help="also write the figures to this file")
    main(parser.parse_args())
