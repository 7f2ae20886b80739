"""The policy: a small decoder-only transformer that learns to copy from its context quickly on a CPU.

Multi-query attention (all heads share one key and one value, Shazeer 2019, arXiv 1911.02150) makes decoding cheap;
rotary positions (Su et al. 2021, arXiv 2104.09864); RMS norms without gains; squared ReLU (So et al. 2021,
arXiv 2109.08668); tied embeddings. Keys are smeared: the key of token t also holds the key of token t-1, so
"what followed this token before" is one attention step and copying appears early (Olsson et al. 2022, arXiv
2209.11895, section "smeared keys").

This module holds the weights and the training pass over packed sequences; `incremental` runs the same weights
token by token with a key-value cache.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

from turngate.runtime.canary import Canary, canary_metadata
from turngate.runtime.engine.config import ValueKind
from turngate.runtime.engine.packing import Packed, Queries, pack
from turngate.runtime.engine.weight_file import fit_weights, max_file_bytes, read_weights
from turngate.runtime.errors import ConfigError, PublishError
from turngate.runtime.files import write_atomically

__all__ = ["CONFIG_FILE", "WEIGHTS_FILE", "ModelConfig", "PolicyModel", "Scores", "apply_rope", "norm"]

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

_CANARY_TOKENS = 16
_TRIAL_TOKENS = 256
"""Enough to see an overflow: norms make everything but the weights themselves of unit scale."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, tag_field="format", tag="turngate-model-1"):
    """Sizes of the model; saved beside the weights."""

    vocab_size: int
    width: int = 96
    layers: int = 2
    heads: int = 4
    head_dim: int = 32
    mlp_width: int = 384
    max_context: int = 1024
    """Longest sequence, prompt and generated tokens together."""
    rope_base: float = 1000.0
    """Short contexts need no slow rotations; 1000 spreads them over a few hundred tokens."""
    value_head: bool = False
    """A scalar read off every position, for learners with a critic."""
    value_kind: ValueKind = "success"
    """What the value head puts out."""

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "width", "layers", "heads", "head_dim", "mlp_width", "max_context")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1: got {getattr(self, name)} (ModelConfig)")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even, rotations act on pairs: got {self.head_dim} (ModelConfig)")


class Scores(NamedTuple):
    """What the training pass returns per scored token."""

    logprobs_M: Tensor
    entropy_M: Tensor | None
    """Entropy of the distribution each token was drawn from, in nats; None unless asked for."""
    values_M: Tensor | None
    """Value of the state before each token; None without a value head."""


class Layer(nn.Module):
    """One transformer layer's weights."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, head_dim = config.width, config.head_dim
        self.q = nn.Linear(width, config.heads * head_dim, bias=False)
        self.k = nn.Linear(width, head_dim, bias=False)
        self.v = nn.Linear(width, head_dim, bias=False)
        self.out = nn.Linear(config.heads * head_dim, width, bias=False)
        self.up = nn.Linear(width, config.mlp_width, bias=False)
        self.down = nn.Linear(config.mlp_width, width, bias=False)
        self.smear = nn.Parameter(torch.ones(head_dim))
        self.heads, self.head_dim = config.heads, head_dim

    def mlp(self, x_N: Tensor) -> Tensor:
        """Return the feed-forward update, shape as the input (..., width)."""
        return functional.linear(squared_relu(self.up(norm(x_N))), self.down.weight)

    def smeared(self, k_BTD: Tensor) -> Tensor:
        """Return each key plus the scaled key before it; the first has none before it."""
        return k_BTD + functional.pad(k_BTD[:, :-1] * self.smear, (0, 0, 1, 0))

    def forward(self, x_N: Tensor, packed: Packed, rope: Tensor) -> Tensor:
        """Return the residual stream after this layer at all positions, shape (N, width)."""
        weight = torch.cat([self.q.weight, self.k.weight, self.v.weight])
        qkv = functional.linear(norm(x_N), weight).split([b * t for b, t in packed.blocks])
        sizes = [self.heads * self.head_dim, self.head_dim, self.head_dim]
        mixed: list[Tensor] = []
        for part, (rows, length) in zip(qkv, packed.blocks, strict=True):
            q, k, v = part.view(rows, length, -1).split(sizes, dim=-1)
            q = apply_rope(q.reshape(rows, length, self.heads, self.head_dim), rope[:length, None])
            k = apply_rope(self.smeared(k), rope[:length])
            mixed.append(attend(q, k, v, None).reshape(rows * length, -1))
        x_N = x_N + self.out(torch.cat(mixed) if len(mixed) > 1 else mixed[0])
        return x_N + self.mlp(x_N)

    def forward_asked(self, x_N: Tensor, packed: Packed, queries: Queries, rope: Tensor) -> Tensor:
        """Return the residual stream after this layer at the asked positions alone, shape (M, width).

        Keys and values are needed everywhere; queries and everything after them only where something is read.
        """
        kv = functional.linear(norm(x_N), torch.cat([self.k.weight, self.v.weight])).split(
            [b * t for b, t in packed.blocks]
        )
        x_M = x_N[packed.asked_M]
        q_MD = self.q(norm(x_M))
        mixed: list[Tensor] = []
        for part, (rows, length), query in zip(kv, packed.blocks, queries.blocks, strict=True):
            k, v = part.view(rows, length, -1).split(self.head_dim, dim=-1)
            q = q_MD[query.source].view(*query.source.shape, self.heads, self.head_dim)
            q = apply_rope(q, rope[query.positions][:, :, None])
            k = apply_rope(self.smeared(k), rope[:length])
            visible = torch.arange(length, device=k.device) <= query.positions[..., None]
            mixed.append(attend(q, k, v, visible[:, None]).reshape(query.source.numel(), -1))
        x_M = x_M + functional.linear(torch.cat(mixed)[queries.index_M], self.out.weight)
        return x_M + self.mlp(x_M)


class PolicyModel(nn.Module):
    """The transformer. One instance per process that learns or serves; a model folder is how they share weights."""

    rope: Tensor

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        """Make a freshly initialised model; equal seeds make equal weights and leave torch's own RNG alone."""
        super().__init__()
        self.config = config
        # torch's layers draw weights of their own first, from the global generator.
        with torch.random.fork_rng(devices=[]):
            self.embed = nn.Embedding(config.vocab_size, config.width)
            self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
            self.value_head = nn.Linear(config.width, 1, bias=False) if config.value_head else None
        self.register_buffer("rope", rope_table(config), persistent=False)
        self.serves_value_head = True
        """Whether published weights hold the value head, if there is one."""
        self._initialise(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        """Draw the weights: embeddings of unit scale, readers of unit gain, writers silent.

        The table itself has unit scale, not a small one multiplied up: Adam moves every entry by its learning rate,
        and a table of scale 0.02 moved that fast is noise (cloning loss after 300 steps 0.56 instead of 0.22).
        """
        for name, weight in self.named_parameters():
            if name == "embed.weight":
                weight.normal_(generator=generator)
            elif name.endswith(("out.weight", "down.weight")) or name == "value_head.weight":
                weight.zero_()
            elif weight.ndim == 2:
                weight.normal_(std=weight.shape[1] ** -0.5, generator=generator)

    def values(self, packed: Packed) -> Tensor | None:
        """Return the value of the state before each scored token, shape (M,); None without a value head."""
        return self.value_head(self.hidden(packed)).squeeze(-1) if self.value_head is not None else None

    @property
    def typed_layers(self) -> list[Layer]:
        """The layers, as what they are."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    @property
    def logit_scale(self) -> float:
        """Factor on the tied output product; unit-scale embeddings give logits of unit scale."""
        return 1 / math.sqrt(self.config.width)

    def hidden(self, packed: Packed) -> Tensor:
        """Return the normed final state at the asked positions, shape (M, width)."""
        x_N = self.embed(packed.ids_N)
        *first, last = self.typed_layers
        for layer in first:
            x_N = layer.forward(x_N, packed, self.rope)
        if packed.queries is not None:
            return norm(last.forward_asked(x_N, packed, packed.queries, self.rope))
        return norm(last.forward(x_N, packed, self.rope)[packed.asked_M])

    def logits(self, packed: Packed) -> Tensor:
        """Return the logits that predict each scored token, shape (M, V), before any temperature."""
        return self.unembed(self.hidden(packed))

    def unembed(self, hidden_M: Tensor) -> Tensor:
        """Return the logits read off normed states, shape (M, V)."""
        return functional.linear(hidden_M * self.logit_scale, self.embed.weight)

    def score(self, packed: Packed, *, temperature: float = 1.0, with_entropy: bool = False) -> Scores:
        """Return the log-probs of the scored tokens under softmax(logits / temperature), and values if there are any.

        Differentiable. Raises: ConfigError: temperature is not positive.
        """
        if temperature <= 0:
            raise ConfigError(f"temperature must be positive to score: got {temperature}; greedy has no density")
        hidden_M = self.hidden(packed)
        values_M = self.value_head(hidden_M).squeeze(-1) if self.value_head is not None else None
        logits_MV = self.unembed(hidden_M if temperature == 1.0 else hidden_M / temperature)
        if not with_entropy:
            return Scores(-functional.cross_entropy(logits_MV, packed.targets_M, reduction="none"), None, values_M)
        logprobs_MV = functional.log_softmax(logits_MV, dim=-1)
        entropy_M = -(logprobs_MV.exp() * logprobs_MV).sum(-1)
        return Scores(logprobs_MV.gather(1, packed.targets_M[:, None]).squeeze(1), entropy_M, values_M)

    def forward(self, packed: Packed, *, temperature: float = 1.0, with_entropy: bool = False) -> Scores:
        """Same as `score`."""
        return self.score(packed, temperature=temperature, with_entropy=with_entropy)

    def save(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors` into a model folder; each file whole or not at all."""
        write_atomically(folder / CONFIG_FILE, msgspec.json.format(msgspec.json.encode(self.config), indent=1))
        self.save_weights(folder / WEIGHTS_FILE, value_head=True)

    def save_weights(self, path: Path, *, value_head: bool | None = None) -> None:
        """Write the weights alone to one safetensors file, whole or not at all, with a canary in its metadata.

        `value_head=False` leaves that out; None does as `serves_value_head` says.
        """
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        if not (self.serves_value_head if value_head is None else value_head):
            state.pop("value_head.weight", None)
        write_atomically(path, safetensors.torch.save(state, canary_metadata(self.canary())))

    @torch.no_grad()
    def canary(self) -> Canary:
        """Return log-probs of ids from all over the vocabulary under the weights as they are."""
        step = math.ceil(self.config.vocab_size / _CANARY_TOKENS)
        ids = tuple(range(0, self.config.vocab_size, step))[: self.config.max_context]
        ids = ids if len(ids) > 1 else (0, 0)  # a vocabulary or context of one: only tests have that
        logprobs_M = self.score(pack([ids]).to(self.embed.weight.device)).logprobs_M
        return Canary(ids, tuple(logprobs_M.tolist()))

    @classmethod
    def load(cls, folder: Path, device: torch.device | str = "cpu") -> "PolicyModel":
        """Read a model folder written by `save`.

        Raises: ConfigError: the folder holds no valid config. PublishError: the weights do not fit it.
        """
        model = cls(cls.read_config(folder))
        model.load_weights(folder / WEIGHTS_FILE)
        return model.to(device)

    @staticmethod
    def read_config(folder: Path) -> ModelConfig:
        """Read the sizes of a saved model. Raises: ConfigError: the folder holds no valid config."""
        try:
            return msgspec.json.decode((folder / CONFIG_FILE).read_bytes(), type=ModelConfig)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"model folder must hold a readable {CONFIG_FILE}: {error} ({folder})") from error

    def load_weights(self, path: Path) -> None:
        """Read weights from a safetensors file into this model, all or none.

        Raises: PublishError: the file is unreadable, does not fit, or is not finite; nothing was changed.
        """
        state = read_weights(path, max_bytes=max_file_bytes(self.state_dict()))
        self.load_tensors(state, where=str(path))

    @torch.no_grad()
    def load_tensors(self, state: Mapping[str, Tensor], *, where: str = "state dict") -> None:
        """Copy named tensors into this model, all or none.

        Raises: PublishError: names, shapes or values do not fit; nothing was changed.
        """
        own = self.state_dict()
        fitting = fit_weights(own, state, where)
        for name, tensor in own.items():
            tensor.copy_(fitting[name])

    @torch.no_grad()
    def check_overflow(self, *, where: str) -> None:
        """Try the weights on a sequence with tokens from all over the vocabulary.

        Raises: PublishError: they are finite, but what the model computes with them is not.
        """
        step = math.ceil(self.config.vocab_size / min(self.config.max_context, _TRIAL_TOKENS))
        packed = pack([range(0, self.config.vocab_size, step)])
        hidden_M = self.hidden(packed.to(self.embed.weight.device))
        read = {"logits": self.unembed(hidden_M)}
        if self.value_head is not None:
            read["values"] = self.value_head(hidden_M)
        for what, outputs in read.items():
            if not outputs.isfinite().all():
                raise PublishError(f"{what} must be finite: the weights overflow ({where}); look at the learner")


class _SquaredReLU(torch.autograd.Function):
    """relu(x)^2 with a backward of one multiplication: the chain of torch's own takes a tenth of a training step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = functional.relu(x)
        ctx.save_for_backward(positive)
        return positive.square()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (positive,) = ctx.saved_tensors
        slope: Tensor = torch.mul(positive, grads[0]).mul_(2)
        return slope


def squared_relu(x: Tensor) -> Tensor:
    """Return relu(x)^2 elementwise; differentiable once."""
    result: Tensor = _SquaredReLU.apply(x)  # type: ignore[no-untyped-call]
    return result


def norm(x: Tensor) -> Tensor:
    """Return x scaled to unit root mean square over its last axis."""
    return functional.rms_norm(x, (x.shape[-1],))


def rope_table(config: ModelConfig) -> Tensor:
    """Return the complex rotations, shape (max_context, head_dim / 2)."""
    pairs = config.head_dim // 2
    frequencies = config.rope_base ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
    angles = torch.arange(config.max_context, dtype=torch.float64)[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def apply_rope(x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate neighbouring pairs of the last axis; `rotations` is complex and broadcasts over the leading axes."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations).flatten(-2)


def attend(q_BTHD: Tensor, k_BTD: Tensor, v_BTD: Tensor, visible_B1QT: Tensor | None) -> Tensor:
    """Return attention of all heads over one shared key and value, shape (B, Q, H, D); causal without a mask."""
    q, k, v = q_BTHD.transpose(1, 2), k_BTD[:, None], v_BTD[:, None]
    causal = visible_B1QT is None
    mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible_B1QT, is_causal=causal, enable_gqa=True)
    return mixed.transpose(1, 2)
