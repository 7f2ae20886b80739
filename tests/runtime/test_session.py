"""One episode of an agent with its own loop: what it may ask, what is recorded, how it ends."""

import asyncio
import math
from typing import Any

import pytest

from turngate.envs.base import End, Task
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.errors import (
    ConfigError,
    ContextOverflow,
    EndpointError,
    EnvError,
    MalformedReply,
    SessionError,
    SessionLimit,
    SessionSealed,
)
from turngate.runtime.events import Events, RolloutFinished, RolloutStarted, TurnFinished
from turngate.runtime.json_ids import JsonIds
from turngate.runtime.limits import Limits
from turngate.runtime.seeds import derive_seed
from turngate.runtime.session_table import SessionTable
from turngate.runtime.testing import FakeEndpoint, run_virtual
from turngate.runtime.testing.endpoints import render_ids
from turngate.runtime.types import Completion, Message, Sampling

TASK = Task("lock", "open it")
PINNED = Sampling()
HI = [{"role": "user", "content": "hi"}]


def open_session(script=lambda _: "yes", *, limits=None, sampling=PINNED, events=None, latency_s=0.0, **options):
    endpoint = script if isinstance(script, FakeEndpoint) else FakeEndpoint(script, latency_s=latency_s)
    return SessionTable(endpoint, limits=limits, sampling=sampling, events=events).create(TASK, id="s", **options)


def grown(reply, answer, messages=HI):
    return [*messages, {"role": "assistant", "content": reply.text}, {"role": "user", "content": answer}]


async def test_a_chat_of_two_turns_is_one_segment_and_its_answers_are_observations():
    async with open_session(["a", "b"]) as session:
        reply = await session.chat(HI)
        await session.chat(grown(reply, "go on"), role="solver")
        session.add_reward("outcome", 1)
    trajectory = session.trajectory
    assert [(t.text, t.observation, t.role, t.segment) for t in trajectory.turns] == [
        ("a", "go on", "", 0),
        ("b", "", "solver", 0),
    ]
    assert trajectory.turns[1].rewards == {"outcome": 1.0}
    (segment,) = trajectory.segments
    assert list(segment.ids()) == render_ids(
        [Message("user", "hi"), Message("assistant", "a"), Message("user", "go on"), Message("assistant", "b")],
        add_generation_prompt=False,
    )
    assert sum(segment.policy_mask) == trajectory.policy_tokens == 4
    assert (trajectory.end, trajectory.id, trajectory.task, trajectory.first_observation) == (
        End.success,
        "s",
        TASK,
        "hi",
    )
    assert [m.content for m in trajectory.messages] == ["hi", "a", "go on", "b"]
    assert trajectory.trainable
    assert repr(session) == "<Session s sealed, success, 2 turns, 0 in flight>"


async def test_seeds_are_derived_per_request_unless_the_agent_gives_one():
    session = open_session(endpoint := FakeEndpoint(lambda _: "yes"), seed=7)
    await session.chat(HI)
    await session.chat(HI, seed=5)
    await session.chat(HI)
    assert [call.seed for call in endpoint.calls] == [derive_seed(7, "sampler", 0), 5, derive_seed(7, "sampler", 1)]
    assert session.env_seed == derive_seed(7, "env")
    assert open_session(env_seed=3).env_seed == 3


async def test_what_is_pinned_stays_whatever_the_agent_asks_for():
    pinned = Sampling(temperature=0.7, top_k=5, max_tokens=9)
    session = open_session(endpoint := FakeEndpoint(lambda _: "yes"), sampling=pinned)
    await session.chat(HI, sampling=Sampling(temperature=0.0, top_p=0.5, max_tokens=3, stop=("\n",)))
    await session.chat(HI)
    assert endpoint.calls[0].sampling == Sampling(temperature=0.7, top_k=5, max_tokens=3, stop=("\n",))
    assert endpoint.calls[1].sampling == pinned
    assert session.seal().trainable


@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        (Sampling(temperature=0.5), "the agent drew at temperature 0.5, top_p 1, top_k 0"),
        (Sampling(top_p=0.9), "the agent drew at temperature 1, top_p 0.9, top_k 0"),
        (Sampling(top_k=4), "the agent drew at temperature 1, top_p 1, top_k 4"),
        (Sampling(max_tokens=3), ""),
        (None, ""),
    ],
)
async def test_an_agent_that_draws_as_it_likes_is_trained_only_where_it_draws_from_the_policy(sampling, why):
    session = open_session(sampling=None)
    await session.chat(HI, sampling=sampling)
    trajectory = session.seal()
    assert trajectory.untrainable_because.startswith(why)
    assert trajectory.trainable is (why == "")


async def test_a_reply_of_which_nobody_says_how_it_was_drawn_is_not_trained():
    session = open_session(sampling=None)
    session.record([Completion("x", [1], [-1.0], [0], [2])], messages=[Message("user", "hi")])
    assert session.seal().untrainable_because == "nobody said how the reply was drawn (turn 0)"


async def test_all_choices_of_a_reply_are_turns_and_count_as_one_towards_the_limit():
    session = open_session(limits=Limits(max_turns=1))
    session.admit("")
    choices = [Completion(str(i), [i], [-1.0], [0], [9, 9]) for i in (1, 2, 3)]
    assert session.record(choices, messages=[Message("user", "hi")])
    with pytest.raises(SessionLimit, match=r"got 1 turns \(Limits.max_turns\) \(session s\)"):
        session.admit("")
    trajectory = session.seal()
    assert [t.text for t in trajectory.turns] == ["1", "2", "3"]
    assert trajectory.policy_tokens == len(trajectory.segments) == 3


async def test_a_turn_limit_refuses_the_next_request_and_truncates_the_episode():
    session = open_session(limits=Limits(max_turns=2))
    await session.chat(HI)
    await session.chat(HI)
    for _ in range(2):
        with pytest.raises(SessionLimit, match="end the episode, rewards are still taken"):
            await session.chat(HI)
    session.add_reward("outcome", 1.0)
    trajectory = session.seal()
    assert (trajectory.end, trajectory.error, trajectory.reward) == (End.turn_limit, "", 1.0)
    assert trajectory.last_context == trajectory.segments[-1].token_ids
    assert not trajectory.last_context_is_whole


async def test_requests_under_way_count_towards_the_turn_limit():
    session = open_session(limits=Limits(max_turns=3), latency_s=0.01)
    replies = await asyncio.gather(*(session.chat(HI) for _ in range(5)), return_exceptions=True)
    assert [type(reply) for reply in replies] == [Completion] * 3 + [SessionLimit] * 2
    assert session.turns == 3


async def test_the_last_tokens_of_the_limit_are_drawn_and_no_more():
    session = open_session(endpoint := FakeEndpoint(lambda _: "abcde"), limits=Limits(max_policy_tokens=8))
    await session.chat(HI)
    await session.chat(HI)
    with pytest.raises(SessionLimit, match=r"got 8 tokens \(Limits.max_policy_tokens\)"):
        await session.chat(HI)
    assert [call.sampling.max_tokens for call in endpoint.calls] == [8, 2]
    assert session.seal().end is End.token_limit


async def test_a_turn_beyond_the_context_limit_is_not_recorded_and_truncates():
    session = open_session(limits=Limits(max_context_tokens=16))
    reply = await session.chat(HI)
    with pytest.raises(SessionLimit, match="beyond 16 tokens"):
        await session.chat(grown(reply, "x"))
    trajectory = session.seal()
    assert (trajectory.end, len(trajectory.turns)) == (End.context_overflow, 1)
    assert trajectory.error == "got a turn beyond 16 tokens (Limits.max_context_tokens) (session s, turn 1)"
    assert trajectory.last_context_is_whole


async def test_a_prompt_that_the_server_finds_too_long_truncates():
    session = open_session(["a", ContextOverflow("too long")])
    await session.chat(HI)
    with pytest.raises(ContextOverflow):
        await session.chat(HI)
    assert session.seal().end is End.context_overflow


async def test_last_contexts_are_asked_for_when_a_limit_refuses_a_chat():
    session = open_session(endpoint := FakeEndpoint(lambda _: "yes"), limits=Limits(max_turns=1), last_contexts=True)
    reply = await session.chat(HI)
    for _ in range(2):
        with pytest.raises(SessionLimit):
            await session.chat(grown(reply, "no"))
    trajectory = session.seal()
    assert len(endpoint.calls) == 2
    assert endpoint.calls[1].sampling.max_tokens == 1
    shown = [Message("user", "hi"), Message("assistant", "yes"), Message("user", "no")]
    assert list(memoryview(trajectory.last_context).cast("i")) == render_ids(shown)
    assert trajectory.last_context_is_whole
    assert len(trajectory.turns) == 1


async def test_rewards_go_to_the_turn_named_or_the_newest_and_add_up():
    session = open_session()
    session.add_reward("early", 0.5)
    await session.chat(HI)
    session.add_reward("step", 1)
    await session.chat(HI)
    session.add_reward("step", 2, turn=0)
    session.add_reward("outcome", -1.0)
    session.add_reward("outcome", 0.25)
    assert [turn.rewards for turn in session.seal().turns] == [{"early": 0.5, "step": 3.0}, {"outcome": -0.75}]


@pytest.mark.parametrize(
    ("name", "value", "turn", "why"),
    [
        ("outcome", math.nan, -1, "rewards must be finite numbers"),
        ("outcome", "much", -1, "rewards must be finite numbers"),
        (1, 1.0, -1, "names must be str"),
        ("\ud800", 1.0, -1, "names must be text that UTF-8 can carry"),
        ("outcome", 1.0, 1, r"turn must be one that was delivered: expected 0 to 0 or -1 .*, got 1"),
        ("outcome", 1.0, -2, "turn must be one that was delivered"),
    ],
)
async def test_a_reward_that_is_none_is_refused_and_changes_nothing(name, value, turn, why):
    session = open_session()
    await session.chat(HI)
    with pytest.raises(EnvError, match=why):
        session.add_reward(name, value, turn)
    assert session.seal().turns[0].rewards == {}


async def test_rewards_that_add_up_beyond_what_learners_can_hold_are_refused():
    session = open_session()
    await session.chat(HI)
    session.add_reward("outcome", 9e29)
    with pytest.raises(EnvError, match="rewards must be finite numbers of at most 1e\\+30"):
        session.add_reward("outcome", 9e29)


async def test_rewards_of_an_agent_that_never_asked_stand_in_the_error():
    session = open_session()
    session.add_reward("outcome", 1.0)
    trajectory = session.seal()
    assert (trajectory.end, trajectory.reward) == (End.success, 0.0)
    assert trajectory.error.startswith("rewards must have a turn to stand on: got {'outcome': 1.0} and no turn")


@pytest.mark.parametrize(
    ("rewards", "end"),
    [
        ([], End.failure),
        ([("outcome", 0.0)], End.failure),
        ([("outcome", 0.1)], End.success),
        ([("outcome", 0.0), ("bonus", 1.0)], End.failure),
        ([("bonus", 1.0)], End.success),
        ([("bonus", -1.0)], End.failure),
    ],
)
async def test_an_episode_is_a_success_when_its_outcome_or_else_all_its_rewards_are_above_zero(rewards, end):
    session = open_session()
    await session.chat(HI)
    for name, value in rewards:
        session.add_reward(name, value)
    assert session.seal().end is end


async def test_a_sealed_session_takes_nothing_and_stays_as_it_is():
    session = open_session()
    with pytest.raises(SessionError, match="session must be sealed before it is read"):
        _ = session.trajectory
    await session.chat(HI)
    first = session.seal(End.failure, "enough")
    assert session.seal(End.success) is session.trajectory is first
    with pytest.raises(SessionSealed, match="rewards must come before the session is sealed: it ended with failure"):
        session.add_reward("outcome", 1.0)
    with pytest.raises(SessionSealed, match="requests must come before"):
        await session.chat(HI)
    assert not session.record([Completion("x", [1], [-1.0], [0], [2])])
    assert (first.end, first.error, len(first.turns)) == (End.failure, "enough", 1)


async def test_sealing_drops_requests_under_way_and_says_so_to_those_who_wait():
    session = open_session(endpoint := FakeEndpoint(lambda _: "yes", latency_s=60))
    waiting = [asyncio.create_task(session.chat(HI)) for _ in range(3)]
    await asyncio.sleep(0)
    assert session.in_flight == 3
    trajectory = session.seal(End.timeout)
    with pytest.raises(SessionSealed, match="it ended with timeout"):
        await waiting[0]
    await asyncio.wait(waiting)
    assert [type(task.exception()) for task in waiting] == [SessionSealed] * 3
    assert (session.in_flight, endpoint.in_flight, trajectory.turns) == (0, 0, ())
    assert all(task.cancelling() == 0 for task in waiting)


async def test_a_cancelled_chat_leaves_no_turn_and_the_session_open():
    session = open_session(FakeEndpoint(lambda _: "yes", latency_s=60))
    task = asyncio.create_task(session.chat(HI))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (session.state, session.in_flight, session.turns) == ("open", 0, 0)


async def test_an_agent_may_give_up_on_a_reply_and_go_on():
    session = open_session(FakeEndpoint(["late", "in time"], latency_s=iter([60, 0]).__next__))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await session.chat(HI)
    assert (await session.chat(HI)).text == "in time"
    assert [turn.text for turn in session.seal().turns] == ["in time"]


@pytest.mark.parametrize(
    ("error", "end", "why"),
    [
        (ValueError("oops"), End.env_error, "the agent must not raise: got ValueError: oops"),
        (asyncio.CancelledError(), End.cancelled, "cancelled from outside"),
        (KeyboardInterrupt(), End.cancelled, "cancelled from outside"),
    ],
)
async def test_what_leaves_the_block_ends_the_session_and_goes_on(error, end, why):
    session = open_session()
    with pytest.raises(type(error)):
        async with session:
            raise error
    assert session.trajectory.end is end
    assert session.trajectory.error.startswith(why)


async def test_an_agent_that_shrugs_off_a_failed_request_does_not_make_the_policy_pay():
    async with open_session([EndpointError("down")]) as session:
        with pytest.raises(EndpointError):
            await session.chat(HI)
        session.add_reward("outcome", 0.0)
    assert session.trajectory.end is End.endpoint_error
    assert session.trajectory.error == "EndpointError: down (session s, turn 0)"


async def test_a_failed_request_that_was_made_good_is_forgotten():
    async with open_session([EndpointError("down"), "yes"]) as session:
        with pytest.raises(EndpointError):
            await session.chat(HI)
        await session.chat(HI)
    assert session.trajectory.end is End.failure


async def test_ids_that_are_none_are_the_servers_failure():
    bad = Completion("x", [1], [-1.0], [0], JsonIds(b'["no"]'))
    async with open_session([bad]) as session:
        with pytest.raises(EndpointError, match="token ids must be integers"):
            await session.chat(HI)
    assert (session.trajectory.end, session.trajectory.turns) == (End.endpoint_error, ())


async def test_events_tell_of_turns_once_their_answer_is_known():
    heard: list[Any] = []
    events = Events()
    for kind in (RolloutStarted, TurnFinished, RolloutFinished):
        events.subscribe(kind, heard.append)
    async with open_session(events=events) as session:
        reply = await session.chat(HI)
        assert [type(event) for event in heard] == [RolloutStarted]
        await session.chat(grown(reply, "go on"))
        assert heard[-1] == TurnFinished("s", session._turns.all()[0])
    assert [type(event) for event in heard] == [RolloutStarted, TurnFinished, TurnFinished, RolloutFinished]
    assert heard[1].turn.observation == "go on"
    assert heard[-1].trajectory is session.trajectory


async def test_waits_are_measured():
    async def play():
        async with open_session(latency_s=2.0) as session:
            reply = await session.chat(HI)
            await asyncio.sleep(3)
            await session.chat(grown(reply, "go on"))
        return session.trajectory

    trajectory = await asyncio.to_thread(run_virtual, play())
    assert [(turn.model_s, turn.env_s) for turn in trajectory.turns] == [(2.0, 3.0), (2.0, 0.0)]
    assert trajectory.ended_s - trajectory.started_s == 7.0


async def test_one_conversation_serves_all_requests_of_a_session():
    endpoint = FakeEndpoint(lambda _: "yes")
    asked = []

    class Chat:
        async def complete(self, messages, sampling, **options):
            asked.append(self)
            return await endpoint.complete(messages, sampling, **options)

    endpoint.conversation = Chat
    session = open_session(endpoint)
    await session.chat(HI)
    await session.chat(HI)
    assert asked == [session.conversation] * 2
    assert open_session(endpoint).conversation is not session.conversation


async def test_those_who_hold_something_for_a_session_are_told_when_it_is_sealed():
    session = open_session()
    told: list[Any] = []
    session.when_sealed(told.append)
    session.seal()
    session.when_sealed(told.append)
    assert told == [session, session]


async def test_without_a_runtime_there_is_no_door():
    with pytest.raises(ConfigError, match="openai needs a Runtime"):
        _ = open_session().openai


async def test_the_token_mode_of_the_endpoint_is_on_the_trajectory():
    async with Endpoint("http://127.0.0.1:9/v1", model="m") as endpoint:
        assert SessionTable(endpoint).create().seal().token_mode == "server"


async def test_a_turn_that_was_delivered_and_cannot_be_recorded_is_not_forgotten_by_later_ones():
    session = open_session()
    garbled = Completion("a", [1], [-0.5], [0], JsonIds(b"[-1]"))
    with pytest.raises(MalformedReply):
        session.record([garbled], messages=[Message("user", "hi")])
    session.failed(MalformedReply("garbled"))
    await session.chat(HI)
    session.add_reward("outcome", 1)
    trajectory = session.seal()
    assert (trajectory.end, len(trajectory.turns), trajectory.trainable) == (End.success, 1, False)
    assert "token ids must be integers" in trajectory.untrainable_because


async def test_choices_share_the_tokens_that_are_left():
    table = SessionTable(FakeEndpoint(["x"]), limits=Limits(max_policy_tokens=10), sampling=Sampling(max_tokens=64))
    session = table.create()
    assert session.allowed_sampling(None).max_tokens == 10
    assert session.allowed_sampling(None, 4).max_tokens == 2
    assert session.allowed_sampling(None, 64).max_tokens == 1
    session.seal()
