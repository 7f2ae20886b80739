"""Scorers: side by side, within a deadline, remembered, and never able to harm an episode."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import pytest

from turngate.envs.base import End, Task, ToolCall
from turngate.envs.fakes import EchoEnv, RaisingEnv
from turngate.runtime.errors import ConfigError, EndpointTimeout
from turngate.runtime.events import Events, ScoringFailed
from turngate.runtime.runtime import Runtime
from turngate.runtime.scorers import ScorerSet, content_key
from turngate.runtime.testing import FakeEndpoint, Outcome, cancel_everywhere, run_virtual
from turngate.runtime.types import Message, Segment, Trajectory, Turn


def episode(*texts: str, id: str = "t", **fields: object) -> Trajectory:
    turns = [Turn(index=i, segment=0, start=0, length=1, text=text, observation="ok") for i, text in enumerate(texts)]
    return Trajectory(**({"id": id, "task": Task("task"), "turns": tuple(turns), "end": End.success} | fields))


class Fixed:
    """Says the same to every episode, after a while; counts how many calls ran together."""

    def __init__(self, *scores: float, name: str = "fixed", after_s: float = 0.0) -> None:
        self.scores, self.name, self.after_s = scores, name, after_s
        self.calls = self.running = self.most = 0

    async def __call__(self, trajectory: Trajectory) -> Sequence[float]:
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.after_s)
        finally:
            self.running -= 1
        return self.scores


def saying(answer: object) -> Callable[[Trajectory], Awaitable[object]]:
    async def scorer(trajectory: Trajectory) -> object:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return scorer


def scores_of(trajectory: Trajectory) -> list[dict[str, float]]:
    return [turn.scores for turn in trajectory.turns]


async def score(scorers: object, trajectory: Trajectory, **options: object) -> tuple[Trajectory, ScorerSet]:
    scorer_set = ScorerSet(scorers, **options)
    return await scorer_set.score(trajectory), scorer_set


# --- what comes of it


async def test_a_scorer_that_writes_into_the_record_changes_neither_rewards_nor_the_scores_of_others() -> None:
    async def meddle(trajectory: Trajectory) -> Sequence[float]:
        for turn in trajectory.turns:
            turn.rewards["outcome"] = 99.0
            turn.scores["other"] = math.inf
        return [0.25]

    first = Turn(index=0, segment=0, start=0, length=1, text="a", rewards={"outcome": 1.0}, scores={"old": 0.5})
    scored, _ = await score({"x": meddle, "y": saying([0.75])}, msgspec.structs.replace(episode("a"), turns=(first,)))
    assert scored.turns[0].rewards == {"outcome": 1.0}
    assert scores_of(scored) == [{"old": 0.5, "x": 0.25, "y": 0.75}]


async def test_every_turn_gets_every_scorers_word_beside_what_it_had() -> None:
    trajectory = episode("a", "b")
    first = msgspec.structs.replace(trajectory.turns[0], scores={"old": 0.5})
    trajectory = msgspec.structs.replace(trajectory, turns=(first, trajectory.turns[1]))
    scored, _ = await score({"x": saying([0.25, 0.5]), "y": saying((1, 0))}, trajectory)
    assert scores_of(scored) == [{"old": 0.5, "x": 0.25, "y": 1.0}, {"x": 0.5, "y": 0.0}]
    assert scores_of(trajectory) == [{"old": 0.5}, {}]
    assert scored.reward == trajectory.reward == 0.0


async def test_an_episode_without_turns_is_nothing_to_judge() -> None:
    scored, scorers = await score([fixed := Fixed(1.0)], episode())
    assert (scored.turns, fixed.calls) == ((), 0)
    assert scorers.statistics()["fixed"].scored == 0


async def test_no_scorers_change_nothing() -> None:
    trajectory = episode("a")
    assert (await score([], trajectory))[0] is trajectory


def test_scorers_run_side_by_side() -> None:
    async def main() -> float:
        await score([Fixed(1.0, name="x", after_s=5.0), Fixed(1.0, name="y", after_s=7.0)], episode("a"))
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 7.0


def test_no_more_calls_run_at_a_time_than_allowed() -> None:
    fixed = Fixed(1.0, after_s=1.0)
    scorers = ScorerSet([fixed], max_concurrent=3)

    async def main() -> None:
        await asyncio.gather(*(scorers.score(episode(f"turn {i}")) for i in range(10)))

    run_virtual(main())
    assert (fixed.calls, fixed.most) == (10, 3)
    assert repr(scorers) == "<ScorerSet fixed: 10 scored, 0 failed, <Slots 0/3 held, 0 waiting>>"


# --- what goes wrong


class Endless:
    def __iter__(self) -> "Endless":
        return self

    def __next__(self) -> float:
        return 0.5


class Broken:
    def __float__(self) -> float:
        raise ZeroDivisionError("no number here")


@pytest.mark.parametrize(
    ("answer", "reason", "message"),
    [
        (ValueError("no model"), "error", "ValueError: no model"),
        (EndpointTimeout("judge is slow"), "timeout", "EndpointTimeout: judge is slow"),
        (SystemExit(3), "error", "SystemExit"),
        (asyncio.CancelledError(), "error", "must not raise CancelledError: nobody cancelled it"),
        ([0.5], "malformed", "expected 2, got 1"),
        ([0.5] * 3, "malformed", "expected 2, got more than 2"),
        (Endless(), "malformed", "expected 2, got more than 2"),
        (None, "malformed", "scores must be one number per turn"),
        ("11", "malformed", "expected a sequence of numbers, got str"),
        (["1", "0"], "malformed", "expected numbers, got text"),
        ({0: 0.5, 1: 0.5}, "malformed", "expected a sequence of numbers, got dict"),
        ([0.5, Broken()], "malformed", "ZeroDivisionError: no number here"),
        ([0.5, None], "malformed", "scores must be one number per turn"),
    ],
)
async def test_scorer_that_fails_leaves_no_score_and_its_reason(answer: object, reason: str, message: str) -> None:
    events, heard = Events(), list[ScoringFailed]()
    events.subscribe(ScoringFailed, heard.append)
    scorers = ScorerSet({"bad": saying(answer), "good": saying([0.25, 0.75])})
    scored = await scorers.score(episode("a", "b"), events=events)
    assert scores_of(scored) == [{"good": 0.25}, {"good": 0.75}]
    bad, good = (scorers.statistics()[name] for name in ("bad", "good"))
    assert (bad.failed, bad.scored, bad.in_flight) == ({reason: 1}, 0, 0)
    assert message in bad.last_failure
    assert "trajectory t" in bad.last_failure
    assert (good.failed, good.scored) == ({}, 1)
    assert [(e.trajectory_id, e.scorer, e.reason) for e in heard] == [("t", "bad", reason)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
async def test_turn_that_cannot_be_told_lacks_the_score_and_the_others_keep_theirs(bad: float) -> None:
    scored, scorers = await score({"x": saying([0.5, bad])}, episode("a", "b"))
    assert scores_of(scored) == [{"x": 0.5}, {}]
    assert scorers.statistics()["x"].failed == {"not_finite": 1}


async def test_missing_scores_survive_a_file(tmp_path) -> None:
    """NaN has no JSON: a score that is missing must be missing by name."""
    from turngate.runtime.transcript import read_trajectories, write_trajectories

    scored, _ = await score({"x": saying([0.5, math.nan])}, episode("a", "b"))
    write_trajectories(tmp_path / "t.jsonl", [scored])
    assert list(read_trajectories(tmp_path / "t.jsonl")) == [scored]


def test_scorer_past_its_deadline_is_cancelled_and_the_others_are_not() -> None:
    slow, fast = Fixed(1.0, name="slow", after_s=100.0), Fixed(0.5, name="fast", after_s=2.0)

    async def main() -> tuple[Trajectory, ScorerSet, float]:
        scored, scorers = await score([slow, fast], episode("a"), deadline_s=10.0)
        return scored, scorers, asyncio.get_running_loop().time()

    scored, scorers, now_s = run_virtual(main())
    assert scores_of(scored) == [{"fast": 0.5}]
    assert now_s == 10.0
    assert (slow.running, scorers.statistics()["slow"].failed) == (0, {"timeout": 1})
    assert "must answer within 10 s" in scorers.statistics()["slow"].last_failure


def test_waiting_for_a_turn_does_not_count_against_the_deadline() -> None:
    fixed = Fixed(1.0, after_s=6.0)
    scorers = ScorerSet([fixed], max_concurrent=1, deadline_s=10.0)

    async def main() -> None:
        await asyncio.gather(*(scorers.score(episode(f"{i}")) for i in range(3)))

    run_virtual(main())
    assert scorers.statistics()["fixed"].scored == 3


def test_scorer_that_ignores_its_cancellation_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    async def stubborn(trajectory: Trajectory) -> list[float]:
        while True:
            try:
                await asyncio.sleep(1000.0)
            except asyncio.CancelledError:
                pass

    async def main() -> tuple[Trajectory, ScorerSet, float]:
        scored, scorers = await score({"stubborn": stubborn}, episode("a"), deadline_s=10.0, grace_s=5.0)
        return scored, scorers, asyncio.get_running_loop().time()

    scored, scorers, now_s = run_virtual(main())
    assert scores_of(scored) == [{}]
    assert now_s == 15.0
    assert scorers.statistics()["stubborn"].failed == {"timeout": 1}
    assert "was left behind" in caplog.text


async def test_only_the_first_failure_of_a_scorer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    scorers = ScorerSet({"bad": saying(ValueError("down"))})
    for i in range(3):
        await scorers.score(episode(f"{i}"))
    assert scorers.statistics()["bad"].failed == {"error": 3}
    assert caplog.text.count("scoring failed") == 1


def test_cancelled_scoring_leaves_no_slot_taken_and_no_scorer_running() -> None:
    made: list[tuple[ScorerSet, Fixed]] = []

    async def make() -> Trajectory:
        fixed = Fixed(1.0, after_s=1.0)
        made.append((ScorerSet([fixed, Fixed(1.0, name="other")], max_concurrent=1), fixed))
        return await made[-1][0].score(episode("a"))

    def check(outcome: Outcome) -> None:
        scorers, fixed = made[-1]
        assert fixed.running == 0
        assert "0/1 held, 0 waiting" in repr(scorers)
        assert all(s.in_flight == 0 and not s.failed for s in scorers.statistics().values())
        assert outcome.cancelled or scores_of(outcome.result) == [{"fixed": 1.0, "other": 1.0}]

    assert cancel_everywhere(make, check) >= 1


# --- the cache


async def test_equal_episodes_are_asked_about_once() -> None:
    fixed = Fixed(0.5)
    scorers = ScorerSet([fixed])
    for id in ("first", "second"):
        assert scores_of(await scorers.score(episode("a", id=id))) == [{"fixed": 0.5}]
    statistics = scorers.statistics()["fixed"]
    assert (fixed.calls, statistics.scored, statistics.cached) == (1, 1, 1)


async def test_failures_are_not_remembered() -> None:
    answers = iter([[math.nan], [0.5]])

    async def scorer(trajectory: Trajectory) -> list[float]:
        return next(answers)

    scorers = ScorerSet({"x": scorer})
    assert scores_of(await scorers.score(episode("a"))) == [{}]
    assert scores_of(await scorers.score(episode("a"))) == [{"x": 0.5}]


async def test_cache_of_size_zero_remembers_nothing() -> None:
    fixed = Fixed(0.5)
    scorers = ScorerSet([fixed], cache_size=0)
    for _ in range(2):
        await scorers.score(episode("a"))
    assert fixed.calls == 2


async def test_scorers_do_not_get_each_others_answers() -> None:
    scorers = ScorerSet([Fixed(0.25, name="x"), Fixed(0.75, name="y")])
    for _ in range(2):
        scored = await scorers.score(episode("a"))
        assert scores_of(scored) == [{"x": 0.25, "y": 0.75}]


def replaced(trajectory: Trajectory, **fields: object) -> Trajectory:
    return msgspec.structs.replace(trajectory, **fields)


def test_key_holds_what_an_episode_shows_and_nothing_else() -> None:
    plain = episode("a")
    turn = plain.turns[0]
    same = [
        replaced(plain, id="u", group_id="g", member=3, seed=7, started_s=1.0),
        replaced(plain, turns=(replaced(turn, model_s=1.0, version_sent=4),)),
    ]
    segment = Segment.of([1], [1], [-0.5], [0], [0])
    other = [
        episode("b"),
        replaced(plain, end=End.failure),
        replaced(plain, task=Task("other")),
        replaced(plain, messages=(Message("user", "start"),)),
        replaced(plain, segments=(segment,)),
        *(
            replaced(plain, turns=(replaced(turn, **{name: value}),))
            for name, value in {
                "observation": "no",
                "rewards": {"outcome": 1.0},
                "valid": False,
                "state": {"x": 1},
                "tool_calls": (ToolCall("1", "f", "{}"),),
            }.items()
        ),
    ]
    assert {content_key(t) for t in same} == {content_key(plain)}
    assert len({content_key(t) for t in (plain, *other)}) == len(other) + 1


async def test_episode_whose_state_cannot_be_compared_is_asked_about_anew() -> None:
    plain = episode("a")
    strange = replaced(plain, turns=(replaced(plain.turns[0], state={"x": object()}),))
    fixed = Fixed(0.5)
    scorers = ScorerSet([fixed])
    for _ in range(2):
        assert scores_of(await scorers.score(strange)) == [{"fixed": 0.5}]
    assert fixed.calls == 2


async def test_answer_under_a_key_that_too_much_shares_is_not_used_for_another_length() -> None:
    async def ones(trajectory: Trajectory) -> list[float]:
        return [1.0] * len(trajectory.turns)

    scorers = ScorerSet({"x": ones}, key=lambda trajectory: "all alike")
    assert scores_of(await scorers.score(episode("a"))) == [{"x": 1.0}]
    assert scores_of(await scorers.score(episode("a", "b"))) == [{"x": 1.0}, {"x": 1.0}]


# --- configuration


@pytest.mark.parametrize(
    ("scorers", "options", "message"),
    [
        ([Fixed(), Fixed()], {}, "names of their own"),
        ([saying([])], {}, "a scorer must have a name"),
        ([Fixed(name="")], {}, "a scorer must have a name"),
        ({"": saying([])}, {}, "names of their own"),
        ([], {"deadline_s": 0.0}, "deadline_s must be positive"),
        ([], {"grace_s": math.nan}, "grace_s must be positive"),
        ([], {"cache_size": -1}, "cache_size must be 0 or more"),
        ([], {"max_concurrent": 0}, "max_concurrent must be 1 or more"),
    ],
)
def test_sets_that_cannot_work_are_refused(scorers: object, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ScorerSet(scorers, **options)


# --- in the runtime


def runtime(scorers: object) -> Runtime:
    return Runtime(FakeEndpoint(lambda messages: "hello"), scorers=scorers)


async def test_rollouts_come_scored() -> None:
    trajectory = await runtime([Fixed(0.25, 0.5, 0.75)]).rollout(EchoEnv, Task("task"))
    assert scores_of(trajectory) == [{"fixed": 0.25}, {"fixed": 0.5}, {"fixed": 0.75}]
    assert (trajectory.reward, trajectory.outcome, trajectory.end) == (1.0, 1.0, End.success)


async def test_a_runtime_takes_a_set_as_it_is() -> None:
    scorers = ScorerSet([Fixed(1.0, 1.0, 1.0)])
    assert runtime(scorers).scorers is scorers


async def test_failed_episodes_are_not_judged() -> None:
    fixed = Fixed(1.0)
    trajectory = await runtime([fixed]).rollout(lambda: RaisingEnv(at=1), Task("task"))
    assert (trajectory.end, fixed.calls) == (End.env_error, 0)


async def test_b7_5_evaluations_are_not_judged() -> None:
    fixed = Fixed(1.0, 1.0, 1.0)
    evaluation = await runtime([fixed]).evaluate(EchoEnv, [Task("task")])
    assert (evaluation.mean_reward, fixed.calls) == (1.0, 0)
    assert scores_of(evaluation.trajectories[0]) == [{}, {}, {}]


def test_rollout_cancelled_while_it_is_judged_leaves_nothing_behind() -> None:
    made: list[Runtime] = []

    async def make() -> Trajectory:
        made.append(runtime([Fixed(1.0, 1.0, 1.0, after_s=1.0)]))
        return await made[-1].rollout(EchoEnv, Task("task"))

    def check(outcome: Outcome) -> None:
        assert made[-1].scorers.statistics()["fixed"].in_flight == 0
        assert outcome.cancelled or scores_of(outcome.result) == [{"fixed": 1.0}] * 3

    assert cancel_everywhere(make, check) > 1
