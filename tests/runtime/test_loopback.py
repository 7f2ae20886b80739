"""Agents of the official `openai` package, unmodified, in the process of the runtime."""

import asyncio
import gc
import threading
from typing import Any

import openai
import pytest

from turngate.envs.base import End, Task
from turngate.runtime.agent import Agent
from turngate.runtime.limits import Limits
from turngate.runtime.runtime import Runtime
from turngate.runtime.testing import FakeEndpoint
from turngate.runtime.testing.endpoints import render_ids
from turngate.runtime.types import Message, Sampling

TASK = Task("t", "Go.", {"digit": "4"})
HI = [{"role": "user", "content": "hi"}]


async def guess(session, task):
    """An agent as people have it: it knows nothing of us but the client."""
    client = session.openai
    messages = [{"role": "user", "content": task.prompt}]
    for _ in range(3):
        reply = await client.chat.completions.create(model="any", messages=messages, temperature=0.2)
        text = reply.choices[0].message.content
        if text == task.data["digit"]:
            return 1.0
        messages += [reply.choices[0].message, {"role": "user", "content": "no"}]
    return 0.0


async def test_an_agent_with_the_openai_client_is_recorded_token_by_token():
    runtime = Runtime(FakeEndpoint(["3", "4"]), sampling=Sampling(max_tokens=9))
    trajectory = await runtime.rollout(Agent(guess), TASK)
    await runtime.aclose()
    assert (trajectory.end, trajectory.reward, trajectory.trainable) == (End.success, 1.0, True)
    (segment,) = trajectory.segments
    said = [Message("user", "Go."), Message("assistant", "3"), Message("user", "no"), Message("assistant", "4")]
    assert list(segment.ids()) == render_ids(said, add_generation_prompt=False)
    assert [(t.text, t.observation) for t in trajectory.turns] == [("3", "no"), ("4", "")]
    assert {call.sampling for call in runtime.endpoint.calls} == {Sampling(max_tokens=9)}  # pinned


async def test_many_agents_share_one_gateway_and_one_pool_and_leave_no_task():
    runtime = Runtime(FakeEndpoint(lambda messages: "4" if len(messages) > 1 else "3", latency_s=0.001))
    before = asyncio.all_tasks()
    evaluation = await runtime.evaluate(Agent(guess), [TASK] * 64)
    assert (evaluation.successes, evaluation.failed) == (64, 0)
    assert len(runtime._loopback._entrances) == 1
    assert repr(runtime._loopback).startswith("<Loopback http://127.0.0.1:")
    await runtime.aclose()
    assert repr(runtime._loopback) == "<Loopback closed>"
    assert asyncio.all_tasks() == before
    assert runtime.sessions.statistics().open == 0


async def test_a_limit_ends_the_agent_at_once_and_truncates_the_episode():
    runtime = Runtime(FakeEndpoint(lambda _: "3"), limits=Limits(max_turns=2))
    async with asyncio.timeout(5):  # the client does not retry for seconds
        trajectory = await runtime.rollout(Agent(guess), TASK)
    await runtime.aclose()
    assert (trajectory.end, len(trajectory.turns)) == (End.turn_limit, 2)


async def test_a_client_that_outlives_its_session_is_told_so():
    runtime = Runtime(FakeEndpoint(lambda _: "3"))
    async with runtime.session() as session:
        client = session.openai
    with pytest.raises(openai.ConflictError, match="session is sealed"):
        await client.chat.completions.create(model="any", messages=HI)
    await runtime.aclose()


def test_a_runtime_serves_one_event_loop_after_the_other():
    runtime = Runtime(FakeEndpoint(lambda _: "4"))
    threads = threading.active_count()
    for _ in range(2):  # asyncio.run cancels what is left, the gateway among it
        assert asyncio.run(runtime.rollout(Agent(guess), TASK)).end is End.success
    gc.collect()
    assert runtime._loopback._entrances == []
    assert threading.active_count() == threads


async def test_the_url_and_the_key_do_for_any_other_client():
    runtime = Runtime(FakeEndpoint(lambda _: "4"))
    async with runtime.session(TASK) as session:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key) as client:
            ask: Any = client.chat.completions.create
            stream = await ask(model="any", messages=HI, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        session.add_reward("outcome", 1.0)
    await runtime.aclose()
    assert text == session.trajectory.turns[0].text == "4"


async def test_the_environment_of_the_process_sends_no_request_astray(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    runtime = Runtime(FakeEndpoint(lambda _: "4"))
    assert (await runtime.rollout(Agent(guess), TASK)).end is End.success
    await runtime.aclose()


async def test_a_gateway_that_cannot_start_is_told_in_the_log_and_refuses(monkeypatch, caplog):
    runtime = Runtime(FakeEndpoint(lambda _: "4"))

    def broken(_listener):
        raise OSError("no more files")

    monkeypatch.setattr(runtime._loopback, "_open_gateway", broken)
    async with runtime.session() as session:
        client = session.openai.with_options(max_retries=0)
        with pytest.raises((openai.APIConnectionError, RuntimeError)):
            await client.chat.completions.create(model="any", messages=HI)
    assert "the gateway for session.openai at http://127.0.0.1" in caplog.text
    assert "no more files" in caplog.text


async def test_a_loopback_closed_before_its_first_step_leaves_no_socket():
    runtime = Runtime(FakeEndpoint(lambda _: "4"))
    session = runtime.session()
    assert session.base_url.startswith("http://127.0.0.1:")
    await runtime.aclose()
    assert runtime._loopback._entrances == []
    session.seal()


def test_a_door_that_was_closed_opens_anew_though_another_loop_has_one_too():
    runtime = Runtime(FakeEndpoint(lambda _: "4"))

    async def url():
        await asyncio.sleep(0)
        return runtime._loopback.base_url

    with asyncio.Runner() as one, asyncio.Runner() as other:
        first, others = one.run(url()), other.run(url())
        one.run(runtime.aclose())
        assert one.run(url()) not in (first, others)
        assert other.run(url()) == others
        assert one.run(runtime.rollout(Agent(guess), TASK)).end is End.success
        for runner in (one, other):
            runner.run(runtime.aclose())
    assert runtime._loopback._entrances == []
