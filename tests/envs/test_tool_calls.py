"""Reading JSON that a model wrote: strictly, and with the reason when it cannot be read."""

import pytest

from turngate.envs.base import ToolCall
from turngate.envs.tool_calls import JSON_ERRORS, excerpt, is_sendable, read_call, read_json, read_json_at


@pytest.mark.parametrize(
    "text",
    [
        '{"a": NaN}',
        "[Infinity]",
        '{"a": -1e999}',
        '{"a": 1, "a": 2}',
        "{",
        "1 2",
        "[" * 100_000,
        "1" * 10_000,
        "{'a': 1}",
    ],
)
def test_what_is_no_strict_json_is_refused(text):
    with pytest.raises(JSON_ERRORS):
        read_json(text)


def test_a_doubled_key_is_named():
    with pytest.raises(ValueError, match="'b' twice"):
        read_json('{"a": 1, "b": 2, "b": 2}')


def test_a_value_is_read_up_to_its_end():
    assert read_json_at('x {"a": "}"} rest', 2) == ({"a": "}"}, 12)


def test_arguments_are_the_raw_text_of_the_object():
    assert read_call('{"name": "f", "arguments": { "a":1.0 }}', "c") == ToolCall("c", "f", '{ "a":1.0 }')


def test_areal_1463_arguments_as_a_string_and_as_an_object_are_the_same_call():
    as_string = read_call('{"name": "f", "arguments": "{\\"a\\": 1}"}', "c")
    as_object = read_call('{"name": "f", "arguments": {"a": 1}}', "c")
    assert as_string == as_object == ToolCall("c", "f", '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"arguments": {}}', "got no name"),
        ('{"name": "f"}', "arguments: got none"),
        ('{"name": "", "arguments": {}}', "got an empty string"),
        ('{"name": 3, "arguments": {}}', "got a number"),
        ('{"name": "f", "arguments": null}', "got null"),
        ('{"name": "f", "arguments": [1]}', "got a list"),
        ('{"name": "f", "arguments": true}', "got a boolean"),
        ('{"name": "f", "arguments": {}, "parameters": {}}', "arguments once"),
        ('{"name": "f", "arguments": {}, "why": "?"}', "'why' too"),
        ('["f", {}]', "JSON object: got a list"),
        ('{"name": "\\ud800", "arguments": {}}', "surrogate"),
    ],
)
def test_verl_7044_a_call_with_missing_or_odd_parts_says_what_is_wrong(text, why):
    with pytest.raises(ValueError, match=why):
        read_call(text, "c")


def test_an_excerpt_is_one_line_that_can_be_sent():
    assert excerpt("a\n\ud800" + "b" * 100, 5) == "a \\ud800bb..."
    assert is_sendable("é")
    assert not is_sendable("\ud800")
