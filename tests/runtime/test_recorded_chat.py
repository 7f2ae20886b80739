"""Branches go on from the ids that the episode had; where they cannot, that is told."""

from random import Random

import msgspec
import pytest

from turngate.envs.base import Observation, Step, Task, ToolSpec
from turngate.envs.fakes import CoinFlipEnv
from turngate.runtime import Dialect, Limits, Runtime
from turngate.runtime.branching import branch, branch_point, play_on
from turngate.runtime.context import last_turns
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.group_branching import Branching, GroupBrancher
from turngate.runtime.guidance import Guidance
from turngate.runtime.injection import Injection
from turngate.runtime.monte_carlo_q import MonteCarloQ
from turngate.runtime.recorded_chat import chat_before, chat_with
from turngate.runtime.testing import FakeEndpoint, FakeRenderer, FakeTransport, render_ids, run_virtual
from turngate.runtime.testing.renderers import PAIR
from turngate.runtime.token_conversation import TokenConversation
from turngate.runtime.transport import Reply
from turngate.runtime.types import Group, Message, Sampling

TASK = Task("abc", "Say ab.")
END = 260
WAYS = ([PAIR, END], [*b"ab", END])  # two ways to write one text


class Listener(CoinFlipEnv):
    """Hears anything, for ever."""

    async def step(self, action):
        self.flipped.append(action.text)
        return Step(Observation(f"again {len(self.flipped)}"))


class ShiftedRenderer(FakeRenderer):
    """Another model's format: begins every chat with something else."""

    def render(self, messages, tools=()):
        return [1, *super().render(messages, tools)]


class ShoutingRenderer(FakeRenderer):
    """Another model's vocabulary: reads the same ids otherwise."""

    def parse(self, token_ids, **options):
        reply = super().parse(token_ids, **options)
        return msgspec.structs.replace(reply, text=reply.text.upper())


def server(answer, renderer=None):
    """An endpoint that is given ids; `answer` says with which ones it answers a prompt."""

    def reply(path, body):
        ids = answer(body["prompt"])
        choice = {"text": "", "finish_reason": "stop", "logprobs": {"token_logprobs": [-0.5] * len(ids)}}
        return Reply(200, {}, msgspec.json.encode({"choices": [choice | {"token_ids": ids}]}))

    transport = FakeTransport(reply)
    dialect = Dialect(token_mode="tokens")
    endpoint = Endpoint(
        "http://x/v1", model="m", dialect=dialect, renderer=renderer or FakeRenderer(), transport=transport
    )
    return endpoint, transport


def either_way(seed=1):
    random = Random(seed)
    return lambda prompt: random.choice(WAYS)


def prompts_of(transport):
    return [body["prompt"] for _, body in transport.requests]


def played(endpoint, transport, *, branches=None, context=None, record_context=None, **options):
    """Record an episode of six turns, branch from it, and return the branches and their prompts."""

    async def play():
        limits = Limits(max_turns=6)
        recording = Runtime(endpoint, limits=limits, context=record_context)
        trajectory = await recording.rollout(Listener, TASK, seed=1, keep_snapshots=True, **options)
        other, carrier = branches or (endpoint, transport)
        carrier.requests.clear()
        runtime = Runtime(other, limits=limits, context=context)
        found = await branch(runtime, Listener, trajectory, continuations=2, estimands=["Q", "V"])
        return found, prompts_of(carrier)

    return run_virtual(play())


def ids_of(trajectory, turn, *, with_action):
    taken = trajectory.turns[turn]
    end = taken.start + (taken.length if with_action else 0)
    return trajectory.segments[taken.segment].ids()[:end].tolist()


def others(found):
    return [of.other_context for side in (found.q, found.v) for of in side.values()]


def test_continuations_see_the_ids_that_the_episode_saw():
    found, prompts = played(*server(either_way()))
    trajectory = found.trajectory
    assert {trajectory.turns[0].length, *(turn.length for turn in trajectory.turns)} == {2, 3}
    for turn in range(6):
        before = ids_of(trajectory, turn, with_action=False)
        assert prompts.count(before) >= 2
        for one in found.v[turn].trajectories:
            assert one.segments[0].ids()[: one.turns[0].start].tolist() == before
        for one in found.q[turn].trajectories[: 2 * (turn < 5)]:
            known = [*ids_of(trajectory, turn, with_action=True), *render_ids([Message("user", f"again {turn + 1}")])]
            assert one.segments[0].ids()[: one.turns[1].start].tolist() == known
            assert len(one.segments) == 1
    assert others(found) == [0] * 12


def without_first_turn(history):
    return history.messages if history.turns < 2 else [*history.head, *history.turn_messages(1)]


@pytest.mark.parametrize("context", [None, without_first_turn])
def test_a_live_decision_is_valued_behind_the_ids_that_it_was_made_with(context):
    """Whether they are those of the whole history, or a context function has hidden some of it."""
    endpoint, transport = server(either_way(7))

    async def play():
        limits = Limits(max_turns=5)
        q = MonteCarloQ(Runtime(endpoint, limits=limits, context=context), Listener, continuations=1)
        runtime = Runtime(server(either_way())[0], limits=limits, context=context)
        return await runtime.rollout(Listener, TASK, seed=1, guidance=Guidance(q, beta=0.0001, draws=2))

    trajectory = run_virtual(play())
    for turn in (0, 2, 3) if context else (0, 1, 2, 3):  # after turn 1 the first is hidden, and all is rendered anew
        heard = render_ids([Message("user", f"again {turn + 1}")])
        first = trajectory.turns[turn].decision.candidates[0]  # equal texts are tried once, as the first was written
        known = [*ids_of(trajectory, turn, with_action=False), *memoryview(first.token_ids).cast("i").tolist(), *heard]
        assert known in prompts_of(transport)


@pytest.mark.parametrize("renderer", [ShiftedRenderer(), ShoutingRenderer()])
def test_ids_of_another_model_are_not_used_and_the_difference_is_told(renderer):
    recorded = server(lambda prompt: [PAIR, END])
    found, prompts = played(*recorded, branches=server(lambda prompt: [PAIR, END], renderer))
    history = [Message("user", "Say ab."), Message("assistant", "ab"), Message("user", "again 1")]
    assert prompts.count(renderer.render(history)) == 4  # as it would have written it itself: Q of turn 0, V of turn 1
    assert [found.v[turn].other_context for turn in range(1, 6)] == [2] * 5
    assert [found.q[turn].other_context for turn in range(5)] == [2] * 5


def test_a_context_function_sees_to_its_own_context():
    endpoint, transport = server(lambda prompt: [PAIR, prompt[-3], END])  # no two answers are the same
    cut = last_turns(1)
    found, prompts = played(endpoint, transport, context=cut, record_context=cut)
    short = [Message("user", "Say ab."), Message("assistant", "ab2"), Message("user", "again 3")]
    # Rendered from text in the episode and in every branch, so nothing is different.
    assert prompts.count(render_ids(short)) == 14  # of all that begin before it, with the action before it, or there
    assert others(found) == [0] * 12
    whole, _ = played(*server(lambda prompt: [PAIR, END]), context=cut)
    assert [whole.v[turn].other_context for turn in range(6)] == [0, 0, 2, 2, 2, 2]  # the second sees all of one turn


def test_an_old_answer_in_the_place_of_one_that_says_the_same_is_told():
    cut = last_turns(1)
    found, _ = played(*server(lambda prompt: [PAIR, END]), context=cut, record_context=cut)
    # The episode went on from the ids of its first answer, which branches that begin behind it do not know.
    assert [found.v[turn].other_context for turn in range(6)] == [0, 0, 2, 2, 2, 2]


def test_a_start_that_goes_on_where_the_episodes_ended_is_another():
    class Prompting(FakeRenderer):
        """Another template: writes something before the model speaks."""

        def render(self, messages, tools=()):
            return [*super().render(messages, tools), 1]

    recorded, other = server(lambda prompt: [PAIR, END]), server(lambda prompt: [PAIR, END], Prompting())
    found, _ = played(*recorded, branches=other)
    assert found.v[0].other_context == 2


def test_branches_of_branches_see_the_ids_that_those_saw():
    endpoint, _ = server(either_way(2))

    async def play():
        runtime = Runtime(endpoint, limits=Limits(max_turns=6))
        trajectory = await runtime.rollout(Listener, TASK, seed=1, keep_snapshots=True)
        assert any(len(trajectory.turns[turn].text) != trajectory.turns[turn].length - 1 for turn in (0, 1))
        first = await play_on(runtime, Listener, branch_point(trajectory, 2), None, seed=5, keep_snapshots=True)
        return await branch(runtime, Listener, first, continuations=2, turns=[1, 2], estimands=["Q", "V"])

    assert others(run_virtual(play())) == [0] * 4


def test_members_that_said_the_same_with_other_ids_are_valued_apart():
    async def play(*ways):
        answers = iter([way for way in ways for _ in range(2)])
        endpoint, _ = server(lambda prompt: next(answers, WAYS[0]))
        runtime = Runtime(endpoint, limits=Limits(max_turns=2))
        members = [
            await runtime.rollout(Listener, TASK, seed=n, env_seed=7, trajectory_id=f"g0.{n}", keep_snapshots=True)
            for n in range(2)
        ]
        brancher = GroupBrancher(Branching(continuations=1), runtime, Listener, seed=1)
        await brancher.value(Group(id="g0", task=TASK, order=0, trajectories=tuple(members)))
        return brancher.ledger.rollouts

    assert run_virtual(play(WAYS[0], WAYS[0])) == 2  # both turns once, for both members
    assert run_virtual(play(WAYS[0], WAYS[1])) == 3  # the second turn of each, behind its own ids


def test_histories_with_injected_actions_are_recalled_as_they_were():
    async def says_no(messages, seed):
        return "no"

    endpoint, transport = server(either_way(3))
    found, _ = played(endpoint, transport, injection=Injection(0.4, says_no, max_per_episode=2))
    assert 0 < sum(turn.injected for turn in found.trajectory.turns) < 6
    assert others(found) == [0] * 12


def test_a_server_that_renders_itself_and_changes_its_mind_is_told_of():
    async def play():
        limits = Limits(max_turns=3)
        trajectory = await Runtime(FakeEndpoint(lambda m: "ab"), limits=limits).rollout(
            Listener, TASK, keep_snapshots=True
        )
        endpoint = FakeEndpoint(lambda m: "ab")
        complete = endpoint.complete

        async def otherwise(messages, *args, **options):
            return await complete([Message("system", "It is Monday."), *messages], *args, **options)

        endpoint.complete = otherwise
        same = await branch(Runtime(FakeEndpoint(lambda m: "ab"), limits=limits), Listener, trajectory, estimands=["V"])
        other = await branch(Runtime(endpoint, limits=limits), Listener, trajectory, estimands=["V"])
        return [of.other_context for of in same.v.values()], [of.other_context for of in other.v.values()]

    assert run_virtual(play()) == ([0, 0, 0], [8, 8, 8])


def test_no_chat_is_recalled_where_ids_are_not_ours_or_did_not_grow():
    async def play(endpoint, context=None):
        runtime = Runtime(endpoint, limits=Limits(max_turns=4), context=context)
        return await runtime.rollout(Listener, TASK, keep_snapshots=True)

    whole = run_virtual(play(server(lambda prompt: [PAIR, END])[0]))
    assert chat_before(whole, 0) is None
    assert [len(chat_before(whole, turn).messages) for turn in (1, 2, 3, 4)] == [2, 4, 6, 8]
    assert branch_point(whole, 2).chat == chat_before(whole, 2)
    assert branch_point(whole, 2, with_action=True).chat == chat_before(whole, 3)
    assert chat_before(run_virtual(play(FakeEndpoint(lambda m: "ab"))), 2) is None
    cut = run_virtual(play(server(lambda prompt: [PAIR, END])[0], last_turns(1)))
    assert chat_before(cut, 3) is None


async def test_calls_after_a_recalled_chat_have_ids_of_their_own():
    endpoint, _ = server(lambda prompt: [*b"add(1)", END])
    tools, sampling, ask = (ToolSpec("add", "Adds.", {"type": "object"}),), Sampling(), [Message("user", "add")]
    first = await endpoint.conversation().complete(ask, sampling, tools=tools)
    again = endpoint.conversation()
    assert isinstance(again, TokenConversation)
    chat = chat_with(ask, first)
    assert chat is not None
    assert again.recall(chat, tools)
    answered = [*chat.messages, Message("tool", "1", tool_call_id=first.tool_calls[0].id)]
    second = await again.complete(answered, sampling, tools=tools)
    assert [call.id for call in (*first.tool_calls, *second.tool_calls)] == ["call_0_0", "call_1_0"]
    assert not again.recall(chat, ())  # what looks like a call is none where there are no tools


async def test_an_answer_cut_at_a_stop_string_is_recalled_with_its_whole_last_token():
    endpoint, _ = server(lambda prompt: [*b"a", PAIR, END])
    ask = [Message("user", "go")]
    first = await endpoint.conversation().complete(ask, Sampling(stop=("b",)))
    assert (first.text, list(first.token_ids)) == ("aa", [*b"a", PAIR, END])
    again = endpoint.conversation()
    assert isinstance(again, TokenConversation)
    chat = chat_with(ask, first)
    assert chat is not None
    assert again.recall(chat)
