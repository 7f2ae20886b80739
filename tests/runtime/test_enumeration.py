"""Actions that somebody lists, weighted by softmax(log pi + beta Q)."""

import asyncio
import math
from collections import Counter

import msgspec
import pytest

from turngate.envs.base import Action, Task, ToolCall, ToolSpec
from turngate.envs.fakes import EchoEnv
from turngate.envs.tool_env import ToolEnv
from turngate.envs.tools import tool
from turngate.runtime import Limits, Runtime, Sampling
from turngate.runtime.capabilities import Capabilities, Finding
from turngate.runtime.dialect import Dialect
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.enumeration import action_ids
from turngate.runtime.errors import ConfigError, EndpointRefused
from turngate.runtime.guidance import Guidance, QValues
from turngate.runtime.selection import enumerated_probs, kl_to_base
from turngate.runtime.testing import FakeEndpoint, FakeTransport, run_virtual
from turngate.runtime.testing.endpoints import END_ID, fake_logprob
from turngate.runtime.testing.renderers import FakeRenderer
from turngate.runtime.transport import Reply
from turngate.runtime.types import TokenGuidance

TASK = Task("t", "go")
ACTIONS = ["ab", "c", "defg"]
Q = {"ab": 0.2, "c": 0.5, "defg": 0.9}


def text_reply(ids, logprobs, **more):
    choice = {"text": "", "finish_reason": "stop", "token_ids": ids, "logprobs": {"token_logprobs": logprobs}}
    return Reply(200, {}, msgspec.json.encode({"choices": [{**choice, **more}]}))


def serve(path, body):
    """Score what is echoed as the fakes do; sample `base` otherwise."""
    ids = body["prompt"] if body.get("echo") else [*b"base", END_ID]
    logprobs = [fake_logprob(i) for i in ids]
    return text_reply(ids, [None, *logprobs[1:]] if body.get("echo") else logprobs)


def endpoint_of(transport):
    dialect = Dialect(token_mode="tokens")
    return Endpoint("http://x/v1", model="m", dialect=dialect, renderer=FakeRenderer(), transport=transport)


def listed(point):
    return [Action(text) for text in ACTIONS]


async def q_of(point, candidates):
    return [Q[one.text] for one in candidates]


def play(guidance, *, turns=1, seed=1, transport=None, sampling=None):
    async def episode():
        transport_ = transport or FakeTransport(serve)
        runtime = Runtime(endpoint_of(transport_), limits=Limits(max_turns=turns), sampling=sampling or Sampling())
        return await runtime.rollout(lambda: EchoEnv(turns), TASK, seed=seed, guidance=guidance), transport_

    return run_virtual(episode())


def sums():
    return [sum(fake_logprob(i) for i in [*text.encode(), END_ID]) for text in ACTIONS]


def test_the_record_holds_base_log_probs_and_what_is_missing_to_the_guided_one():
    trajectory, transport = play(Guidance(q_of, beta=2.0, candidates=listed))
    turn, decision = trajectory.turns[0], trajectory.turns[0].decision
    probs = enumerated_probs(sums(), [Q[a] for a in ACTIONS], 2.0)
    assert [c.weight for c in decision.candidates] == pytest.approx(probs)
    assert [c.text for c in decision.candidates] == ACTIONS
    assert decision.is_enumerated
    recorded = trajectory.segments[0].logprob_values()[turn.start : turn.start + turn.length]
    assert list(recorded) == [fake_logprob(i) for i in [*turn.text.encode(), END_ID]]
    assert sum(recorded) + decision.log_selection == pytest.approx(math.log(probs[decision.chosen]))
    assert len(transport.requests) == 3
    assert trajectory.trainable


def test_over_seeds_actions_are_taken_by_the_formula_and_the_weight_leads_back_to_the_base():
    probs = enumerated_probs(sums(), [Q[a] for a in ACTIONS], 4.0)
    seen: Counter[str] = Counter()
    for seed in range(400):
        seen[play(Guidance(q_of, beta=4.0, candidates=listed), seed=seed)[0].turns[0].text] += 1
    for action, p in zip(ACTIONS, probs, strict=True):
        assert seen[action] / 400 == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 400))


def test_the_weight_back_is_exact_by_enumeration():
    trajectory, _ = play(Guidance(q_of, beta=2.0, candidates=listed, floor=0.1))
    decision = trajectory.turns[0].decision
    for candidate, base in zip(decision.candidates, sums(), strict=True):
        log_selection = math.log(candidate.weight) - candidate.logprob
        assert candidate.weight * math.exp(-log_selection) == pytest.approx(math.exp(base))
    assert min(c.weight for c in decision.candidates) > 0.1 / 3


def test_beta_zero_is_the_base_policy_over_the_actions_and_log_pi_is_no_mean():
    trajectory, _ = play(Guidance(q_of, beta=0.0, candidates=listed))
    weights = [c.weight for c in trajectory.turns[0].decision.candidates]
    total = sum(map(math.exp, sums()))
    assert weights == pytest.approx([math.exp(one) / total for one in sums()])
    trajectory, _ = play(Guidance(q_of, beta=0.0, candidates=listed, length_normalised=True))
    means = [one / (len(text) + 1) for one, text in zip(sums(), ACTIONS, strict=True)]
    assert [c.weight for c in trajectory.turns[0].decision.candidates] == pytest.approx(
        enumerated_probs(means, [0.0] * 3, 0.0)
    )


def test_a_kl_budget_is_from_the_base_policy_over_the_actions():
    guidance = Guidance(q_of, beta=100.0, candidates=listed, max_kl=0.05)
    trajectory, _ = play(guidance)
    weights = [c.weight for c in trajectory.turns[0].decision.candidates]
    assert kl_to_base(weights, sums()) == pytest.approx(0.05, abs=1e-9)
    assert guidance.statistics().kl_mean == pytest.approx(0.05, abs=1e-6)


def test_later_turns_go_on_from_the_ids_of_the_action():
    trajectory, _ = play(Guidance(q_of, beta=2.0, candidates=listed), turns=3)
    assert len(trajectory.segments) == 1
    assert [turn.text in ACTIONS for turn in trajectory.turns] == [True] * 3
    assert trajectory.drifts == 0


def test_equal_actions_count_once_and_those_too_long_to_be_said_not_at_all():
    guidance = Guidance(q_of, beta=1.0, candidates=lambda point: [*listed(point), Action("c")])
    trajectory, _ = play(guidance, sampling=Sampling(max_tokens=4))
    assert [c.text for c in trajectory.turns[0].decision.candidates] == ["ab", "c"]


@pytest.mark.parametrize("q", [[0.1, math.nan, 0.2], [-math.inf] * 3, [1.0], RuntimeError("no")])
def test_without_values_the_base_draws_an_action_of_its_own(q):
    async def values(point, candidates):
        if isinstance(q, Exception):
            raise q
        return q

    trajectory, _ = play(Guidance(values, beta=1.0, candidates=listed))
    turn = trajectory.turns[0]
    assert (turn.text, turn.decision.log_selection) == ("base", 0.0)
    assert turn.decision.fallback.partition(":")[0] in ("values", "malformed", "error")


def test_an_empty_list_leaves_the_base():
    trajectory, _ = play(Guidance(q_of, beta=1.0, candidates=lambda point: []))
    assert trajectory.turns[0].decision.fallback == "no candidates: nothing was listed"


async def never(point):
    await asyncio.Event().wait()


def broken(point):
    raise LookupError("no such room")


@pytest.mark.parametrize(("listing", "why"), [(never, "timeout"), (broken, "error"), (lambda point: ["ab"], "error")])
def test_a_list_that_fails_or_never_comes_leaves_the_base(listing, why):
    trajectory, _ = play(Guidance(q_of, beta=1.0, candidates=listing, timeout_s=3.0))
    (turn,) = trajectory.turns
    assert (turn.text, turn.decision.fallback.partition(":")[0]) == ("base", why)
    assert trajectory.ended_s - trajectory.started_s == (3.0 if listing is never else 0.0)


def test_where_actions_cannot_be_scored_it_is_refused_with_the_reason():
    runtime = Runtime(FakeEndpoint(lambda _: "x"), guidance=Guidance(q_of, beta=1.0, candidates=listed))
    with pytest.raises(ConfigError, match="enumerated candidates need the log-probs of whole actions"):
        run_virtual(runtime.rollout(lambda: EchoEnv(1), TASK))
    with pytest.raises(ConfigError, match="expected temperature 1"):
        play(Guidance(q_of, beta=1.0, candidates=listed), sampling=Sampling(temperature=0.5))


def test_weights_that_change_while_actions_are_scored_leave_the_base():
    transport = FakeTransport(serve)

    async def episode():
        endpoint = endpoint_of(transport)
        asked = endpoint.score

        async def score(ids, **options):
            found = await asked(ids, **options)
            endpoint.policy_version += 1
            return found

        endpoint.score = score
        runtime = Runtime(endpoint, limits=Limits(max_turns=1))
        guidance = Guidance(q_of, beta=1.0, candidates=listed)
        return await runtime.rollout(lambda: EchoEnv(1), TASK, guidance=guidance)

    decision = run_virtual(episode()).turns[0].decision
    assert "new weights came while actions were scored" in decision.fallback


def test_tool_calls_are_rendered_as_the_model_says_them():
    renderer, tools = FakeRenderer(), (ToolSpec("buy", "", {}),)
    call = Action("", (ToolCall("1", "buy", '{"what": 1}'),))
    assert action_ids(renderer, call, tools) == [*b'buy({"what": 1})', END_ID]
    with pytest.raises(EndpointRefused, match="as the model would say it"):
        action_ids(renderer, call, ())


def test_actions_of_the_engines_format_are_its_own_ids():
    from turngate.runtime.engine.tokenizer import Tokenizer
    from turngate.runtime.engine_renderer import EngineRenderer

    renderer = EngineRenderer(Tokenizer.train(["search red shoes buy"], 300))
    said = Action("buy", (ToolCall("1", "search", '{"q": "red"}'),))
    ids = action_ids(renderer, said, (ToolSpec("search", "", {}),))
    assert ids[-1] == renderer.stop_token_ids[0]
    assert renderer.parse(ids).tool_calls[0].arguments == '{"q": "red"}'


@pytest.mark.parametrize("bad", [Action(5), Action(None), Action("\udcff"), Action("a", ("look",)), "a"])
def test_a_list_that_holds_what_nobody_could_say_costs_the_guidance(bad):
    guidance = Guidance(q_of, beta=1.0, candidates=lambda point: [Action("left"), bad])
    trajectory, _ = play(guidance)
    (turn,) = trajectory.turns
    assert (turn.text, turn.decision.fallback.partition(":")[0]) == ("base", "error")
    assert guidance.statistics().fallbacks == {"error": 1}


def test_a_long_list_is_scored_a_few_at_a_time():
    open_now, most = 0, 0

    class Counting(FakeTransport):
        async def post(self, path, body, *, timeout_s):
            nonlocal open_now, most
            open_now += 1
            most = max(most, open_now)
            try:
                return await super().post(path, body, timeout_s=timeout_s)
            finally:
                open_now -= 1

    async def q(point, candidates):
        return [0.0] * len(candidates)

    guidance = Guidance(q, beta=1.0, candidates=lambda point: [Action(str(number)) for number in range(200)])
    trajectory, transport = play(guidance, transport=Counting(serve, latency_s=1.0))
    assert len(trajectory.turns[0].decision.candidates) == len(transport.requests) == 200
    assert most == 64


def test_a_floor_is_shared_by_what_is_not_forbidden_and_infinite_beta_can_be_written():
    async def q(point, candidates):
        return QValues([-math.inf if one.text == "c" else Q[one.text] for one in candidates], version=7)

    trajectory, _ = play(Guidance(q, beta=math.inf, candidates=listed, floor=0.3))
    decision = trajectory.turns[0].decision
    assert [c.weight for c in decision.candidates] == pytest.approx([0.15, 0.0, 0.85])
    assert (decision.beta, decision.value_version, decision.floor) == (-1.0, 7, 0.3)
    assert msgspec.json.decode(msgspec.json.encode(decision), type=type(decision)) == decision


def test_the_weight_of_a_length_normalised_choice_is_back_to_the_policy_itself():
    for seed in range(6):
        trajectory, _ = play(Guidance(q_of, beta=3.0, candidates=listed, length_normalised=True), seed=seed)
        decision = trajectory.turns[0].decision
        chosen = decision.candidates[decision.chosen]
        base = sums()[ACTIONS.index(chosen.text)]
        assert decision.log_selection == pytest.approx(math.log(chosen.weight) - base)


def test_an_action_may_be_as_long_as_a_turn_and_none_that_fits_leaves_the_base():
    trajectory, _ = play(Guidance(q_of, beta=1.0, candidates=listed), sampling=Sampling(max_tokens=3))
    assert [c.text for c in trajectory.turns[0].decision.candidates] == ["ab", "c"]
    trajectory, _ = play(Guidance(q_of, beta=1.0, candidates=listed), sampling=Sampling(max_tokens=1))
    fallback = trajectory.turns[0].decision.fallback
    assert fallback == "values: at least one action must be short enough: all have more than 1 tokens"


@pytest.mark.parametrize("other", [{"top_p": 0.9}, {"top_k": 5}, {"guidance": TokenGuidance(beta=1.0)}])
def test_log_probs_of_another_distribution_than_the_policys_are_refused(other):
    with pytest.raises(ConfigError, match="enumerated candidates need the policy itself"):
        play(Guidance(q_of, beta=1.0, candidates=listed), sampling=Sampling(**other))


def test_a_server_that_was_found_not_to_score_prompts_is_refused_before_it_is_asked():
    async def episode():
        transport = FakeTransport(serve)
        endpoint = endpoint_of(transport)
        no = Finding("no", "it does not echo")
        endpoint.capabilities = Capabilities(url="http://x/v1", model="m", prompt_logprobs=no)
        guidance = Guidance(q_of, beta=1.0, candidates=listed)
        with pytest.raises(ConfigError, match="a server that scores prompts"):
            await Runtime(endpoint, limits=Limits(max_turns=1)).rollout(lambda: EchoEnv(1), TASK, guidance=guidance)
        assert transport.requests == []

    run_virtual(episode())


def test_the_tokens_of_an_action_have_the_version_that_scored_them_and_prompts_name_the_tools():
    class Bell(ToolEnv):
        @tool
        async def ring(self) -> str:
            """Ring the bell."""
            return "dong"

    async def episode():
        transport = FakeTransport(serve)
        endpoint = endpoint_of(transport)
        endpoint.policy_version = 5
        runtime = Runtime(endpoint, limits=Limits(max_turns=1))
        guidance = Guidance(q_of, beta=1.0, candidates=listed)
        return await runtime.rollout(Bell, TASK, seed=1, guidance=guidance), transport

    trajectory, transport = run_virtual(episode())
    assert trajectory.turns[0].decision.fallback == ""
    assert {*trajectory.segments[0].sampled_versions()} == {5}
    assert all(bytes(body["prompt"][:4]) == b"ring" for _, body in transport.requests)


def test_a_server_that_fails_to_score_is_told_as_itself():
    def answer(path, body):
        return Reply(404, {}, b"{}")

    trajectory, _ = play(Guidance(q_of, beta=1.0, candidates=listed), transport=FakeTransport(answer))
    assert trajectory.end.is_failure
    assert "404" in trajectory.error
    assert "unhandled errors" not in trajectory.error


class TwoEnds(FakeRenderer):
    """Knows a second way to end a turn, which its format does not write."""

    stop_token_ids = (999, END_ID)


class Counts(FakeRenderer):
    """Says first how many messages there are: nothing stays where it was."""

    def render(self, messages, tools=()):
        return [len(messages), *super().render(messages, tools)]


def test_an_actions_ids_end_as_the_format_ends_a_turn_and_stand_behind_the_prompt():
    assert action_ids(TwoEnds(), Action("ab"), ()) == [*b"ab", END_ID]
    with pytest.raises(EndpointRefused, match="does not only append"):
        action_ids(Counts(), Action("ab"), ())
