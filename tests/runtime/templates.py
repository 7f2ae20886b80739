"""Chat templates of the kinds that models have, and a small tokenizer to run them with."""

from functools import lru_cache

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Knows nothing of tools."""

_HEAD = (
    "{% if TOOLS %}{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}"
    "{% endif %}{{ 'Tools:' }}{% for t in tools %}{{ '\n' + (t | tojson) }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{% endif %}"
)
_REST = (
    "{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' + ANSWER }}"
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ (c.function.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
HERMES = _HEAD.replace("TOOLS", "tools") + _REST.replace("ANSWER", "m.content")
"""Tools at the head, calls in tags, results grouped: append-only."""
EMPTY_TOOLS = _HEAD.replace("TOOLS", "tools is not none") + _REST.replace("ANSWER", "m.content")
"""Takes an empty list of tools for tools on offer."""
_LAST_THOUGHT = "(m.content if loop.last else m.content.split('</think>')[-1].lstrip('\n'))"
THINKING = _HEAD.replace("TOOLS", "tools") + _REST.replace("ANSWER", _LAST_THOUGHT)
"""The same for a reasoning model: what was thought in earlier turns is left out."""
TRIMMING = CHATML.replace("m.content", "(m.content | trim)")

HEADERS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.tool_calls %}{{ '<|start|>assistant<|sep|>' + m.content }}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{{ '<|eom|>' }}"
    "{% elif m.role == 'tool' %}{{ '<|start|>ipython<|sep|>' + (m.content | tojson) + '<|eot|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|sep|>' }}{% if tools and loop.first %}{{ tools | tojson }}{% endif %}"
    "{{ m.content + '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|sep|>' }}{% endif %}"
)
"""Headers around roles, another end of turn after calls, the tools in the first message."""
LAST_USER = (
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ bos_token }}{% for m in messages %}{% if m.role in ['user', 'system'] %}"
    "{% if tools and m == users[-1] %}{{ '<|tools|>' + (tools | tojson) }}{% endif %}"
    "{{ '<|user|>' + m.content + '<|sep|>' }}"
    "{% elif m.role == 'tool' %}{{ '<|result|>' + m.content + '<|sep|>' }}"
    "{% elif m.tool_calls %}{{ '<|call|>' + (m.tool_calls | tojson) + '</s>' }}"
    "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
)
"""The tools stand before the newest user message and nowhere else; no generation prompt."""
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|start|>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content + '<|eot|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>model\n' }}{% endif %}"
)
NUMBERED = (
    "{% for m in messages %}{% if m.role == 'user' %}[Round {{ loop.index }}]{% endif %}{{ m.content + '<|eot|>' }}"
    "{% endfor %}"
)
NAMED = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% set ns = namespace(name='') %}{% for m in messages %}"
    "{% if m.tool_calls %}{{ '<|start|>assistant<|sep|>' + m.content }}"
    "{% for c in m.tool_calls %}{% set ns.name = c.function.name %}"
    "{{ ' to=' + c.function.name + ' ' + (c.function.arguments | tojson) }}{% endfor %}{{ '<|call|>' }}"
    "{% elif m.role == 'tool' %}{{ '<|start|>' + ns.name + ' to=assistant ' + m.content + '<|eot|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|sep|>' + m.content + '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|sep|>' }}{% endif %}"
)
"""Results are written with the name of the tool that was called last."""
PARTS = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '<|sep|>' }}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{{ '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|sep|>' }}{% endif %}"
)
"""Reads lists of parts alone."""
PLAIN = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + m.content + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)

SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|sep|>", "<|eot|>", "<|eom|>", "<|tools|>",
    "<|user|>", "<|result|>", "<|call|>",
)  # fmt: skip
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Tokens of their own that are not special."""


@lru_cache
def _backend():
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["One, two? And then? Three. Let me see. user assistant system tool"] * 4, trainer)
    backend.add_tokens([AddedToken(token, special=False) for token in ADDED])
    return backend


def make_tokenizer(template: str | None, eos: str = "<|im_end|>"):
    """Return a byte-level tokenizer of transformers with a chat template."""
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_object=_backend(), bos_token="<s>", eos_token=eos)
    made.chat_template = template
    return made
