import msgspec
import pytest

from turngate.envs.base import ToolCall
from turngate.runtime.gateway.asks import decode_chat, decode_text
from turngate.runtime.openai_api.refusals import RequestError
from turngate.runtime.types import Message

USER = {"role": "user", "content": "hi"}


def chat(**fields):
    return msgspec.json.encode({"messages": [USER], **fields})


def test_fields_nobody_reads_come_back_as_they_were():
    body = b'{"messages": [{"role": "user", "content": "hi", "x": 1}], "new_field": {"deep": [1.50, "\\u00e9"]}}'
    fields, ask = decode_chat(body)
    assert bytes(fields["new_field"]) == b'{"deep": [1.50, "\\u00e9"]}'
    assert b'"x": 1' in bytes(fields["messages"])
    assert ask.messages[0].as_message() == Message("user", "hi")


def test_messages_become_what_the_record_has():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    parts = [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": "x"}}]
    _, ask = decode_chat(
        chat(
            messages=[
                {"role": "developer", "content": parts},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "ok", "tool_call_id": "c"},
            ]
        )
    )
    assert [message.as_message() for message in ask.messages] == [
        Message("system", "see [image_url]"),
        Message("assistant", "", (ToolCall("c", "f", '{"a":1}'),)),
        Message("tool", "ok", (), "c"),
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"text": "no type"}]}]}, "messages[0].content[0].type"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 100_000}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [1]}, "tools[0]"),
        ({"top_logprobs": -1}, "top_logprobs"),
    ],
)
def test_wrong_fields_are_named(fields, param):
    with pytest.raises(RequestError) as caught:
        decode_chat(chat(**fields))
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "body", [b"", b"nonsense", b"[]", b"7", b'{"messages": [', chat()[:-1], chat(x="\u00e9").replace(b"\xc3", b"\xff")]
)
def test_what_is_no_json_object_is_a_bad_request(body):
    with pytest.raises(RequestError) as caught:
        decode_chat(body)
    assert caught.value.status == 400


@pytest.mark.parametrize("at", ["messages", "unknown", "tools"])
def test_nesting_beyond_what_can_be_followed_is_a_bad_request(at):
    body = chat(**{at: "HERE"}).replace(b'"HERE"', b"[" * 100_000 + b"]" * 100_000)
    with pytest.raises(RequestError) as caught:
        decode_chat(body)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({}, "prompt"),
    ],
)
def test_wrong_text_requests_are_named(fields, param):
    with pytest.raises(RequestError) as caught:
        decode_text(msgspec.json.encode(fields))
    assert caught.value.param == param


def test_scoring_is_told_from_generating():
    _, scoring = decode_text(b'{"prompt": [1, 2], "echo": true, "max_tokens": 0}')
    _, generating = decode_text(b'{"prompt": [1, 2]}')
    assert (scoring.is_scoring, generating.is_scoring) == (True, False)
