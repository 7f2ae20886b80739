"""What guidance has done, counted: what is on the record, and nothing else."""

import asyncio
import logging
import math
from array import array

import pytest

from tests.runtime.test_guidance import decide, draws, point, q_of
from turngate.runtime.errors import EndpointError
from turngate.runtime.guidance import Guidance, QValues
from turngate.runtime.guidance_tally import decision_kl
from turngate.runtime.types import Candidate, Decision


def test_the_tally_counts_the_decisions_that_are_on_the_record():
    async def failing(seed):
        raise EndpointError("down")

    async def works_once(point, candidates):
        if guidance.statistics().decisions:
            raise ValueError
        return await q_of(point, candidates)

    guidance = Guidance(works_once, beta=1.0, draws=2)
    asyncio.run(guidance.choose(draws("ab"), point()))
    asyncio.run(guidance.variant(beta=0.0).choose(draws("a"), point()))
    with pytest.raises(EndpointError):
        asyncio.run(guidance.choose(failing, point()))
    asyncio.run(guidance.choose(draws("ab"), point()))
    found = guidance.statistics()
    assert (found.decisions, found.guided, found.fallbacks) == (2, 1, {"error": 1})


def test_tallies_count_draws_fallbacks_seconds_and_kl():
    async def never_a(point, candidates):
        return QValues([-math.inf if c.text == "a" else 0.0 for c in candidates], version=5)

    guidance = Guidance(never_a, beta=1.0, draws=3)
    _, decision = decide(guidance, draws("aba"))
    assert decision.seconds > 0
    told = guidance.statistics()
    assert (told.decisions, told.guided, told.draws, told.distinct_mean) == (1, 1, 3, 2)
    assert told.kl_mean == pytest.approx(math.log(3))  # one of three draws, for certain
    assert told.value_s == decision.seconds
    decide(guidance, draws("aba", fails={1: EndpointError("down")}))
    told = guidance.statistics()
    assert (told.decisions, told.guided, told.draws, told.fallbacks) == (2, 1, 6, {"a draw failed": 1})


def test_sixteen_decisions_without_values_are_told_once(caplog):
    async def broken(point, candidates):
        raise RuntimeError("no values")

    guidance = Guidance(broken, beta=1.0, draws=1)
    with caplog.at_level(logging.WARNING, "turngate.guidance"):
        for number in range(40):
            decide(guidance, draws("a"))
            assert len(caplog.records) == (number >= 15)


def test_b6_5_the_kl_of_listed_actions_does_not_underflow():
    def listed(logprob, weight):
        return Candidate(text="x", logprobs=array("f", [logprob]).tobytes(), weight=weight)

    def kl(*weights):
        candidates = tuple(listed(-2000.0, weight) for weight in weights)
        return decision_kl(
            Decision(candidates=candidates, chosen=0, beta=1.0, log_selection=0.0, source="q", is_enumerated=True)
        )

    assert kl(0.5, 0.5) == pytest.approx(0.0)
    assert kl(1.0, 0.0) == pytest.approx(math.log(2))
