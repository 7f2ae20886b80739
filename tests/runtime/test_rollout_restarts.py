"""Episodes that start in a kept state, and episodes in which something else acts now and then."""

import asyncio
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from turngate.envs.base import Action, End, Env, Observation, Snapshot, Step, Task, ToolCall
from turngate.envs.shopping import ShoppingEnv, train_tasks
from turngate.envs.testing import CoinFlipEnv, EchoEnv
from turngate.runtime.context import last_turns
from turngate.runtime.errors import ConfigError
from turngate.runtime.injection import Actor, Injection
from turngate.runtime.limits import Limits
from turngate.runtime.restarts import RestartPoint, Restarts, find_restart_points
from turngate.runtime.rollout import run_rollout
from turngate.runtime.testing import FakeEndpoint, Outcome, cancel_everywhere, run_virtual
from turngate.runtime.testing.endpoints import render_ids
from turngate.runtime.types import NO_TURN, Message, RestartedFrom, Trajectory

TASK = Task("coins", "Heads or tails?")


def play(env: Callable[[], Env], script: Sequence[str], task: Task = TASK, **options: Any) -> Trajectory:
    return run_virtual(run_rollout(env, task, FakeEndpoint(script), **options))


def coins() -> CoinFlipEnv:
    return CoinFlipEnv(4)


def first_mistake(seed: int = 1) -> tuple[Trajectory, RestartPoint]:
    """An episode whose second action is nonsense, and the state after it."""
    origin = play(coins, ["heads", "edge", "heads", "heads", "heads"], keep_snapshots=True, seed=seed)
    (point,) = find_restart_points(origin, Restarts(reasons=("invalid",)))
    return origin, point


def test_a_restarted_episode_goes_on_from_the_state_and_trains_its_own_turns_only() -> None:
    origin, point = first_mistake()
    again = play(coins, ["tails", "heads", "tails"], start=point, seed=9, trajectory_id="again")
    assert again.restarted_from == RestartedFrom(origin.id, 2, 0, "invalid")
    assert again.first_observation == origin.turns[1].observation != origin.first_observation
    assert [turn.text for turn in again.turns] == ["tails", "heads", "tails"]  # one coin was flipped before
    assert [turn.index for turn in again.turns] == [0, 1, 2]
    assert again.messages[: len(point.messages)] == point.messages == origin.messages[:5]
    (segment,) = again.segments
    prefix = render_ids(point.messages)
    assert segment.ids().tolist()[: len(prefix)] == prefix
    assert not any(segment.policy_mask[: len(prefix)])
    assert set(segment.turn_values()[: len(prefix)]) == {NO_TURN}
    assert sum(segment.policy_mask) == again.policy_tokens == sum(len(text) + 1 for text in ("tails", "heads", "tails"))


def test_restarts_have_luck_of_their_own() -> None:
    _, point = first_mistake()
    coins_seen = {
        tuple(turn.observation for turn in play(coins, ["heads"] * 3, start=point, seed=seed).turns)
        for seed in range(20)
    }
    assert len(coins_seen) > 4
    # With the environment's seed shared, as in a group, two members meet the same coins.
    one, two = (play(coins, ["heads"] * 3, start=point, seed=seed, env_seed=5) for seed in range(2))
    assert [t.observation for t in one.turns] == [t.observation for t in two.turns]


def test_turns_before_the_restart_count_towards_the_turn_limit() -> None:
    _, point = first_mistake()
    again = play(coins, ["heads"] * 3, start=point, limits=Limits(max_turns=4))
    assert (again.end, len(again.turns)) == (End.turn_limit, 2)


def test_context_functions_see_the_turns_before_the_restart() -> None:
    _, point = first_mistake()
    again = play(coins, ["heads"] * 3, start=point, context=last_turns(1))
    shown = [point.messages[0], *point.messages[-2:]]  # the task, and the mistake with its answer
    assert again.segments[0].ids().tolist()[: len(render_ids(shown))] == render_ids(shown)


def test_a_restarted_shop_is_open_at_the_page_that_the_origin_had_come_to() -> None:
    (task,) = train_tasks(1, seed=3)
    word = "bottle"  # of the task
    script = [f'search["{word}"]', "dance", "back"]
    origin = play(ShoppingEnv, script, task, keep_snapshots=True, limits=Limits(max_turns=3))
    (point,) = find_restart_points(origin, Restarts(reasons=("invalid",)))
    listed = re.findall(r"item_\d+", origin.turns[0].observation)[0]
    click = [f'click["{listed}"]']
    assert play(ShoppingEnv, click, task, start=point, limits=Limits(max_turns=3)).turns[0].valid
    assert not play(ShoppingEnv, click, task, limits=Limits(max_turns=1)).turns[0].valid  # nothing is listed yet


def test_a_restart_needs_an_environment_with_snapshots() -> None:
    _, point = first_mistake()
    with pytest.raises(ConfigError, match=r"restarts need snapshot\(\) and restore\(\): EchoEnv has not both"):
        play(EchoEnv, ["one"], start=point)


def test_a_state_that_cannot_be_restored_is_an_env_error() -> None:
    _, point = first_mistake()
    broken = RestartPoint(TASK, Snapshot("elsewhere", b""), point.messages, point.restarted_from)
    trajectory = play(coins, ["heads"], start=broken)
    assert trajectory.end is End.env_error
    assert "env.restore must not raise" in trajectory.error
    assert trajectory.restarted_from is not None


def test_a_restore_that_hangs_ends_at_the_tool_deadline() -> None:
    class Hanging(CoinFlipEnv):
        async def restore(self, snapshot: Snapshot, seed: int) -> None:
            await asyncio.Event().wait()

    _, point = first_mistake()
    trajectory = play(Hanging, ["heads"], start=point, limits=Limits(tool_timeout_s=3))
    assert (trajectory.end, trajectory.ended_s) == (End.env_error, 3.0)
    assert "env.restore must finish within 3 s" in trajectory.error


# Injection.


def says(*texts: str | Action) -> Actor:
    """An actor that says these in turn."""
    given = iter(texts)

    async def act(messages: Sequence[Message], seed: int) -> str | Action:
        return next(given)

    return act


def test_an_injected_action_is_stepped_and_shown_but_is_none_of_the_policys() -> None:
    endpoint = FakeEndpoint(["two", "three"])
    trajectory = run_virtual(
        run_rollout(EchoEnv, TASK, endpoint, injection=Injection(1.0, says("odd")), trajectory_id="x")
    )
    assert [(t.text, t.injected, t.length, t.observation) for t in trajectory.turns] == [
        ("odd", True, 0, "odd"),
        ("two", False, 4, "two"),
        ("three", False, 6, "three"),
    ]
    assert [m.content for m in endpoint.calls[0].messages] == [TASK.prompt, "odd", "odd"]
    (segment,) = trajectory.segments
    assert trajectory.policy_tokens == sum(segment.policy_mask) == 10
    assert {turn for turn in segment.turn_values() if turn != NO_TURN} == {1, 2}
    assert (trajectory.end, trajectory.trainable) == (End.success, True)


def test_b8_2_no_injected_and_no_replayed_token_is_trained_on() -> None:
    # Reported for frameworks that concatenate the forced prefix with the rollout and mask neither; the suffix alone is
    # the policy's (R3L, arXiv 2601.03715).
    origin, point = first_mistake()
    again = play(coins, ["heads"] * 3, start=point)
    injected = play(lambda: EchoEnv(3), ["one", "two"], injection=Injection(1.0, says("odd")))
    for trajectory in (origin, again, injected):
        trained: list[int] = []
        for segment in trajectory.segments:
            trained += [i for i, m in zip(segment.ids(), segment.policy_mask, strict=True) if m]
        said = [t.text for t in trajectory.turns if not t.injected]
        assert trained == [i for text in said for i in (*text.encode(), 260)]


def test_how_often_something_else_acts_follows_from_probability_and_seed() -> None:
    def injected(seed: int, probability: float, **options: int) -> list[int]:
        injection = Injection(probability, says(*["odd"] * 9), **options)
        trajectory = play(lambda: EchoEnv(4), ["own"] * 9, injection=injection, seed=seed)
        return [t.index for t in trajectory.turns if t.injected]

    assert [injected(seed, 0.5, max_per_episode=4) for seed in range(9)] == [
        injected(seed, 0.5, max_per_episode=4) for seed in range(9)
    ]
    counts = [len(injected(seed, 0.5, max_per_episode=4)) for seed in range(200)]
    assert sum(counts) / 800 == pytest.approx(0.5, abs=0.06)
    assert injected(0, 1.0) == [0]
    assert injected(0, 1.0, max_per_episode=2) == [0, 1]
    assert injected(0, 0.0) == []


def test_an_actor_sees_what_the_model_would_and_a_seed_of_its_own() -> None:
    seen: list[tuple[Sequence[Message], int]] = []

    async def act(messages: Sequence[Message], seed: int) -> str:
        seen.append((messages, seed))
        return random.Random(seed).choice(["a", "b"])

    for seed in (1, 1, 2):
        play(lambda: EchoEnv(2), ["own"], injection=Injection(1.0, act), seed=seed)
    assert seen[0] == seen[1] != seen[2]
    assert seen[0][0] == (Message("user", TASK.prompt),)


def test_an_actor_may_call_tools() -> None:
    action = Action("", (ToolCall("1", "find", "{}"),))
    seen: list[Action] = []

    class Env(EchoEnv):
        async def step(self, action: Action) -> Step:
            seen.append(action)
            return await super().step(action)

    trajectory = play(Env, ["own", "own"], injection=Injection(1.0, says(action)))
    assert seen[0] == action
    assert trajectory.messages[1] == Message("assistant", "", action.tool_calls)
    assert trajectory.turns[0].tool_calls == action.tool_calls


def test_an_actor_that_fails_fails_the_rollout_alone() -> None:
    async def broken(messages: Sequence[Message], seed: int) -> str:
        raise OSError("nobody there")

    trajectory = play(EchoEnv, [], injection=Injection(1.0, broken))
    assert (trajectory.end, trajectory.turns) == (End.tool_error, ())
    assert "the injection must not raise: got OSError: nobody there" in trajectory.error

    async def silent(messages: Sequence[Message], seed: int) -> Any:
        return None

    trajectory = play(EchoEnv, [], injection=Injection(1.0, silent))
    assert trajectory.end is End.tool_error
    assert "injected action must be a str or an Action: got NoneType" in trajectory.error


@pytest.mark.parametrize(
    ("action", "why"),
    [
        (Action("\ud800"), "text that can be sent"),
        (Action("go", (ToolCall("1", "buy", "\ud800"),)), "tool calls that can be sent"),
        (Action("go", (ToolCall("1", "buy", 3),)), "tool calls that can be sent"),
        (Action("go", (3,)), "tool calls that can be sent"),
        (Action("go", None), "tool calls that can be sent"),
    ],
)
def test_an_injected_action_that_cannot_be_shown_fails_the_rollout_alone(action: Action, why: str) -> None:
    async def act(messages: Sequence[Message], seed: int) -> Action:
        return action

    trajectory = play(EchoEnv, ["own"], injection=Injection(1.0, act))
    assert (trajectory.end, trajectory.turns) == (End.tool_error, ())
    assert why in trajectory.error


def test_an_actor_that_hangs_ends_at_the_turn_deadline() -> None:
    async def hang(messages: Sequence[Message], seed: int) -> str:
        await asyncio.Event().wait()
        return ""

    trajectory = play(EchoEnv, [], injection=Injection(1.0, hang), limits=Limits(turn_timeout_s=5))
    assert (trajectory.end, trajectory.ended_s) == (End.tool_error, 5.0)
    assert "injection must finish within 5 s" in trajectory.error


def test_an_injected_action_that_was_not_answered_is_not_in_the_last_context() -> None:
    class Slow(EchoEnv):
        async def step(self, action: Action) -> Step:
            await asyncio.sleep(2 if action.text == "own" else 60)
            return await super().step(action)

    class Second(Injection, frozen=True):
        def is_due(self, seed: int, turn: int, injected: int) -> bool:
            return turn == 1

    trajectory = play(Slow, ["own"], injection=Second(1.0, says("odd")), limits=Limits(rollout_timeout_s=9))
    assert (trajectory.end, [t.injected for t in trajectory.turns]) == (End.timeout, [False, True])
    assert trajectory.last_context == trajectory.segments[-1].token_ids
    assert not trajectory.last_context_is_whole


@pytest.mark.parametrize(
    ("bad", "message"),
    [((1.5, says()), "probability must be between 0 and 1"), ((0.5, says(), 0), "max_per_episode must be 1 or more")],
)
def test_injections_that_cannot_work_are_refused(bad: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Injection(*bad)


def test_an_environment_that_says_nothing_new_still_restarts_with_its_tools() -> None:
    class Silent(CoinFlipEnv):
        async def reset(self, task: Task, seed: int) -> Observation:
            await super().reset(task, seed)
            return Observation("Another start.")

    _, point = first_mistake()
    again = play(Silent, ["heads"] * 4, start=point)
    assert again.messages[0].content == "Heads or tails?"  # the origin's head, not the fresh episode's


def test_cancelled_at_every_wait_a_restarted_or_injected_rollout_leaves_nothing_behind() -> None:
    class Waiting(CoinFlipEnv):
        async def restore(self, snapshot: Snapshot, seed: int) -> None:
            await asyncio.sleep(1)
            await super().restore(snapshot, seed)

    async def act(messages: Sequence[Message], seed: int) -> str:
        await asyncio.sleep(1)
        return "edge"

    _, point = first_mistake()
    made: list[Waiting] = []
    reported: list[Trajectory] = []

    def make() -> Any:
        made.clear()
        reported.clear()

        def make_env() -> Waiting:
            made.append(Waiting(4))
            return made[-1]

        return run_rollout(
            make_env,
            TASK,
            FakeEndpoint(["heads", "discarded"], latency_s=1),
            start=point,
            injection=Injection(1.0, act),
            last_contexts=True,
            limits=Limits(max_turns=4),
            on_cancelled=reported.append,
        )

    def check(outcome: Outcome) -> None:
        assert [env.closed for env in made] == [1] * len(made)
        trajectory: Trajectory = reported[0] if outcome.cancelled else outcome.result
        assert trajectory.end is (End.cancelled if outcome.cancelled else End.turn_limit)
        assert trajectory.last_context_is_whole is not outcome.cancelled
        assert sum(sum(segment.policy_mask) for segment in trajectory.segments) == trajectory.policy_tokens

    assert cancel_everywhere(make, check) >= 4  # restore, actor, completion, look ahead
