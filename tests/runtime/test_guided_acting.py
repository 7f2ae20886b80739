"""Guided turns of an episode: what a value function is shown, what draws are asked with, how long it all may take."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from turngate.envs.base import Task, ToolSpec
from turngate.envs.fakes import CoinFlipEnv, EchoEnv
from turngate.envs.tool_env import ToolEnv
from turngate.envs.tools import tool
from turngate.runtime import Limits, Runtime
from turngate.runtime.context import History
from turngate.runtime.dialect import Dialect
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.guidance import DecisionPoint, Guidance
from turngate.runtime.injection import Injection
from turngate.runtime.testing import FakeEndpoint, FakeTransport, run_virtual
from turngate.runtime.testing.endpoints import END_ID
from turngate.runtime.testing.renderers import PAIR, FakeRenderer
from turngate.runtime.transport import Reply
from turngate.runtime.types import Completion, Message, Sampling, Trajectory

TASK = Task("t", "go")


async def alike(point: DecisionPoint, candidates: Sequence[Completion]) -> list[float]:
    return [0.0] * len(candidates)


class Bell(ToolEnv):
    """Has one tool."""

    @tool
    async def ring(self) -> str:
        """Ring the bell."""
        return "dong"


def play(runtime: Runtime, env: Any, **options: Any) -> Trajectory:
    return run_virtual(runtime.rollout(env, TASK, seed=1, **options))


def test_a_value_function_is_told_of_the_turn_the_task_the_tools_and_the_whole_history() -> None:
    seen: list[tuple[Any, ...]] = []

    async def q(point: DecisionPoint, candidates: Sequence[Completion]) -> list[float]:
        shown, history = [m.content for m in point.messages], [m.content for m in point.history]
        seen.append((point.turn, point.task, point.policy_version, point.policy_tokens, point.snapshot, shown, history))
        tools.append([one.name for one in point.tools])
        return [0.0] * len(candidates)

    def newest(history: History) -> list[Message]:
        return [history.messages[0], *history.messages[2:]]  # without the first answer

    tools: list[list[str]] = []
    endpoint = FakeEndpoint(lambda messages: "ab", policy_version=4)
    runtime = Runtime(endpoint, limits=Limits(max_turns=2), context=newest)
    play(runtime, lambda: EchoEnv(2), guidance=Guidance(q, beta=1.0, draws=2))
    assert seen == [
        (0, TASK, 4, 0, None, ["go"], ["go"]),
        (1, TASK, 4, 3, None, ["go", "ab"], ["go", "ab", "ab"]),
    ]
    play(runtime, lambda: Bell(), guidance=Guidance(q, beta=1.0, draws=2))
    assert tools[2:] == [["ring"], ["ring"]]
    assert all([one.name for one in call.tools] == ["ring"] for call in endpoint.calls[4:])


def test_every_draw_has_the_requests_own_deadline() -> None:
    class Timed(FakeEndpoint):
        async def complete(
            self,
            messages: Sequence[Message],
            sampling: Sampling,
            *,
            seed: int | None = None,
            tools: Sequence[ToolSpec] = (),
            timeout_s: float = 600.0,
        ) -> Completion:
            given.append(timeout_s)
            return await super().complete(messages, sampling, seed=seed, tools=tools, timeout_s=timeout_s)

    given: list[float] = []
    runtime = Runtime(Timed(lambda messages: "x"), limits=Limits(max_turns=1, request_timeout_s=17.0))
    play(runtime, lambda: EchoEnv(1), guidance=Guidance(alike, beta=1.0, draws=3))
    assert given == [17.0] * 3


def test_a_guided_turn_says_how_long_draws_and_values_took() -> None:
    async def slow(point: DecisionPoint, candidates: Sequence[Completion]) -> list[float]:
        await asyncio.sleep(2.0)
        return [0.0] * len(candidates)

    runtime = Runtime(FakeEndpoint(lambda messages: "x", latency_s=1.0), limits=Limits(max_turns=1))
    trajectory = play(runtime, lambda: EchoEnv(1), guidance=Guidance(slow, beta=1.0, draws=2))
    assert trajectory.turns[0].model_s == pytest.approx(3.0)


def test_after_a_snapshot_values_have_the_decisions_time_and_not_the_tools() -> None:
    async def looks_then_thinks(point: DecisionPoint, candidates: Sequence[Completion]) -> list[float]:
        assert point.snapshot is not None
        await point.snapshot()
        await asyncio.sleep(20.0)
        return [0.0] * len(candidates)

    limits = Limits(max_turns=1, tool_timeout_s=5.0, turn_timeout_s=100.0)
    runtime = Runtime(FakeEndpoint(lambda messages: "heads"), limits=limits)
    trajectory = play(
        runtime, lambda: CoinFlipEnv(1), guidance=Guidance(looks_then_thinks, beta=1.0, draws=2, timeout_s=60.0)
    )
    assert trajectory.end.is_terminal, trajectory.error
    assert trajectory.turns[0].decision is not None
    assert trajectory.turns[0].decision.fallback == ""


def test_a_draw_that_never_comes_ends_the_turn_as_an_unguided_one_does() -> None:
    async def forever(messages: Sequence[Message]) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    def end(guidance: Guidance | None) -> tuple[Any, ...]:
        limits = Limits(max_turns=2, tool_timeout_s=3.0, turn_timeout_s=50.0)
        runtime = Runtime(FakeEndpoint(lambda messages: forever(messages)), limits=limits)
        trajectory = play(runtime, lambda: EchoEnv(2), guidance=guidance)
        return trajectory.end, trajectory.error, trajectory.ended_s - trajectory.started_s

    assert end(Guidance(alike, beta=1.0, draws=3)) == end(None)
    assert end(None)[2] == 50.0


def test_what_is_injected_is_not_guided() -> None:
    async def actor(shown: Sequence[Message], seed: int) -> str:
        return "injected"

    runtime = Runtime(FakeEndpoint(lambda messages: "drawn"), limits=Limits(max_turns=2))
    trajectory = play(
        runtime, lambda: EchoEnv(2), guidance=Guidance(alike, beta=1.0, draws=2), injection=Injection(1.0, actor)
    )
    assert [(turn.text, turn.decision is None) for turn in trajectory.turns] == [("injected", True), ("drawn", False)]


def test_where_chats_are_rendered_here_an_episode_goes_on_from_the_ids_of_the_chosen_draw() -> None:
    """`ab` is sampled as one id and would be rendered as two."""
    drawn: list[int] = []

    def serve(path: str, body: dict[str, Any]) -> Reply:
        text = [PAIR, ord("0") + len(drawn) % 10]
        drawn.append(len(body["prompt"]))
        ids = [*text, END_ID]
        choice = {
            "text": "",
            "finish_reason": "stop",
            "token_ids": ids,
            "logprobs": {"token_logprobs": [-0.5] * len(ids)},
        }
        return Reply(200, {}, msgspec.json.encode({"choices": [choice]}))

    async def last(point: DecisionPoint, candidates: Sequence[Completion]) -> list[float]:
        return [float(one.text[-1]) for one in candidates]

    dialect, transport = Dialect(token_mode="tokens"), FakeTransport(serve)
    endpoint = Endpoint("http://x/v1", model="m", dialect=dialect, renderer=FakeRenderer(), transport=transport)
    runtime = Runtime(endpoint, limits=Limits(max_turns=3))
    trajectory = play(runtime, lambda: EchoEnv(3), guidance=Guidance(last, beta=float("inf"), draws=2))
    assert [turn.text for turn in trajectory.turns] == ["ab1", "ab3", "ab5"]
    assert len(trajectory.segments) == 1
    assert trajectory.drifts == 0
    ids = list(trajectory.segments[0].ids())
    assert [ids[turn.start : turn.start + 2] for turn in trajectory.turns] == [
        [PAIR, ord("1")],
        [PAIR, ord("3")],
        [PAIR, ord("5")],
    ]
