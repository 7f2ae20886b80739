"""Chats whose ids are kept: what was sampled stays, only what is new is rendered, every branch finds its own way."""

import asyncio
from typing import Any

import pytest

from turngate.envs.base import ToolCall, ToolSpec
from turngate.runtime.errors import EndpointRefused
from turngate.runtime.recorder import Recorder
from turngate.runtime.testing import FakeRenderer, render_ids
from turngate.runtime.testing.renderers import PAIR
from turngate.runtime.token_conversation import TokenConversation
from turngate.runtime.types import Completion, Message, Sampling

END = 260
SAMPLING = Sampling(max_tokens=64)
TOOLS = (ToolSpec("add", "Adds.", {"type": "object"}),)
SYSTEM, HI, MORE = Message("system", "be good"), Message("user", "hi"), Message("user", "and?")


class Server:
    """Answers prompts of ids with ids, in order, once `gate` is open."""

    def __init__(self, *answers):
        self.answers = [[*a.encode(), END] if isinstance(a, str) else a for a in answers]
        self.prompts = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, prompt, sampling, /, *, seed=None, timeout_s=600.0):
        self.prompts.append(list(prompt))
        ids = self.answers.pop(0)
        await self.gate.wait()
        stop_reason = "stop" if END in ids or sampling.stop else "length"
        return Completion("the server's text", ids, [-1.0] * len(ids), [0] * len(ids), prompt, stop_reason)


def chat(*answers):
    server, renderer = Server(*answers), FakeRenderer()
    return TokenConversation(renderer, server), server, renderer


def said(completion):
    return Message("assistant", completion.text, completion.tool_calls)


async def test_what_was_sampled_is_kept_and_only_what_is_new_is_rendered():
    conversation, server, renderer = chat("yes", "no")
    first = await conversation.complete([SYSTEM, HI], SAMPLING)
    second = await conversation.complete([SYSTEM, HI, said(first), MORE], SAMPLING)
    assert (first.text, second.text) == ("yes", "no")
    assert server.prompts[0] == render_ids([SYSTEM, HI])
    assert server.prompts[1] == [*server.prompts[0], *b"yes", END, *render_ids([MORE])]
    assert renderer.whole == 1
    assert list(second.prompt_token_ids) == server.prompts[1]
    assert len(second.prompt_token_ids) == len(server.prompts[1])


@pytest.mark.parametrize("issue", ["rllm#272", "SkyRL#123"])
async def test_of_two_tokenisations_of_one_text_the_sampled_one_stays(issue):
    conversation, server, _ = chat([PAIR, END], "no")
    recorder = Recorder()
    first = await conversation.complete([HI], SAMPLING)
    recorder.add(first, 0)
    recorder.add(await conversation.complete([HI, said(first), MORE], SAMPLING), 1, goes_on=True)
    assert first.text == "ab"
    assert server.prompts[1][len(server.prompts[0]) :][:2] == [PAIR, END]
    assert (len(recorder.segments()), recorder.drifts) == (1, 0)


async def test_verl_6921_a_turn_cut_by_max_tokens_gets_its_end_as_context():
    conversation, server, _ = chat([*b"ye"], "no")
    recorder = Recorder()
    first = await conversation.complete([HI], SAMPLING)
    recorder.add(first, 0)
    recorder.add(await conversation.complete([HI, said(first), MORE], SAMPLING), 1, goes_on=True)
    assert first.stop_reason == "length"
    assert server.prompts[1] == [*server.prompts[0], *b"ye", END, *render_ids([MORE])]
    (segment,) = recorder.segments()
    sampled = [token for token, mask in zip(segment.ids(), segment.policy_mask, strict=True) if mask]
    assert sampled == [*b"ye", *b"no", END]


async def test_skyrl_710_role_markers_and_separators_are_never_trained_on():
    conversation, _, _ = chat("yes", "no", "so")
    recorder, messages = Recorder(), [SYSTEM, HI]
    for turn in range(3):
        completion = await conversation.complete(messages, SAMPLING)
        recorder.add(completion, turn)
        messages += [said(completion), MORE]
    (segment,) = recorder.segments()
    for token, mask, turn in zip(segment.ids(), segment.policy_mask, segment.turn_values(), strict=True):
        assert mask == (turn >= 0)
        assert not (mask and token in (256, 257, 258, 259))
    assert sum(segment.policy_mask) == len(b"yesnoso") + 3


async def test_work_per_turn_is_the_same_at_turn_1_and_at_turn_128(monkeypatch):
    from turngate.runtime import token_conversation

    encoded = []
    ids_text = token_conversation.ids_text

    def spied(ids):
        encoded.append(len(ids))
        return ids_text(ids)

    monkeypatch.setattr(token_conversation, "ids_text", spied)
    conversation, server, renderer = chat(*["yes"] * 128)
    messages = [SYSTEM, HI]
    for _ in range(128):
        completion = await conversation.complete(messages, SAMPLING)
        assert len(completion.prompt_token_ids) == len(server.prompts[-1])
        messages += [said(completion), MORE]
    assert renderer.whole == 1
    assert set(renderer.rendered[1:]) == {len(render_ids([MORE]))}
    # Beside the first prompt: the ids of one answer, and those of one new message, per turn.
    assert set(encoded[1:]) == {4, len(render_ids([MORE]))}
    assert len(encoded) == 2 * 128
    assert server.prompts[-1] == render_ids(messages[:-2])


# Branches.


async def test_sub_agents_go_on_from_chats_of_their_own():
    conversation, server, renderer = chat("a", "b", [PAIR, END], "d", "e")
    boss = [SYSTEM, HI, said(await conversation.complete([SYSTEM, HI], SAMPLING))]
    helper = [HI, said(await conversation.complete([HI], SAMPLING))]
    boss += [MORE, said(await conversation.complete([*boss, MORE], SAMPLING))]
    await conversation.complete([*helper, MORE], SAMPLING)
    await conversation.complete([*boss, MORE], SAMPLING)
    assert renderer.whole == 2
    assert PAIR in server.prompts[4]
    assert server.prompts[3] == [*server.prompts[1], *b"b", END, *render_ids([MORE])]


async def test_several_answers_to_one_prompt_are_branches_of_which_the_shown_one_goes_on():
    conversation, server, renderer = chat("root", [PAIR, END], "ax", [PAIR, PAIR, END], "on")
    root = [HI, said(await conversation.complete([HI], SAMPLING)), MORE]
    three = await asyncio.gather(*(conversation.complete(root, SAMPLING) for _ in range(3)))
    assert [one.text for one in three] == ["ab", "ax", "abab"]
    await conversation.complete([*root, said(three[0]), MORE], SAMPLING)
    assert server.prompts[4] == [*server.prompts[1], PAIR, END, *render_ids([MORE])]
    assert renderer.whole == 1
    assert repr(conversation) == "<TokenConversation 3 branches, the longest 6 messages>"


@pytest.mark.parametrize("shown", [0, 1, 2])
async def test_the_longest_chat_that_is_shown_goes_on(shown):
    conversation, server, renderer = chat([PAIR, END], "a", "b", "c", "on")
    root = [HI, said(await conversation.complete([HI], SAMPLING)), MORE]
    answers = [said(await conversation.complete(root, SAMPLING)) for _ in range(3)]
    await conversation.complete([*root, answers[shown], MORE], SAMPLING)
    assert server.prompts[4] == [*server.prompts[1], *answers[shown].content.encode(), END, *render_ids([MORE])]
    assert renderer.rendered[-1] == len(render_ids([MORE]))


async def test_a_request_asked_again_is_asked_with_the_same_ids():
    conversation, server, renderer = chat([PAIR, END], "no", "yes", "so")
    first = said(await conversation.complete([HI], SAMPLING))
    asked = [HI, first, MORE]
    await conversation.complete(asked, SAMPLING)
    again = said(await conversation.complete(asked, SAMPLING))
    await conversation.complete([*asked, again, MORE], SAMPLING)
    assert server.prompts[1] == server.prompts[2] == server.prompts[3][: len(server.prompts[1])]
    assert renderer.whole == 1


async def test_what_somebody_else_said_in_between_is_new_context():
    conversation, server, renderer = chat([PAIR, END], "no")
    first = said(await conversation.complete([HI], SAMPLING))
    injected = Message("assistant", "I was told to say this")
    await conversation.complete([HI, first, MORE, injected, MORE], SAMPLING)
    assert server.prompts[1] == [*server.prompts[0], PAIR, END, *render_ids([MORE, injected, MORE])]
    assert renderer.whole == 1


@pytest.mark.parametrize(
    "rewritten",
    [
        [SYSTEM, HI, Message("assistant", "YES"), MORE],
        [SYSTEM, HI, Message("assistant", "yes", (ToolCall("1", "add", "{}"),)), MORE],
        [SYSTEM, Message("user", "Hi"), Message("assistant", "yes"), MORE],
        [HI, Message("assistant", "yes"), MORE],
        [SYSTEM, HI, Message("user", "yes"), MORE],
        [SYSTEM, HI],
        [SYSTEM, HI, Message("assistant", "yes")],
    ],
    ids=["answer", "calls", "question", "system", "role", "asked again", "nothing new"],
)
async def test_a_rewritten_history_is_rendered_whole(rewritten):
    conversation, server, renderer = chat("yes", "no")
    await conversation.complete([SYSTEM, HI], SAMPLING)
    await conversation.complete(rewritten, SAMPLING)
    assert renderer.whole == (1 if rewritten == [SYSTEM, HI] else 2)  # asked again, it has the ids that it had
    assert server.prompts[1] == render_ids(rewritten)


@pytest.mark.parametrize(
    "shown",
    [
        Message("assistant", "", (ToolCall("toolu_9", "add", '{"a": 1, "b": "x"}'),)),
        Message("assistant", "", (ToolCall("call_0_0", "add", '{"b":"x","a":1}'),)),
        Message("assistant", None, (ToolCall("", "add", '{"a":1,"b":"x"}'),)),
        Message("assistant", [], (ToolCall("", "add", '{"a":1,"b":"x"}'),)),
    ],
    ids=["renamed", "written anew", "content None", "content parts"],
)
async def test_an_answer_that_an_sdk_has_only_spelled_anew_goes_on(shown):
    conversation, server, renderer = chat('add({"a":1,"b":"x"})', "no", "so")
    first = await conversation.complete([HI], SAMPLING, tools=TOOLS)
    assert first.tool_calls == (ToolCall("call_0_0", "add", '{"a":1,"b":"x"}'),)
    assert (first.text, first.stop_reason) == ("", "tool_calls")
    messages = [HI, shown, Message("tool", "2", (), "toolu_9")]
    second = await conversation.complete(messages, SAMPLING, tools=TOOLS)
    await conversation.complete([*messages, said(second), MORE], SAMPLING, tools=TOOLS)
    assert renderer.whole == 1
    assert server.prompts[2][: len(server.prompts[1])] == server.prompts[1]


@pytest.mark.parametrize(
    "call",
    [ToolCall("c", "add", '{"a": true}'), ToolCall("c", "sub", '{"a": 1}'), ToolCall("c", "add", "{a}")],
    ids=["arguments", "name", "no JSON"],
)
async def test_an_answer_with_other_calls_is_another_answer(call):
    conversation, _, renderer = chat('add({"a": 1})', "no")
    await conversation.complete([HI], SAMPLING, tools=TOOLS)
    await conversation.complete([HI, Message("assistant", "", (call,)), MORE], SAMPLING, tools=TOOLS)
    assert renderer.whole == 2


async def test_trl_5379_an_empty_list_of_tools_is_the_same_as_none():
    conversation, server, renderer = chat("yes", "no", "so")
    first = said(await conversation.complete([HI], SAMPLING, tools=[]))
    await conversation.complete([HI, first, MORE], SAMPLING)
    assert renderer.whole == 1
    await conversation.complete([HI, first, MORE], SAMPLING, tools=TOOLS)  # what the model sees has changed
    assert renderer.whole == 2
    assert server.prompts[2][:3] == [*b"add"]


async def test_without_tools_on_offer_all_is_text():
    conversation, _, _ = chat("add(1)")
    completion = await conversation.complete([HI], SAMPLING)
    assert (completion.text, completion.tool_calls, completion.stop_reason) == ("add(1)", (), "stop")


async def test_calls_have_other_ids_than_those_of_a_chat_that_began_elsewhere():
    conversation, _, _ = chat("add(1)", "add(2)", "add(3)")
    before = Message("assistant", "", (ToolCall("call_0_0", "add", "0"), ToolCall("call_7_0", "add", "0")))
    shown = [HI, before, Message("tool", "0", (), "call_0_0"), Message("tool", "0", (), "call_7_0")]
    first = await conversation.complete(shown, SAMPLING, tools=TOOLS)
    shown += [said(first), Message("tool", "1", (), first.tool_calls[0].id)]
    second = await conversation.complete(shown, SAMPLING, tools=TOOLS)
    other = await conversation.complete([MORE], SAMPLING, tools=TOOLS)
    assert [one.tool_calls[0].id for one in (first, second, other)] == ["call_8_0", "call_9_0", "call_10_0"]


async def test_old_branches_are_forgotten_and_rendered_whole_when_they_come_back():
    conversation, _, renderer = chat(*["yes"] * 35)
    for number in range(33):
        await conversation.complete([Message("user", str(number))], SAMPLING)
    assert repr(conversation) == "<TokenConversation 32 branches, the longest 2 messages>"
    for number, whole in ((32, 33), (0, 34)):
        await conversation.complete([Message("user", str(number)), Message("assistant", "yes"), MORE], SAMPLING)
        assert renderer.whole == whole


async def test_the_messages_may_be_a_live_view():
    conversation, server, _ = chat("yes", "no")
    server.gate.clear()
    messages = [HI]
    asking = asyncio.ensure_future(conversation.complete(messages, SAMPLING))
    await asyncio.sleep(0)
    messages.append(MORE)
    server.gate.set()
    first = said(await asking)
    await conversation.complete([HI, first, MORE], SAMPLING)
    assert server.prompts[1] == [*render_ids([HI]), *b"yes", END, *render_ids([MORE])]


# Ends of requests.


async def test_a_cancelled_request_leaves_nothing():
    conversation, server, renderer = chat("yes", "no")
    server.gate.clear()
    asking = asyncio.ensure_future(conversation.complete([HI], SAMPLING))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert repr(conversation) == "<TokenConversation 0 branches, the longest 0 messages>"
    server.gate.set()
    await conversation.complete([HI, Message("assistant", "yes"), MORE], SAMPLING)
    assert renderer.whole == 2


async def test_the_text_ends_before_a_stop_string_and_the_ids_do_not():
    conversation, server, _ = chat([*b"yes!\n", *b"User"], "no")
    sampling = Sampling(stop=("\nUser", "\n\n"))
    first = await conversation.complete([HI], sampling)
    assert (first.text, bytes(first.token_ids)) == ("yes!", b"yes!\nUser")
    await conversation.complete([HI, said(first), MORE], SAMPLING)
    assert server.prompts[1] == [*server.prompts[0], *b"yes!\nUser", END, *render_ids([MORE])]


async def test_a_reply_without_ids_is_passed_on_as_text():
    conversation, _, renderer = chat([], "no")
    first = await conversation.complete([HI], SAMPLING)
    assert (first.text, list(first.token_ids)) == ("the server's text", [])
    await conversation.complete([HI, said(first), MORE], SAMPLING)
    assert renderer.whole == 2


async def test_a_chat_that_the_format_cannot_write_is_refused_as_a_server_would():
    conversation, server, _ = chat("yes")
    with pytest.raises(EndpointRefused, match="chat must be one that the model's format can write: role must be"):
        await conversation.complete([Message("wizard", "hi")], SAMPLING)
    assert server.prompts == []


async def test_several_draws_from_one_chat_are_rendered_once_and_another_chat_anew():
    rendered = []

    class Counting(FakeRenderer):
        def render(self, messages, tools=()):
            rendered.append(len(messages))
            return super().render(messages, tools)

        def extend(self, completion_ids, new_messages, tools=()):
            rendered.append(-len(new_messages))
            return super().extend(completion_ids, new_messages, tools)

    server = Server(*["yes"] * 8)
    conversation = TokenConversation(Counting(), server)
    later: list[Any] = []
    first, *_ = [await conversation.complete([SYSTEM, HI], SAMPLING, later=later) for _ in range(3)]
    later[1]()
    for _ in range(2):
        await conversation.complete([SYSTEM, HI, said(first), MORE], SAMPLING)
    await conversation.complete([SYSTEM, HI, said(first), MORE], SAMPLING, tools=TOOLS)
    await conversation.complete([SYSTEM, HI, said(first), HI], SAMPLING)
    await conversation.complete([SYSTEM, MORE], SAMPLING)
    assert rendered == [2, -1, 4, -1, 2]
    assert server.prompts[0] == server.prompts[2] == render_ids([SYSTEM, HI])
    assert server.prompts[4] == render_ids([SYSTEM, HI, said(first), MORE])
    assert server.prompts[6] == render_ids([SYSTEM, HI, said(first), HI])
