"""Agents with loops of their own, trained for real: engine and learner in processes of their own, weights in flight."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from turngate.envs import End, Task
from turngate.learners import GRPO, PPO, CloningConfig, GAEConfig, StepGroups, clone
from turngate.runtime import Agent, Limits, Runtime, Session, train
from turngate.runtime.engine import Engine
from turngate.runtime.transcript import read_trajectories

ANIMALS = ["fox", "owl", "bear", "wolf", "hare", "deer", "seal", "crow"]
TASKS = [Task(f"{a}/{n}", a, {"digit": str(1 + i)}) for i, a in enumerate(ANIMALS) for n in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that writes a digit, any digit."""
    script = (("user", ANIMALS), ("assistant", "12345678"), ("user", ["no"]), ("assistant", "12345678"))
    demos = [[(role, random.Random(at).choice(words)) for role, words in script] for at in range(300)]
    return clone(demos, tmp_path_factory.mktemp("policy") / "model", config=CloningConfig(steps=40))


async def scattered(session: Session, task: Task) -> float:
    """Uses the model in every way that makes segments: chats side by side, a history rewritten, one gone on with."""
    ask = [{"role": "user", "content": task.prompt}]
    first = await session.chat(ask, role="guesser")
    advice = await asyncio.gather(*(session.chat(ask, role="adviser") for _ in range(2)))
    ask += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "no"}]
    second = await session.chat(ask, role="guesser")
    third = await session.chat(ask[1:], role="guesser")
    tries = [first, *advice, second, third]
    return sum(reply.text == task.data["digit"] for reply in tries) / len(tries)


async def test_training_logprobs_equal_behaviour_logprobs_however_the_agent_asks(model: Path, tmp_path: Path) -> None:
    async with Engine.start(model) as engine:
        runtime = Runtime(engine.endpoint, limits=Limits(max_turns=8))
        report = await train(
            runtime,
            Agent(scattered),
            TASKS,
            learner=GRPO(model, off_policy="decoupled", parity="error", parity_tolerance=1e-4),
            updates=3,
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
    assert report.ledger.dropped == {}
    for trajectory in read_trajectories(tmp_path / "trajectories" / "update-000001.jsonl"):
        assert [turn.role for turn in trajectory.turns] == ["guesser", "adviser", "adviser", "guesser", "guesser"]
        assert sum(sum(s.policy_mask) for s in trajectory.segments) == trajectory.policy_tokens
        assert len(trajectory.segments) == 4  # the second guess goes on from the first
        assert trajectory.turns[3].segment == trajectory.turns[0].segment
        assert trajectory.turns[0].observation == "no"
        assert trajectory.token_mode == "server"
    assert len(runtime.sessions) == 0


LEARNERS = {
    "steps": lambda model: GRPO(model, off_policy="decoupled", credit=StepGroups(), score_truncations=True),
    "critic": lambda model: PPO(model, off_policy="decoupled", credit=GAEConfig(level="bilevel")),
}


@pytest.mark.parametrize("learner", LEARNERS.values(), ids=LEARNERS.keys())
async def test_finer_credit_takes_scattered_turns_and_episodes_that_a_limit_cut_short(
    model: Path, tmp_path: Path, learner: Any
) -> None:
    async with Engine.start(model) as engine:
        runtime = Runtime(engine.endpoint, limits=Limits(max_turns=4))  # the agent's last request is one too many
        report = await train(
            runtime,
            Agent(scattered),
            TASKS,
            learner=learner(model),
            updates=2,
            run_dir=tmp_path,
            group_size=4,
            groups_per_batch=4,
            keep_trajectories_every=1,
            worker="thread",
        )
    assert report.updates == 2
    kept = list(read_trajectories(tmp_path / "trajectories" / "update-000002.jsonl"))
    assert {trajectory.end for trajectory in kept} == {End.turn_limit}
    asks_ahead = getattr(learner(model), "needs_last_context", False)
    assert {trajectory.last_context_is_whole for trajectory in kept} == {asks_ahead}
