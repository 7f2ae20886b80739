"""Models' own chat templates, rendered by what is new alone, against the templates' whole text."""

import logging

import pytest

from tests.runtime.templates import (
    CHATML,
    EMPTY_TOOLS,
    HEADERS,
    HERMES,
    LAST_USER,
    NAMED,
    NUMBERED,
    PARTS,
    PLAIN,
    STRICT,
    THINKING,
    TRIMMING,
    make_tokenizer,
)
from turngate.envs.base import ToolCall, ToolSpec
from turngate.envs.tool_calls import ParsedReply
from turngate.runtime.errors import ConfigError
from turngate.runtime.huggingface_renderer import HuggingFaceRenderer
from turngate.runtime.rendering import Reply
from turngate.runtime.types import Message

SYSTEM, HI, MORE = Message("system", "be good"), Message("user", "hi there"), Message("user", "and?")
TOOLS = (ToolSpec("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}}),)
CALL = ToolCall("call00001", "add", '{"a": 1, "text": "ä</tool_call>"}')
CALLING, RESULT = Message("assistant", "", (CALL,)), Message("tool", "two", (), "call00001")
SAID = Message("assistant", "yes.")


class NamedParser:
    """Reads calls as the template NAMED writes them."""

    def parse(self, text, *, id_prefix="call"):
        text, *calls = text.split(" to=")
        made = (ToolCall(f"{id_prefix}_{i}", *call.split(" ", 1)) for i, call in enumerate(calls))
        return ParsedReply(text, tuple(made))


def renderer_of(template, **options):
    return HuggingFaceRenderer(make_tokenizer(template), **options)


def whole(template, messages, tools=(), **kwargs):
    """What transformers itself makes of a chat."""

    def as_dict(m):
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": eval(c.arguments)}}
            for c in m.tool_calls
        ]
        return {"role": m.role, "content": m.content, **({"tool_calls": calls} if calls else {})}

    tokenizer = make_tokenizer(template)
    specs = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in tools
    ]
    text = tokenizer.apply_chat_template(
        [as_dict(m) for m in messages], tools=specs or None, tokenize=False, add_generation_prompt=True, **kwargs
    )
    return tokenizer.encode(text, add_special_tokens=False)


def turn_by_turn(renderer, messages, tools=(), *, cut=False):
    """Ids of a chat as a conversation builds them, answers sampled as the template writes them."""
    answers = [i for i, m in enumerate(messages) if m.role == "assistant"]
    ids = renderer.render(messages[: answers[0]], tools)
    for at, stop in zip(answers, [*answers[1:], len(messages)], strict=True):
        sampled = whole(renderer._test_template, [*messages[: at + 1]], tools)[len(ids) :]
        end = next(i for i, token in enumerate(sampled) if token in renderer._ends)
        sampled = sampled[: end if cut else end + 1]
        ids = [*ids, *sampled, *renderer.extend(sampled, messages[at + 1 : stop], tools)]
    return ids


CHATS = [
    ([HI, SAID, MORE, SAID, MORE], ()),
    ([SYSTEM, HI, SAID, MORE], TOOLS),
    ([SYSTEM, HI, CALLING, RESULT, SAID, MORE], TOOLS),
    ([HI, Message("assistant", "", (CALL, CALL)), RESULT, RESULT, CALLING, RESULT, SAID, HI, MORE], TOOLS),
]


@pytest.mark.parametrize(
    ("template", "parser"),
    [(HERMES, "hermes"), (HEADERS, "hermes"), (NAMED, NamedParser())],
    ids=["hermes", "headers", "named"],
)
@pytest.mark.parametrize("chat", CHATS, ids=["turns", "tools", "calls", "several calls"])
@pytest.mark.parametrize("cut", [False, True])
def test_what_is_rendered_turn_by_turn_is_byte_for_byte_what_the_template_writes(template, parser, chat, cut):
    messages, tools = chat
    renderer = renderer_of(template, tool_parser=parser)
    renderer._test_template = template
    assert renderer.differs_from_template == ()
    assert renderer.render(messages, tools) == whole(template, messages, tools)
    assert turn_by_turn(renderer, messages, tools, cut=cut) == whole(template, messages, tools)


def test_trl_5379_an_empty_list_of_tools_is_the_same_prompt_as_none():
    renderer = renderer_of(EMPTY_TOOLS)
    assert renderer.render([HI], []) == renderer.render([HI])
    assert renderer.render([HI]) != renderer.render([HI], TOOLS)
    sampled = renderer.render([HI])[-1:]
    assert renderer.extend(sampled, [MORE], []) == renderer.extend(sampled, [MORE])


@pytest.mark.parametrize("issue", ["tinker-cookbook#176", "tinker-cookbook#837", "NeMo-RL#3931", "verl#6719"])
def test_a_template_that_drops_earlier_reasoning_is_told_and_what_was_sampled_is_kept(issue, caplog):
    caplog.set_level(logging.INFO)
    renderer = renderer_of(THINKING)
    assert renderer.differs_from_template == (
        "an earlier answer is written otherwise than it was said (reasoning)",
        "an earlier answer is written otherwise than it was said (reasoning with tool calls)",
    )
    assert len(caplog.records) == 1
    assert "does not only append" in caplog.text
    assert repr(renderer).endswith(", 2 differences from the template>")
    # The separator and the new messages are those of the template; the thoughts stay in the ids before them.
    end = make_tokenizer(THINKING).convert_tokens_to_ids("<|im_end|>")
    new = renderer.extend([5, end], [MORE])
    assert whole(THINKING, [HI, Message("assistant", "<think>\nhm\n</think>\n\nyes."), MORE])[-len(new) :] == new


def test_a_template_that_trims_answers_differs_only_where_there_is_something_to_trim():
    said = "an earlier answer is written otherwise than it was said (answers with blanks around them)"
    assert renderer_of(TRIMMING).differs_from_template == (said,)


@pytest.mark.parametrize("issue", ["verifiers#626", "verifiers#955"])
def test_a_template_that_moves_the_tools_is_told(issue):
    renderer = HuggingFaceRenderer(make_tokenizer(LAST_USER, "</s>"))
    assert "earlier messages are written otherwise once others follow (tools on offer)" in (
        renderer.differs_from_template
    )
    sampled = renderer._template.encode("yes.</s>")
    tail = renderer.extend(sampled, [MORE], TOOLS)
    assert whole(LAST_USER, [HI, SAID, MORE], TOOLS)[-len(tail) :] == tail


def test_verl_6921_the_separator_after_an_answer_is_never_dropped():
    renderer = renderer_of(HERMES)
    end, *rest = renderer._template.encode("<|im_end|>\n<|im_start|>user\n<tool_response>\ntwo\n</tool_response>")
    assert renderer.extend([5], [RESULT], TOOLS)[: 1 + len(rest)] == [end, *rest]
    assert renderer.extend([5, end], [RESULT], TOOLS)[: len(rest)] == rest
    assert renderer.extend([], [RESULT], TOOLS)[0] == end


def test_what_closes_a_call_is_no_place_to_stop():
    template = HEADERS.replace("{{ '<|eom|>' }}", "{{ '<|result|><|eot|>' }}")
    renderer = HuggingFaceRenderer(make_tokenizer(template, "<|eot|>"))
    renderer._test_template = template
    (end,) = renderer.stop_token_ids
    assert make_tokenizer(template).decode([end]) == "<|eot|>"
    for messages, tools in CHATS:
        assert turn_by_turn(renderer, messages, tools) == whole(template, messages, tools)


def test_a_template_that_counts_its_messages_is_refused():
    with pytest.raises(ConfigError, match=r"write new messages the same wherever they stand: .* token_mode='server'"):
        renderer_of(NUMBERED)


def test_a_template_with_strict_roles_refuses_chats_as_a_server_would():
    renderer = HuggingFaceRenderer(make_tokenizer(STRICT, "<|eot|>"), tool_parser=None)
    assert renderer.render([HI]) == whole(STRICT, [HI])
    with pytest.raises(ConfigError, match=r"chat template must accept the chat: TemplateError: roles must alternate"):
        renderer.render([SYSTEM, HI])
    with pytest.raises(ConfigError, match=r"roles user, assistant, tool"):
        renderer.extend([5], [RESULT])


def test_a_chat_format_in_plain_words_ends_turns_with_the_end_of_text():
    renderer = HuggingFaceRenderer(make_tokenizer(PLAIN, "</s>"), tool_parser=None)
    ids = renderer._template.encode("yes.</s>")
    assert [*renderer.render([HI]), *ids, *renderer.extend(ids, [MORE])] == whole(PLAIN, [HI, SAID, MORE])


def test_tokens_that_reach_into_an_answer_are_told():
    spaced = CHATML.replace("\n' + m.content", " ' + m.content").replace("assistant\n", "assistant ")
    assert renderer_of(CHATML, tool_parser=None).differs_from_template == ()
    assert renderer_of(spaced, tool_parser=None).differs_from_template[0] == (
        "tokens reach over the border between an answer and what is around it (several turns)"
    )


@pytest.mark.parametrize("content", ["hi there", ["hi", " there"], [{"type": "text", "text": "hi there"}]])
@pytest.mark.parametrize("template", [HERMES, PARTS], ids=["text", "parts"])
def test_content_may_be_parts_and_templates_may_want_parts(template, content):
    renderer = HuggingFaceRenderer(make_tokenizer(template), tool_parser=None)
    text = make_tokenizer(template).decode(renderer.render([Message("user", content)]))
    assert "hi there" in text
    assert text == make_tokenizer(template).decode(renderer.render([HI]))
    with pytest.raises(ConfigError, match="parts of content must be texts"):
        renderer.render([Message("user", [{"type": "image_url", "image_url": {}}])])


def test_content_none_is_empty_and_arguments_are_what_the_model_wrote():
    renderer = renderer_of(HERMES)
    nothing = Message("assistant", None, (CALL, ToolCall("2", "add", "not JSON")))
    text = make_tokenizer(HERMES).decode(renderer.render([HI, nothing, RESULT], TOOLS))
    assert "None" not in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1, "text": "ä</tool_call>"}}\n</tool_call>' in text
    assert '"arguments": "not JSON"' in text


def test_the_developer_is_the_system_where_the_template_knows_no_better():
    developer = Message("developer", "be good")
    assert renderer_of(HERMES).render([developer, HI]) == whole(HERMES, [SYSTEM, HI])


def test_tools_are_written_by_the_parser_where_the_template_leaves_them_out(caplog):
    caplog.set_level(logging.INFO)
    renderer = renderer_of(CHATML)
    assert "leaves tools out" in caplog.text
    assert renderer.differs_from_template == ()
    text = make_tokenizer(CHATML).decode(renderer.render([SYSTEM, HI, CALLING, RESULT], TOOLS))
    assert text.startswith("<|im_start|>system\nbe good\n\n# Tools")
    assert '{"name": "add", "arguments": {"a": 1, "text": "ä</tool_call>"}}' in text
    assert "<|im_start|>user\n<tool_response>\ntwo\n</tool_response><|im_end|>\n" in text
    assert "# Tools" in make_tokenizer(CHATML).decode(renderer.render([HI], TOOLS))
    sampled = renderer._template.encode("yes.<|im_end|>")
    whole_ids = renderer.render([HI, SAID, RESULT, RESULT, MORE], TOOLS)
    assert [*renderer.render([HI], TOOLS), *sampled, *renderer.extend(sampled, [RESULT, RESULT, MORE], TOOLS)] == (
        whole_ids
    )
    assert renderer_of(CHATML, tool_parser=None).render([HI], TOOLS) == whole(CHATML, [HI])


def test_arguments_of_the_template_are_passed_on():
    renderer = renderer_of(HERMES, chat_template_kwargs={"enable_thinking": False})
    assert renderer.render([HI]) == whole(HERMES, [HI], enable_thinking=False)
    assert renderer.render([HI]) != whole(HERMES, [HI])
    assert renderer.differs_from_template != ()


def test_work_per_turn_is_the_same_at_turn_1_and_at_turn_128():
    tokenizer = make_tokenizer(HERMES)
    renderer = HuggingFaceRenderer(tokenizer)
    written, encoded, shown = [], [], []
    encode, write = tokenizer.encode, tokenizer.apply_chat_template

    def spied(text, **options):
        encoded.append(len(text))
        return encode(text, **options)

    def apply(messages, **options):
        shown.append(len(messages))
        text = write(messages, **options)
        written.append(len(text))
        return text

    tokenizer.encode, tokenizer.apply_chat_template = spied, apply
    ids = renderer.render([SYSTEM, HI], TOOLS)
    sampled = encode("yes.<|im_end|>", add_special_tokens=False)
    for _ in range(128):
        ids += [*sampled, *renderer.extend(sampled, [MORE], TOOLS)]
    assert (len(written), len(encoded)) == (129, 129)
    assert set(shown[1:]) == {3}
    assert len(set(written[1:])) == len(set(encoded[1:])) == 1


# Reading what was sampled.


def test_sampled_ids_are_read_with_their_calls_and_without_their_end():
    renderer = renderer_of(HERMES)
    ids = renderer._template.encode(
        'Sure.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    )
    assert renderer.parse(ids, call_id_prefix="c3") == Reply("Sure.", (ToolCall("c3_0", "add", '{"a": 1}'),))
    as_text = 'Sure.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert renderer.parse(ids, has_tools=False) == Reply(as_text)
    assert renderer_of(HERMES, tool_parser=None).parse(ids) == Reply(as_text)
    assert renderer.parse([]) == Reply("")


def test_blanks_and_broken_characters_are_read_as_they_are():
    renderer = renderer_of(HERMES)
    for text in (" a , b . ", "it 's", "\n\n x  y\n", "日本"):
        assert renderer.parse(renderer._template.encode(text)).text == text
    assert renderer.parse(renderer._template.encode("日本")[:-1]).text.endswith("\ufffd")


# Construction.


def test_what_cannot_work_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match="there is no folder"):
        HuggingFaceRenderer(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="model folder must hold a tokenizer"):
        HuggingFaceRenderer(tmp_path)
    with pytest.raises(ConfigError, match="must have a chat template"):
        renderer_of(None)
    with pytest.raises(ConfigError, match="tool parser must be one of"):
        renderer_of(HERMES, tool_parser="klingon")
    with pytest.raises(ConfigError, match="must show what the user says"):
        renderer_of("<|im_start|>nothing<|im_end|>")
    with pytest.raises(ConfigError, match="must show what the assistant says"):
        renderer_of("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")
    with pytest.raises(ConfigError, match="must show messages of the role user"):
        renderer_of("{% for m in messages[:2] %}{{ m.content }}{% endfor %}")


def test_a_folder_will_do_and_says_where_the_model_stops(tmp_path):
    make_tokenizer(HERMES).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    renderer = HuggingFaceRenderer(str(tmp_path))
    assert renderer.stop_token_ids == (1, 3)
    assert renderer.render([HI]) == renderer_of(HERMES).render([HI])
    assert repr(renderer) == f"<HuggingFaceRenderer {tmp_path}>"
