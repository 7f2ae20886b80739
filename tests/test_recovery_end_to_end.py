"""Restarts, injected actions and last contexts for real: the engine's tokens, and a learner that checks them."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from turngate.envs.shopping import ShoppingEnv, demonstrations, train_tasks
from turngate.envs.shopping.shoppers import NOISY, Shopper
from turngate.learners import GRPO, CloningConfig, clone
from turngate.runtime import (
    Context,
    Injection,
    Limits,
    Message,
    Restarts,
    Runtime,
    full,
    last_turns,
    read_trajectories,
    train,
)
from turngate.runtime.context import FullHistory
from turngate.runtime.engine import Engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that has just learned to write actions."""
    folder = tmp_path_factory.mktemp("policy") / "model"
    return clone(demonstrations(256, seed=1), folder, config=CloningConfig(steps=80, adamw_lr=0.02))


class Bootstrapping(GRPO):
    """Wants the whole last contexts of truncated episodes, as a critic does."""

    needs_last_context = True


async def sloppy(messages: Sequence[Message], seed: int) -> str:
    """What a sloppy scripted shopper would do after the newest observation alone."""
    shopper = Shopper(NOISY, random.Random(seed))
    return [shopper.act(message.content) for message in messages if message.role == "user"][-1]


@pytest.mark.parametrize("context", [full(), last_turns(1)], ids=repr)
async def test_replayed_and_injected_turns_leave_every_trained_token_behind_its_own_context(
    model: Path, tmp_path: Path, context: Context
) -> None:
    async with Engine.start(model) as engine:
        runtime = Runtime(engine.endpoint, limits=Limits(max_turns=6), context=context)
        learner = Bootstrapping(model, off_policy="decoupled", parity_tolerance=1e-4, score_truncations=True)
        report = await train(
            runtime,
            ShoppingEnv,
            train_tasks(64, seed=1),
            learner=learner,
            updates=3,
            run_dir=tmp_path,
            group_size=4,
            groups_per_batch=6,
            max_staleness=0,
            keep_trajectories_every=1,
            worker="thread",
            restarts=Restarts(share=0.6),
            injection=Injection(0.2, sloppy),
        )
    for row in report.history:  # synchronous: every token is of the learner's own version
        assert row["parity_tokens"] == row["policy_tokens"] > 0
        assert row["parity_max_abs"] <= 1e-4
    kept = [t for n in (1, 2, 3) for t in read_trajectories(tmp_path / "trajectories" / f"update-{n:06d}.jsonl")]
    assert report.ledger.drawn == report.ledger.trained + sum(report.ledger.dropped.values())
    assert {t.restarted_from is None for t in kept} == {True, False}
    assert any(turn.injected for t in kept for turn in t.turns)
    for t in kept:
        assert sum(sum(s.policy_mask) for s in t.segments) == t.policy_tokens
        assert t.last_context_is_whole == t.end.is_truncation
        if t.end.is_truncation and isinstance(context, FullHistory) and (last := t.turns[-1]).length:
            # What the server would see next goes on from what it saw last; how it spells the action itself is its own.
            prompt = t.segments[last.segment].token_ids[: 4 * last.start]
            assert t.last_context.startswith(prompt)
            assert len(t.last_context) > len(prompt) + 4
    assert any(t.end.is_truncation for t in kept)
