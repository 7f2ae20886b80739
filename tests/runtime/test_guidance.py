"""Choosing among draws, and what is recorded of it."""

import asyncio
import gc
import itertools
import math
import random
from collections import Counter, defaultdict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.runtime.errors import ConfigError, EndpointError
from turngate.runtime.guidance import DecisionPoint, Guidance, QValues
from turngate.runtime.selection import enumerated_probs, log_selection_weight, pick, selection_probs
from turngate.runtime.testing import run_virtual
from turngate.runtime.types import Completion, Message, ToolCall, Turn

PI = {"a": 0.6, "b": 0.3, "c": 0.1}
Q = {"a": 0.2, "b": 0.5, "c": 0.9}


def point(seed=1, **fields):
    return DecisionPoint(messages=[Message("user", "go")], seed=seed, **fields)


def completion(text):
    return Completion(text, [ord(text[0])], [math.log(PI.get(text, 0.5))], [0], [1, 2])


def draws(texts, *, fails=None):
    """Return a draw function that answers in order, and fails where it is told to."""
    numbers = itertools.count()

    async def draw(seed):
        number = next(numbers)
        if fails and number in fails:
            raise fails[number]
        return completion(texts[number])

    return draw


async def q_of(point, candidates):
    return [Q[c.text] for c in candidates]


def choose(texts, *, seed=1, q=q_of, **settings):
    guidance = Guidance(q, draws=len(texts), **{"beta": 3.0, **settings})
    return asyncio.run(guidance.choose(draws(texts), point(seed))), guidance


def decide(guidance, draw, *, seed=1):
    chosen = asyncio.run(guidance.choose(draw, point(seed)))
    return chosen, chosen.decision


def test_the_record_holds_every_draw_with_its_value_and_weight():
    chosen, guidance = choose("abac")
    decision = chosen.decision
    assert [c.text for c in decision.candidates] == list("abac")
    assert [c.q for c in decision.candidates] == [0.2, 0.5, 0.2, 0.9]
    weights = selection_probs([0.2, 0.5, 0.2, 0.9], 3.0)
    assert [c.weight for c in decision.candidates] == pytest.approx(weights)
    assert decision.candidates[decision.chosen].text == chosen.text
    assert decision.log_selection == pytest.approx(math.log(4 * weights[decision.chosen]))
    assert (decision.source, decision.fallback, decision.distinct) == ("q_of", "", 3)
    assert guidance.statistics().guided == 1


def test_p12_over_all_draws_and_choices_the_marginal_is_the_formula():
    guided: dict[str, float] = defaultdict(float)
    for drawn in itertools.product("abc", repeat=3):
        chance = math.prod(PI[a] for a in drawn)
        chosen, _ = choose(drawn)
        for index, candidate in enumerate(chosen.decision.candidates):
            guided[candidate.text] += chance * candidate.weight
            if index == chosen.decision.chosen:
                assert math.exp(chosen.decision.log_selection) == pytest.approx(3 * candidate.weight)
    expected: dict[str, float] = defaultdict(float)
    for drawn in itertools.product("abc", repeat=3):
        for action, weight in zip(drawn, selection_probs([Q[a] for a in drawn], 3.0), strict=True):
            expected[action] += math.prod(PI[a] for a in drawn) * weight
    assert {a: guided[a] for a in PI} == pytest.approx(expected)


def test_p12_and_p11_by_a_hundred_thousand_samples_the_marginal_is_the_formula_and_the_weights_lead_back():
    every = {"".join(drawn): math.prod(PI[a] for a in drawn) for drawn in itertools.product("abc", repeat=3)}
    weights = {drawn: selection_probs([Q[a] for a in drawn], 3.0) for drawn in every}
    formula = dict.fromkeys(PI, 0.0)
    for drawn, chance in every.items():
        for action, weight in zip(drawn, weights[drawn], strict=True):
            formula[action] += chance * weight
    seen, back, count = Counter[str](), dict.fromkeys(PI, 0.0), 100_000
    samples = random.Random(0).choices(list(every), list(every.values()), k=count)
    for seed, drawn in enumerate(samples):
        chosen = pick(weights[drawn], seed)
        seen[drawn[chosen]] += 1
        back[drawn[chosen]] += math.exp(-log_selection_weight(weights[drawn], chosen))
    for action, expected in formula.items():
        assert seen[action] / count == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / count))
        assert back[action] / count == pytest.approx(PI[action], abs=0.01)


def test_choices_over_many_seeds_follow_the_weights():
    seen = Counter(choose("abac", seed=seed)[0].decision.chosen for seed in range(2000))
    weights = selection_probs([0.2, 0.5, 0.2, 0.9], 3.0)
    for index, weight in enumerate(weights):
        assert seen[index] / 2000 == pytest.approx(weight, abs=4 * math.sqrt(weight * (1 - weight) / 2000))


def test_beta_zero_draws_once_with_the_base_seed_and_records_no_decision():
    seeds = []

    async def draw(seed):
        seeds.append(seed)
        return completion("a")

    chosen = asyncio.run(Guidance(q_of, beta=0.0, draws=8).choose(draw, point(77)))
    assert (seeds, chosen) == ([77], completion("a"))


def test_the_first_draw_has_the_base_seed_and_the_others_streams_of_their_own():
    seeds = []

    async def draw(seed):
        seeds.append(seed)
        return completion("a")

    asyncio.run(Guidance(q_of, beta=1.0, draws=8).choose(draw, point(77)))
    assert seeds[0] == 77
    assert len(set(seeds)) == 8


def test_a_schedule_sees_the_policy_version():
    guidance = Guidance(q_of, beta=lambda version: version / 2, draws=2)
    chosen = asyncio.run(guidance.choose(draws("ab"), point(policy_version=6)))
    assert chosen.decision.beta == 3.0


def test_a_kl_budget_lowers_beta():
    chosen, _ = choose("abac", beta=1000.0, max_kl=0.1)
    weights = [c.weight for c in chosen.decision.candidates]
    assert sum(w * math.log(4 * w) for w in weights) == pytest.approx(0.1, abs=1e-9)
    assert 0 < chosen.decision.beta < 1000


def test_infinite_beta_takes_the_best_draw_and_says_so():
    chosen, _ = choose("abac", beta=math.inf)
    assert chosen.text == "c"
    assert chosen.decision.is_greedy
    assert msgspec.json.decode(msgspec.json.encode(chosen.decision), type=type(chosen.decision)) == chosen.decision
    floored, _ = choose("abac", beta=math.inf, floor=0.2)
    assert not floored.decision.is_greedy


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([0.1, math.nan, 0.2, 0.3], "values"),
        ([0.1, math.inf, 0.2, 0.3], "values"),
        ([-math.inf] * 4, "values"),
        ([0.1, 0.2], "malformed"),
        ("abcd", "error"),
        (None, "error"),
        (RuntimeError("no"), "error"),
    ],
)
def test_where_values_fail_the_first_draw_is_taken_and_flagged(values, reason):
    async def q(point, candidates):
        if isinstance(values, Exception):
            raise values
        return values

    chosen, guidance = choose("abac", q=q)
    decision = chosen.decision
    assert (chosen.text, decision.chosen, decision.log_selection) == ("a", 0, 0.0)
    assert decision.fallback.startswith(reason)
    assert guidance.statistics().fallbacks == {reason: 1}
    assert len(decision.candidates) == 4


def test_a_forbidden_draw_is_never_chosen():
    async def q(point, candidates):
        return QValues([-math.inf if c.text == "a" else 0.0 for c in candidates], version=9)

    for seed in range(50):
        chosen, _ = choose("aab", q=q, seed=seed, floor=0.5)
        assert chosen.text == "b"
        assert chosen.decision.value_version == 9
        assert chosen.decision.candidates[0].q is None


def test_a_failed_first_draw_fails_as_the_base_would_and_another_one_costs_the_guidance():
    def failing(at):
        calls = itertools.count()

        async def draw(seed):
            if next(calls) == at:
                raise EndpointError("down")
            return completion("a")

        return draw

    with pytest.raises(EndpointError, match="down"):
        asyncio.run(Guidance(q_of, beta=1.0, draws=3).choose(failing(0), point()))
    chosen = asyncio.run(Guidance(q_of, beta=1.0, draws=3).choose(failing(2), point()))
    assert chosen.decision.fallback == "a draw failed: EndpointError"
    assert len(chosen.decision.candidates) == 2


def test_cancelling_a_decision_cancels_its_draws_and_its_values():
    running = set()

    async def draw(seed):
        running.add(seed)
        try:
            await asyncio.sleep(60)
        finally:
            running.discard(seed)

    async def play():
        task = asyncio.ensure_future(Guidance(q_of, beta=1.0, draws=4).choose(draw, point()))
        await asyncio.sleep(1)
        assert len(running) == 4
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not running

    run_virtual(play())


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": -1.0},
        {"beta": math.nan},
        {"draws": 0},
        {"floor": 1.5},
        {"max_kl": -0.1},
        {"timeout_s": 0.0},
        {"grace_s": 0.0},
        {"length_normalised": True},
    ],
)
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ConfigError, match="Guidance"):
        Guidance(q_of, **{"beta": 1.0, **settings})


def test_tool_calls_of_equal_arguments_are_one_action_whatever_their_ids():
    calls = [Completion("", [1], [-1.0], [0], [1], tool_calls=(ToolCall(str(i), "buy", "{}"),)) for i in range(3)]
    waiting = iter(calls)

    async def draw(seed):
        return next(waiting)

    async def q(point, candidates):
        return [0.0] * len(candidates)

    chosen = asyncio.run(Guidance(q, beta=1.0, draws=3).choose(draw, point()))
    assert chosen.decision.distinct == 1


def test_a_decision_is_written_and_read_with_its_turn():
    chosen, _ = choose("ab")
    turn = Turn(index=0, segment=0, start=0, length=1, text=chosen.text, decision=chosen.decision)
    assert msgspec.json.decode(msgspec.json.encode(turn), type=Turn) == turn


def test_guided_and_enumerated_agree_in_the_limit_of_many_draws():
    drawn = "a" * 600 + "b" * 300 + "c" * 100
    chosen, _ = choose(drawn)
    total: dict[str, float] = defaultdict(float)
    for candidate in chosen.decision.candidates:
        total[candidate.text] += candidate.weight
    target = enumerated_probs([math.log(p) for p in PI.values()], list(Q.values()), 3.0)
    assert [total[a] for a in PI] == pytest.approx(target)


def test_a_schedule_that_gives_no_beta_is_refused_by_name():
    for wrong in (-1.0, math.nan):
        schedule = dict.fromkeys(range(9), wrong).__getitem__
        with pytest.raises(ConfigError, match=r"from its schedule at policy version 3"):
            asyncio.run(Guidance(q_of, beta=schedule).choose(draws("a"), point(policy_version=3)))


def test_a_kl_budget_that_even_the_best_draw_keeps_to_is_not_greedy_by_intent():
    chosen, _ = choose("abac", beta=math.inf, max_kl=5.0)
    assert chosen.text == "c"
    assert not chosen.decision.is_greedy


def test_variants_share_their_tallies_and_check_their_settings():
    guidance = Guidance(q_of, beta=1.0, draws=2)
    variant = guidance.variant(beta=7.0, draws=4, floor=0.1, max_kl=9.0)
    chosen = asyncio.run(variant.choose(draws("abac"), point()))
    assert (chosen.decision.beta, chosen.decision.floor) == (7.0, 0.1)
    assert (guidance.statistics().guided, guidance.beta, guidance.draws) == (1, 1.0, 2)
    with pytest.raises(ConfigError, match="draws must be 1 or more"):
        guidance.variant(draws=0)


def written(decision):
    return msgspec.json.decode(msgspec.json.encode(decision), type=type(decision))


@pytest.mark.parametrize("values", [[1e308, -1e308, 0.0, 0.0], [1e308, 1e308, 1e308, 1e307]])
@pytest.mark.parametrize("settings", [{"beta": 50.0}, {"beta": 1e308}, {"beta": 1e308, "max_kl": 0.1}])
def test_values_beyond_all_bounds_choose_as_any_others_do(values, settings):
    async def q(point, candidates):
        return values

    decision = choose("abca", q=q, **settings)[0].decision
    weights = [c.weight for c in decision.candidates]
    assert decision.fallback == ""
    assert math.fsum(weights) == pytest.approx(1)
    assert weights[0] == max(weights)
    if "max_kl" in settings:
        assert sum(w * math.log(4 * w) for w in weights if w > 0) <= 0.1 + 1e-9


@pytest.mark.parametrize("wrong", [None, "2", 1j, KeyError("no")])
def test_a_schedule_that_raises_or_gives_no_number_is_refused_by_name(wrong):
    def schedule(version):
        if isinstance(wrong, Exception):
            raise wrong
        return wrong

    with pytest.raises(ConfigError, match="from its schedule at policy version 3"):
        asyncio.run(Guidance(q_of, beta=schedule).choose(draws("a"), point(policy_version=3)))


@pytest.mark.parametrize("q", [None, "http://127.0.0.1:8000", Completion])
def test_what_is_no_value_function_is_refused_when_it_is_given(q):
    with pytest.raises(ConfigError, match=r"^q must be a coroutine function of \(point, candidates\): got "):
        Guidance(q, beta=1.0)


@pytest.mark.parametrize("settings", [{"beta": None}, {"beta": "2"}, {"draws": 2.0}, {"floor": "0"}, {"max_kl": "1"}])
def test_settings_that_are_no_numbers_are_refused_when_they_are_given(settings):
    with pytest.raises(ConfigError, match="Guidance"):
        Guidance(q_of, **{"beta": 1.0, **settings})


@given(
    values=st.lists(st.floats(), min_size=1, max_size=6),
    beta=st.floats(min_value=0, allow_nan=False),
    floor=st.floats(0, 1),
    max_kl=st.none() | st.floats(min_value=0, allow_nan=False),
    seed=st.integers(0, 2**53),
)
def test_whatever_the_values_are_a_draw_is_chosen_and_the_record_says_how(values, beta, floor, max_kl, seed):
    async def q(point, candidates):
        return values

    guidance = Guidance(q, beta=beta, draws=len(values), floor=floor, max_kl=max_kl)
    chosen = asyncio.run(guidance.choose(draws("abcdef"), point(seed)))
    decision = chosen.decision
    if beta == 0:
        assert decision is None
        return
    weights = [c.weight for c in decision.candidates]
    weight = weights[decision.chosen]
    assert math.fsum(weights) == pytest.approx(1)
    assert weight > 0
    if decision.fallback:
        assert any(not math.isfinite(value) for value in values)
        assert (decision.chosen, decision.log_selection) == (0, 0.0)
    else:
        assert values[decision.chosen] > -math.inf
        assert decision.log_selection == pytest.approx(math.log(len(values) * weight))
        allowed = [value for value in values if value > -math.inf]
        if max_kl is not None and len(allowed) == len(values) and floor == 0:
            assert sum(w * math.log(len(weights) * w) for w in weights if w > 0) <= max_kl + 1e-6
    assert written(decision) == decision


def test_a_failed_first_draw_is_told_at_once_and_ends_the_others():
    running, unheard = [], []

    async def draw(seed):
        if seed == 1:
            await asyncio.sleep(2)
            raise EndpointError("down")
        running.append(seed)
        try:
            await asyncio.sleep(600 if len(running) > 1 else 1)
            raise EndpointError("down, too")
        finally:
            running.remove(seed)

    async def play():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unheard.append(context))
        with pytest.raises(EndpointError, match=r"^down$"):
            await Guidance(q_of, beta=1.0, draws=3).choose(draw, point(1))
        gc.collect()
        return loop.time(), list(running), unheard

    assert run_virtual(play()) == (pytest.approx(2.0, abs=0.1), [], [])


def test_p12_the_choice_has_luck_of_its_own_and_not_that_of_the_draws():
    """A client that draws with the decision's seed must not see the same luck choose among its draws."""

    async def draw(seed):
        return completion("a" if random.Random(seed).random() < 0.5 else "b")

    async def alike(point, candidates):
        return [0.5] * len(candidates)

    guidance = Guidance(alike, beta=1.0, draws=2)
    first = [decide(guidance, draw, seed=seed)[0].text for seed in range(600)].count("a")
    assert first / 600 == pytest.approx(0.5, abs=4 * math.sqrt(0.25 / 600))


def test_p11_a_floor_is_part_of_the_recorded_weight():
    for seed in range(20):
        _, decision = decide(Guidance(q_of, beta=30.0, draws=4, floor=0.4), draws("abca"), seed=seed)
        weights = [candidate.weight for candidate in decision.candidates]
        assert min(weights) >= 0.4 / 4
        assert decision.log_selection == pytest.approx(math.log(4 * weights[decision.chosen]))


def test_b6_4_without_values_the_first_draw_is_taken_and_not_the_likeliest():
    """vllm-project/vllm#6589: log-probs are no measure of quality."""

    async def broken(point, candidates):
        raise RuntimeError("no values")

    chosen, decision = decide(Guidance(broken, beta=1.0, draws=3), draws("cab"))
    assert (chosen.text, decision.chosen) == ("c", 0)
    assert [candidate.weight for candidate in decision.candidates] == [1.0, 0.0, 0.0]


def test_a_draw_that_breaks_the_program_is_no_fallback():
    with pytest.raises(ZeroDivisionError):
        decide(Guidance(q_of, beta=1.0, draws=3), draws("abc", fails={2: ZeroDivisionError()}))


def test_decisions_that_nothing_can_guide_are_counted_and_drawn_once():
    class Branching:
        name, needs_snapshots = "branching", True

        async def __call__(self, point, candidates):
            raise AssertionError("nobody asks where there is nothing to branch from")

    guidance = Guidance(Branching(), beta=1.0, draws=4)
    chosen, _ = decide(guidance, draws("b"))
    told = guidance.statistics()
    assert (chosen.text, told.draws, told.fallbacks) == ("b", 1, {"no snapshots": 1})


def test_a_variant_may_set_anything_to_nothing():
    guidance = Guidance(q_of, beta=3.0, draws=4, floor=0.2, max_kl=1.0)
    found = guidance.variant(beta=0.0, floor=0.0, max_kl=0.0)
    assert (found.beta, found.draws, found.floor, found.max_kl) == (0.0, 4, 0.0, 0.0)
    assert found.tally is guidance.tally
    with pytest.raises(ConfigError, match="floor"):
        guidance.variant(floor=2.0)
