"""One sequence on its way through the batcher, and the checks a request passes first."""

import math

from turngate.runtime.engine.cache import Entry, block_keys
from turngate.runtime.engine.request import Finished, FinishReason, Progress, Rejection, Request, TopLogprobs
from turngate.runtime.engine.stops import TextWatcher
from turngate.runtime.engine.tokenizer import Tokenizer

__all__ = ["LiveSequence", "check_request"]


class LiveSequence:
    """Everything known about one sequence. Mutable: it grows a token per step until it finishes."""

    __slots__ = (
        "base_logprobs",
        "cached_tokens",
        "entry",
        "finish_reason",
        "id",
        "ids",
        "keys",
        "logprobs",
        "prompt_length",
        "prompt_logprobs",
        "prompt_top_logprobs",
        "reported",
        "request",
        "room",
        "row",
        "seed",
        "stop_ids",
        "top_logprobs",
        "value",
        "value_entry",
        "value_versions",
        "versions",
        "watcher",
    )

    def __init__(self, id: int, request: Request, seed: int, tokenizer: Tokenizer, max_context: int) -> None:
        self.id = id
        self.request = request
        self.seed = seed
        self.ids = list(request.prompt_ids)
        """Prompt and generated tokens."""
        self.prompt_length = len(self.ids)
        self.keys = block_keys(self.ids)
        self.room = 0 if request.value else min(request.max_tokens, max_context - self.prompt_length)
        self.stop_ids = frozenset((tokenizer.end,) if request.stop_ids is None else request.stop_ids)
        self.watcher = TextWatcher(tokenizer, request.stop) if request.stop or request.stream else None
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.top_logprobs: list[TopLogprobs] = []
        self.prompt_logprobs: list[float | None] | None = None
        self.prompt_top_logprobs: list[TopLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.base_logprobs: list[float] = []
        self.value_versions: list[int] = []
        self.value: float | None = None
        self.value_entry: Entry | None = None
        self.cached_tokens = 0
        self.reported = 0
        self.row = -1
        self.entry: Entry | None = None

    @property
    def wants_values(self) -> bool:
        """Whether the critic follows this sequence."""
        return self.request.guidance is not None or self.request.value

    def push(self, token: int, logprob: float, version: int) -> bool:
        """Add a drawn token; True when it ends the sequence."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        is_stopped = self.watcher is not None and self.watcher.push(token)
        if is_stopped or token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.logprobs) >= self.room:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def progress(self) -> Progress:
        """Return what was added since the last call."""
        assert self.watcher is not None
        if self.finish_reason is not None:
            self.watcher.finish()
        new = slice(self.reported, None)
        self.reported = len(self.logprobs)
        return Progress(
            id=self.id,
            token_ids=tuple(self.ids[self.prompt_length :][new]),
            logprobs=tuple(self.logprobs[new]),
            versions=tuple(self.versions[new]),
            text=self.watcher.take(),
            top_logprobs=tuple(self.top_logprobs[new]),
            base_logprobs=tuple(self.base_logprobs[new]),
            value_versions=tuple(self.value_versions[new]),
        )

    def finished(self, tokenizer: Tokenizer, policy_version: int, value_version: int = 0) -> Finished:
        """Return the whole sequence as a result."""
        assert self.finish_reason is not None
        token_ids = self.ids[self.prompt_length :]
        if self.watcher is not None:
            self.watcher.finish()
        return Finished(
            id=self.id,
            token_ids=token_ids,
            logprobs=self.logprobs,
            versions=self.versions,
            text=tokenizer.decode(token_ids) if self.watcher is None else self.watcher.text,
            finish_reason=self.finish_reason,
            cached_tokens=self.cached_tokens,
            top_logprobs=self.top_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            prompt_top_logprobs=self.prompt_top_logprobs,
            policy_version=policy_version,
            base_logprobs=self.base_logprobs,
            value_versions=self.value_versions,
            value=self.value,
            value_version=value_version,
        )


def check_request(request: Request, max_context: int, *, has_values: bool = False) -> Rejection | None:
    """Return why a request cannot be served, or None when it can.

    Ids are taken to be the vocabulary's: whoever takes them from outside checks them.
    """
    prompt = request.prompt_ids
    checks = (
        ("prompt_ids", len(prompt) > 0, "must not be empty: got no tokens"),
        (
            "prompt_ids",
            len(prompt) + (request.max_tokens > 0 and not request.value) <= max_context,
            f"must leave room in the context of {max_context} tokens: got {len(prompt)}; shorten the history",
        ),
        (
            "max_tokens",
            request.max_tokens >= (0 if request.echo or request.value else 1),
            f"must be at least 1, or 0 with echo: got {request.max_tokens}",
        ),
        (
            "temperature",
            math.isfinite(request.temperature) and request.temperature >= 0,
            f"must be finite and at least 0: got {request.temperature}",
        ),
        ("top_p", 0 < request.top_p <= 1, f"must lie in (0, 1]: got {request.top_p}"),
        ("top_k", request.top_k >= 0, f"must be at least 0, which keeps every token: got {request.top_k}"),
        *_guidance_checks(request, has_values=has_values),
        ("stop", all(request.stop), "must not hold an empty string: every text contains it"),
    )
    for param, is_fine, message in checks:
        if not is_fine:
            return Rejection(param, f"{param} {message}")
    return None


def _guidance_checks(request: Request, *, has_values: bool) -> tuple[tuple[str, bool, str], ...]:
    """Return what guidance and values demand, as (field, whether it is so, what to say otherwise)."""
    guidance, needs = request.guidance, request.guidance is not None or request.value
    checks = (("guidance" if guidance else "value", has_values or not needs, _NO_VALUES),)
    if guidance is None:
        return checks
    return (
        *checks,
        ("guidance", request.temperature > 0, "must come with a temperature above 0: greedy tokens are not drawn"),
        ("guidance", not request.echo, "must come without echo: the prompt is scored under the base"),
    )


_NO_VALUES = "needs values: the engine has no critic and its model no value head; start it with critic=..."
