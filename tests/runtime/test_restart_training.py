"""Training with restarts and injected actions, whole: the shop, a scripted policy, a learner that looks."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from turngate.envs.base import End
from turngate.envs.shopping import ShoppingEnv, train_tasks
from turngate.envs.shopping.shoppers import NOISY, Noise, Shopper
from turngate.envs.testing import EchoEnv
from turngate.runtime.errors import ConfigError
from turngate.runtime.injection import Injection
from turngate.runtime.limits import Limits
from turngate.runtime.restarts import Restarts
from turngate.runtime.run import TrainReport
from turngate.runtime.runtime import Runtime
from turngate.runtime.testing import FakeEndpoint
from turngate.runtime.testing.learner import CountingLearner
from turngate.runtime.training import train
from turngate.runtime.types import NO_TURN, Batch, Group, Message, Turn, UpdateReport
from turngate.runtime.weights import InFlight

TASKS = train_tasks(16, seed=1)
NONSENSE = Noise(invalid=1.0)


def shop(messages: Sequence[Message], seed: int = 0, noise: Noise = NOISY) -> str:
    """What a scripted shopper with this luck does after these messages."""
    shopper = Shopper(noise, random.Random(seed))
    actions = [shopper.act(message.content) for message in messages if message.role == "user"]
    return actions[-1]


async def stumble(messages: Sequence[Message], seed: int) -> str:
    """Act in the policy's place, and badly."""
    return shop(messages, seed, NONSENSE)


def violates(turn: Turn) -> bool:
    return turn.state is not None and bool(turn.state.get("violates"))


class Publisher:
    """Weights that change nothing."""

    in_flight: InFlight = "continues"

    async def publish(self, path: Path, policy_version: int) -> None:
        assert path.exists()

    async def served_version(self) -> int:
        return 0


class Looking(CountingLearner):
    """Keeps the groups it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[Group, ...]] = []

    def update(self, batch: Batch) -> UpdateReport:
        self.batches.append(batch.groups)
        return super().update(batch)


def shopping_runtime() -> Runtime:
    count = [0]

    def answer(messages: Sequence[Message]) -> str:
        count[0] += 1
        return shop(messages, seed=count[0])

    endpoint = FakeEndpoint(answer)
    endpoint.publisher = Publisher()
    return Runtime(endpoint, limits=Limits(max_turns=10))


async def train_shopper(runtime: Runtime, learner: CountingLearner, folder: Path, **options: Any) -> TrainReport:
    settings: dict[str, Any] = {
        "updates": 6,
        "group_size": 4,
        "groups_per_batch": 4,
        "worker": "thread",
        "restarts": Restarts(share=0.5, is_mistake=violates, max_age=3),
        "injection": Injection(0.2, stumble),
        "seed": 3,
    }
    return await train(runtime, ShoppingEnv, TASKS, learner=learner, run_dir=folder, **(settings | options))


async def test_training_mixes_task_starts_restarts_and_injected_actions_and_accounts_for_all(tmp_path: Path) -> None:
    learner = Looking()
    report = await train_shopper(shopping_runtime(), learner, tmp_path)
    groups = [g for batch in learner.batches for g in batch]
    assert report.ledger.trained == len(groups) * 4 == 6 * 4 * 4
    assert report.ledger.drawn == report.ledger.trained + sum(report.ledger.dropped.values())
    restarted = [g for g in groups if g.restarted_from is not None]
    assert 4 <= len(restarted) <= 20
    members = [t for g in groups for t in g.trajectories]
    ids = {t.id for t in members}
    for group in restarted:
        assert {t.restarted_from for t in group.trajectories} == {group.restarted_from}
        assert group.restarted_from is not None
        assert group.restarted_from.origin in ids
        assert not any(turn.injected for t in group.trajectories for turn in t.turns)
    assert any(turn.injected for t in members for turn in t.turns)
    for t in members:
        own = [turn.index for turn in t.turns if not turn.injected]
        trained = sorted({turn for s in t.segments for turn in s.turn_values() if turn != NO_TURN})
        assert trained == own
        assert sum(turn.length for turn in t.turns) == sum(sum(s.policy_mask) for s in t.segments)


async def test_the_runs_success_leaves_restarts_and_injected_episodes_out(tmp_path: Path) -> None:
    learner = Looking()
    report = await train_shopper(shopping_runtime(), learner, tmp_path)
    assert any("restart_success" in row for row in report.history)
    assert any("injected_success" in row for row in report.history)
    for row, batch in zip(report.history, learner.batches, strict=True):
        members = [t for g in batch for t in g.trajectories]
        roots = [t for t in members if t.restarted_from is None]
        clean = [t for t in roots if not any(turn.injected for turn in t.turns)]
        rate = sum(t.end is End.success for t in clean) / len(clean) if clean else math.nan
        assert row["success"] == pytest.approx(rate, nan_ok=True)
        assert row.get("restart_share", 0.0) == 1 - len(roots) / len(members)
    assert report.history[-1]["restart_points"] > 0
    assert report.history[-1]["restart_groups_drawn"] >= sum(
        g.restarted_from is not None for batch in learner.batches for g in batch
    )
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["restarts"].startswith("Restarts(share=0.5")


async def test_kept_states_survive_a_stop(tmp_path: Path) -> None:
    await train_shopper(shopping_runtime(), Looking(), tmp_path, updates=3)
    learner = Looking()
    report = await train_shopper(
        shopping_runtime(), learner, tmp_path, updates=4, resume=True, restarts=Restarts(share=1.0, max_age=9)
    )
    assert all(g.restarted_from is not None for g in learner.batches[0])
    assert report.ledger.drawn == report.ledger.trained + sum(report.ledger.dropped.values())


async def test_states_that_are_too_old_are_not_started_from(tmp_path: Path) -> None:
    learner = Looking()
    report = await train_shopper(
        shopping_runtime(), learner, tmp_path, updates=8, max_staleness=0, restarts=Restarts(share=0.5, max_age=1)
    )
    for version, batch in enumerate(learner.batches):
        for group in batch:
            assert group.restarted_from is None or version - group.restarted_from.policy_version <= 1
    assert report.history[-1]["restart_points_aged_out"] > 0


async def test_an_evaluation_always_starts_from_the_tasks_start(tmp_path: Path) -> None:
    runtime = shopping_runtime()
    await train_shopper(runtime, Looking(), tmp_path, updates=3)
    evaluation = await runtime.evaluate(ShoppingEnv, TASKS)
    assert len(evaluation.trajectories) == len(TASKS)
    for trajectory in evaluation.trajectories:
        assert trajectory.restarted_from is None
        assert not any(turn.injected for turn in trajectory.turns)
        assert trajectory.messages[0] == Message("user", trajectory.task.prompt)
        assert trajectory.turns[0].snapshot is None


async def test_an_environment_without_snapshots_is_refused(tmp_path: Path) -> None:
    runtime = shopping_runtime()
    with pytest.raises(ConfigError, match=r"restarts need snapshot\(\) and restore\(\): EchoEnv has not both"):
        await train(
            runtime, EchoEnv, TASKS, learner=CountingLearner(), updates=1, run_dir=tmp_path, worker="thread",
            restarts=Restarts(),
        )  # fmt: skip


async def test_values_without_a_scorer_are_refused_before_anything_runs(tmp_path: Path) -> None:
    learner = Looking()
    with pytest.raises(ConfigError, match="must have a scorer for value_score: expected progress, got none"):
        await train_shopper(shopping_runtime(), learner, tmp_path, restarts=Restarts(value_score="progress"))
    assert learner.batches == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"restarts": 0.25}, r"restarts must be Restarts\(...\) or None: got 0.25"),
        ({"injection": 0.02}, r"injection must be Injection\(...\) or None: got 0.02"),
    ],
)
async def test_a_number_for_restarts_or_injection_is_refused_before_anything_runs(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await train_shopper(shopping_runtime(), Looking(), tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
