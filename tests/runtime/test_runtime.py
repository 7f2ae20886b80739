import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from turngate.envs.base import End, Task
from turngate.envs.fakes import EchoEnv
from turngate.envs.shopping import ShoppingEnv, running_example
from turngate.runtime.endpoint import ChatEndpoint
from turngate.runtime.errors import ConfigError
from turngate.runtime.events import EvaluationFinished
from turngate.runtime.runtime import Runtime
from turngate.runtime.testing import FakeEndpoint
from turngate.runtime.types import Completion, Message, TokenGuidance


class Buyer:
    """Buys at once; counts how many requests run together."""

    policy_version, publisher = 0, None
    running = most = 0

    async def complete(self, *args: object, **kwargs: object) -> Completion:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001)
        self.running -= 1
        return Completion('buy["item_3"]')

    async def aclose(self) -> None: ...


def _runtime(**options: int) -> tuple[Runtime, Buyer]:
    buyer: ChatEndpoint = Buyer()
    return Runtime(buyer, **options), buyer  # type: ignore[return-value]


async def test_what_is_no_guidance_is_refused_wherever_it_is_given() -> None:
    wrong: Any = TokenGuidance(beta=5.0)
    runtime, buyer = _runtime()
    said = r"guidance must be Guidance\(...\) or None: got TokenGuidance.*goes into Sampling\(guidance="
    with pytest.raises(ConfigError, match=said):
        Runtime(runtime.endpoint, guidance=wrong)
    with pytest.raises(ConfigError, match=said):
        runtime.session(guidance=wrong)
    with pytest.raises(ConfigError, match=said):
        await runtime.evaluate(ShoppingEnv, [running_example()] * 2, guidance=wrong)
    assert buyer.most == 0


async def test_evaluation_runs_every_task_within_the_slots() -> None:
    runtime, buyer = _runtime(max_concurrent=3)
    heard: list[EvaluationFinished] = []
    runtime.events.subscribe(EvaluationFinished, heard.append)
    evaluation = await runtime.evaluate(ShoppingEnv, [running_example()] * 10, name="before")
    assert buyer.most == 3
    assert (evaluation.scored, evaluation.successes) == (10, 0)
    assert (heard[0].name, heard[0].episodes) == ("before", 10)
    assert runtime.slots.held == 0


async def test_equal_seeds_give_equal_evaluations_and_other_seeds_other_luck() -> None:
    runtime, _ = _runtime()
    seeds = [
        [t.seed for t in (await runtime.evaluate(ShoppingEnv, [running_example()], seed=s)).trajectories]
        for s in (1, 1, 2)
    ]
    assert seeds[0] == seeds[1] != seeds[2]


async def test_a_cancelled_evaluation_leaves_no_slot_taken() -> None:
    runtime, _ = _runtime(max_concurrent=2)
    running = asyncio.create_task(runtime.evaluate(ShoppingEnv, [running_example()] * 8))
    await asyncio.sleep(0.002)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (runtime.slots.held, runtime.slots.waiting) == (0, 0)


async def test_a_rollout_that_is_cancelled_from_inside_costs_its_task_and_no_other() -> None:
    def answer(messages: Sequence[Message]) -> str | BaseException:
        return asyncio.CancelledError() if messages[0].content == "2" else "hello"

    runtime = Runtime(FakeEndpoint(answer), max_concurrent=2)
    evaluation = await runtime.evaluate(EchoEnv, [Task(str(n), str(n)) for n in range(6)])
    assert [t.end for t in evaluation.trajectories] == [End.env_error if n == 2 else End.success for n in range(6)]
    assert "cancelled by something that runs inside it" in evaluation.trajectories[2].error
    assert runtime.slots.held == 0


async def test_a_task_the_environment_cannot_read_is_an_env_error_on_the_trajectory() -> None:
    runtime, _ = _runtime()
    trajectory = await runtime.rollout(ShoppingEnv, Task("broken"))
    assert trajectory.end is End.env_error
    assert trajectory.error
