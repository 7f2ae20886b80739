"""The whole path for real: engine and learner in processes of their own, HTTP between them, weights in flight."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from turngate.envs.latency import HeavyTail
from turngate.envs.shopping import ShoppingEnv, demonstrations, train_tasks
from turngate.learners import GRPO, CloningConfig, clone
from turngate.runtime import Context, Limits, Message, Runtime, full, last_turns, summarise, token_budget, train
from turngate.runtime.engine import Engine
from turngate.runtime.transcript import read_trajectories


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that has just learned to write actions."""
    folder = tmp_path_factory.mktemp("policy") / "model"
    return clone(demonstrations(256, seed=1), folder, config=CloningConfig(steps=80, adamw_lr=0.02))


def _shorten(summary: str, messages: Sequence[Message]) -> str:
    return f"{summary} {len(messages)}".strip()


CONTEXTS = {
    "full": full(),
    "last_turns": last_turns(1),
    "token_budget": token_budget(60, lambda message: len(message.content.split()) + 8),
    "summarise": summarise(_shorten, after_turns=2),
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS.keys())
async def test_training_logprobs_equal_behaviour_logprobs_through_every_context(
    model: Path, tmp_path: Path, context: Context
) -> None:
    async with Engine.start(model) as engine:
        runtime = Runtime(engine.endpoint, limits=Limits(max_turns=6), context=context)
        learner = GRPO(model, off_policy="decoupled", parity="error", parity_tolerance=1e-4, score_truncations=True)
        report = await train(
            runtime,
            ShoppingEnv,
            train_tasks(64, seed=1),
            learner=learner,
            updates=2,
            run_dir=tmp_path,
            group_size=4,
            groups_per_batch=4,
            max_staleness=0,
            keep_trajectories_every=1,
            worker="thread",
        )
    for row in report.history:  # synchronous: every token is of the learner's own version
        assert row["parity_tokens"] == row["policy_tokens"] > 0
        assert row["parity_max_abs"] < 1e-4
    kept = list(read_trajectories(tmp_path / "trajectories" / "update-000001.jsonl"))
    for trajectory in kept:  # each generated token is the policy's exactly once
        assert sum(sum(s.policy_mask) for s in trajectory.segments) == trajectory.policy_tokens
    # A rewritten context starts a new segment; an append-only one does so only where the policy spelled a word in a
    # way that its tokenizer would not.
    long = [t for t in kept if len(t.turns) > 3]
    assert any(len(t.segments) == 1 for t in long) == (context is CONTEXTS["full"])


async def test_slow_agents_span_updates_and_no_token_is_staler_than_the_bound(model: Path, tmp_path: Path) -> None:
    env = functools.partial(ShoppingEnv, latency_s=HeavyTail(mean_s=0.05, max_s=1.0))
    async with Engine.start(model) as engine:
        runtime = Runtime(engine.endpoint, limits=Limits(max_turns=16))
        report = await train(
            runtime,
            env,
            train_tasks(64, seed=1),
            learner=GRPO(model, off_policy="decoupled"),
            updates=8,
            run_dir=tmp_path,
            group_size=4,
            groups_per_batch=2,
            max_staleness=3,
        )
        statistics = await engine.statistics()
    assert runtime.endpoint.policy_version == report.policy_version == 8
    assert max(row["lag_max"] for row in report.history) <= 3
    assert max(row["version_span_max"] for row in report.history) >= 1
    assert report.ledger.drawn == report.ledger.trained + sum(report.ledger.dropped.values())
    assert report.ledger.trained == 8 * 8
    assert json.loads((tmp_path / "report.json").read_text())["updates"] == 8
    assert statistics is not None
