"""Agents that bring their own loop, run wherever environments are."""

import asyncio
import functools
from typing import Any

import pytest

from turngate.envs.base import End, Task, ToolSpec
from turngate.envs.testing import EchoEnv
from turngate.runtime.agent import Agent, Outcome
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.errors import ConfigError, EndpointError, ToolError
from turngate.runtime.events import Events, RolloutFinished, RolloutStarted, TurnFinished
from turngate.runtime.injection import Injection
from turngate.runtime.limits import Limits
from turngate.runtime.restarts import Restarts
from turngate.runtime.runtime import Runtime
from turngate.runtime.seeds import derive_seed
from turngate.runtime.testing import FakeEndpoint, FakeTransport, cancel_everywhere, run_virtual
from turngate.runtime.testing.learner import CountingLearner
from turngate.runtime.training import train
from turngate.runtime.transcript import read_trajectories, write_trajectories
from turngate.runtime.transport import Reply
from turngate.runtime.types import Message, Sampling

TASK = Task("t", "Go.", {"digit": "4"})


async def guess(session, task):
    """Asks until told that the guess is right, three times at most."""
    messages = [{"role": "user", "content": task.prompt}]
    for _ in range(3):
        reply = await session.chat(messages)
        if reply.text == task.data["digit"]:
            return 1.0
        messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "no"}]
    return 0.0


def runtime_with(script, *, latency_s=0.0, **options):
    return Runtime(FakeEndpoint(script, latency_s=latency_s), **options)


async def play(fn, script=lambda _: "yes", **options):
    runtime = runtime_with(script, **options)
    trajectory = await runtime.rollout(Agent(fn), TASK, trajectory_id="e")
    assert (len(runtime.sessions), runtime.endpoint.in_flight) == (0, 0)
    return trajectory


async def test_an_agent_is_an_episode_like_that_of_an_environment():
    trajectory = await play(guess, ["3", "4"])
    assert (trajectory.end, trajectory.reward, trajectory.id, trajectory.task) == (End.success, 1.0, "e", TASK)
    assert [(t.text, t.observation, t.rewards) for t in trajectory.turns] == [
        ("3", "no", {}),
        ("4", "", {"outcome": 1.0}),
    ]
    assert len(trajectory.segments) == 1
    assert trajectory.trainable


@pytest.mark.parametrize(
    ("verdict", "end", "rewards"),
    [
        (0.5, End.success, {"outcome": 0.5}),
        (True, End.success, {"outcome": 1.0}),
        (0, End.failure, {"outcome": 0.0}),
        (-1, End.failure, {"outcome": -1.0}),
        (None, End.failure, {}),
        ({"outcome": 0.0, "bonus": 2.0}, End.failure, {"outcome": 0.0, "bonus": 2.0}),
        ({"bonus": 2.0}, End.success, {"bonus": 2.0}),
        (Outcome(-1.0, End.success), End.success, {"outcome": -1.0}),
        (Outcome({"tests": 0.4}, End.failure), End.failure, {"tests": 0.4}),
        (Outcome(0.0, End.budget), End.budget, {"outcome": 0.0}),
        (Outcome(0.0, End.timeout), End.timeout, {"outcome": 0.0}),
    ],
)
async def test_what_an_agent_returns_is_the_reward_of_its_newest_turn_and_the_end(verdict, end, rewards):
    async def agent(session, task):
        await session.chat([{"role": "user", "content": "hi"}])
        return verdict

    trajectory = await play(agent)
    assert (trajectory.end, trajectory.turns[-1].rewards, trajectory.error) == (end, rewards, "")


@pytest.mark.parametrize(
    ("verdict", "why"),
    [
        ("much", "rewards must be finite numbers"),
        ("42", "rewards must be finite numbers of at most 1e+30: got '42'"),
        (float("nan"), "rewards must be finite numbers"),
        ({1: 1.0}, "names must be str"),
        (Outcome(1.0, End.env_error), r"the agent's Outcome.end must be terminal or a truncation: got <End.env_error"),
        (Outcome(1.0, "success"), "the agent's Outcome.end must be terminal or a truncation: got 'success'"),
    ],
)
async def test_a_verdict_that_is_none_is_the_agents_error(verdict, why):
    async def agent(session, task):
        await session.chat([{"role": "user", "content": "hi"}])
        return verdict

    trajectory = await play(agent)
    assert trajectory.end is End.env_error
    assert why.replace("\\", "") in trajectory.error.replace("\\", "")


@pytest.mark.parametrize(
    ("error", "end", "why"),
    [
        (ValueError("oops"), End.env_error, "the agent must not raise: got ValueError: oops"),
        (SystemExit(3), End.env_error, "the agent must not raise: got SystemExit: 3"),
        (ToolError("calculator broke"), End.tool_error, "calculator broke (session e, turn 0)"),
        (EndpointError("made up"), End.env_error, "the agent must not raise: got EndpointError: made up"),
        (asyncio.CancelledError(), End.env_error, "the agent must not raise CancelledError: nobody cancelled it"),
    ],
)
async def test_what_an_agent_raises_is_data(error, end, why):
    async def agent(session, task):
        raise error

    trajectory = await play(agent)
    assert trajectory.end is end
    assert trajectory.error.startswith(why)


async def test_a_function_that_is_no_coroutine_is_the_agents_error():
    trajectory = await play(lambda session, task: 1.0)
    assert trajectory.end is End.env_error
    assert "TypeError" in trajectory.error


async def test_a_server_that_fails_is_not_the_agents_error_whatever_the_agent_makes_of_it():
    async def careless(session, task):
        try:
            return await guess(session, task)
        except Exception:
            return 0.0

    for agent in (guess, careless):
        trajectory = await play(agent, ["3", EndpointError("down")])
        assert (trajectory.end, len(trajectory.turns)) == (End.endpoint_error, 1)
        assert trajectory.error == "EndpointError: down (session e, turn 1)"


async def test_a_bug_of_ours_stops_the_run_whatever_the_agent_makes_of_it():
    async def careless(session, task):
        try:
            return await guess(session, task)
        except Exception:
            return 0.5

    for agent in (guess, careless):
        with pytest.raises(ZeroDivisionError, match="ours"):
            await play(agent, ["3", ZeroDivisionError("ours")])


async def test_text_that_no_request_can_carry_is_the_agents_bug_and_not_ours():
    def endpoint(messages):
        return messages[0].content.encode().decode()

    async def agent(session, task):
        await session.chat([{"role": "user", "content": "\ud800"}])

    trajectory = await play(agent, endpoint)
    assert trajectory.end is End.env_error
    assert "messages must be text that UTF-8 can carry: got '\\ud800' (session.chat: messages[0])" in trajectory.error


class _Unspeakable(Exception):
    def __str__(self):
        raise SystemExit


_CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda s: s.chat(_CHAT, role=None), "role must be text that UTF-8 can carry: got None"),
        (lambda s: s.chat(_CHAT, seed=object()), "seed must be an integer: got <object"),
        (lambda s: s.chat(_CHAT, sampling=Sampling(stop=("\ud800",))), "sampling must be JSON: got UnicodeEncodeError"),
        (lambda s: s.chat(_CHAT, tools=[ToolSpec("f", "", {"x": object()})]), "tools[0] must be JSON: got TypeError"),
        (lambda s: s.chat([Message(7, "hi")]), "messages must be text that UTF-8 can carry: got 7"),
        (lambda s: s.chat([Message("user", "hi", (), 5)]), "messages must be text that UTF-8 can carry: got 5"),
        (lambda s: s.seal("success"), "end must be an End or None: got 'success'"),
        (lambda s: _raise(_Unspeakable()), "an error whose text cannot be had"),
    ],
)
async def test_whatever_an_agent_gives_its_session_costs_its_own_episode_and_leaves_a_record(spoil, why, tmp_path):
    async def agent(session, task):
        made = spoil(session)
        await (made if asyncio.iscoroutine(made) else asyncio.sleep(0))
        return 1.0

    reply = Reply(200, {}, b'{"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}')
    runtime = Runtime(Endpoint("http://x/v1", model="m", transport=FakeTransport(reply)))
    trajectory = await runtime.rollout(Agent(agent), TASK)
    assert trajectory.end is End.env_error
    assert why in trajectory.error
    write_trajectories(tmp_path / "e.jsonl", [trajectory])
    assert list(read_trajectories(tmp_path / "e.jsonl")) == [trajectory]


def _raise(error):
    raise error


async def test_a_limit_of_turns_truncates_whether_the_agent_raises_or_returns():
    async def careless(session, task):
        try:
            return await guess(session, task)
        except Exception:
            return 0.5

    for agent, reward in ((guess, 0.0), (careless, 0.5)):
        trajectory = await play(agent, lambda _: "3", limits=Limits(max_turns=2))
        assert (trajectory.end, len(trajectory.turns), trajectory.reward) == (End.turn_limit, 2, reward)


async def test_an_agent_can_have_a_turn_limit_of_its_own():
    runtime = runtime_with(lambda _: "3")
    assert (await runtime.rollout(Agent(guess, max_turns=1), TASK)).end is End.turn_limit


def test_a_slow_agent_is_cut_short_and_what_it_did_stays():
    async def slow(session, task):
        await session.chat([{"role": "user", "content": "hi"}])
        await asyncio.sleep(1000)

    trajectory = run_virtual(play(slow, limits=Limits(rollout_timeout_s=60)))
    assert (trajectory.end, len(trajectory.turns), trajectory.ended_s - trajectory.started_s) == (End.timeout, 1, 60.0)
    assert trajectory.error == "agent must end within 60 s: it did not (session e); see Limits.rollout_timeout_s"
    assert trajectory.last_context == trajectory.segments[0].token_ids


def test_an_agent_that_swallows_its_cancellation_is_left_behind():
    async def stubborn(session, task):
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                continue

    trajectory = run_virtual(play(stubborn, limits=Limits(rollout_timeout_s=60, close_timeout_s=5)))
    assert (trajectory.end, trajectory.ended_s - trajectory.started_s) == (End.timeout, 65.0)


async def test_a_session_that_the_agent_sealed_itself_stays_as_it_left_it():
    async def hasty(session, task):
        session.seal(End.budget)
        return 1.0

    assert (await play(hasty)).end is End.budget


def test_cancelled_at_every_wait_an_agent_leaves_nothing_behind():
    kept: list[Any] = []

    async def patient(session, task):
        await asyncio.sleep(1)
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(session.chat([{"role": "user", "content": "hi"}]))
        try:
            return await guess(session, task)
        finally:
            await asyncio.sleep(1)

    def make():
        events, finished = Events(), []
        events.subscribe(RolloutFinished, lambda event: finished.append(event.trajectory))
        runtime = runtime_with(lambda _: "4", latency_s=1.0, events=events)
        kept[:] = [runtime, finished]
        return runtime.rollout(Agent(patient), TASK)

    def check(outcome):
        runtime, finished = kept
        assert (len(runtime.sessions), runtime.endpoint.in_flight) == (0, 0)
        assert [t.end for t in finished] in ([End.success], [End.cancelled])
        assert (finished[0].end is End.cancelled) is outcome.cancelled

    assert cancel_everywhere(make, check) > 3


async def test_requests_are_drawn_as_the_rollout_says_from_seeds_of_its_own():
    runtime = runtime_with(["4"], sampling=Sampling(max_tokens=9))
    await runtime.rollout(Agent(guess), TASK, seed=5, sampling=Sampling(temperature=0.0, max_tokens=2))
    (call,) = runtime.endpoint.calls
    assert (call.sampling, call.seed) == (Sampling(temperature=0.0, max_tokens=2), derive_seed(5, "sampler", 0))


async def test_members_of_a_group_can_share_the_luck_of_what_is_around_the_model():
    seen = []

    async def agent(session, task):
        seen.append((session.seed, session.env_seed))

    await runtime_with([]).rollout(Agent(agent), TASK, seed=1, env_seed=9)
    assert seen == [(1, 9)]


async def test_events_of_an_agents_episode_are_those_of_any():
    events = Events()
    heard: list[Any] = []
    for kind in (RolloutStarted, TurnFinished, RolloutFinished):
        events.subscribe(kind, heard.append)
    await runtime_with(["3", "4"], events=events).rollout(Agent(guess), TASK, group_id="g", member=2)
    assert heard[0] == RolloutStarted("t.0", "g", 2, "t")
    assert [type(event) for event in heard[1:]] == [TurnFinished, TurnFinished, RolloutFinished]


async def test_evaluation_takes_an_agent():
    evaluation = await runtime_with(lambda m: "4" if len(m) > 1 else "3").evaluate(Agent(guess), [TASK] * 8)
    assert (evaluation.successes, evaluation.scored, evaluation.mean_turns) == (8, 8, 2.0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"keep_snapshots": True}, "keep_snapshots"),
        ({"start": object()}, "restarts"),
        ({"injection": Injection(0.1, guess)}, "injection"),
    ],
)
async def test_what_needs_a_look_inside_the_loop_is_refused(options, named):
    with pytest.raises(
        ConfigError, match=f"{named} must go with an environment: got <Agent guess>, which runs its own"
    ):
        await runtime_with([]).rollout(Agent(guess), TASK, **options)


@pytest.mark.parametrize(
    ("played", "told"),
    [
        (guess, r"agent must be wrapped: got the coroutine function .*guess.*Agent"),
        (functools.partial(guess), "agent must be wrapped"),
        (EchoEnv(), "environment must be a class, or anything callable"),
        (None, "got None; pass the class"),
    ],
)
async def test_what_is_neither_an_agent_nor_makes_environments_is_refused(played, told):
    with pytest.raises(ConfigError, match=told):
        await runtime_with([]).rollout(played, TASK)
    with pytest.raises(ConfigError, match=told):
        await runtime_with([]).evaluate(played, [TASK] * 2)


async def test_an_agent_that_is_no_coroutine_function_is_told_so():
    plain: Any = lambda session, task: 1.0
    trajectory = await runtime_with([]).rollout(Agent(plain), TASK)
    assert "must return something to await: got float; write it as `async def`" in trajectory.error


async def test_training_refuses_restarts_of_an_agent_before_anything_starts(tmp_path):
    runtime = runtime_with([])
    with pytest.raises(ConfigError, match="restarts must go with an environment"):
        await train(
            runtime, Agent(guess), [TASK], learner=CountingLearner(), updates=1, run_dir=tmp_path / "run",
            restarts=Restarts(), publisher=object(),
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_an_agent_is_known_by_its_functions_name_or_its_own():
    assert repr(Agent(guess)) == "<Agent guess>"
    assert repr(Agent(guess, name="solver")) == "<Agent solver>"
    with pytest.raises(ConfigError, match="agent must be a coroutine function"):
        Agent("guess")
    with pytest.raises(ConfigError, match="max_turns must be 1 or more: got 0"):
        Agent(guess, max_turns=0)


async def test_environments_still_go_everywhere():
    assert (await runtime_with(lambda _: "x").rollout(EchoEnv, TASK)).end is End.success
