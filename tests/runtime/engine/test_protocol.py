import json

import msgspec
import pytest

from turngate.envs.base import ToolCall, ToolSpec
from turngate.runtime.engine.protocol import (
    ChatRequest,
    CompletionRequest,
    RequestError,
    decode_request,
)
from turngate.runtime.types import Message

CHAT = msgspec.json.Decoder(ChatRequest)
COMPLETION = msgspec.json.Decoder(CompletionRequest)
HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields) -> ChatRequest:
    return decode_request(CHAT, json.dumps({"messages": HELLO, **fields}).encode())


def completion(**fields) -> CompletionRequest:
    return decode_request(COMPLETION, json.dumps({"prompt": "hello", **fields}).encode())


def refusal(decode, **fields) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decode(**fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 100_000}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"seed": "lucky"}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_bad_chat_field_is_named(fields, param):
    error = refusal(chat, **fields)
    assert error.param == param
    assert param.split("[")[0] in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": {"text": "hello"}}, "prompt"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
    ],
)
def test_bad_completion_field_is_named(fields, param):
    assert refusal(completion, **fields).param == param


def test_missing_field_is_named():
    with pytest.raises(RequestError) as caught:
        decode_request(CHAT, b"{}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"messages": "\xff"}', b"[" * 100_000])
def test_body_that_is_no_request_is_refused(body):
    with pytest.raises(RequestError) as caught:
        decode_request(CHAT, body)
    assert caught.value.status == 400


@pytest.mark.parametrize("levels", [5000, 200_000])
@pytest.mark.parametrize("field", ["unknown", "tools", "tool_choice", "messages"])
def test_deep_nesting_is_refused(field, levels):
    nest = b"[" * levels + b"]" * levels
    with pytest.raises(RequestError) as caught:
        decode_request(CHAT, b'{"messages": [{"role": "user", "content": "x"}], "%s": %s}' % (field.encode(), nest))
    assert caught.value.status == 400


def test_unknown_fields_are_ignored():
    assert chat(user="me", store=False, metadata={"a": 1}, temperatur=3).temperature is None


def test_unsupported_fields_that_change_nothing_are_accepted():
    chat(presence_penalty=0.0, frequency_penalty=0, logit_bias={}, response_format={"type": "text"}, tools=[])
    completion(best_of=1, suffix="", echo=False)


def test_numbers_keep_their_value():
    ask = chat(max_tokens=7, temperature=1, top_p=0.5, seed=-(2**63), n=3, stop="x", top_k=-1)
    assert (ask.max_tokens, ask.temperature, ask.top_p, ask.seed, ask.n, ask.top_k) == (7, 1.0, 0.5, -(2**63), 3, -1)


def test_scoring_needs_no_generated_token():
    assert completion(echo=True, max_tokens=0, logprobs=0).max_tokens == 0


def test_messages_are_read_as_the_template_wants_them():
    call = {"id": "call_1", "type": "function", "function": {"name": "buy", "arguments": '{"item": 3}'}}
    ask = chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "bought", "tool_call_id": "call_1"},
        ]
    )
    assert [message.as_message() for message in ask.messages] == [
        Message("system", "be brief"),
        Message("assistant", "", (ToolCall("call_1", "buy", '{"item": 3}'),)),
        Message("tool", "bought", tool_call_id="call_1"),
    ]


def test_tools_are_read_as_the_template_wants_them():
    ask = chat(tools=[{"type": "function", "function": {"name": "buy", "parameters": {"type": "object"}}}])
    assert [tool.as_spec() for tool in ask.tools or ()] == [ToolSpec("buy", "", {"type": "object"})]
