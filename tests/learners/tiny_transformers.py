"""Tiny models of transformers with random weights, made on the spot; nothing is downloaded."""

from pathlib import Path
from typing import Any

import torch

from turngate.runtime.engine.packing import Packed

VOCABULARY = 24
"""That of the embedded models in `conftest.py`, whose trajectories then fit."""

KINDS = ("llama", "qwen3", "gemma2", "gpt2", "qwen3_moe")
"""Grouped queries; normed ones; soft caps on logits and sliding windows; learned positions and biases; experts."""

_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def config_of(kind: str, **changes: Any) -> Any:
    """Return the configuration of a tiny model."""
    import transformers

    if kind == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128, "vocab_size": VOCABULARY}
        return transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=1, **changes)
    extras: dict[str, dict[str, Any]] = {
        "gemma2": {"sliding_window": 4, "final_logit_softcapping": 1.5, "query_pre_attn_scalar": 16},
        "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    }
    name = {"llama": "LlamaConfig", "qwen3": "Qwen3Config", "gemma2": "Gemma2Config", "qwen3_moe": "Qwen3MoeConfig"}
    return getattr(transformers, name[kind])(
        **(_SMALL | {"tie_word_embeddings": False} | extras.get(kind, {}) | changes)
    )


def make_folder(folder: Path, kind: str = "llama", *, seed: int = 0, **changes: Any) -> Path:
    """Write a model folder and return it; weights are large enough for every token to matter."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config_of(kind, initializer_range=0.2, **changes))
    model.save_pretrained(folder)
    return folder


def read(folder: Path) -> Any:
    """Return the model of a folder as a user of transformers would load it."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def plain_logprobs(model: Any, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Return the log-probs (T - 1,) of all ids but the first by a forward pass of transformers alone."""
    logits_TV = model(input_ids=torch.tensor([ids])).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits_TV, -1).gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)


class Sampler:
    """Lets the helpers of `conftest.py` sample trajectories from a model of transformers."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.no_grad()
    def logits(self, packed: Packed) -> torch.Tensor:
        """Return the logits at the asked positions; for one sequence."""
        logits_TV = self.model(input_ids=packed.ids_N[None]).logits[0]
        return logits_TV[packed.asked_M]
