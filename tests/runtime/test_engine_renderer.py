"""The embedded engine's chat template on our side; `engine/test_token_modes.py` holds it against the engine itself."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.envs.base import ToolCall, ToolSpec
from turngate.runtime.engine.chat import render
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.engine_renderer import EngineRenderer
from turngate.runtime.errors import ConfigError
from turngate.runtime.rendering import Reply
from turngate.runtime.types import Message

TOKENIZER = Tokenizer.train(["buy the red one", 'search["backpack"] under $80'])
RENDERER = EngineRenderer(TOKENIZER)
TOOLS = (ToolSpec("add", "Adds.", {"type": "object"}),)
MESSAGES = st.builds(Message, st.sampled_from(["user", "assistant", "tool", "system"]), st.text(max_size=20))


@given(st.lists(MESSAGES, min_size=1, max_size=4), st.lists(MESSAGES, min_size=1, max_size=4), st.text(max_size=20))
def test_a_chat_extended_is_the_chat_rendered_whole(head, new, answer):
    for tools in ((), TOOLS):
        sampled = [*TOKENIZER.encode(answer), TOKENIZER.end]
        whole = RENDERER.render([*head, Message("assistant", answer), *new], tools)
        assert [*RENDERER.render(head, tools), *sampled, *RENDERER.extend(sampled, new, tools)] == whole
        assert [*RENDERER.render(head, tools), *sampled[:-1], *RENDERER.extend(sampled[:-1], new, tools)] == whole


def test_rendering_is_that_of_the_engine():
    chat = [Message("user", "buy"), Message("assistant", "", (ToolCall("1", "add", "{}"),)), Message("tool", "2")]
    assert RENDERER.render(chat, TOOLS) == render(chat, TOKENIZER, tools=TOOLS)
    with pytest.raises(ConfigError, match=r"messages\[0\].role"):
        RENDERER.render([Message("wizard", "buy")])


def test_calls_are_found_only_where_tools_are_on_offer():
    ids = [*TOKENIZER.encode("red"), TOKENIZER.special("<|call|>"), *TOKENIZER.encode("add {}"), TOKENIZER.end]
    assert RENDERER.parse(ids, call_id_prefix="c7") == Reply("red", (ToolCall("c7_0", "add", "{}"),))
    assert RENDERER.parse(ids, has_tools=False) == Reply("redadd {}")


def test_a_model_folder_will_do(tmp_path):
    TOKENIZER.save(tmp_path / "tokenizer.json")
    renderer = EngineRenderer(str(tmp_path))
    assert renderer.tokenizer == TOKENIZER
    assert repr(renderer).startswith("<EngineRenderer <Tokenizer ")
    assert renderer.stop_token_ids == (TOKENIZER.end,)
    with pytest.raises(ConfigError, match="tokenizer must be a readable"):
        EngineRenderer(tmp_path / "nowhere")


def test_it_needs_no_torch():
    code = "import sys, turngate.runtime.engine_renderer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
