"""A causal LM of transformers as a learner sees it: log-probs at the trained tokens, values, and files to publish.

The trunk runs on the blocks of a packed batch; logits are made only where a token is scored, a few hundred rows at a
time, and made again in the backward pass: a vocabulary of 150,000 times a batch of 8,192 tokens would be 5 GB.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from turngate.learners.logprobs import check_temperature, entropy_from_logits, selected_logprobs
from turngate.learners.lora import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_config,
    read_adapter,
    without_adapters,
    write_adapter,
)
from turngate.learners.model_folder import write_model_folder, write_weights_file
from turngate.runtime.canary import Canary, canary_metadata
from turngate.runtime.engine.model import Scores
from turngate.runtime.engine.packing import Packed, pack
from turngate.runtime.engine.weight_file import max_file_bytes, read_weights
from turngate.runtime.errors import ConfigError, LearnerError, PublishError
from turngate.runtime.files import write_atomically

__all__ = ["CausalLM", "Sizes", "WithoutAdapters", "check_head"]

VALUE_HEAD_FILE = "value_head/value_head.safetensors"
"""In a folder of its own: servers load every weights file they find in the model's."""

_LOGITS_PER_CHUNK = 2**26
"""256 MB of float32 at a time."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The two sizes that data must fit."""

    vocab_size: int
    max_context: int


class CausalLM(nn.Module):
    """A causal LM with an optional value head and optional adapters. Dropout is off, whatever `train` is called with.

    State: the weights. With bfloat16, matrices are multiplied in it and everything else is float32: the weights that
    train, their gradients, softmax and values.
    """

    def __init__(
        self,
        network: Any,
        config: Sizes,
        *,
        is_lora: bool = False,
        is_bfloat16: bool = False,
        value_head: bool = False,
        untie: bool = False,
        canary_ids: tuple[int, ...] = (0, 1),
    ) -> None:
        """Wrap a model of transformers, or peft's around one."""
        super().__init__()
        self.network: Any = network
        self.config, self._canary_ids = config, canary_ids
        self._is_lora, self._is_bfloat16, self._untie = is_lora, is_bfloat16, untie
        width = self.lm.config.get_text_config().hidden_size
        self.value_head = nn.Linear(width, 1, bias=False) if value_head else None
        if self.value_head is not None:
            nn.init.zeros_(self.value_head.weight)

    @property
    def lm(self) -> Any:
        """The model of transformers itself, with adapters inside if there are any."""
        return self.network.get_base_model() if self._is_lora else self.network

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.lm.get_input_embeddings().weight.device
        return device

    def train(self, mode: bool = True) -> Self:
        """Change nothing: what is computed must not depend on whether it is for training."""
        return self

    def score(self, packed: Packed, *, temperature: float = 1.0, with_entropy: bool = False) -> Scores:
        """Return the log-probs of the scored tokens under softmax(logits / temperature), and values if there are any.

        Differentiable. Raises: ConfigError: temperature is not positive.
        """
        check_temperature(temperature)
        packed = packed.to(self.device)
        with self._precision():
            hidden_M = self._hidden(packed)
            logprobs_M, entropy_M = self._read(hidden_M, packed.targets_M, temperature, with_entropy)
        return Scores(logprobs_M.cpu(), None if entropy_M is None else entropy_M.cpu(), self._values(hidden_M))

    def values(self, packed: Packed) -> Tensor | None:
        """Return the value of the state before each scored token, (M,); None without a head. Makes no logits."""
        if self.value_head is None:
            return None
        with self._precision():
            hidden_M = self._hidden(packed.to(self.device))
        return self._values(hidden_M)

    @torch.no_grad()
    def canary(self) -> Canary:
        """Return log-probs of a few words under the weights as they are, computed as in training.

        The second half continues the first with the second-likeliest token each time: such tokens are among the
        alternatives that a server tells of, and not so likely that every model gives them the same odds.
        """
        ids = list(self._canary_ids[: (len(self._canary_ids) + 1) // 2])
        while len(ids) < len(self._canary_ids):
            with self._precision():
                logits_V = self.network(input_ids=torch.tensor([ids], device=self.device)).logits[0, -1]
            ids.append(int(logits_V[: self.config.vocab_size].topk(2).indices[1]))
        logprobs_M = self.score(pack([tuple(ids)])).logprobs_M
        dtype = "bfloat16" if self._is_bfloat16 else "float32"
        return Canary(tuple(ids), tuple(logprobs_M.tolist()), dtype)

    def save_weights(self, path: Path) -> None:
        """Write what servers load to one safetensors file, whole or not at all, with a canary in its metadata.

        All weights in the precision that they are computed with, or the adapters alone; never a value head.
        """
        metadata = canary_metadata(self.canary())
        if self._is_lora:
            write_adapter(self.network, path, metadata)
        else:
            dtype = torch.bfloat16 if self._is_bfloat16 else torch.float32
            write_weights_file(self.lm, path, metadata, dtype=dtype, untie=self._untie)

    def save(self, folder: Path) -> None:
        """Write a model folder of transformers, or an adapter folder of peft, and the value head in a folder inside."""
        if self._is_lora:
            write_atomically(folder / ADAPTER_CONFIG, adapter_config(self.network).encode())
            write_adapter(self.network, folder / ADAPTER_WEIGHTS, {})
        else:
            write_model_folder(self.lm, folder, untie=self._untie)
        if self.value_head is not None:
            tensors = {"weight": self.value_head.weight.detach().cpu()}
            write_atomically(folder / VALUE_HEAD_FILE, safetensors.torch.save(tensors))

    def restore(self, folder: Path) -> None:
        """Read what of `save` transformers does not: adapters and value head.

        Raises: LearnerError: they are unreadable or of another shape.
        """
        if self._is_lora:
            read_adapter(self.network, folder)
        path = folder / VALUE_HEAD_FILE
        if self.value_head is None or not path.exists():
            return
        own = self.value_head.state_dict()
        try:
            self.value_head.load_state_dict(read_weights(path, max_bytes=max_file_bytes(own)))
        except (PublishError, RuntimeError) as error:
            raise LearnerError(f"checkpoint must be readable: {error} ({path}); use an older one") from error

    def _precision(self) -> torch.autocast:
        # Without its cache: a cast made in one chunk would be missing when another is made again in the backward pass.
        kind = self.device.type
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=self._is_bfloat16, cache_enabled=False)

    def _hidden(self, packed: Packed) -> Tensor:
        """Return the trunk's final state at the asked positions, shape (M, width)."""
        trunk = _trunk(self.lm)
        states: list[Tensor] = []
        for ids, (rows, length) in zip(
            packed.ids_N.split([r * n for r, n in packed.blocks]), packed.blocks, strict=True
        ):
            # Padding is on the right, where a causal model never looks: it needs no mask, and positions count from 0.
            output = trunk(input_ids=ids.view(rows, length), use_cache=False)
            states.append(output.last_hidden_state.flatten(0, 1))
        return torch.cat(states)[packed.asked_M]

    def _read(
        self, hidden_M: Tensor, targets_M: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probs and entropies (M,), float32."""
        head = _head(self.lm)

        def read(hidden_P: Tensor, targets_P: Tensor) -> tuple[Tensor, Tensor]:
            logits_PV = head(inputs_embeds=hidden_P[None], use_cache=False).logits[0].float()
            logprobs_P = selected_logprobs(logits_PV, targets_P, temperature=temperature)
            entropy_P = entropy_from_logits(logits_PV, temperature=temperature) if with_entropy else logprobs_P
            return logprobs_P, entropy_P

        rows = max(1, _LOGITS_PER_CHUNK // self.config.vocab_size)
        chunks = list(zip(hidden_M.split(rows), targets_M.split(rows), strict=True))
        if len(chunks) == 1 or not torch.is_grad_enabled():
            made = [read(*chunk) for chunk in chunks]
        else:
            made = [checkpoint(read, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
        logprobs_M = torch.cat([logprobs_P for logprobs_P, _ in made])
        return logprobs_M, torch.cat([entropy_P for _, entropy_P in made]) if with_entropy else None

    def _values(self, hidden_M: Tensor) -> Tensor | None:
        if self.value_head is None:
            return None
        values_M: Tensor = self.value_head(hidden_M.float()).squeeze(-1)
        return values_M.cpu()


class WithoutAdapters:
    """The model under the adapters, sharing its weights: the policy as it was before training."""

    def __init__(self, model: CausalLM) -> None:
        self.config, self._model = model.config, model

    def score(self, packed: Packed, *, temperature: float = 1.0, with_entropy: bool = False) -> Scores:
        """Return what the base model alone says; no gradient flows."""
        with without_adapters(self._model.network):
            return self._model.score(packed, temperature=temperature, with_entropy=with_entropy)


class _Passed(nn.Module):
    """Stands where the trunk was and returns what it is given."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> "_Output":
        return _Output(inputs_embeds)


class _Output:
    """What a trunk returns, with nothing but the last state."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None  # caches, attentions, router logits: not asked for

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]


def _trunk(lm: Any) -> Any:
    return getattr(lm, lm.base_model_prefix)


def _head(lm: Any) -> Any:
    """Return the model with its trunk left out: its own forward then turns states into logits.

    Soft caps, scales and biases are in that forward, not in the output layer, and differ from model to model.
    """
    head = copy.copy(lm)
    head.__dict__["_modules"] = {**lm._modules, lm.base_model_prefix: _Passed()}
    return head


@torch.no_grad()
def check_head(lm: Any, where: Path) -> None:
    """Raise ConfigError unless trunk and head, one after the other, compute what the model does."""
    ids = torch.arange(min(8, lm.get_input_embeddings().weight.shape[0]), device=lm.device)[None]
    expected = lm(input_ids=ids, use_cache=False).logits
    got = None
    if lm.base_model_prefix in lm._modules:
        state = _trunk(lm)(input_ids=ids, use_cache=False).last_hidden_state
        got = _head(lm)(inputs_embeds=state, use_cache=False).logits
    if got is None or not torch.allclose(expected.float(), got.float(), rtol=1e-3, atol=1e-4):
        raise ConfigError(
            f"a model's logits must be a function of its trunk's last state: {type(lm).__name__} computes them "
            f"otherwise ({where}); it cannot be trained here"
        )
