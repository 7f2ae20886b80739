"""Guidance for agents with loops of their own: sessions, agents, and chats that are rendered here."""

import asyncio
import logging

import pytest

from tests.runtime.test_enumeration import text_reply
from turngate.envs.base import End, Task
from turngate.envs.fakes import CoinFlipEnv
from turngate.runtime import Agent, Limits, Runtime
from turngate.runtime.dialect import Dialect
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.errors import EndpointError
from turngate.runtime.guidance import Guidance
from turngate.runtime.monte_carlo_q import MonteCarloQ
from turngate.runtime.selection import selection_probs
from turngate.runtime.testing import FakeEndpoint, FakeTransport, cancel_at_every_tick, run_virtual
from turngate.runtime.testing.renderers import FakeRenderer
from turngate.runtime.types import Message

TASK = Task("t", "say something")
HI = [{"role": "user", "content": "hi"}]


def saying(*texts):
    waiting = iter(texts)
    return FakeEndpoint(lambda _: next(waiting))


async def by_length(point, candidates):
    """Longer is better."""
    return [float(len(one.text)) for one in candidates]


async def one_turn(endpoint, guidance, **options):
    runtime = Runtime(endpoint, guidance=guidance)
    async with runtime.session(TASK, **options) as session:
        reply = await session.chat(HI)
    return reply, session.trajectory


def test_the_reply_is_chosen_and_the_decision_is_on_its_turn_with_the_chosen_tokens_alone():
    reply, trajectory = run_virtual(one_turn(saying("a", "abc", "ab"), Guidance(by_length, beta=2.0, draws=3)))
    turn, decision = trajectory.turns[0], trajectory.turns[0].decision
    assert [c.text for c in decision.candidates] == ["a", "abc", "ab"]
    assert [c.weight for c in decision.candidates] == pytest.approx(selection_probs([1, 3, 2], 2.0))
    assert turn.text == reply.text == decision.candidates[decision.chosen].text
    (segment,) = trajectory.segments
    assert list(segment.ids())[turn.start :] == [*reply.text.encode(), 260]
    assert sum(segment.policy_mask) == turn.length == len(reply.text) + 1


def test_a_value_function_sees_the_chat_the_task_and_the_turn():
    seen = []

    async def q(point, candidates):
        seen.append((point.task, point.turn, [m.role for m in point.messages], point.snapshot, point.policy_version))
        return [0.0] * len(candidates)

    async def agent(session, task):
        first = await session.chat(HI)
        await session.chat([*HI, {"role": "assistant", "content": first.text}, {"role": "user", "content": "go"}])
        return 1.0

    endpoint = FakeEndpoint(lambda _: "x", policy_version=4)
    trajectory = run_virtual(Runtime(endpoint, guidance=Guidance(q, beta=1.0, draws=2)).rollout(Agent(agent), TASK))
    assert trajectory.end is End.success
    assert seen == [
        (TASK, 0, ["user"], None, 4),
        (TASK, 1, ["user", "assistant", "user"], None, 4),
    ]
    assert all(turn.decision is not None for turn in trajectory.turns)


def test_beta_zero_is_the_session_without_guidance_bit_for_bit():
    async def play(guidance):
        endpoint = FakeEndpoint(lambda _: "hello")
        reply, trajectory = await one_turn(endpoint, guidance, seed=9)
        return reply, trajectory.segments, trajectory.turns, endpoint.calls

    assert run_virtual(play(None)) == run_virtual(play(Guidance(by_length, beta=0.0)))


def test_guidance_can_be_left_out_of_a_session_and_an_evaluation():
    async def agent(session, task):
        return float(len((await session.chat(HI)).text))

    async def play():
        endpoint = FakeEndpoint(lambda _: "x")
        runtime = Runtime(endpoint, guidance=Guidance(by_length, beta=1.0, draws=4))
        async with runtime.session(TASK, guidance=None) as session:
            await session.chat(HI)
        await runtime.evaluate(Agent(agent), [TASK], guidance=None)
        unguided = len(endpoint.calls)
        await runtime.evaluate(Agent(agent), [TASK])
        return unguided, len(endpoint.calls)

    assert run_virtual(play()) == (2, 6)


def test_monte_carlo_values_have_nothing_to_branch_from_which_is_flagged_and_told_once(caplog):
    async def play():
        runtime = Runtime(FakeEndpoint(lambda _: "x"))
        runtime.sessions.guidance = Guidance(MonteCarloQ(runtime, lambda: CoinFlipEnv(1)), beta=1.0, draws=4)
        async with runtime.session(TASK, guidance=runtime.sessions.guidance) as session:
            for _ in range(3):
                await session.chat(HI)
        return session.trajectory, runtime.endpoint

    with caplog.at_level(logging.WARNING, "turngate.guidance"):
        trajectory, endpoint = run_virtual(play())
    assert [turn.decision.fallback.partition(":")[0] for turn in trajectory.turns] == ["no snapshots"] * 3
    assert len(endpoint.calls) == 3  # nothing is drawn to be thrown away
    assert len(caplog.records) == 1


def test_the_look_ahead_of_an_agent_is_not_guided():
    async def agent(session, task):
        chat = list(HI)
        while True:
            reply = await session.chat(chat)
            chat += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "go"}]

    async def play():
        endpoint = FakeEndpoint(lambda _: "x")
        runtime = Runtime(endpoint, limits=Limits(max_turns=1), guidance=Guidance(by_length, beta=1.0, draws=4))
        trajectory = await runtime.rollout(Agent(agent), TASK, last_contexts=True)
        return trajectory, len(endpoint.calls)

    trajectory, calls = run_virtual(play())
    assert (trajectory.end, calls) == (End.turn_limit, 5)
    assert trajectory.last_context_is_whole


@pytest.mark.parametrize("draws", [4, 40])  # more than a conversation remembers branches, too
def test_where_chats_are_rendered_here_only_the_chosen_draw_is_remembered(draws):
    texts = iter(["abc", "abcd", *["a"] * (draws - 2), *["x"] * (draws - 1), "xyzw"])

    def serve(path, body):
        ids = [*next(texts).encode(), 260]
        return text_reply(ids, [-0.5] * len(ids))

    async def play():
        endpoint = Endpoint(
            "http://x/v1",
            model="m",
            dialect=Dialect(token_mode="tokens"),
            renderer=FakeRenderer(),
            transport=FakeTransport(serve),
        )
        runtime = Runtime(endpoint, guidance=Guidance(by_length, beta=50.0, draws=draws))
        async with runtime.session(TASK) as session:
            first = await session.chat(HI)
            said = {"role": "assistant", "content": first.text}
            second = await session.chat([*HI, said, {"role": "user", "content": "go"}])
            branches = len(session.conversation._branches)
        return first.text, second.text, branches, session.trajectory

    first, second, branches, trajectory = run_virtual(play())
    assert (first, second, branches) == ("abcd", "xyzw", 1)
    assert len(trajectory.segments) == 1


def test_a_request_without_a_seed_sends_none():
    async def play():
        from turngate.runtime.guided_conversation import GuidedConversation
        from turngate.runtime.types import Sampling

        endpoint = FakeEndpoint(lambda _: "x")
        chat = GuidedConversation(endpoint, endpoint, Guidance(by_length, beta=1.0, draws=3))
        await chat.complete([Message("user", "hi")], Sampling())
        return [call.seed for call in endpoint.calls]

    assert run_virtual(play()) == [None] * 3


def test_a_server_that_fails_the_first_draw_fails_the_request_as_without_guidance():
    async def play():
        endpoint = FakeEndpoint(lambda _: EndpointError("down"))
        with pytest.raises(EndpointError, match="down"):
            await one_turn(endpoint, Guidance(by_length, beta=1.0, draws=3))
        return endpoint.in_flight

    assert run_virtual(play()) == 0


def test_sealing_a_session_drops_a_decision_that_is_under_way():
    asked = []

    async def slow(point, candidates):
        asked.append(len(candidates))
        await asyncio.sleep(3600)

    async def play():
        runtime = Runtime(FakeEndpoint(lambda _: "x"), guidance=Guidance(slow, beta=1.0, draws=2, timeout_s=7200))
        session = runtime.session(TASK)
        task = asyncio.ensure_future(session.chat(HI))
        await asyncio.sleep(1)
        session.seal(End.cancelled)
        with pytest.raises(Exception, match="sealed"):
            await task
        return session.trajectory

    trajectory = run_virtual(play())
    assert asked == [2]
    assert trajectory.turns == ()


def test_a_decision_cancelled_at_any_tick_leaves_nothing_behind():
    state = {}

    async def q(point, candidates):
        await asyncio.sleep(0)
        return [0.0] * len(candidates)

    async def play():
        state["endpoint"] = FakeEndpoint(lambda _: "x")
        await one_turn(state["endpoint"], Guidance(q, beta=1.0, draws=3))

    def check(tick):
        assert state["endpoint"].in_flight == 0

    assert cancel_at_every_tick(play, check) > 5


def test_a_thousand_decisions_at_once_get_their_own_values():
    async def q(point, candidates):
        await asyncio.sleep(0.1)
        wanted = point.messages[0].content
        return [float(one.text == wanted) for one in candidates]

    async def one(runtime, number):
        async with runtime.session(TASK, id=str(number), seed=number) as session:
            reply = await session.chat([Message("user", f"n{number % 4}")])
        return reply.text == f"n{number % 4}", session.trajectory.turns[0].decision.fallback

    async def play():
        counter = iter(range(1 << 30))
        endpoint = FakeEndpoint(lambda _: f"n{next(counter) % 4}", latency_s=1.0)
        runtime = Runtime(endpoint, guidance=Guidance(q, beta=200.0, draws=4))
        return await asyncio.gather(*(one(runtime, number) for number in range(1000)))

    found = run_virtual(play())
    assert found == [(True, "")] * 1000
