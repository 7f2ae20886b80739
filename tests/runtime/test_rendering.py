"""When two messages say the same, and contents of every shape as text."""

import pytest

from turngate.envs.base import ToolCall
from turngate.runtime.errors import ConfigError
from turngate.runtime.rendering import content_text, says_the_same
from turngate.runtime.types import Message

DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        (("a", "b"), "ab"),
    ],
)
def test_contents_of_every_shape_are_text(content, text):
    assert content_text(content) == text


@pytest.mark.parametrize("content", [7, {"text": "a"}, [7], [{"type": "image_url"}], [{"text": None}], b"hi"])
def test_contents_that_are_no_text_are_refused(content):
    with pytest.raises(ConfigError, match="content must be"):
        content_text(content)
    assert not says_the_same(Message("user", content), Message("user", "hi"))


def calling(arguments, name="add", id="1", content=""):
    return Message("assistant", content, (ToolCall(id, name, arguments),))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (Message("user", "a"), Message("user", "a"), True),
        (Message("user", "a"), Message("assistant", "a"), False),
        (Message("user", "a"), Message("user", "a "), False),
        (Message("user", ""), Message("user", None), True),
        (Message("tool", "a", (), "1"), Message("tool", "a", (), "2"), True),
        (calling('{"a": 1, "b": 2}'), calling('{"b":2,"a":1}', id="2", content=None), True),
        (calling('{"a": 1}'), calling('{"a": 1.0}'), False),
        (calling('{"a": 1}'), calling('{"a": true}'), False),
        (calling('{"a": 1}'), calling('{"a": 1}', name="sub"), False),
        (calling("no JSON"), calling("no JSON", id="2"), True),
        (calling("no JSON"), calling("no JSON at all"), False),
        (calling(DEEP), calling(DEEP + " "), False),
        (calling("{}"), Message("assistant", ""), False),
        (calling("{}", content="a"), calling("{}", content="b"), False),
    ],
)
def test_messages_say_the_same_but_for_what_sdks_change(one, other, same):
    assert says_the_same(one, other) is same
    assert says_the_same(other, one) is same
