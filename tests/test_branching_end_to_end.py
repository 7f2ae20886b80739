"""Branches of the engine's own rollouts teach: VinePPO's credit, the policy on continuations, and a critic."""

from pathlib import Path
from typing import Any

import pytest

from turngate.envs.shopping import ShoppingEnv, demonstrations, train_tasks
from turngate.learners import GRPO, CloningConfig, clone
from turngate.learners.value_fit import ValueFitConfig, fit_critic
from turngate.runtime import Limits, Runtime, train
from turngate.runtime.branching import branch
from turngate.runtime.engine import Engine
from turngate.runtime.errors import ConfigError
from turngate.runtime.group_branching import Branching, continuations_of

LIMITS = Limits(max_turns=10)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that has learned to write actions, and now and then succeeds."""
    folder = tmp_path_factory.mktemp("policy") / "model"
    return clone(demonstrations(128, seed=1), folder, config=CloningConfig(steps=60, adamw_lr=0.02))


async def trained(model: Path, run_dir: Path, learner: GRPO, branching: Branching | None) -> list[dict[str, Any]]:
    async with Engine.start(model, mode="thread") as engine:
        report = await train(
            Runtime(engine.endpoint, limits=LIMITS), ShoppingEnv, train_tasks(64, seed=1), learner=learner, updates=2,
            run_dir=run_dir, group_size=2, groups_per_batch=2, max_staleness=1, worker="thread", branching=branching,
        )  # fmt: skip
    assert report.ledger.trained == 8  # continuations are in the branches' own accounts
    return list(report.history)


async def test_vine_credit_trains_on_values_from_branches(model: Path, tmp_path: Path) -> None:
    learner = GRPO(model, credit="vine", off_policy="decoupled", score_truncations=True)
    with pytest.raises(ConfigError, match=r"expected mc_value, got none; .*train\(branching="):
        await trained(model, tmp_path / "refused", learner, None)
    with pytest.raises(ConfigError, match="train_on must go with a learner that reads no scores"):
        await trained(model, tmp_path / "refused", learner, Branching(continuations=2, train_on=True))
    rows = await trained(model, tmp_path / "run", learner, Branching(continuations=2))
    assert [row["excluded_unvalued"] for row in rows] == [0, 0]
    assert all(row["policy_tokens"] > 0 for row in rows)
    assert any(row["grad_norm"] > 0 for row in rows)  # also from groups that are all alike
    assert rows[-1]["branch_rollouts"] >= 2 * sum(row["env_steps"] for row in rows) / 2
    assert rows[-1]["branch_failed"] == rows[-1]["branch_refused"] == 0
    assert 0 <= rows[-1]["branch_truncated_fraction"] <= 1


async def test_continuations_train_the_policy_beside_their_groups(model: Path, tmp_path: Path) -> None:
    learner = GRPO(model, off_policy="decoupled", score_truncations=True)
    branching = Branching(continuations=3, train_on=True, turns=lambda trajectory: [0])
    rows = await trained(model, tmp_path, learner, branching)
    for row in rows:
        assert row["groups"] == 4  # two of their own, and one for the start that the members of each share
        assert row["trajectories"] == 2 * 2 + 2 * 3
        assert not row["parity_max_abs"] >= 1e-4
        assert row["tokens"] is not None  # the run's own numbers are of the groups alone


async def test_branches_train_a_critic(model: Path, tmp_path: Path) -> None:
    async with Engine.start(model, mode="thread") as engine:
        runtime = Runtime(engine.endpoint, limits=LIMITS)
        found = [
            await branch(
                runtime,
                ShoppingEnv,
                await runtime.rollout(ShoppingEnv, task, seed=n, trajectory_id=f"t{n}", keep_snapshots=True),
                turns=[0],
                continuations=2,
                estimands=("Q", "V"),
            )
            for n, task in enumerate(train_tasks(16, seed=5))
        ]
    episodes = [one.trajectory for one in found] + [t for one in found for t in continuations_of(one)]
    config = ValueFitConfig(epochs=1, held_out=0.3)
    report = fit_critic(model, episodes, tmp_path / "critic", config=config, branches=found)
    ended = sum(one.trajectory.end.is_terminal for one in found)
    assert report.branched == ended > 0
    assert report.episodes + report.held_out + report.excluded == len(episodes)
    async with Engine.start(model, critic=tmp_path / "critic", mode="thread"):
        pass
