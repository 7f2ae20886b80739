"""One episode as one coroutine: what is recorded, and how every kind of end comes about. All in virtual time."""

import asyncio
import math
from typing import Any, cast

import pytest

from turngate.envs.base import Action, End, Observation, Snapshot, Step, Task, ToolCall, ToolResult, ToolSpec
from turngate.envs.testing import CoinFlipEnv, EchoEnv, HangingEnv, RaisingEnv
from turngate.runtime.clock import ManualClock
from turngate.runtime.context import last_turns
from turngate.runtime.errors import (
    ConfigError,
    ContextOverflow,
    EndpointError,
    EndpointTimeout,
    MalformedReply,
    ToolError,
)
from turngate.runtime.events import Event, Events, RolloutFinished, RolloutStarted, TurnFinished
from turngate.runtime.json_ids import JsonIds
from turngate.runtime.limits import Limits
from turngate.runtime.recorder import Recorder
from turngate.runtime.rollout import run_rollout
from turngate.runtime.seeds import derive_seed
from turngate.runtime.testing import FakeEndpoint, run_virtual
from turngate.runtime.testing.endpoints import fake_logprob, render_ids
from turngate.runtime.types import NO_TURN, NO_VERSION, Completion, Message, Sampling

TASK = Task("t1", "Say three things.")


class Kept:
    """A factory that keeps the environments it made."""

    def __init__(self, make):
        self.make = make
        self.envs = []

    def __call__(self):
        self.envs.append(self.make())
        return self.envs[-1]


def play(make_env=EchoEnv, script=("one", "two", "three"), *, endpoint=None, task=TASK, **options):
    """Run one episode and check what holds for every one: the environment was closed once."""
    factory = Kept(make_env)
    endpoint = endpoint or FakeEndpoint(script)
    trajectory = run_virtual(run_rollout(factory, task, endpoint, **options))
    assert [env.closed for env in factory.envs if hasattr(env, "closed")] == [1] * len(factory.envs)
    return trajectory


class Stepping(EchoEnv):
    """An environment whose steps are given."""

    def __init__(self, *steps):
        super().__init__()
        self.given = list(steps)

    async def step(self, action):
        return self.given.pop(0)


def test_an_append_only_episode_is_one_segment_with_every_token_in_place():
    trajectory = play(seed=7, trajectory_id="x", group_id="g", member=2)
    assert (trajectory.id, trajectory.group_id, trajectory.member, trajectory.seed) == ("x", "g", 2, 7)
    assert (trajectory.end, trajectory.error, trajectory.outcome) == (End.success, "", 1.0)
    (segment,) = trajectory.segments
    first, second, third = [*b"one", 260], [*b"two", 260], [*b"three", 260]
    contexts = [
        [257, *b"Say three things.", 260, 258],
        [257, *b"one", 260, 258],
        [257, *b"two", 260, 258],
    ]
    expected_ids, mask, logprobs, versions, turns = [], [], [], [], []
    for turn, (context, sampled) in enumerate(zip(contexts, (first, second, third), strict=True)):
        expected_ids += context + sampled
        mask += [0] * len(context) + [1] * len(sampled)
        logprobs += [0.0] * len(context) + [fake_logprob(i) for i in sampled]
        versions += [NO_VERSION] * len(context) + [0] * len(sampled)
        turns += [NO_TURN] * len(context) + [turn] * len(sampled)
    assert list(segment.ids()) == expected_ids
    assert list(segment.policy_mask) == mask
    assert list(segment.logprob_values()) == logprobs
    assert list(segment.version_values()) == versions
    assert list(segment.turn_values()) == turns
    for turn in trajectory.turns:
        assert bytes(list(segment.ids())[turn.start : turn.start + turn.length - 1]).decode() == turn.text


def test_turns_hold_what_was_said_answered_and_measured():
    class Slow(EchoEnv):
        async def step(self, action):
            await asyncio.sleep(2)
            return await super().step(action)

    trajectory = play(Slow, endpoint=FakeEndpoint(["one", "two", "three"], latency_s=0.5, policy_version=4))
    assert [turn.text for turn in trajectory.turns] == ["one", "two", "three"]
    assert [turn.observation for turn in trajectory.turns] == ["one", "two", "three"]
    assert [turn.index for turn in trajectory.turns] == [0, 1, 2]
    assert [turn.rewards for turn in trajectory.turns] == [{}, {}, {"outcome": 1.0}]
    assert {(t.model_s, t.env_s, t.version_sent, t.version_received) for t in trajectory.turns} == {(0.5, 2.0, 4, 4)}
    assert (trajectory.started_s, trajectory.ended_s) == (0.0, 7.5)
    assert [m.role for m in trajectory.messages] == ["user"] + ["assistant", "user"] * 3


def test_a_context_that_drops_turns_starts_new_segments_and_trains_each_token_once():
    trajectory = play(lambda: EchoEnv(4), ["one", "two", "three", "four"], context=last_turns(1))
    # Turn 1 still extends turn 0 (nothing dropped yet); from turn 2 on the first turn is gone.
    assert [(t.segment, t.length) for t in trajectory.turns] == [(0, 4), (0, 4), (1, 6), (2, 5)]
    head = Message("user", TASK.prompt)
    prompt = render_ids([head, Message("assistant", "two"), Message("user", "two")])
    assert list(trajectory.segments[1].ids()) == [*prompt, *b"three", 260]
    assert sum(sum(segment.policy_mask) for segment in trajectory.segments) == trajectory.policy_tokens == 19
    trained = [turn for s in trajectory.segments for turn in s.turn_values() if turn != NO_TURN]
    assert trained == [0] * 4 + [1] * 4 + [2] * 6 + [3] * 5


def test_a_prompt_that_drifts_from_what_was_sampled_starts_a_new_segment():
    prompts = [[1, 2], [1, 2, 9, 9, 3]]  # the second re-renders the first completion differently
    completions = [Completion("a", [5, 6], [-1.0, -1.0], [0, 0], prompt) for prompt in prompts]
    trajectory = play(lambda: EchoEnv(2), completions)
    assert [list(segment.ids()) for segment in trajectory.segments] == [[1, 2, 5, 6], [1, 2, 9, 9, 3, 5, 6]]
    assert [list(segment.policy_mask) for segment in trajectory.segments] == [[0, 0, 1, 1], [0, 0, 0, 0, 0, 1, 1]]


def test_weights_published_in_flight_give_one_turn_two_versions():
    endpoint = FakeEndpoint(["abc"], latency_s=1.0, policy_version=1)

    async def main():
        asyncio.get_running_loop().call_later(0.5, setattr, endpoint, "policy_version", 2)
        return await run_rollout(lambda: EchoEnv(1), TASK, endpoint)

    trajectory = run_virtual(main())
    assert [v for v in trajectory.segments[0].version_values() if v != NO_VERSION] == [1, 1, 2, 2]
    assert (trajectory.turns[0].version_sent, trajectory.turns[0].version_received) == (1, 2)
    assert trajectory.version_range() == (1, 2)


def test_seeds_of_environment_and_turns_derive_from_the_rollouts_seed():
    seen = []

    class Seeded(EchoEnv):
        async def reset(self, task, seed):
            seen.append(seed)
            return await super().reset(task, seed)

    endpoint = FakeEndpoint(["a", "b", "c"] * 2)
    run_virtual(run_rollout(Seeded, TASK, endpoint, seed=5))
    run_virtual(run_rollout(Seeded, TASK, endpoint, seed=5, env_seed=77))
    assert seen == [derive_seed(5, "env"), 77]
    assert [call.seed for call in endpoint.calls] == [derive_seed(5, "sampler", turn) for turn in (0, 1, 2)] * 2


def test_system_prompt_tools_and_results_become_messages():
    tool = ToolSpec("look", "Look.", {"type": "object"})
    call = ToolCall("c1", "look", "{}")

    class Tooled(EchoEnv):
        async def reset(self, task, seed):
            return Observation("go", system="be quick", tools=(tool,))

        async def step(self, action):
            assert action == Action("", (call,))
            return Step(Observation("now?", (ToolResult("c1", "a wall"),)), {"outcome": 1.0}, End.success)

    endpoint = FakeEndpoint([Completion("", [5], [-1.0], [0], [1], "tool_calls", (call,))])
    trajectory = play(Tooled, endpoint=endpoint)
    assert trajectory.messages == (
        Message("system", "be quick"),
        Message("user", "go"),
        Message("assistant", "", (call,)),
        Message("tool", "a wall", (), "c1"),
        Message("user", "now?"),
    )
    assert trajectory.turns[0].observation == "a wall\nnow?"
    assert endpoint.calls[0].tools == (tool,)


def test_an_environment_that_says_nothing_at_first_is_asked_with_the_tasks_words():
    class Silent(EchoEnv):
        async def reset(self, task, seed):
            return Observation()

    endpoint = FakeEndpoint(["one", "two", "three"])
    trajectory = play(Silent, endpoint=endpoint)
    assert endpoint.calls[0].messages == (Message("user", TASK.prompt),)
    assert trajectory.first_observation == TASK.prompt


# Truncations: the collector stopped, and the task could go on.


def test_turn_limit_truncates_and_leaves_the_last_context():
    trajectory = play(limits=Limits(max_turns=2))
    assert (trajectory.end, len(trajectory.turns)) == (End.turn_limit, 2)
    assert trajectory.last_context == trajectory.segments[-1].token_ids
    assert play(limits=Limits(max_turns=3)).end is End.success  # an end at the limit is the task's own
    assert play().last_context == b""


def test_token_limit_shrinks_the_last_turn_and_truncates():
    endpoint = FakeEndpoint(["one", "two", "three"])
    trajectory = play(endpoint=endpoint, limits=Limits(max_policy_tokens=6))
    assert [turn.length for turn in trajectory.turns] == [4, 2]
    assert [turn.stop_reason for turn in trajectory.turns] == ["stop", "length"]
    assert [call.sampling.max_tokens for call in endpoint.calls] == [6, 2]
    assert (trajectory.end, trajectory.policy_tokens) == (End.token_limit, 6)


def test_a_completion_cut_at_max_tokens_is_an_action_all_the_same():
    trajectory = play(lambda: EchoEnv(1), ["a long story"], sampling=Sampling(max_tokens=6))
    assert (trajectory.turns[0].text, trajectory.turns[0].observation) == ("a long", "a long")
    assert (trajectory.turns[0].stop_reason, trajectory.end) == ("length", End.success)


def test_context_limit_drops_the_turn_that_exceeds_it():
    limit = len(render_ids([Message("user", TASK.prompt)])) + 4 + 6
    trajectory = play(limits=Limits(max_context_tokens=limit))
    assert (trajectory.end, len(trajectory.turns)) == (End.context_overflow, 1)
    assert max(len(segment) for segment in trajectory.segments) <= limit
    assert last_context(trajectory) == render_ids(trajectory.messages)  # that far it was within the limit


def test_a_server_that_refuses_an_overlong_prompt_truncates_the_episode():
    trajectory = play(script=["one", ContextOverflow("prompt is too long")])
    assert (trajectory.end, len(trajectory.turns)) == (End.context_overflow, 1)
    assert trajectory.error == "prompt is too long (trajectory t1.0, turn 1)"


# Drift: the messages go on, the ids do not.


def drifting_ids(messages):
    """Render as a server whose template changes the first message once there are others."""
    return [999, *render_ids(messages)] if len(messages) > 1 else render_ids(messages)


def test_a_prompt_that_is_rendered_differently_the_second_time_is_a_counted_drift():
    def answer(messages):
        return Completion("ok", [5, 6], [-1.0, -1.0], [0, 0], drifting_ids(messages))

    trajectory = play(lambda: EchoEnv(2), endpoint=FakeEndpoint(answer))
    assert (trajectory.drifts, len(trajectory.segments)) == (1, 2)
    assert trajectory.policy_tokens == sum(sum(s.policy_mask) for s in trajectory.segments) == 4


def test_contexts_that_were_rewritten_on_purpose_are_no_drift():
    trajectory = play(lambda: EchoEnv(4), ["one", "two", "three", "four"], context=last_turns(1))
    assert len(trajectory.segments) > 1
    assert trajectory.drifts == 0
    assert play(lambda: EchoEnv(2), ["one", "two"]).drifts == 0


# The context to bootstrap from.


def last_context(trajectory):
    return memoryview(trajectory.last_context).cast("i").tolist()


def test_a_truncated_rollout_asks_for_one_token_to_learn_the_whole_last_context():
    endpoint = FakeEndpoint(["one", "two", "discarded"])
    trajectory = play(endpoint=endpoint, limits=Limits(max_turns=2), last_contexts=True)
    assert (trajectory.end, trajectory.error, len(trajectory.turns)) == (End.turn_limit, "", 2)
    assert trajectory.last_context_is_whole
    assert last_context(trajectory) == render_ids(trajectory.messages)
    assert trajectory.segments[0].ids().tolist() == last_context(trajectory)[: len(trajectory.segments[0])]
    assert trajectory.policy_tokens == sum(sum(s.policy_mask) for s in trajectory.segments) == 8
    assert [call.sampling.max_tokens for call in endpoint.calls] == [64, 64, 1]


def test_the_last_context_is_what_the_context_function_shows():
    trajectory = play(
        lambda: EchoEnv(9), script=["one", "two", "x"], context=last_turns(1), limits=Limits(max_turns=2),
        last_contexts=True,
    )  # fmt: skip
    assert last_context(trajectory) == render_ids([trajectory.messages[0], *trajectory.messages[-2:]])
    assert trajectory.last_context_is_whole


def test_only_truncations_ask_for_a_last_context():
    endpoint = FakeEndpoint(["one", "two", "three"])
    trajectory = play(endpoint=endpoint, last_contexts=True)
    assert (trajectory.end, trajectory.last_context, trajectory.last_context_is_whole) == (End.success, b"", False)
    assert len(endpoint.calls) == 3


def test_an_environments_own_truncation_has_a_whole_last_context_too():
    env = Stepping(Step(Observation("time is up"), end=End.timeout))
    trajectory = play(lambda: env, script=["one", "x"], last_contexts=True)
    assert (trajectory.end, trajectory.last_context_is_whole) == (End.timeout, True)
    assert last_context(trajectory) == render_ids(trajectory.messages)


GARBLED = Completion("x", prompt_token_ids=JsonIds(b'[1,"x"]'))  # noticed once somebody reads it


@pytest.mark.parametrize(
    "error",
    [EndpointError("gone"), EndpointTimeout("late"), ContextOverflow("too long"), GARBLED],
)
def test_a_last_context_that_cannot_be_had_is_the_prefix(error):
    trajectory = play(script=["one", "two", error], limits=Limits(max_turns=2), last_contexts=True)
    assert (trajectory.end, trajectory.error) == (End.turn_limit, "")
    assert trajectory.last_context == trajectory.segments[-1].token_ids
    assert not trajectory.last_context_is_whole


def test_a_last_context_is_not_waited_for_beyond_the_rollouts_time():
    def answer(messages):
        return "one" if len(messages) < 5 else wait()

    async def wait():
        await asyncio.Event().wait()

    limits = Limits(max_turns=2, rollout_timeout_s=7)
    trajectory = play(endpoint=FakeEndpoint(answer, latency_s=1.0), limits=limits, last_contexts=True)
    assert (trajectory.end, trajectory.error, trajectory.ended_s) == (End.turn_limit, "", 7.0)
    assert trajectory.last_context == trajectory.segments[-1].token_ids
    assert not trajectory.last_context_is_whole


def test_a_last_context_longer_than_the_limit_is_the_prefix():
    trajectory = play(script=["one", "two", "x"], limits=Limits(max_turns=2, max_context_tokens=34), last_contexts=True)
    assert trajectory.end is End.turn_limit
    assert len(render_ids(trajectory.messages)) > 34 >= len(trajectory.segments[-1])
    assert trajectory.last_context == trajectory.segments[-1].token_ids
    assert not trajectory.last_context_is_whole


def test_a_server_without_token_ids_leaves_no_last_context():
    endpoint = FakeEndpoint(["one", "two", "x"], token_ids=False)
    trajectory = play(endpoint=endpoint, limits=Limits(max_turns=2), last_contexts=True)
    assert (trajectory.last_context, trajectory.last_context_is_whole) == (b"", False)


def test_a_prompt_the_server_refused_is_asked_for_with_less_room():
    script = ["one", ContextOverflow("too long with 64 more"), "x"]
    trajectory = play(script=script, last_contexts=True)
    assert trajectory.end is End.context_overflow
    assert trajectory.error.startswith("too long with 64 more")
    assert last_context(trajectory) == render_ids(trajectory.messages)
    assert trajectory.last_context_is_whole


def test_the_prompt_of_a_completion_that_was_too_long_is_the_whole_last_context():
    endpoint = FakeEndpoint(["one", "quite a long story about things"])
    trajectory = play(endpoint=endpoint, limits=Limits(max_context_tokens=40), last_contexts=True)
    assert (trajectory.end, len(trajectory.turns), len(endpoint.calls)) == (End.context_overflow, 1, 2)
    assert trajectory.last_context_is_whole
    assert last_context(trajectory) == render_ids(trajectory.messages)


def test_time_running_out_inside_an_action_keeps_the_action_in_the_last_context():
    trajectory = play(SlowEnv, limits=Limits(rollout_timeout_s=15, turn_timeout_s=11), last_contexts=True)
    assert (trajectory.end, len(trajectory.turns)) == (End.timeout, 2)
    assert trajectory.last_context == trajectory.segments[-1].token_ids
    assert trajectory.last_context_is_whole


def test_time_running_out_before_an_action_is_sampled_leaves_the_prefix():
    endpoint = FakeEndpoint(["one", "two"], latency_s=10)
    trajectory = play(endpoint=endpoint, limits=Limits(rollout_timeout_s=15), last_contexts=True)
    assert (trajectory.end, len(trajectory.turns)) == (End.timeout, 1)
    assert trajectory.last_context == trajectory.segments[-1].token_ids
    assert not trajectory.last_context_is_whole


class SlowEnv(EchoEnv):
    """Takes ten seconds a step."""

    async def step(self, action):
        await asyncio.sleep(10)
        return await super().step(action)


def test_turn_timeout_keeps_the_sampled_action_without_an_answer():
    trajectory = play(SlowEnv, limits=Limits(turn_timeout_s=9))
    assert (trajectory.end, trajectory.ended_s) == (End.env_error, 9.0)
    assert trajectory.error == (
        "turn.step must finish within 9 s: it did not (Limits.turn_timeout_s) (trajectory t1.0, turn 0)"
    )
    assert [(turn.text, turn.observation, turn.rewards) for turn in trajectory.turns] == [("one", "", {})]
    assert trajectory.messages[-1] == Message("assistant", "one")
    assert trajectory.policy_tokens == 4


def test_rollout_timeout_truncates_in_the_middle_of_a_later_turn():
    trajectory = play(SlowEnv, limits=Limits(rollout_timeout_s=15, turn_timeout_s=11))
    assert (trajectory.end, trajectory.ended_s, len(trajectory.turns)) == (End.timeout, 15.0, 2)


def test_a_context_function_that_raises_fails_the_rollout_alone():
    def broken(history):
        raise OSError("no summary today")

    trajectory = play(context=broken)
    assert trajectory.end is End.tool_error
    assert "the context function must not raise: got OSError" in trajectory.error


def test_turn_timeout_covers_slow_context_functions_and_models():
    async def dawdle(history):
        await asyncio.sleep(100)

    assert play(context=dawdle, limits=Limits(turn_timeout_s=5)).end is End.tool_error
    slow = FakeEndpoint(["one"], latency_s=100)
    trajectory = play(endpoint=slow, limits=Limits(turn_timeout_s=5))
    assert (trajectory.end, slow.in_flight, trajectory.turns) == (End.endpoint_error, 0, ())


# Failures of the machinery: recorded, with the reason.


@pytest.mark.parametrize("at", ["reset", 0, 2])
def test_an_environment_that_raises_is_an_env_error_with_the_place(at):
    trajectory = play(lambda: RaisingEnv(at))
    assert trajectory.end is End.env_error
    what = "reset" if at == "reset" else "step"
    assert trajectory.error.startswith(f"env.{what} must not raise: got RuntimeError: the environment broke (")
    assert "fakes.py:" in trajectory.error
    assert len(trajectory.turns) == (0 if at == "reset" else at + 1)


def test_an_environment_that_cannot_be_made_is_an_env_error():
    def make():
        raise OSError("no display")

    trajectory = run_virtual(run_rollout(make, TASK, FakeEndpoint([])))
    assert trajectory.end is End.env_error
    assert trajectory.error.startswith("the environment factory must not raise: got OSError: no display")


@pytest.mark.parametrize("at", ["reset", 1])
def test_an_environment_that_hangs_is_cancelled_at_the_tool_deadline(at):
    trajectory = play(lambda: HangingEnv(at), limits=Limits(tool_timeout_s=30))
    assert (trajectory.end, trajectory.ended_s) == (End.env_error, 30.0)
    assert "must finish within 30 s: it did not (Limits.tool_timeout_s)" in trajectory.error


def test_an_environment_that_swallows_the_deadline_still_ends():
    class Stubborn(EchoEnv):
        async def step(self, action):
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass
            return Step(Observation("never mind"))

    trajectory = play(Stubborn, limits=Limits(tool_timeout_s=30))
    assert (trajectory.end, trajectory.ended_s) == (End.env_error, 30.0)


def test_an_environment_that_raises_cancelled_error_of_its_own_is_an_env_error():
    class Confused(EchoEnv):
        async def step(self, action):
            raise asyncio.CancelledError

    assert play(Confused).error.startswith("env.step must not raise CancelledError: nobody cancelled it")


def test_an_environments_own_timeout_is_not_taken_for_ours():
    assert play(lambda: RaisingEnv(1, error=TimeoutError("tool"))).end is End.env_error


def test_a_tool_error_keeps_its_name():
    trajectory = play(lambda: RaisingEnv(0, error=ToolError("browser crashed")))
    assert (trajectory.end, trajectory.error) == (
        End.tool_error,
        "ToolError: browser crashed (trajectory t1.0, turn 0)",
    )


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (None, "env.step() must be Step: got NoneType ('None')"),
        (("obs", 1.0, False), "env.step() must be Step: got tuple"),
        (Step("text"), "env.step().observation must be Observation: got str ('text')"),
        (Step(Observation(3)), "env.step().observation.text must be str: got int"),
        (Step(Observation("\ud800")), "env.step().observation.text must be text that UTF-8 can carry"),
        (Step(Observation(), {"outcome": math.nan}), "got nan (env.step().rewards['outcome'])"),
        (Step(Observation(), {"outcome": -math.inf}), "got -inf (env.step().rewards['outcome'])"),
        (Step(Observation(), {"outcome": cast(float, "1?")}), "got '1?' (env.step().rewards['outcome'])"),
        (Step(Observation(), {}, True), "env.step().end must be a terminal End, a truncation, or None: got True"),
        (Step(Observation(), {}, End.env_error), "raise an exception to fail"),
        (Step(Observation(), {}, [1]), "env.step().end must be a terminal End, a truncation, or None: got [1]"),
        (Step(Observation(), None), "env.step().rewards must be dict: got NoneType"),
        (Step(Observation(), [1.0]), "env.step().rewards must be dict: got list"),
        (Step(Observation(), 1.0), "env.step().rewards must be dict: got float"),
        (Step(Observation(), cast(Any, {1: 1.0})), "env.step().rewards' names must be str: got int"),
        (Step(Observation(), {"\ud800": 1.0}), "env.step().rewards' names must be text that UTF-8 can carry"),
        (Step(Observation(), {"a": 10**400}), "rewards must be finite numbers of at most 1e+30: got 1000"),
        (Step(Observation(), {"a": 1.7e308, "b": 1.7e308}), "got 1.7e+308 (env.step().rewards['a'])"),
        (Step(Observation(), {}, None, None), "env.step().valid must be bool: got None"),
        (Step(Observation(), {}, None, True, "\ud800"), "env.step().state must be dict: got str"),
        (Step(Observation("", None)), "env.step().observation.results must be tuple: got NoneType"),
        (Step(Observation("", (1,))), "env.step().observation.results[0] must be ToolResult: got int"),
        (
            Step(Observation("", (ToolResult(5, "x"),))),
            "env.step().observation.results[0].call_id must be str: got int",
        ),
        (Step(Observation("", (ToolResult("c", None),))), "observation.results[0].text must be str: got NoneType"),
    ],
)
def test_garbage_from_the_environment_is_an_env_error_that_says_what(step, message):
    trajectory = play(lambda: Stepping(step))
    assert trajectory.end is End.env_error
    assert message in trajectory.error
    assert len(trajectory.turns) == 1


class Nameless:
    """Even its text cannot be had."""

    def __repr__(self):
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (None, "env.reset() must be Observation: got NoneType"),
        (Nameless(), "env.reset() must be Observation: got Nameless ('a Nameless')"),
        (Observation(None), "env.reset().text must be str: got NoneType"),
        (Observation("\ud800"), "env.reset().text must be text that UTF-8 can carry"),
        (Observation("", None), "env.reset().results must be tuple: got NoneType"),
        (Observation("", (), 5), "env.reset().system must be str: got int"),
        (Observation("", (), "\ud800"), "env.reset().system must be text that UTF-8 can carry"),
        (Observation("", (), "", None), "env.reset().tools must be tuple: got NoneType"),
        (Observation("", (), "", (1,)), "env.reset().tools[0] must be ToolSpec: got int"),
        (Observation("", (), "", (ToolSpec(1, "", {}),)), "env.reset().tools[0].name must be str: got int"),
        (Observation("", (), "", (ToolSpec("a", None, {}),)), "env.reset().tools[0].description must be str"),
        (Observation("", (), "", (ToolSpec("a", "", None),)), "env.reset().tools[0].parameters must be dict"),
        (
            Observation("", (), "", (ToolSpec("a", "", {"x": "\ud800"}),)),
            "env.reset().tools[0].parameters must be a JSON schema: got UnicodeEncodeError",
        ),
    ],
)
def test_garbage_at_the_start_is_an_env_error_that_names_the_field(observation, message):
    class Starting(EchoEnv):
        async def reset(self, task, seed):
            return observation

    trajectory = play(Starting)
    assert (trajectory.end, trajectory.turns) == (End.env_error, ())
    assert message in trajectory.error


@pytest.mark.parametrize("snapshot", [None, Snapshot(1, b""), Snapshot("coin", "text")])
def test_garbage_for_a_snapshot_is_an_env_error(snapshot):
    class Shooting(CoinFlipEnv):
        async def snapshot(self):
            return snapshot

    trajectory = play(lambda: Shooting(2), ["heads"], keep_snapshots=True)
    assert trajectory.end is End.env_error
    assert "env.snapshot()" in trajectory.error


@pytest.mark.parametrize(
    ("shown", "message"),
    [
        (None, "must return messages, in a list or tuple: got None"),
        ("hello", "must return messages, in a list or tuple: got 'hello'"),
        ([], "must return messages, in a list or tuple: got []"),
        ([1], "message 0 of the context function must be a Message: got 1"),
        ([{"role": "user", "content": "x"}], "message 0 of the context function must be a Message: got {'role'"),
        ([Message("user", "a"), Message("bogus", "x")], "message 1 of the context function must have a role of"),
        ([Message(None, "x")], "must have a role of assistant, developer, system, tool, user: got None"),
        ([Message("user", None)], "must have a content that can be sent: it must be str: got NoneType"),
        ([Message("user", "\ud800")], "must have a content that can be sent: it must be text that UTF-8 can carry"),
        ([Message("tool", "x", (), 5)], "must have tool calls that can be sent: tool_call_id must be str: got int"),
        ([Message("assistant", "x", None)], "must have tool calls that can be sent: got None"),
        ([Message("assistant", "x", (1,))], "must have tool calls that can be sent: got 1"),
        ([Message("assistant", "x", (ToolCall("a", "b", None),))], "must be str: got NoneType"),
    ],
)
def test_garbage_from_a_context_function_is_a_tool_error_that_names_it(shown, message):
    def my_context(history):
        return shown

    trajectory = play(context=my_context)
    assert trajectory.end is End.tool_error
    assert message in trajectory.error
    assert "my_context" in trajectory.error


def test_a_context_function_that_changes_the_history_is_a_tool_error():
    def forgetful(history):
        history.messages.clear()
        return [Message("user", "go")]

    trajectory = play(context=forgetful)
    assert trajectory.end is End.tool_error
    assert "the context function must not change the history: it did (" in trajectory.error


def test_errors_whose_text_cannot_be_had_or_written_are_recorded_all_the_same():
    class Speechless(Exception):
        def __str__(self):
            raise ValueError

    assert (
        "must not raise: got Speechless: an error whose text" in play(lambda: RaisingEnv(0, error=Speechless())).error
    )
    trajectory = play(lambda: RaisingEnv(0, error=ToolError("\ud800")))
    assert trajectory.error.startswith("ToolError: \\ud800 (")


@pytest.mark.parametrize(
    "error", [EndpointError("down"), EndpointTimeout("slow"), MalformedReply("logprobs must align")]
)
def test_an_endpoint_that_fails_is_an_endpoint_error_and_keeps_the_turns_before(error):
    trajectory = play(script=["one", error])
    assert (trajectory.end, len(trajectory.turns)) == (End.endpoint_error, 1)
    assert trajectory.error == f"{type(error).__name__}: {error} (trajectory t1.0, turn 1)"


def test_a_bug_of_ours_propagates_and_the_environment_is_closed(monkeypatch):
    factory = Kept(EchoEnv)

    def broken(recorder, completion, turn, **rest):
        raise KeyError("bug")

    monkeypatch.setattr(Recorder, "add", broken)
    with pytest.raises(KeyError, match="bug"):
        run_virtual(run_rollout(factory, TASK, FakeEndpoint(["one"])))
    assert factory.envs[0].closed == 1


# Servers that cannot be trained on.


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"token_ids": False}, "the server gave no prompt token ids (turn 0)"),
        ({"logprobs": False}, "the server gave no log-probs (turn 0)"),
    ],
)
def test_without_ids_or_logprobs_the_episode_runs_and_says_why_it_cannot_train(given, missing):
    trajectory = play(endpoint=FakeEndpoint(["one", "two", "three"], **given))
    assert (trajectory.end, trajectory.outcome) == (End.success, 1.0)
    assert (trajectory.trainable, trajectory.untrainable_because) == (False, missing)
    assert trajectory.segments == ()
    assert [(turn.text, turn.length) for turn in trajectory.turns] == [("one", 0), ("two", 0), ("three", 0)]


# Closing.


def test_a_close_that_raises_or_hangs_changes_nothing_about_the_episode(caplog):
    assert play(lambda: RaisingEnv("aclose")).end is End.success
    assert "env.aclose() raised" in caplog.text
    trajectory = play(lambda: HangingEnv("aclose"), limits=Limits(close_timeout_s=3))
    assert (trajectory.end, trajectory.ended_s) == (End.success, 3.0)
    assert "did not finish within 3 s" in caplog.text


# Snapshots, events, configuration.


def test_snapshots_are_kept_from_before_each_action():
    trajectory = play(lambda: CoinFlipEnv(2), ["heads", "tails"], keep_snapshots=True)
    states = [turn.snapshot.data for turn in trajectory.turns]
    assert states[0] == b"[2,[]]"
    assert states[1].startswith(b'[2,["')
    with pytest.raises(ConfigError, match=r"keep_snapshots and restarts need snapshot\(\) and restore\(\): EchoEnv"):
        run_virtual(run_rollout(EchoEnv, TASK, FakeEndpoint(["one"]), keep_snapshots=True))


def test_events_tell_of_start_turns_and_finish_in_order():
    events = Events()
    heard: list[Event] = []
    for kind in (RolloutStarted, TurnFinished, RolloutFinished):
        events.subscribe(kind, heard.append)
    trajectory = play(events=events, trajectory_id="x", group_id="g", member=1)
    assert heard == [
        RolloutStarted("x", "g", 1, "t1"),
        *[TurnFinished("x", turn) for turn in trajectory.turns],
        RolloutFinished(trajectory),
    ]


def test_timings_come_from_the_injected_clock():
    trajectory = play(clock=ManualClock(50.0))
    assert (trajectory.started_s, trajectory.ended_s) == (50.0, 50.0)
