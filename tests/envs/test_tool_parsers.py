"""Parsers of tool calls: what they read, leave as text and complain of, and that no text breaks them."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.envs.base import ToolCall, ToolResult, ToolSpec
from turngate.envs.tool_parsers import MAX_CALLS, TOOL_PARSERS, HermesParser, JsonParser, ShoppingParser, tool_parser

ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
ADD_CALL = ToolCall("call_0", "add", '{"a": 1, "b": 2}')

hermes, bare, shopping = HermesParser(), JsonParser(), ShoppingParser()


def tagged(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


# Hermes.


def test_text_around_calls_is_kept_and_calls_are_numbered():
    reply = hermes.parse(f"First.\n{tagged(ADD)}\nthen\n{tagged(ADD)}\n", id_prefix="t3")
    assert reply.text == "First.\nthen"
    assert [call.id for call in reply.tool_calls] == ["t3_0", "t3_1"]
    assert reply.errors == ()


def test_a_reply_without_calls_is_returned_unchanged():
    for parser in TOOL_PARSERS.values():
        assert parser.parse("  no call \n").text == "  no call \n"
        assert parser.parse("").text == ""


def test_a_string_may_hold_the_closing_tag():
    body = '{"name": "write", "arguments": {"text": "</tool_call> <tool_call>"}}'
    (call,) = hermes.parse(tagged(body)).tool_calls
    assert json.loads(call.arguments) == {"text": "</tool_call> <tool_call>"}


@pytest.mark.parametrize(
    "body",
    ["not json", "{'name': 'add'}", '{"name": "add"}', '{"name": "add", "arguments": {"a": NaN}}', ADD[:-1], "", "[]"],
)
def test_a_malformed_call_is_reported_stays_in_the_text_and_spoils_no_other(body):
    reply = hermes.parse(tagged(body) + tagged(ADD))
    assert reply.tool_calls == (ADD_CALL,)
    assert len(reply.errors) == 1
    assert "could not be read" in reply.errors[0]
    assert tagged(body) in reply.text


def test_a_call_cut_off_by_the_token_limit_is_reported():
    for text in ("<tool_call>", f"<tool_call>{ADD}", "<tool_call>\n" + ADD[:20]):
        reply = hermes.parse(text)
        assert reply.text == text
        assert len(reply.errors) == 1


def test_what_a_model_thinks_of_is_no_call():
    thought = f"<think>maybe {tagged(ADD)}</think>"
    assert hermes.parse(thought).tool_calls == ()
    assert hermes.parse(f"<think>maybe {tagged(ADD)}").tool_calls == ()
    reply = hermes.parse(f"{thought}\n{tagged(ADD)}")
    assert (reply.text, reply.tool_calls) == (thought, (ADD_CALL,))


def test_a_model_in_a_loop_gets_only_so_many_calls():
    for parser, text in ((hermes, tagged(ADD) * 1000), (bare, f"[{', '.join([ADD] * 1000)}]")):
        reply = parser.parse(text)
        assert len(reply.tool_calls) <= MAX_CALLS
        assert len(reply.errors) == 1
        assert f"at most {MAX_CALLS}" in reply.errors[0]


# JSON.


@pytest.mark.parametrize(
    "text",
    [
        ADD,
        f" {ADD}\n",
        f"[{ADD}]",
        ADD.replace("arguments", "parameters"),
        f"<|python_tag|>{ADD}",
        '{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}',
        f"```json\n{ADD}\n```",
        f"```\n{ADD}\n```\n",
        f"```json\n{ADD}",
    ],
)
def test_a_bare_call_is_read(text):
    reply = bare.parse(text)
    assert (reply.text, reply.tool_calls, reply.errors) == ("", (ADD_CALL,), ())


def test_several_calls_in_a_list_and_in_fences_are_numbered():
    assert [c.id for c in bare.parse(f"[{ADD}, {ADD}]").tool_calls] == ["call_0", "call_1"]
    reply = bare.parse(f"One:\n```json\n{ADD}\n```\ntwo:\n```\n{ADD}\n```\ndone")
    assert [c.id for c in reply.tool_calls] == ["call_0", "call_1"]
    assert reply.text == "One:\ntwo:\ndone"


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        "[1, 2]",
        '{"answer": 3}',
        '{"name": "Bob", "age": 3}',
        "{curly} braces",
        f"```python\n{ADD}\n```",
        "[1",
    ],
)
def test_json_that_is_no_call_is_text(text):
    reply = bare.parse(text)
    assert (reply.text, reply.tool_calls, reply.errors) == (text, (), ())


@pytest.mark.parametrize(
    "text",
    [
        ADD[:-2],
        '{"name": "add"}',
        '{"arguments": {}}',
        f"{ADD}; {ADD}",
        f"[{ADD}, 3]",
        '{"name": "add", "arguments": {"a": 1}, "name": "sub"}',
        '{"type": "function", "function": {"name": "add"}}',
        '```json\n{"name": "add", "arguments": {"a": \n```',
    ],
)
def test_json_that_looks_like_a_call_and_is_none_is_reported(text):
    reply = bare.parse(text)
    assert (reply.text, reply.tool_calls, len(reply.errors)) == (text, (), 1)


# Shopping.


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ('search["red backpack"]', "search", '{"query":"red backpack"}'),
        (' click["item_3"]\n', "click", '{"item":"item_3"}'),
        ('select["red"]', "select", '{"color":"red"}'),
        ("back", "back", "{}"),
        ('buy["item_1"]', "buy", '{"item":"item_1"}'),
    ],
)
def test_a_command_of_the_shop_is_a_call(text, name, arguments):
    reply = shopping.parse(text)
    assert reply.tool_calls == (ToolCall("call_0", name, arguments),)
    assert shopping.render_call(reply.tool_calls[0]) == text.strip()


@pytest.mark.parametrize(
    "text", ['search["a"] now', "click[item]", 'buy["a"]\nbuy["b"]', 'search["\ud800"]', 'buy("x")']
)
def test_a_command_that_is_almost_one_is_reported(text):
    reply = shopping.parse(text)
    assert (reply.text, reply.tool_calls, len(reply.errors)) == (text, (), 1)
    reply.errors[0].encode()


def test_a_call_that_the_shop_has_no_words_for_is_shown_as_json():
    for call in (ToolCall("c", "fly", "{}"), ToolCall("c", "buy", '{"item": "a\\"]"}'), ToolCall("c", "buy", "?")):
        assert json.loads(shopping.render_call(call))["name"] == call.name


# All of them.

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
arguments_texts = st.dictionaries(names, values, max_size=4).map(json.dumps) | names


@given(names, arguments_texts)
def test_a_rendered_call_is_read_back_exactly(name, arguments):
    for parser in (hermes, bare):
        reply = parser.parse(parser.render_call(ToolCall("?", name, arguments)))
        assert reply.tool_calls == (ToolCall("call_0", name, arguments),)
        assert (reply.text, reply.errors) == ("", ())


snippets = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "\n", "{", "}", "[", "]", '"', "\\", ",", ":", ADD, '"name"', '"arguments"'),
        *("NaN", "\ud800", "\\ud800", "```json\n", "```", "\n```\n", "<think>", "</think>", 'search["', "💥", "1e999"),
        *('{"name": "a", "name": "b"}', "<|python_tag|>", "[" * 3000, "9" * 5000),
    ]
)


@given(st.lists(snippets | st.text(st.characters(), max_size=5), max_size=30).map("".join))
def test_no_text_breaks_a_parser(text):
    for parser in TOOL_PARSERS.values():
        reply = parser.parse(text)
        assert reply == parser.parse(text)
        assert [c.id for c in reply.tool_calls] == [f"call_{i}" for i in range(len(reply.tool_calls))]
        for sent in (*reply.errors, *(part for c in reply.tool_calls for part in (c.name, c.arguments))):
            sent.encode()
        if not reply.tool_calls:
            assert reply.text == text


@pytest.mark.parametrize(
    "piece",
    ["<tool_call>", "<tool_call>[", '<tool_call>{"', tagged("{"), "```\n", "[", '{"name": ', "\n", '"<tool_call>"'],
)
def test_a_megabyte_of_nonsense_takes_no_time(piece):
    text = piece * (1_000_000 // len(piece))
    began = time.process_time()
    for parser in TOOL_PARSERS.values():
        parser.parse(text)
    assert time.process_time() - began < 2.0  # measured below 0.1 s; a quadratic pass takes minutes


def test_tools_and_results_are_described_in_each_format():
    tools = [ToolSpec("search", "Find.", {"type": "object", "required": ["query"]}), ToolSpec("back", "Go back.", {})]
    results = [ToolResult("call_0", "one"), ToolResult("call_1", "two")]
    for parser in TOOL_PARSERS.values():
        described = parser.render_tools(tools)
        assert "search" in described
        assert "back" in described
        said = parser.render_results(results)
        assert said.index("one") < said.index("two")
    assert hermes.render_results(results[:1]) == "<tool_response>\none\n</tool_response>"


def test_parsers_are_found_by_name():
    assert tool_parser("hermes") is TOOL_PARSERS["hermes"]
    assert tool_parser(bare) is bare
    with pytest.raises(ValueError, match="hermes, json, shopping"):
        tool_parser("xml")
