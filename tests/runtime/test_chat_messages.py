"""Messages as agents write them."""

import pytest

from turngate.envs.base import ToolCall, ToolSpec
from turngate.runtime.chat_messages import chat_messages, chat_role, chat_tools, why_not_asked, why_not_sendable
from turngate.runtime.errors import EnvError
from turngate.runtime.types import Message, Sampling


def test_structs_are_kept_as_they_are_in_a_sequence_that_does_not_change():
    messages = [Message("system", "be brief"), Message("user", "hi")]
    kept = chat_messages(messages)
    messages.append(Message("user", "later"))
    assert kept == (Message("system", "be brief"), Message("user", "hi"))


def test_dictionaries_are_read_as_the_api_spells_them():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert chat_messages(
        [
            Message("system", "be brief"),
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call, ToolCall("c2", "sub", "{}")], "refusal": None},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
            {"role": "assistant", "content": "done", "tool_calls": None},
        ]
    ) == (
        Message("system", "be brief"),
        Message("user", "ab"),
        Message("assistant", "", (ToolCall("c1", "add", '{"a": 1}'), ToolCall("c2", "sub", "{}"))),
        Message("tool", "3", (), "c1"),
        Message("assistant", "done"),
    )


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ("hi", r"messages must be a list with at least one message: got 'hi'"),
        ({"role": "user", "content": "hi"}, "messages must be a list"),
        ([], "messages must be a list"),
        (None, "messages must be a list"),
        (["hi"], r"message must be a Message or a dict: got 'hi' \(session.chat: messages\[0\]\)"),
        ([{"content": "hi"}], "role must be one of assistant, developer, system, tool, user: got None"),
        ([{"role": ["user"], "content": "hi"}], "role must be one of"),
        ([{"role": "assistant", "tool_calls": 5}], r"tool_calls must be a list: got 5"),
        ([{"role": "user", "content": 3}], "content must be text or a list of text parts: got 3"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "parts of content must have a text"),
        ([{"role": "assistant", "tool_calls": [{"id": "c"}]}], r"tool call must have .*messages\[0\].tool_calls\[0\]"),
        ([{"role": "tool", "content": "", "tool_call_id": 5}], "tool_call_id must be text: got 5"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}],
            "arguments as JSON text",
        ),
    ],
)
def test_what_is_no_message_is_refused_and_named(messages, why):
    with pytest.raises(EnvError, match=why):
        chat_messages(messages)


def test_tools_are_read_as_the_api_spells_them():
    spec = ToolSpec("add", "adds", {"type": "object"})
    function = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
    offered = [spec, {"type": "function", "function": function}, {"type": "function", "function": {"name": "now"}}]
    assert chat_tools(offered) == (spec, spec, ToolSpec("now", "", {}))


@pytest.mark.parametrize("tool", ["add", {"name": "add"}, {"function": {"name": 3}}, {"function": {}}])
def test_what_is_no_tool_is_refused_and_named(tool):
    with pytest.raises(EnvError, match=r"tool must be a ToolSpec or a dict .*session.chat: tools\[0\]"):
        chat_tools([tool])


def test_what_no_request_can_carry_is_named():
    assert why_not_sendable([Message("user", "h\u00e9"), Message("assistant", "", (ToolCall("c", "f", "{}"),))]) == ""
    assert "got 'a\\ud800' (session.chat: messages[1])" in why_not_sendable(
        [Message("user", ""), Message("user", "a\ud800")]
    )
    assert "messages[0]" in why_not_sendable([Message("assistant", "", (ToolCall("c", "f", "\ud800"),))])
    assert "got 5" in why_not_sendable([Message("user", 5)])


class _Text(str):
    """As NumPy's: a str, and no encoder takes it."""


def test_text_that_is_more_than_text_is_made_plain():
    (message,) = chat_messages([{"role": _Text("user"), "content": _Text("hi"), "tool_call_id": _Text("c")}])
    assert {type(text) for text in (message.role, message.content, message.tool_call_id)} == {str}
    assert type(chat_role(_Text("critic"))) is str
    assert "got 'hi'" in why_not_sendable([Message("user", _Text("hi"))])


@pytest.mark.parametrize("role", [None, 5, "\ud800"])
def test_a_role_that_no_record_can_hold_is_refused(role):
    with pytest.raises(EnvError, match="role must be text that UTF-8 can carry: got"):
        chat_role(role)


def test_what_else_of_a_request_cannot_be_asked_is_named():
    chat, sampling = [Message("user", "hi")], Sampling()
    assert why_not_asked(chat, [ToolSpec("a", "", {})], sampling, 7) == ""
    assert "messages must be text" in why_not_asked([Message("user", 5)], [], sampling, 7)
    assert "seed must be an integer: got '7'" in why_not_asked(chat, [], sampling, "7")
    assert "sampling must be a Sampling: got {}" in why_not_asked(chat, [], {}, 7)
    assert "sampling must be JSON" in why_not_asked(chat, [], Sampling(stop=("\ud800",)), 7)
    tools = [ToolSpec("a", "", {}), ToolSpec("b", "", {"x": object()})]
    assert "tools[1] must be JSON" in why_not_asked(chat, tools, sampling, 7)
