"""The official client, unmodified: asynchronous, synchronous, streaming, with tools, through both of its APIs."""

import asyncio
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.runtime.gateway.doors import HI, LOOK, TOOLS, door_to, two_tool_agent
from turngate.envs.base import ToolCall
from turngate.runtime.testing.scripted_server import Said

RESPONSE_TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
RESULTS = {"look": "there are 2 and 2", "take": "taken"}


async def play_chat(client, *, stream=False):
    """Play the agent's own loop over chat completions and return its answer."""
    messages = [{"role": "user", "content": "how many?"}]
    while True:
        if stream:
            async with client.chat.completions.stream(model="any", messages=messages, tools=TOOLS) as events:
                message = (await events.get_final_completion()).choices[0].message
        else:
            reply = await client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
            message = reply.choices[0].message
        if not message.tool_calls:
            return message.content
        said = message.model_dump(exclude_none=True, exclude={"parsed"})
        for call in said["tool_calls"]:
            call["function"].pop("parsed_arguments", None)
        messages.append(said)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULTS[call.function.name]})


async def play_responses(client, *, by_id, stream=False):
    """Play the same over the responses API, with earlier turns by their id or in full."""
    history: list[Any] = []
    given, previous = [{"role": "user", "content": "how many?"}], None
    while True:
        sent = {"input": given, "previous_response_id": previous} if by_id else {"input": history + given}
        asked = {"model": "any", "tools": RESPONSE_TOOLS, "instructions": "be brief", **sent}
        if stream:
            async with client.responses.stream(**asked) as events:
                response = await events.get_final_response()
        else:
            response = await client.responses.create(**asked)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        history += given + [item.model_dump(exclude={"parsed_arguments"}) for item in response.output]
        previous = response.id
        given = [
            {"type": "function_call_output", "call_id": call.call_id, "output": RESULTS[call.name]} for call in calls
        ]


def check(trajectory):
    """Three turns, two of them with a call, in one exact sequence of tokens."""
    assert [turn.text for turn in trajectory.turns] == ["let me see", "", "it is 4"]
    assert [turn.tool_calls for turn in trajectory.turns] == [
        (LOOK,),
        (ToolCall("call_2", "take", '{"count": 2}'),),
        (),
    ]
    assert trajectory.trainable
    assert (len(trajectory.segments), trajectory.drifts) == (1, 0)
    assert sum(trajectory.segments[0].policy_mask) == trajectory.policy_tokens
    assert trajectory.turns[0].observation == RESULTS["look"]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_completions_with_two_tools(stream):
    async with door_to(two_tool_agent) as door:
        session = door.session()
        async with door.client(session.key) as client:
            assert await play_chat(client, stream=stream) == "it is 4"
        check(session.seal())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
async def test_responses_with_two_tools(stream, by_id):
    async with door_to(two_tool_agent) as door:
        session = door.session()
        async with door.client(session.key) as client:
            assert await play_responses(client, by_id=by_id, stream=stream) == "it is 4"
        check(session.seal())
        assert door.server.requests[0]["messages"][0] == {"role": "system", "content": "be brief"}
        assert door.server.requests[0]["tools"] == TOOLS


async def test_the_synchronous_client():
    def talk(url, key):
        with OpenAI(base_url=url, api_key=key) as client:
            whole = client.chat.completions.create(model="any", messages=HI).choices[0].message.content
            stream = client.chat.completions.create(model="any", messages=HI, stream=True)
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            response = client.responses.create(model="any", input="hi").output_text
            text = client.completions.create(model="any", prompt="hi").choices[0].text
            return whole, streamed, response, text, [model.id for model in client.models.list()]

    async with door_to("one two") as door:
        session = door.session()
        told = await asyncio.to_thread(talk, door.gateway.url, session.key)
        assert told == ("one two", "one two", "one two", "one two", ["base"])
        assert session.turns == 4


async def test_refusals_are_the_clients_own_errors():
    async with door_to() as door:
        session = door.session()
        async with door.client(session.key, max_retries=0) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="m", messages=HI, temperature=-1)
            assert caught.value.param == "temperature"
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="wrong").chat.completions.create(model="m", messages=HI)
            with pytest.raises(openai.NotFoundError):
                await client.embeddings.create(model="m", input="x")
            session.seal()
            with pytest.raises(openai.ConflictError):
                await client.with_options(max_retries=2).chat.completions.create(model="m", messages=HI)
        assert door.gateway.statistics().requests["/v1/chat/completions 409"] == 1


async def test_a_stream_that_breaks_off_is_an_error_of_the_client():
    async with door_to("one two three") as door:
        session = door.session()
        async with door.client(session.key, max_retries=0) as client:
            door.server.breaks_after = 2
            stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
            with pytest.raises(openai.APIError):
                _ = [chunk async for chunk in stream]
            door.server.breaks_after = 2
            stream = await client.responses.create(model="m", input="hi", stream=True)
            with pytest.raises(openai.APIError):
                _ = [event async for event in stream]
        assert session.turns == 0


async def test_parsed_output_is_recorded_as_the_text_it_was():
    from pydantic import BaseModel

    class Answer(BaseModel):
        answer: int

    async with door_to('{"answer": 4}') as door:
        session = door.session()
        async with door.client(session.key) as client:
            reply = await client.chat.completions.parse(model="m", messages=HI, response_format=Answer)
            assert reply.choices[0].message.parsed == Answer(answer=4)
            response = await client.responses.parse(model="m", input="hi", text_format=Answer)
            assert response.output_parsed == Answer(answer=4)
        assert door.server.requests[1]["response_format"]["json_schema"]["name"] == "Answer"
        assert [turn.text for turn in session.seal().turns] == ['{"answer": 4}'] * 2


async def test_a_reply_cut_at_its_cap_is_an_incomplete_response():
    async with door_to(lambda _: Said("one two", finish_reason="length")) as door:
        async with door.client(door.session().key) as client:
            whole = await client.responses.create(model="m", input="hi", max_output_tokens=2)
            stream = await client.responses.create(model="m", input="hi", max_output_tokens=2, stream=True)
            last = [event async for event in stream][-1]
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (last.type, last.response.output_text) == ("response.incomplete", "one two")
    assert door.server.requests[0]["max_tokens"] == 2


async def test_the_events_of_a_streamed_response_are_complete_and_numbered():
    async with door_to(two_tool_agent) as door:
        async with door.client(door.session().key) as client:
            stream = await client.responses.create(model="m", input="hi", tools=RESPONSE_TOOLS, stream=True)
            events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 3,
        "output_item.added",
        *["function_call_arguments.delta"] * 2,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert events[-1].response.usage.output_tokens == len(Said("let me see", (LOOK,)).token_ids())


@pytest.mark.parametrize(
    ("asked", "status", "param"),
    [
        ({"input": "x", "previous_response_id": "resp_of_somebody"}, 404, "previous_response_id"),
        ({"input": ""}, 400, "input"),
        ({"input": [{"type": "computer_call"}]}, 400, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, 400, "input[0].arguments"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
        ({"input": "x", "background": True}, 400, "background"),
        ({"input": 7}, 400, "input"),
        ({}, 400, "input"),
    ],
)
async def test_what_the_responses_api_has_beyond_its_basics_is_refused(asked, status, param):
    async with door_to() as door:
        session = door.session()
        got, told, _ = await door.post("/v1/responses", session.key, asked)
        assert (got, told["error"]["param"]) == (status, param)
        assert session.turns == 0


async def test_a_response_of_another_session_is_not_known():
    async with door_to() as door:
        one, two = door.session(), door.session()
        _, told, _ = await door.post("/v1/responses", one.key, {"input": "secret"})
        asked = {"input": "x", "previous_response_id": told["id"]}
        assert (await door.post("/v1/responses", two.key, asked))[0] == 404
        assert (await door.post("/v1/responses", one.key, asked))[0] == 200


async def test_a_model_that_says_nothing_has_said_an_empty_message():
    async with door_to("") as door:
        session = door.session()
        async with door.client(session.key) as client:
            whole = await client.responses.create(model="m", input="hi")
            async with client.responses.stream(model="m", input="hi") as events:
                streamed = await events.get_final_response()
            chat = await client.chat.completions.create(model="m", messages=HI)
        assert [len(whole.output), len(streamed.output)] == [1, 1]
        assert (whole.output_text, streamed.output_text, chat.choices[0].message.content) == ("", "", "")
        assert [turn.length for turn in session.seal().turns] == [1, 1, 1]
