"""Value functions that are slow, wrong or rude: each costs a decision its guidance, and nothing else."""

import asyncio

import msgspec
import numpy
import pytest

from tests.runtime.test_guidance import choose, decide, draws, point
from turngate.runtime.guidance import DecisionPoint, Guidance, QValues
from turngate.runtime.testing import run_virtual
from turngate.runtime.types import Message


def written(decision):
    return msgspec.json.decode(msgspec.json.encode(decision), type=type(decision))


def test_values_that_come_too_late_are_not_waited_for():
    async def slow(point, candidates):
        await asyncio.sleep(60)

    async def play():
        guidance = Guidance(slow, beta=1.0, draws=2, timeout_s=5.0)
        started = asyncio.get_running_loop().time()
        chosen = await guidance.choose(draws("ab"), point())
        return chosen, asyncio.get_running_loop().time() - started

    chosen, seconds = run_virtual(play())
    assert (chosen.text, chosen.decision.fallback) == ("a", "timeout")
    assert seconds == pytest.approx(5.0)


def test_values_that_ignore_their_cancellation_are_left_behind():
    async def stubborn(point, candidates):
        while True:
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                pass

    async def play():
        guidance = Guidance(stubborn, beta=1.0, draws=2, timeout_s=3.0, grace_s=2.0)
        began = asyncio.get_running_loop().time()
        chosen = await guidance.choose(draws("ab"), point())
        return chosen.decision.fallback, asyncio.get_running_loop().time() - began

    fallback, seconds = run_virtual(play())
    assert (fallback, seconds) == ("timeout", pytest.approx(5.0))


@pytest.mark.parametrize("kind", [asyncio.CancelledError, SystemExit, GeneratorExit])
def test_what_values_must_not_raise_costs_a_decision_and_not_the_loop(kind):
    async def q(point, candidates):
        raise kind

    chosen, _ = choose("ab", q=q)
    assert chosen.decision.fallback.startswith("error")


@pytest.mark.parametrize(
    "values",
    [numpy.array([0.1, 0.2]), numpy.array([0.1, 0.2], dtype="float32"), [numpy.int64(0), True], (0.1, 0.2)],
)
def test_numbers_of_any_kind_are_values_and_the_record_has_plain_ones(values):
    async def q(point, candidates):
        return QValues(values, numpy.int64(3))

    settings = {"beta": numpy.float32(2.0), "floor": numpy.float32(0.25), "max_kl": numpy.float64(9)}
    decision = choose("ab", q=q, **settings)[0].decision
    assert decision.fallback == ""
    assert (decision.beta, decision.floor, decision.value_version) == (2.0, 0.25, 3)
    assert written(decision) == decision


@pytest.mark.parametrize("values", ["12", b"12", ["1", "2"], {0.1: 0, 0.2: 1}, {0.1, 0.2}, [1j, 0], [None, 1]])
def test_what_only_looks_like_one_number_per_candidate_is_no_value(values):
    async def q(point, candidates):
        return values

    decision = choose("ab", q=q)[0].decision
    assert decision.fallback.startswith("error")
    assert (decision.chosen, decision.log_selection) == (0, 0.0)


@pytest.mark.parametrize("version", ["v1", None, 2.5])
def test_a_version_that_is_no_number_costs_the_guidance_and_not_the_record(version):
    async def q(point, candidates):
        return QValues([0.0, 1.0], version)

    decision = choose("ab", q=q)[0].decision
    assert decision.fallback.startswith("error")
    assert written(decision) == decision


def test_a_value_function_cannot_change_the_draws_or_the_chat():
    def shuffles(point, candidates):
        candidates[0].token_ids.append(99)
        candidates.reverse()

    def forgets(point, candidates):
        point.history.clear()

    for spoil in (shuffles, forgets):
        history = [Message("user", "go")]

        async def q(point, candidates, spoil=spoil):
            spoil(point, candidates)
            return [0.0] * len(candidates)

        guidance = Guidance(q, beta=1.0, draws=2)
        here = DecisionPoint(messages=history, history=history)
        decision = asyncio.run(guidance.choose(draws("ab"), here)).decision
        assert [c.text for c in decision.candidates] == ["a", "b"]
        assert decision.fallback.startswith("error")
        assert memoryview(decision.candidates[0].token_ids).cast("i").tolist() == [ord("a")]
        assert len(history) == 1


def test_a_failure_of_any_length_is_told_in_short():
    async def q(point, candidates):
        raise ValueError("x" * 10_000_000)

    assert len(choose("ab", q=q)[0].decision.fallback) == 1000


def test_a_timeout_of_the_value_functions_own_is_its_error():
    async def impatient(point, candidates):
        raise TimeoutError("the judge did not answer")

    _, decision = decide(Guidance(impatient, beta=1.0, draws=2), draws("ab"))
    assert decision.fallback.startswith("error: ")
    assert "the judge did not answer" in decision.fallback
