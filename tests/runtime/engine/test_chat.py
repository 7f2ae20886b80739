import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.envs.base import ToolCall, ToolSpec
from turngate.runtime.engine.chat import parse_reply, render
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.errors import ConfigError
from turngate.runtime.types import Message

TOKENIZER = Tokenizer.train(["find a red backpack", 'search["red backpack"]'])


def names(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special=False)


def test_a_conversation_is_rendered_role_content_end():
    messages = [Message("system", "shop"), Message("user", "find"), Message("assistant", "ok"), Message("tool", "red")]
    ids = render(messages, TOKENIZER)
    assert names(ids) == "<|system|>shop<|end|><|user|>find<|end|><|assistant|>ok<|end|><|tool|>red<|end|><|assistant|>"
    assert names(render(messages[:1], TOKENIZER, False)) == "<|system|>shop<|end|>"


@given(st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8")))
def test_b2_15_a_history_with_the_reply_extends_the_prompt_and_the_sampled_ids(question, answer):
    # Decoding and encoding a reply again must not change its ids (huggingface/trl#6250, sgl-project/sglang#26555).
    history = [Message("user", question)]
    sampled = [*TOKENIZER.encode(answer), TOKENIZER.end]
    extended = render([*history, Message("assistant", answer), Message("user", "next")], TOKENIZER)
    prefix = render(history, TOKENIZER) + sampled
    assert extended[: len(prefix)] == prefix


def test_tool_calls_survive_rendering_and_parsing():
    calls = (ToolCall("call_0", "search", '{"query": "red"}'), ToolCall("call_1", "back", "{}"))
    ids = render([Message("assistant", "let me see", calls)], TOKENIZER, False)
    reply = parse_reply(ids[1:], TOKENIZER)
    assert reply.text == "let me see"
    assert reply.tool_calls == calls


def test_a_plain_reply_has_its_text_and_no_calls():
    reply = parse_reply([*TOKENIZER.encode("red backpack"), TOKENIZER.end], TOKENIZER)
    assert (reply.text, reply.tool_calls) == ("red backpack", ())


def test_tools_on_offer_are_described_in_the_system_message():
    tools = [ToolSpec("search", "find items", {"type": "object"})]
    line = 'search: find items {"type":"object"}'
    assert names(render([Message("system", "shop")], TOKENIZER, False, tools=tools)) == f"<|system|>shop\n{line}<|end|>"
    assert names(render([Message("user", "a")], TOKENIZER, False, tools=tools)).startswith(
        f"<|system|>{line}<|end|><|user|>"
    )


def test_an_unknown_role_is_refused_with_its_place():
    with pytest.raises(
        ConfigError, match=r"messages\[1\]\.role must be one of system, user, assistant, tool: got 'boss'"
    ):
        render([Message("user", "hi"), Message("boss", "hi")], TOKENIZER)
