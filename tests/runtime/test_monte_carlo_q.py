"""Values of live decisions by trying the candidates: which are one action, what counts, and what they go on from."""

import itertools
from random import Random
from typing import Any

import msgspec

from turngate.envs.base import Action, End, Observation, Snapshot, Step, Task, ToolCall
from turngate.envs.fakes import CoinFlipEnv
from turngate.runtime import Limits, Runtime
from turngate.runtime.context import History
from turngate.runtime.dialect import Dialect
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.guidance import Guidance
from turngate.runtime.monte_carlo_q import MonteCarloQ
from turngate.runtime.recorded_chat import chat_with
from turngate.runtime.testing import FakeEndpoint, FakeTransport, run_virtual
from turngate.runtime.testing.endpoints import END_ID
from turngate.runtime.testing.renderers import PAIR, FakeRenderer
from turngate.runtime.transport import Reply
from turngate.runtime.types import Completion, Message, Trajectory

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


def test_continuations_go_on_from_the_ids_of_the_candidate_and_not_from_its_text() -> None:
    """`ab` is sampled as one id and would be rendered as two."""
    prompts: list[list[int]] = []

    def serve(path: str, body: dict[str, Any]) -> Reply:
        prompts.append(body["prompt"])
        ids = [PAIR, ord("0") + len(prompts) % 10, END_ID]
        logprobs = {"token_logprobs": [-0.5] * len(ids)}
        choice = {"text": "", "finish_reason": "stop", "token_ids": ids, "logprobs": logprobs}
        return Reply(200, {}, msgspec.json.encode({"choices": [choice]}))

    async def episode() -> Trajectory:
        dialect, transport = Dialect(token_mode="tokens"), FakeTransport(serve)
        endpoint = Endpoint("http://x/v1", model="m", dialect=dialect, renderer=FakeRenderer(), transport=transport)
        runtime = Runtime(endpoint, limits=Limits(max_turns=20))
        q = MonteCarloQ(runtime, lambda: Till(3), continuations=2)
        return await runtime.rollout(lambda: Till(3), TASK, seed=1, guidance=Guidance(q, beta=1.0, draws=2))

    assert run_virtual(episode()).end.is_terminal
    assert len(prompts) > 6
    assert max(prompt.count(PAIR) for prompt in prompts) == 2
    for prompt in prompts:
        assert b"ab" not in bytes(i for i in prompt if i < 256)


def test_what_has_no_ids_is_no_chat_to_go_on_from() -> None:
    shown = [Message("user", "go")]
    assert chat_with(shown, Completion("x")) is None
    assert chat_with(shown, Completion("x", [1], [-1.0], [0])) is None
    found = chat_with(shown, Completion("x", [1], [-1.0], [0], [5, 6]))
    assert found is not None
    assert (found.prompt_ids(), found.answer_ids(), list(found.head())) == ([5, 6], [1], shown)
