"""The fields by which clients say how completions are drawn, and what they may hold: as the engine and the gateway read
them alike."""

import math
from collections.abc import Callable
from typing import Any, cast

import msgspec

from turngate.envs.base import ToolSpec
from turngate.runtime.openai_api.refusals import RequestError

__all__ = ["INT64", "OfferedFunction", "SamplingFields", "StreamOptions", "check", "check_sampling", "prompts_of"]

_MAX_CHOICES = 1024
"""Cap on `n`: more is a mistake, and each choice is held in memory."""
INT64 = 2**63


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a streamed reply."""

    include_usage: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True, frozen=True):
    """What chat and text completions have in common."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 and -1 keep the whole vocabulary."""
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class OfferedFunction(msgspec.Struct, frozen=True):
    """The function of a tool on offer."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def as_spec(self) -> ToolSpec:
        """Return the tool as chat templates read it."""
        return ToolSpec(self.name, self.description or "", self.parameters or {})


def check_sampling(asked: SamplingFields) -> None:
    """Require values that a completion can be drawn by. Raises: RequestError: 400, naming the field."""
    check(asked.temperature, "temperature", "a finite number >= 0", lambda v: math.isfinite(v) and v >= 0)
    check(asked.top_p, "top_p", "a number in (0, 1]", lambda v: 0 < v <= 1)
    check(asked.top_k, "top_k", "an integer >= -1", lambda v: -1 <= v < INT64)
    check(asked.n, "n", f"an integer in [1, {_MAX_CHOICES}]", lambda v: 1 <= v <= _MAX_CHOICES)
    check(asked.seed, "seed", "a 64 bit integer", lambda v: -INT64 <= v < INT64)
    if not all(asked.stops):
        raise RequestError("stop must not hold an empty string: it would end every completion", param="stop")


def check(value: float | None, name: str, expected: str, is_good: Callable[[float], bool]) -> None:
    """Require a number that is good, if there is one. Raises: RequestError: 400, naming the field."""
    if value is not None and not is_good(value):
        raise RequestError(f"{name} must be {expected}: got {value}", param=name)


def prompts_of(prompt: str | list[str | int | list[int]], param: str = "prompt") -> list[str | list[int]]:
    """Return the prompts of a text completion, one by one: texts, or token ids.

    Raises: RequestError: the list is empty or mixes texts, ids and lists of ids.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError(f"{param} must not be empty: expected a text or token ids, got []", param=param)
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise RequestError(
            f"{param} must be one kind of thing: expected texts, token ids or lists of token ids, got a mixture",
            param=param,
        )
    return cast("list[str | list[int]]", [prompt] if kinds == {int} else prompt)
