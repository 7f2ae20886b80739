"""Values of live decisions by trying the candidates: which are one action, what counts, and what they go on from."""

import itertools
import math
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
import pytest

from turngate.envs.base import Action, End, Observation, Snapshot, Step, Task, ToolCall
from turngate.envs.fakes import CoinFlipEnv, EchoEnv
from turngate.runtime import Limits, Runtime
from turngate.runtime.branch_budget import BranchLedger, BranchLimits
from turngate.runtime.context import History
from turngate.runtime.dialect import Dialect
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.errors import ConfigError
from turngate.runtime.guidance import Guidance
from turngate.runtime.monte_carlo_q import MonteCarloQ
from turngate.runtime.recorded_chat import chat_with
from turngate.runtime.testing import FakeEndpoint, FakeTransport, cancel_at_every_tick, run_virtual
from turngate.runtime.testing.endpoints import END_ID
from turngate.runtime.testing.renderers import PAIR, FakeRenderer
from turngate.runtime.transport import Reply
from turngate.runtime.types import Completion, Message, Trajectory

TASK = Task("till")
LIMITS = Limits(max_turns=20)


def says_heads(messages: Sequence[Message]) -> str:
    return "heads"


class Written(CoinFlipEnv):
    """What the first action was decides, and is part of the state."""

    async def step(self, action: Action) -> Step:
        self.flipped.append(action.text)
        if len(self.flipped) < self.flips:
            return Step(Observation("noted"))
        right = self.flipped[0] == "heads"
        return Step(Observation("done"), {"outcome": float(right)}, End.success if right else End.failure)


class Till(CoinFlipEnv):
    """Pays 1 at the end if the first call of the first action was for two."""

    async def step(self, action: Action) -> Step:
        self.flipped.append(action.tool_calls[0].arguments if action.tool_calls else "")
        if len(self.flipped) < self.flips:
            return Step(Observation("go on"))
        paid = self.flipped[0] == '{"n": 2}'
        return Step(Observation("done"), {"outcome": float(paid)}, End.success if paid else End.failure)


class Fails(Till):
    """Cannot go back with every third luck or so."""

    async def restore(self, snapshot: Snapshot, seed: int) -> None:
        await super().restore(snapshot, seed)
        if Random(seed).random() < 0.4:
            raise RuntimeError("no way back")


def buy(number: int, arguments: str) -> Action:
    return Action("", (ToolCall(str(number), "buy", arguments),))


def play(env: Any, *, draws: int, latency_s: float = 0.0, **settings: Any) -> tuple[Trajectory, MonteCarloQ, Any]:
    """Play an episode whose actions buy one, two, one and so on; no two calls have one id."""
    numbers = itertools.count()

    def answer(messages: object) -> Action:
        number = next(numbers)
        return buy(number, '{"n": 2}' if number % 2 else '{"n": 1}')

    async def episode() -> tuple[Trajectory, MonteCarloQ, Any]:
        endpoint = FakeEndpoint(answer, latency_s=latency_s, policy_version=3)
        runtime = Runtime(endpoint, limits=LIMITS)
        q = MonteCarloQ(runtime, env, **settings)
        guidance = Guidance(q, beta=50.0, draws=draws, timeout_s=300.0)
        return await runtime.rollout(env, TASK, seed=1, guidance=guidance), q, endpoint

    return run_virtual(episode())


def test_candidates_are_one_action_by_their_calls_and_not_by_the_ids_of_calls() -> None:
    trajectory, q, _ = play(lambda: Till(1), draws=4, continuations=3)
    decision = trajectory.turns[0].decision
    assert decision is not None
    assert [candidate.q for candidate in decision.candidates] == [0.0, 1.0, 0.0, 1.0]
    assert q.ledger.rollouts == 2 * 3
    assert decision.value_version == 3  # of the policy that played on


def test_continuations_that_failed_say_nothing_about_their_candidate() -> None:
    trajectory, q, _ = play(lambda: Fails(1), draws=2, continuations=12)
    decision = trajectory.turns[0].decision
    assert decision is not None
    assert [candidate.q for candidate in decision.candidates] == [0.0, 1.0]
    assert q.ledger.rollouts == 24
    assert q.truncated_fraction == 0.0


def test_no_more_continuations_run_at_once_than_allowed() -> None:
    _, _, endpoint = play(lambda: Till(2), draws=2, continuations=5, max_concurrent=3, latency_s=1.0)
    assert endpoint.most_in_flight == 3


def test_continuations_go_on_from_the_whole_history_and_not_from_what_the_model_was_shown() -> None:
    def without_first_answer(history: History) -> list[Message]:
        return [*history.messages[:1], *history.messages[2:]]

    async def episode() -> list[tuple[int, int]]:
        endpoint = FakeEndpoint(lambda messages: "go")
        runtime = Runtime(endpoint, limits=LIMITS, context=without_first_answer)
        q = MonteCarloQ(runtime, lambda: Till(4), continuations=2)
        await runtime.rollout(lambda: Till(4), TASK, seed=1, guidance=Guidance(q, beta=1.0, draws=2))
        roles = [[message.role for message in call.messages] for call in endpoint.calls]
        return [(shown.count("user"), shown.count("assistant")) for shown in roles]

    shown = run_virtual(episode())
    assert {users - answers for users, answers in shown if users > 1} == {2}
    assert (4, 2) in shown


def test_continuations_go_on_from_the_ids_of_the_candidate_and_not_from_its_text() -> None:
    """`ab` is sampled as one id and would be rendered as two."""
    prompts: list[list[int]] = []

    def serve(path: str, body: dict[str, Any]) -> Reply:
        prompts.append(body["prompt"])
        ids = [PAIR, ord("0") + len(prompts) % 10, END_ID]
        logprobs = {"token_logprobs": [-0.5] * len(ids)}
        choice = {"text": "", "finish_reason": "stop", "token_ids": ids, "logprobs": logprobs}
        return Reply(200, {}, msgspec.json.encode({"choices": [choice]}))

    async def episode() -> Trajectory:
        dialect, transport = Dialect(token_mode="tokens"), FakeTransport(serve)
        endpoint = Endpoint("http://x/v1", model="m", dialect=dialect, renderer=FakeRenderer(), transport=transport)
        runtime = Runtime(endpoint, limits=LIMITS)
        q = MonteCarloQ(runtime, lambda: Till(3), continuations=2)
        return await runtime.rollout(lambda: Till(3), TASK, seed=1, guidance=Guidance(q, beta=1.0, draws=2))

    assert run_virtual(episode()).end.is_terminal
    assert len(prompts) > 6
    assert max(prompt.count(PAIR) for prompt in prompts) == 2
    for prompt in prompts:
        assert b"ab" not in bytes(i for i in prompt if i < 256)


def test_what_has_no_ids_is_no_chat_to_go_on_from() -> None:
    shown = [Message("user", "go")]
    assert chat_with(shown, Completion("x")) is None
    assert chat_with(shown, Completion("x", [1], [-1.0], [0])) is None
    found = chat_with(shown, Completion("x", [1], [-1.0], [0], [5, 6]))
    assert found is not None
    assert (found.prompt_ids(), found.answer_ids(), list(found.head())) == ([5, 6], [1], shown)


def guided(
    env: Any, drawn: Sequence[str], *, limits: Limits = LIMITS, **settings: Any
) -> tuple[Trajectory, MonteCarloQ, Runtime]:
    """Play an episode whose first decision is among `drawn`; the policy says heads otherwise."""

    async def episode() -> tuple[Trajectory, MonteCarloQ, Runtime]:
        answers = iter(drawn)

        def answer(messages: Sequence[Message]) -> str:
            is_first = not any(message.role == "assistant" for message in messages)
            return next(answers, "heads") if is_first else "heads"

        runtime = Runtime(FakeEndpoint(answer), limits=limits)
        q = MonteCarloQ(runtime, env, **settings)
        guidance = Guidance(q, beta=50.0, draws=len(drawn))
        trajectory = await runtime.rollout(env, TASK, seed=1, guidance=guidance)
        return trajectory, q, runtime

    return run_virtual(episode())


def test_monte_carlo_values_choose_the_action_that_leads_to_success() -> None:
    trajectory, q, runtime = guided(lambda: Written(3), ["tails", "heads", "tails", "tails"], continuations=2)
    first = trajectory.turns[0].decision
    assert [c.q for c in first.candidates] == [0.0, 1.0, 0.0, 0.0]
    assert trajectory.end is End.success
    assert runtime.slots.held == 0
    # Two different first actions, then one at each of the two decisions that follow: two continuations each.
    assert q.ledger.rollouts == 8


def test_a_spent_ledger_leaves_the_base_action() -> None:
    trajectory, _, _ = guided(
        lambda: Written(2), ["tails", "heads"], continuations=2, ledger=BranchLedger(BranchLimits(rollouts=1))
    )
    assert trajectory.turns[0].text == "tails"
    why = trajectory.turns[0].decision.fallback
    assert "every candidate must have a continuation" in why
    assert "; the ledger's cap on rollouts is met" in why


def test_soft_values_are_the_log_mean_exp() -> None:
    trajectory, _, _ = guided(lambda: CoinFlipEnv(1), ["heads", "tails"], continuations=8, soft_beta=5.0)
    plain, _, _ = guided(lambda: CoinFlipEnv(1), ["heads", "tails"], continuations=8)
    for soft, mean in zip(trajectory.turns[0].decision.candidates, plain.turns[0].decision.candidates, strict=True):
        expected = math.log(1 + (mean.q or 0.0) * (math.exp(5) - 1)) / 5
        assert soft.q == pytest.approx(expected)


def test_b5_5_live_values_of_truncated_continuations_are_reported_or_bootstrapped() -> None:
    limits = Limits(max_turns=2)
    plain, q, _ = guided(lambda: Written(3), ["tails", "heads"], limits=limits, continuations=2)
    assert [c.q for c in plain.turns[0].decision.candidates] == [0.0, 0.0]
    assert q.truncated_fraction == 1.0
    assert "100% cut short" in repr(q)

    async def worth(trajectory: Trajectory) -> float:
        return float(trajectory.turns[0].text == "heads")

    valued, _, _ = guided(lambda: Written(3), ["tails", "heads"], limits=limits, continuations=2, bootstrap=worth)
    assert [c.q for c in valued.turns[0].decision.candidates] == [0.0, 1.0]


def test_a_live_decision_holds_one_snapshot_within_the_cap() -> None:
    ledger = BranchLedger()
    guided(lambda: Written(2), ["tails", "heads"], continuations=2, ledger=ledger)
    assert ledger.snapshot_bytes == 0 < ledger.most_snapshot_bytes
    capped = BranchLedger(BranchLimits(snapshot_bytes=1))
    trajectory, _, _ = guided(lambda: Written(2), ["tails", "heads"], continuations=2, ledger=capped)
    assert (trajectory.turns[0].text, capped.rollouts) == ("tails", 0)
    assert "room for a decision's snapshot" in trajectory.turns[0].decision.fallback


def test_a_state_that_is_kept_for_the_record_is_not_saved_again_for_the_values() -> None:
    saved: list[int] = []

    class Counts(Written):
        async def snapshot(self) -> Snapshot:
            saved.append(len(self.flipped))
            return await super().snapshot()

    async def play(keep: bool) -> tuple[list[int], Trajectory]:
        saved.clear()
        runtime = Runtime(FakeEndpoint(says_heads), limits=LIMITS)
        q = MonteCarloQ(runtime, lambda: Written(3), continuations=1)
        guidance = Guidance(q, beta=1.0, draws=2)
        trajectory = await runtime.rollout(lambda: Counts(3), TASK, guidance=guidance, keep_snapshots=keep)
        return list(saved), trajectory

    (kept, recorded), (_, plain) = run_virtual(play(True)), run_virtual(play(False))
    assert kept == saved == [0, 1, 2]
    assert [turn.decision.candidates for turn in recorded.turns] == [turn.decision.candidates for turn in plain.turns]


@pytest.mark.parametrize("bad", [{"continuations": 0}, {"soft_beta": 0.0}, {"soft_beta": math.inf}])
def test_settings_that_cannot_work_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        MonteCarloQ(Runtime(FakeEndpoint(says_heads), limits=LIMITS), lambda: CoinFlipEnv(1), **bad)


def test_without_an_environment_there_is_nothing_to_branch_from() -> None:
    trajectory, _, _ = guided(lambda: EchoEnv(1), ["a", "b"])
    assert "need an environment with snapshots" in trajectory.turns[0].decision.fallback


def test_cancelling_a_decision_cancels_its_branches() -> None:
    state: dict[str, Any] = {}

    async def play() -> None:
        made: list[CoinFlipEnv] = []
        state["made"] = made

        def env() -> CoinFlipEnv:
            made.append(CoinFlipEnv(2))
            return made[-1]

        runtime = Runtime(FakeEndpoint(says_heads), limits=LIMITS)
        state["q"] = q = MonteCarloQ(runtime, env, continuations=2, max_concurrent=3)
        await runtime.rollout(env, TASK, guidance=Guidance(q, beta=1.0, draws=2))

    def check(tick: int) -> None:
        q = state["q"]
        assert (q._player.slots.held, q._player.slots.waiting, q.ledger.snapshot_bytes) == (0, 0, 0), tick
        assert all(env.closed == 1 for env in state["made"]), tick

    assert cancel_at_every_tick(play, check) > 20


def test_tokens_of_the_episode_and_of_the_candidate_count_towards_its_limit() -> None:
    limits = Limits(max_turns=20, max_policy_tokens=24)  # four times "heads" and its end
    _, q, _ = guided(lambda: CoinFlipEnv(9), ["tails"], limits=limits, continuations=1)
    # The candidate is played, and counts as it would have; then what is left of 24 tokens: 3, 2, 1 and no turns.
    assert (q.ledger.rollouts, q.ledger.model_turns) == (4, 6)
