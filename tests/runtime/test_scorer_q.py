"""Process reward models and judges as value functions."""

import math

import pytest

from turngate.envs.base import Task, ToolCall
from turngate.envs.fakes import EchoEnv
from turngate.runtime import JudgeEndpoint, Limits, Runtime
from turngate.runtime.errors import GuidanceError
from turngate.runtime.guidance import DecisionPoint, Guidance
from turngate.runtime.opening import opening_messages
from turngate.runtime.scorer_q import ScorerQ, imagined
from turngate.runtime.testing import FakeEndpoint, run_virtual
from turngate.runtime.types import Completion, Message

TASK = Task("t", "find it")
HISTORY = [
    Message("system", "rules"),
    Message("user", "find it"),
    Message("assistant", "look", (ToolCall("1", "look", "{}"),)),
    Message("tool", "a door", (), "1"),
    Message("user", "hurry"),
]


class Lengths:
    name = "lengths"

    def __init__(self, edit=lambda scores: scores):
        self.asked, self.edit = [], edit

    async def __call__(self, trajectory):
        self.asked.append(trajectory)
        return self.edit([float(len(turn.text)) for turn in trajectory.turns])


def values(scorer, *texts, **point):
    given = DecisionPoint(messages=HISTORY, history=HISTORY, **{"task": TASK, "seed": 7, **point})
    return run_virtual(ScorerQ(scorer)(given, [Completion(text) for text in texts]))


def test_the_scorer_sees_the_history_with_one_turn_more():
    found = imagined(
        DecisionPoint(messages=HISTORY, task=TASK), Completion("open", tool_calls=(ToolCall("2", "o", ""),))
    )
    assert [turn.text for turn in found.turns] == ["look", "open"]
    assert found.turns[0].observation == "a door\nhurry"
    assert found.turns[1].observation == ""
    assert found.turns[1].tool_calls == (ToolCall("2", "o", ""),)
    assert opening_messages(found) == tuple(HISTORY[:2])
    assert (found.task, found.first_observation) == (TASK, "find it")


def test_each_candidate_gets_the_score_of_its_turn_and_equal_ones_are_asked_about_once():
    scorer = Lengths()
    assert list(values(scorer, "a", "abc", "a").values) == [1.0, 3.0, 1.0]
    assert len(scorer.asked) == 2


def test_a_chat_without_a_task_is_named_by_what_was_asked_first():
    scorer = Lengths()
    values(scorer, "a", task=None)
    assert scorer.asked[0].task.prompt == "find it"


@pytest.mark.parametrize(
    ("edit", "reason"),
    [(lambda s: [*s[:-1], math.nan], "values"), (lambda s: s[1:], "error"), (lambda s: None, "error")],
)
def test_what_a_scorer_cannot_tell_costs_the_decision_its_guidance(edit, reason):
    async def play():
        runtime = Runtime(FakeEndpoint(lambda _: "x"), limits=Limits(max_turns=1))
        return await runtime.rollout(lambda: EchoEnv(1), TASK, guidance=Guidance(ScorerQ(Lengths(edit)), beta=1.0))

    decision = run_virtual(play()).turns[0].decision
    assert decision.fallback.partition(":")[0] == reason
    assert decision.source == "lengths"


def last(messages):
    return messages[1].content.rsplit('{"agent": "', 1)[1].partition('"')[0]


def test_a_judge_is_asked_about_the_candidates_alone():
    judge = FakeEndpoint(lambda messages: "0.9" if last(messages) == "right" else "0.1")

    async def play():
        answers = iter(["wrong", "right", "wrong", "right"] * 3)
        runtime = Runtime(FakeEndpoint(lambda _: next(answers)), limits=Limits(max_turns=3))
        guidance = Guidance(ScorerQ(JudgeEndpoint(judge)), beta=100.0, draws=4)
        return await runtime.rollout(lambda: EchoEnv(3), TASK, guidance=guidance)

    trajectory = run_virtual(play())
    assert [turn.text for turn in trajectory.turns] == ["right"] * 3
    assert [c.q for c in trajectory.turns[0].decision.candidates] == [0.1, 0.9, 0.1, 0.9]
    assert len(judge.calls) == 6  # two different candidates at each of three turns


@pytest.mark.parametrize("edit", [lambda scores: ["0.5"] * len(scores), lambda scores: "12"[: len(scores)]])
def test_scores_that_are_texts_cost_the_guidance(edit):
    async def play():
        runtime = Runtime(FakeEndpoint(lambda _: "x"), limits=Limits(max_turns=1))
        guidance = Guidance(ScorerQ(Lengths(edit)), beta=1.0, draws=2)
        return await runtime.rollout(lambda: EchoEnv(1), TASK, guidance=guidance)

    assert "got texts" in run_virtual(play()).turns[0].decision.fallback


def test_candidates_are_equal_by_their_text_and_calls_and_not_by_the_ids_of_calls():
    class Calls(Lengths):
        async def __call__(self, trajectory):
            self.asked.append(trajectory)
            calls = trajectory.turns[-1].tool_calls
            return [0.0] * (len(trajectory.turns) - 1) + [float(len(calls[0].arguments))]

    scorer = Calls()
    given = DecisionPoint(messages=HISTORY, history=HISTORY, task=TASK)
    candidates = [
        Completion("", tool_calls=(ToolCall(number, "buy", arguments),))
        for number, arguments in (("1", "{}"), ("2", '{"n": 1}'), ("3", "{}"))
    ]
    assert list(run_virtual(ScorerQ(scorer)(given, candidates)).values) == [2.0, 8.0, 2.0]
    assert len(scorer.asked) == 2


def test_scores_of_another_number_than_turns_are_nobodys():
    with pytest.raises(GuidanceError, match="scores must be one number per turn: expected 2, got 3"):
        values(Lengths(lambda scores: [*scores, 9.0]), "a")


def test_what_a_scorer_raises_goes_on_as_itself_and_its_version_is_told():
    class Broken(Lengths):
        async def __call__(self, trajectory):
            raise ZeroDivisionError("broken scorer")

    with pytest.raises(ZeroDivisionError, match="broken scorer"):
        values(Broken(), "a", "b")
    given = DecisionPoint(messages=HISTORY, history=HISTORY, task=TASK)
    assert run_virtual(ScorerQ(Lengths(), version=6)(given, [Completion("a")])).version == 6


def test_what_is_imagined_is_the_whole_history_and_never_trained_on():
    shown = [HISTORY[0], Message("user", "find it"), Message("user", "quickly")]
    found = imagined(DecisionPoint(messages=shown, history=HISTORY), Completion("open"))
    assert [turn.text for turn in found.turns] == ["look", "open"]
    assert not found.trainable
    assert imagined(DecisionPoint(messages=shown), Completion("open")).first_observation == "find it\nquickly"
