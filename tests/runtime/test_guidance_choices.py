"""What a guided decision must not get wrong: luck of its own, floors in the weight, plain fallbacks, honest tallies."""

import asyncio
import itertools
import logging
import math
from array import array
from collections.abc import Awaitable, Callable, Sequence
from random import Random

import pytest

from turngate.runtime.errors import ConfigError, EndpointError
from turngate.runtime.guidance import DecisionPoint, Guidance, QValues
from turngate.runtime.guidance_tally import decision_kl
from turngate.runtime.selection import pick
from turngate.runtime.types import Candidate, Completion, Decision, Message

PI = {"a": 0.6, "b": 0.3, "c": 0.1}
Q = {"a": 0.2, "b": 0.5, "c": 0.9}
Drawer = Callable[[int], Awaitable[Completion]]


def point(seed: int = 1, **fields: int) -> DecisionPoint:
    return DecisionPoint(messages=[Message("user", "go")], seed=seed, policy_version=fields.get("policy_version", 0))


def completion(text: str) -> Completion:
    return Completion(text, [ord(text[0])], [math.log(PI[text])], [0], [1, 2])


def drawing(texts: str, *, fails: dict[int, BaseException] | None = None) -> Drawer:
    numbers = itertools.count()

    async def draw(seed: int) -> Completion:
        number = next(numbers)
        if fails and number in fails:
            raise fails[number]
        return completion(texts[number])

    return draw


async def q_of(point: DecisionPoint, candidates: Sequence[Completion]) -> list[float]:
    return [Q[c.text] for c in candidates]


def decide(guidance: Guidance, draw: Drawer, *, seed: int = 1) -> tuple[Completion, Decision]:
    chosen = asyncio.run(guidance.choose(draw, point(seed)))
    assert chosen.decision is not None
    return chosen, chosen.decision


def test_p12_the_choice_has_luck_of_its_own_and_not_that_of_the_draws() -> None:
    """A client that draws with the decision's seed must not see the same luck choose among its draws."""

    async def draw(seed: int) -> Completion:
        return completion("a" if Random(seed).random() < 0.5 else "b")

    async def alike(point: DecisionPoint, candidates: Sequence[Completion]) -> list[float]:
        return [0.5] * len(candidates)

    guidance = Guidance(alike, beta=1.0, draws=2)
    first = [decide(guidance, draw, seed=seed)[0].text for seed in range(600)].count("a")
    assert first / 600 == pytest.approx(0.5, abs=4 * math.sqrt(0.25 / 600))


def test_p11_a_floor_is_part_of_the_recorded_weight() -> None:
    for seed in range(20):
        _, decision = decide(Guidance(q_of, beta=30.0, draws=4, floor=0.4), drawing("abca"), seed=seed)
        weights = [candidate.weight for candidate in decision.candidates]
        assert min(weights) >= 0.4 / 4
        assert decision.log_selection == pytest.approx(math.log(4 * weights[decision.chosen]))


def test_b6_4_without_values_the_first_draw_is_taken_and_not_the_likeliest() -> None:
    """vllm-project/vllm#6589: log-probs are no measure of quality."""

    async def broken(point: DecisionPoint, candidates: Sequence[Completion]) -> list[float]:
        raise RuntimeError("no values")

    chosen, decision = decide(Guidance(broken, beta=1.0, draws=3), drawing("cab"))
    assert (chosen.text, decision.chosen) == ("c", 0)
    assert [candidate.weight for candidate in decision.candidates] == [1.0, 0.0, 0.0]


def test_a_draw_that_breaks_the_program_is_no_fallback() -> None:
    with pytest.raises(ZeroDivisionError):
        decide(Guidance(q_of, beta=1.0, draws=3), drawing("abc", fails={2: ZeroDivisionError()}))


def test_a_timeout_of_the_value_functions_own_is_its_error() -> None:
    async def impatient(point: DecisionPoint, candidates: Sequence[Completion]) -> list[float]:
        raise TimeoutError("the judge did not answer")

    _, decision = decide(Guidance(impatient, beta=1.0, draws=2), drawing("ab"))
    assert decision.fallback.startswith("error: ")
    assert "the judge did not answer" in decision.fallback


def test_a_weight_of_nothing_is_never_picked_however_the_others_were_rounded() -> None:
    assert {pick([0.25, 0.0], seed) for seed in range(50)} == {0}


def test_tallies_count_draws_fallbacks_seconds_and_kl() -> None:
    async def never_a(point: DecisionPoint, candidates: Sequence[Completion]) -> QValues:
        return QValues([-math.inf if c.text == "a" else 0.0 for c in candidates], version=5)

    guidance = Guidance(never_a, beta=1.0, draws=3)
    _, decision = decide(guidance, drawing("aba"))
    assert decision.seconds > 0
    told = guidance.statistics()
    assert (told.decisions, told.guided, told.draws, told.distinct_mean) == (1, 1, 3, 2)
    assert told.kl_mean == pytest.approx(math.log(3))  # one of three draws, for certain
    assert told.value_s == decision.seconds
    decide(guidance, drawing("aba", fails={1: EndpointError("down")}))
    told = guidance.statistics()
    assert (told.decisions, told.guided, told.draws, told.fallbacks) == (2, 1, 6, {"a draw failed": 1})


def test_decisions_that_nothing_can_guide_are_counted_and_drawn_once() -> None:
    class Branching:
        name, needs_snapshots = "branching", True

        async def __call__(self, point: DecisionPoint, candidates: Sequence[Completion], /) -> list[float]:
            raise AssertionError("nobody asks where there is nothing to branch from")

    guidance = Guidance(Branching(), beta=1.0, draws=4)
    chosen, _ = decide(guidance, drawing("b"))
    told = guidance.statistics()
    assert (chosen.text, told.draws, told.fallbacks) == ("b", 1, {"no snapshots": 1})


def test_sixteen_decisions_without_values_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(point: DecisionPoint, candidates: Sequence[Completion]) -> list[float]:
        raise RuntimeError("no values")

    guidance = Guidance(broken, beta=1.0, draws=1)
    with caplog.at_level(logging.WARNING, "turngate.guidance"):
        for number in range(40):
            decide(guidance, drawing("a"))
            assert len(caplog.records) == (number >= 15)


def test_b6_5_the_kl_of_listed_actions_does_not_underflow() -> None:
    def listed(logprob: float, weight: float) -> Candidate:
        return Candidate(text="x", logprobs=array("f", [logprob]).tobytes(), weight=weight)

    def kl(*weights: float) -> float:
        candidates = tuple(listed(-2000.0, weight) for weight in weights)
        return decision_kl(
            Decision(candidates=candidates, chosen=0, beta=1.0, log_selection=0.0, source="q", is_enumerated=True)
        )

    assert kl(0.5, 0.5) == pytest.approx(0.0)
    assert kl(1.0, 0.0) == pytest.approx(math.log(2))


@pytest.mark.parametrize("settings", [{"grace_s": 0.0}, {"length_normalised": True}])
def test_settings_that_cannot_work_are_refused(settings: dict[str, float | bool]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Guidance(q_of, beta=1.0, **settings)


def test_a_variant_may_set_anything_to_nothing() -> None:
    guidance = Guidance(q_of, beta=3.0, draws=4, floor=0.2, max_kl=1.0)
    found = guidance.variant(beta=0.0, floor=0.0, max_kl=0.0)
    assert (found.beta, found.draws, found.floor, found.max_kl) == (0.0, 4, 0.0, 0.0)
    assert found.tally is guidance.tally
    with pytest.raises(ConfigError, match="floor"):
        guidance.variant(floor=2.0)
