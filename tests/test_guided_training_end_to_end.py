"""Training on rollouts of the engine that a critic beside the policy guides: by choice among draws, and by token."""

from pathlib import Path
from typing import Any

import pytest
import torch

from turngate.envs.shopping import ShoppingEnv, demonstrations, train_tasks
from turngate.learners import GRPO, PPO, CloningConfig, clone
from turngate.learners.critic import CriticConfig, with_value_head
from turngate.learners.reward_scheme import RewardScheme
from turngate.runtime import Limits, Runtime, Sampling, train
from turngate.runtime.critic_q import CriticQ
from turngate.runtime.engine import Engine
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.errors import ConfigError
from turngate.runtime.guidance import Guidance
from turngate.runtime.types import TokenGuidance

LIMITS = Limits(max_turns=3)
# A policy this raw earns nothing: turns cost something, so that there is something to learn from.
REWARDS = RewardScheme(turn_cost=0.1, invalid_penalty=0.2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that has just learned to write actions."""
    folder = tmp_path_factory.mktemp("policy") / "model"
    return clone(demonstrations(128, seed=1), folder, config=CloningConfig(steps=40, adamw_lr=0.02))


@pytest.fixture(scope="module")
def critic(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A critic that says something different of every prefix."""
    made = with_value_head(PolicyModel.load(model))
    assert made.value_head is not None
    with torch.no_grad():
        made.value_head.weight.normal_(std=0.5, generator=torch.Generator().manual_seed(3))
    folder = tmp_path_factory.mktemp("critic") / "model"
    made.save(folder)
    return folder


async def trained(
    model: Path, critic: Path, run_dir: Path, learner: Any, *, beta: float | None, sampling: Sampling, **options: Any
) -> list[dict[str, Any]]:
    async with Engine.start(model, critic=critic, mode="thread") as engine, CriticQ.of(engine) as q:
        guidance = None if beta is None else Guidance(q, beta=beta, draws=3)
        runtime = Runtime(engine.endpoint, limits=LIMITS, sampling=sampling, guidance=guidance)
        report = await train(
            runtime, ShoppingEnv, train_tasks(64, seed=1), learner=learner, updates=2, run_dir=run_dir, group_size=2,
            groups_per_batch=4, worker="thread", **{"max_staleness": 0} | options,
        )  # fmt: skip
    return list(report.history)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_grpo_trains_on_actions_chosen_by_a_critic(
    model: Path, critic: Path, tmp_path: Path, temperature: float
) -> None:
    sampling = Sampling(temperature=temperature)
    learner = GRPO(model, sampling=sampling, rewards=REWARDS, score_truncations=True, off_policy="decoupled")
    rows = await trained(model, critic, tmp_path, learner, beta=4.0, sampling=sampling)
    for row in rows:
        assert row["parity_tokens"] == row["policy_tokens"] > 0
        assert row["parity_max_abs"] < 1e-4
        assert row["guided_turns_fraction"] == 1
        assert row["guided_fallback_fraction"] == 0
        assert 0.2 < row["guided_weight_mean"] < 3
        assert row["guided_selection_kl"] > 0
        assert row["guided_distinct_mean"] > 1
        assert row["grad_norm"] > 0


async def test_ppo_trains_on_guided_tokens_among_guided_draws_and_parity_stays_exact(
    model: Path, critic: Path, tmp_path: Path
) -> None:
    sampling = Sampling(temperature=0.8, guidance=TokenGuidance(beta=3.0, top_k=4))
    learner = PPO(
        model, sampling=sampling, rewards=REWARDS, off_policy="decoupled", critic=CriticConfig(kind="scalar"),
    )  # fmt: skip
    rows = await trained(model, critic, tmp_path, learner, beta=2.0, sampling=sampling, max_staleness=1)
    for row in rows:
        assert not row["parity_max_abs"] >= 1e-4  # NaN where nothing was fresh
        assert row["guided_token_turns"] == row["guided_decisions"] > 0
        assert row["guided_token_kl"] > 0
        assert row["guided_zero_tail_fraction"] == 0
        assert row["log_ratio_abs_max"] > 1e-3  # ratios are over the guided distribution
    assert rows[0]["parity_tokens"] == rows[0]["policy_tokens"]


async def test_greedy_guidance_stops_before_the_first_rollout(model: Path, critic: Path, tmp_path: Path) -> None:
    learner = GRPO(model, off_policy="decoupled")
    with pytest.raises(ConfigError, match="leave every draw a chance"):
        await trained(model, critic, tmp_path, learner, beta=float("inf"), sampling=Sampling())
    assert not list(tmp_path.iterdir())
