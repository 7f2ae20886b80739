"""What goes into the batcher and what comes out: plain values, no tensors."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from turngate.runtime.types import TokenGuidance

__all__ = [
    "BatcherConfig",
    "BatcherStatistics",
    "FinishReason",
    "Finished",
    "Progress",
    "Rejection",
    "Request",
    "TopLogprobs",
]

FinishReason = Literal["stop", "length"]
"""`stop`: an end-of-turn token or a stop string; `length`: cut at max_tokens or at the model's context."""

TopLogprobs = tuple[tuple[int, float], ...]
"""The likeliest tokens at one position and their log-probs, best first; tokens of zero probability are left out."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to continue. `n` choices are `n` requests that differ in their seeds."""

    prompt_ids: Sequence[int]
    """Ids of the vocabulary; not checked again."""
    max_tokens: int = 16
    """Cap on generated tokens; 0 with `echo` only scores the prompt."""
    temperature: float = 1.0
    """0 is greedy: the likeliest token, lowest id first, with the log-prob that the untempered model gives it."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary. Applied before top_p, as vLLM and Hugging Face do."""
    seed: int | None = None
    """Any integer; None lets the batcher draw one. Equal seeds give equal tokens whatever else is running."""
    stop: tuple[str, ...] = ()
    """Texts that end the generation; the ids keep the whole token that completed the text."""
    stop_ids: tuple[int, ...] | None = None
    """Tokens that end the generation and belong to it; None means the tokenizer's end-of-turn token."""
    top_logprobs: int = 0
    """How many alternatives to report per generated token (and per prompt token with `echo`)."""
    echo: bool = False
    """Report the prompt's own log-probs; such a request does not read the prefix cache."""
    stream: bool = False
    """Report `Progress` after every step, not only `Finished`."""
    guidance: TokenGuidance | None = None
    """Tilt every token towards what continues better, by the values of a critic or of the model's own value head."""
    value: bool = False
    """Report the value of the prompt; nothing is generated."""


class Rejection(msgspec.Struct, frozen=True):
    """Why a request was not taken."""

    param: str
    """The field of `Request` at fault."""
    message: str
    kind: Literal["invalid", "overloaded"] = "invalid"
    """`overloaded`: nothing is wrong with the request; try again later."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to one streaming sequence."""

    id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    text: str
    """Text that is now certain: what might become a stop string is held back. May be empty."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    base_logprobs: tuple[float, ...] = ()
    value_versions: tuple[int, ...] = ()


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """One whole sequence. A streaming sequence gets its last `Progress` first."""

    id: int
    token_ids: list[int]
    """Generated ids as sampled, the stop token included."""
    logprobs: list[float]
    """Log-prob of each token under the distribution it was drawn from (greedy ones: under the untempered model's);
    aligned with token_ids."""
    versions: list[int]
    """Policy version that produced each token; aligned with token_ids."""
    text: str
    """Decoded text, cut before the stop string if one ended it."""
    finish_reason: FinishReason
    cached_tokens: int
    """Prompt tokens that came from the prefix cache."""
    top_logprobs: list[TopLogprobs] = []
    """Aligned with token_ids; empty unless asked for."""
    prompt_logprobs: list[float | None] | None = None
    """With `echo`: raw (temperature 1) log-prob of each prompt token; None for the first, which has no context."""
    prompt_top_logprobs: list[TopLogprobs] = []
    """With `echo` and `top_logprobs`: aligned with the prompt; the first is empty."""
    policy_version: int = 0
    """Version that served when the sequence finished."""
    base_logprobs: list[float] = []
    """With guidance: log-prob of each token under the base, aligned with token_ids; `logprobs` are the guided ones."""
    value_versions: list[int] = []
    """With guidance: version of the critic whose values each token was drawn by, aligned with token_ids."""
    value: float | None = None
    """Of the prompt, when it was asked for."""
    value_version: int = 0
    """Version of the critic when the sequence finished; a head on the policy's trunk has the policy's."""


class BatcherConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and policies of the batcher."""

    max_running: int = 128
    """Sequences decoded together."""
    max_waiting: int = 8192
    """Requests that may wait for a slot before new ones are turned away."""
    max_prefill_tokens: int = 8192
    """Prompt tokens computed in one step (one longer prompt may exceed it): bounds how long decoding stalls."""
    max_cached_tokens: int = 262_144
    """Tokens of finished sequences kept for reuse by prompts that extend them; 0 turns the prefix cache off."""
    on_update: Literal["recompute", "keep"] = "recompute"
    """Running sequences after a weight swap. `recompute` makes every later log-prob exactly the new version's;
    `keep` goes on with keys and values of the old weights, faster and slightly off."""
    seed: int = 0
    """Root of the seeds drawn for requests that bring none."""


class BatcherStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start, and the present load."""

    running: int
    waiting: int
    policy_version: int
    steps: int
    finished: int
    cancelled: int
    rejected: int
    generated_tokens: int
    prompt_tokens: int
    """Prompt tokens of all admitted requests, the cached ones included."""
    cached_tokens: int
    """Prompt tokens served by the prefix cache."""
    recomputed_tokens: int
    """Tokens run again because the weights changed under a running sequence."""
    guided_tokens: int
    """Generated tokens that values had a say in."""
    busy_s: float
    """Seconds spent inside `step` while there was work."""
    tokens_per_s: float
    """Generated tokens per busy second, over about the last second of work."""
    cache_entries: int
    cache_tokens: int
