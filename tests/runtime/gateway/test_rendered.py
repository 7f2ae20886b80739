"""Where chats are rendered here and the server is sent ids: the same door, exact ids, whole replies as streams."""

import asyncio

import aiohttp
import pytest

from tests.runtime.gateway.doors import CHAT, HI, TOOLS, door_to, events
from tests.runtime.gateway.test_openai_client import RESULTS
from tests.runtime.gateway.test_server import until
from turngate.envs.base import ToolCall, ToolSpec
from turngate.runtime.capabilities import Capabilities
from turngate.runtime.dialect import Dialect
from turngate.runtime.gateway import Gateway
from turngate.runtime.session_table import SessionTable
from turngate.runtime.testing import FakeEndpoint, render_ids
from turngate.runtime.testing.renderers import FakeRenderer
from turngate.runtime.types import Completion, Message, Sampling

CALL = ToolCall("call_0", "look", '{"at": 1}')


def says_call(messages):
    """Answer with a call, then with words; ids as the fakes' tokenizer has them."""
    if messages[-1].role == "tool":
        return "done"
    ids = [*b'see look({"at": 1})', 260]
    return Completion("see ", ids, [-0.5] * len(ids), [0] * len(ids), render_ids(messages), "tool_calls", (CALL,))


@pytest.fixture
def fake():
    return FakeEndpoint(says_call)


async def ask(gateway, session, body):
    async with aiohttp.ClientSession() as http:
        headers = {"Authorization": f"Bearer {session.key}"}
        async with http.post(f"{gateway.url}/chat/completions", json=body, headers=headers) as reply:
            return reply.status, await (reply.json() if "json" in reply.content_type else reply.text())


def table(fake):
    return SessionTable(fake, sampling=Sampling(max_tokens=64))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_is_written_from_what_was_sampled(fake, stream):
    async with Gateway(table(fake)) as gateway:
        session = gateway.sessions.create()
        body = {**CHAT, "tools": TOOLS, "logprobs": True, "stream": stream, "stream_options": {"include_usage": True}}
        if not stream:
            del body["stream_options"]
        status, told = await ask(gateway, session, body)
        trajectory = session.seal()
    assert status == 200
    call = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    if stream:
        *chunks, last, done = events(told)
        said = [c["choices"][0] for c in chunks]
        assert [s["delta"].get("content") for s in said] == ["", "see ", None]
        assert said[1]["delta"]["tool_calls"] == [{"index": 0, **call}]
        assert [s["finish_reason"] for s in said] == [None, None, "tool_calls"]
        assert (last["usage"]["completion_tokens"], done) == (20, "[DONE]")
        entries = said[1]["logprobs"]["content"]
    else:
        choice = told["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "see ", "tool_calls": [call]}
        assert (choice["finish_reason"], told["usage"]["total_tokens"]) == ("tool_calls", 25)
        entries = choice["logprobs"]["content"]
    assert (entries[0]["token"], entries[0]["logprob"], len(entries)) == (f"token_id:{ord('s')}", -0.5, 20)
    assert trajectory.turns[0].tool_calls == (CALL,)
    assert fake.calls[0].tools[0] == ToolSpec("look", "look", TOOLS[0]["function"]["parameters"])


async def test_an_episode_of_several_turns_is_one_sequence_of_tokens(fake):
    async with Gateway(table(fake)) as gateway:
        session = gateway.sessions.create()
        _, told = await ask(gateway, session, {**CHAT, "tools": TOOLS})
        said = told["choices"][0]["message"]
        answer = {"role": "tool", "tool_call_id": "call_0", "content": RESULTS["look"]}
        await ask(gateway, session, {"messages": [*HI, said, answer], "tools": TOOLS})
        trajectory = session.seal()
    assert (len(trajectory.segments), len(trajectory.turns), trajectory.drifts) == (1, 2, 0)


async def test_choices_are_sampled_at_once_with_seeds_of_their_own():
    fake = FakeEndpoint(lambda _: "x")
    async with Gateway(table(fake)) as gateway:
        session = gateway.sessions.create()
        _, told = await ask(gateway, session, {**CHAT, "n": 3, "seed": 5})
    assert [choice["index"] for choice in told["choices"]] == [0, 1, 2]
    assert fake.most_in_flight == 3
    assert fake.calls[0].seed == 5
    assert len({call.seed for call in fake.calls}) == 3
    assert session.seal().policy_tokens == 6


async def test_roles_that_templates_do_not_know_get_their_older_names(fake):
    async with Gateway(table(fake)) as gateway:
        await ask(gateway, gateway.sessions.create(), {"messages": [{"role": "developer", "content": "be"}, *HI]})
    assert fake.calls[0].messages == (Message("system", "be"), Message("user", "hi"))


async def test_tools_are_kept_from_the_model_when_the_agent_says_so(fake):
    async with Gateway(table(fake)) as gateway:
        await ask(gateway, gateway.sessions.create(), {**CHAT, "tools": TOOLS, "tool_choice": "none"})
    assert fake.calls[0].tools == ()


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ],
)
async def test_what_only_a_server_that_renders_can_do_is_refused(fake, asked, param):
    async with Gateway(table(fake)) as gateway:
        session = gateway.sessions.create()
        status, told = await ask(gateway, session, {**CHAT, **asked})
        assert (status, told["error"]["param"]) == (400, param)
        assert (fake.calls, session.seal().turns) == ([], ())


@pytest.mark.parametrize("harmless", [{"frequency_penalty": 0}, {"response_format": {"type": "text"}}, {"user": "me"}])
async def test_fields_that_ask_for_nothing_do_no_harm(fake, harmless):
    async with Gateway(table(fake)) as gateway:
        assert (await ask(gateway, gateway.sessions.create(), {**CHAT, **harmless}))[0] == 200


TOKENS = {"dialect": Dialect(token_mode="tokens"), "renderer": FakeRenderer()}


async def test_words_are_said_as_they_are_sampled():
    async with door_to("one two three", endpoint=TOKENS) as door:
        session = door.session()
        pieces: list[str] = []
        gate = asyncio.Semaphore(0)
        door.server.between_chunks = gate.acquire
        headers, body = {"Authorization": f"Bearer {session.key}"}, {**CHAT, "stream": True}
        async with door.http.post(f"{door.gateway.url}/chat/completions", json=body, headers=headers) as reply:
            for word in ("one ", "two ", "three"):
                while word not in "".join(pieces):
                    pieces.append((await reply.content.readany()).decode())
                assert session.turns == 0
                gate.release()
            pieces.append((await reply.read()).decode())
        told = events("".join(pieces))
        trajectory = session.seal()
    assert told[-1] == "[DONE]"
    assert [c["choices"][0]["delta"].get("content") for c in told[:-1]] == ["", "one ", "two ", "three", None]
    assert told[-2]["choices"][0]["finish_reason"] == "stop"
    assert list(trajectory.segments[0].ids()) == [*render_ids([Message("user", "hi")]), *b"one two three", 260]
    assert trajectory.trainable
    assert (door.server.requests[0]["stream"], "prompt" in door.server.requests[0]) == (True, True)


async def test_streamed_ids_that_come_spelled_out_are_recorded_as_others_are():
    dialect = Dialect(token_mode="tokens", token_id_strings=True, return_token_ids=False)
    async with door_to("one two three", endpoint={**TOKENS, "dialect": dialect}) as door:
        session = door.session()
        _, text, _ = await door.post("/v1/chat/completions", session.key, {**CHAT, "stream": True})
        trajectory = session.seal()
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in events(text)[:-1]) == "one two three"
    assert (trajectory.untrainable_because, trajectory.trainable) == ("", True)
    assert list(trajectory.segments[0].ids()) == [*render_ids([Message("user", "hi")]), *b"one two three", 260]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_of_ids_is_recorded_though_the_server_does_not_repeat_it(stream):
    dialect = Dialect(token_mode="tokens", token_id_strings=True, return_token_ids=False)
    async with door_to("one two", endpoint={**TOKENS, "dialect": dialect}) as door:
        session = door.session()
        await door.post("/v1/completions", session.key, {"prompt": [104, 105], "stream": stream, "n": 2})
        trajectory = session.seal()
    assert (trajectory.untrainable_because, len(trajectory.turns)) == ("", 2)
    assert [list(segment.ids()) for segment in trajectory.segments] == [[104, 105, *b"one two", 260]] * 2


async def test_streamed_turns_go_on_from_the_ids_that_were_sampled():
    async with door_to("one two", endpoint=TOKENS) as door:
        session = door.session()
        messages = list(HI)
        for _ in range(3):
            body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}}
            _, text, _ = await door.post("/v1/chat/completions", session.key, body)
            *chunks, last, _ = events(text)
            said = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
            assert last["usage"]["completion_tokens"] == 8
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
        trajectory = session.seal()
    assert (len(trajectory.turns), len(trajectory.segments), trajectory.drifts) == (3, 1, 0)


async def test_a_stop_string_is_not_said_though_its_ids_were_sampled():
    async with door_to("one two three", endpoint=TOKENS) as door:
        session = door.session()
        _, text, _ = await door.post("/v1/chat/completions", session.key, {**CHAT, "stream": True, "stop": "two"})
        assert "".join(c["choices"][0]["delta"].get("content") or "" for c in events(text)[:-1]) == "one "
        assert session.seal().turns[0].text == "one "


async def test_words_stop_with_the_server_and_with_the_session():
    async with door_to("one two three", endpoint=TOKENS) as door:
        session = door.session()
        door.server.breaks_after = 2
        _, text, _ = await door.post("/v1/chat/completions", session.key, {**CHAT, "stream": True})
        assert events(text)[-1]["error"]["code"] == "upstream_failed"
        door.server.between_chunks = asyncio.Event().wait
        waiting = asyncio.create_task(door.post("/v1/chat/completions", session.key, {**CHAT, "stream": True}))
        await until(lambda: door.server.open == 1)
        session.seal()
        await waiting
        await until(lambda: door.server.open == 0 and door.gateway.statistics().in_flight == 0)
    assert session.trajectory.turns == ()


@pytest.mark.parametrize(("context", "cap"), [(400, 100), (100_000, 1024), (None, 1024)])
async def test_an_agent_that_names_no_cap_gets_one_that_fits_the_context(fake, context, cap):
    fake.capabilities = Capabilities(url="http://x", model="m", max_context=context)
    async with Gateway(SessionTable(fake)) as gateway:
        await ask(gateway, gateway.sessions.create(), CHAT)
    assert fake.calls[0].sampling.max_tokens == cap
