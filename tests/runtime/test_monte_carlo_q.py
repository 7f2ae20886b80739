"""Values of live decisions by trying the candidates: which are one action, what counts, and what they go on from."""

import itertools
from random import Random
from typing import Any

from turngate.envs.base import Action, End, Observation, Snapshot, Step, Task, ToolCall
from turngate.envs.fakes import CoinFlipEnv
from turngate.runtime import Limits, Runtime
from turngate.runtime.context import History
from turngate.runtime.guidance import Guidance
from turngate.runtime.monte_carlo_q import MonteCarloQ
from turngate.runtime.testing import FakeEndpoint, run_virtual
from turngate.runtime.types import Message, Trajectory

TASK = Task("till")


class Till(CoinFlipEnv):
    """Pays 1 at the end if the first call of the first action was for two."""

    async def step(self, action: Action) -> Step:
        self.flipped.append(action.tool_calls[0].arguments if action.tool_calls else "")
        if len(self.flipped) < self.flips:
            return Step(Observation("go on"))
        paid = self.flipped[0] == '{"n": 2}'
        return Step(Observation("done"), {"outcome": float(paid)}, End.success if paid else End.failure)


class Fails(Till):
    """Cannot go back with every third luck or so."""

    async def restore(self, snapshot: Snapshot, seed: int) -> None:
        await super().restore(snapshot, seed)
        if Random(seed).random() < 0.4:
            raise RuntimeError("no way back")


def buy(number: int, arguments: str) -> Action:
    return Action("", (ToolCall(str(number), "buy", arguments),))


def play(env: Any, *, draws: int, latency_s: float = 0.0, **settings: Any) -> tuple[Trajectory, MonteCarloQ, Any]:
    """Play an episode whose actions buy one, two, one and so on; no two calls have one id."""
    numbers = itertools.count()

    def answer(messages: object) -> Action:
        number = next(numbers)
        return buy(number, '{"n": 2}' if number % 2 else '{"n": 1}')

    async def episode() -> tuple[Trajectory, MonteCarloQ, Any]:
        endpoint = FakeEndpoint(answer, latency_s=latency_s, policy_version=3)
        runtime = Runtime(endpoint, limits=Limits(max_turns=20))
        q = MonteCarloQ(runtime, env, **settings)
        guidance = Guidance(q, beta=50.0, draws=draws, timeout_s=300.0)
        return await runtime.rollout(env, TASK, seed=1, guidance=guidance), q, endpoint

    return run_virtual(episode())


def test_candidates_are_one_action_by_their_calls_and_not_by_the_ids_of_calls() -> None:
    trajectory, q, _ = play(lambda: Till(1), draws=4, continuations=3)
    decision = trajectory.turns[0].decision
    assert decision is not None
    assert [candidate.q for candidate in decision.candidates] == [0.0, 1.0, 0.0, 1.0]
    assert q.ledger.rollouts == 2 * 3
    assert decision.value_version == 3  # of the policy that played on


def test_continuations_that_failed_say_nothing_about_their_candidate() -> None:
    trajectory, q, _ = play(lambda: Fails(1), draws=2, continuations=12)
    decision = trajectory.turns[0].decision
    assert decision is not None
    assert [candidate.q for candidate in decision.candidates] == [0.0, 1.0]
    assert q.ledger.rollouts == 24
    assert q.truncated_fraction == 0.0


def test_no_more_continuations_run_at_once_than_allowed() -> None:
    _, _, endpoint = play(lambda: Till(2), draws=2, continuations=5, max_concurrent=3, latency_s=1.0)
    assert endpoint.most_in_flight == 3


def test_continuations_go_on_from_the_whole_history_and_not_from_what_the_model_was_shown() -> None:
    def without_first_answer(history: History) -> list[Message]:
        return [*history.messages[:1], *history.messages[2:]]

    async def episode() -> list[tuple[int, int]]:
        endpoint = FakeEndpoint(lambda messages: "go")
        runtime = Runtime(endpoint, limits=Limits(max_turns=20), context=without_first_answer)
        q = MonteCarloQ(runtime, lambda: Till(4), continuations=2)
        await runtime.rollout(lambda: Till(4), TASK, seed=1, guidance=Guidance(q, beta=1.0, draws=2))
        roles = [[message.role for message in call.messages] for call in endpoint.calls]
        return [(shown.count("user"), shown.count("assistant")) for shown in roles]

    shown = run_virtual(episode())
    assert {users - answers for users, answers in shown if users > 1} == {2}
    assert (4, 2) in shown
