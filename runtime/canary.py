"""A canary: a short prompt whose log-probs tell whether a server really serves the weights it was given.

The learner writes it into the metadata of every weights file. A server that answers 200 and keeps old weights, a tied
head above all, gives itself away. Reading it needs neither torch nor safetensors: a file's header is JSON.
"""

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from turngate.runtime.errors import EndpointError, PublishError, PublishRefused, RecordError
from turngate.runtime.json_ids import DECODE_ERRORS

__all__ = [
    "CANARY_KEY",
    "MAX_HEADER_BYTES",
    "Canary",
    "CanaryReport",
    "ScoresTokens",
    "canary_metadata",
    "check_canary",
    "measure_canary",
    "read_canary",
    "read_metadata",
]

CANARY_KEY = "turngate.canary"
"""Name of the canary in the metadata of a safetensors file."""

MAX_HEADER_BYTES = 100_000_000
"""What the safetensors format allows; more is another kind of file."""


class Canary(msgspec.Struct, frozen=True):
    """A sequence of ids and the log-probs of all but the first, at temperature 1 over the whole vocabulary."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """`logprobs[i]` is that of `token_ids[i + 1]` given all ids before it."""
    dtype: str = "float32"
    """What the learner computed them in: a server of another precision agrees less closely."""

    def __post_init__(self) -> None:
        if len(self.token_ids) < 2 or len(self.logprobs) != len(self.token_ids) - 1:
            raise RecordError(
                "a canary must have one log-prob for every id but the first: expected "
                f"{max(len(self.token_ids) - 1, 1)}, got {len(self.logprobs)}"
            )


class CanaryReport(msgspec.Struct, frozen=True):
    """How far a server's log-probs are from a canary's, in nats."""

    mean_error: float
    max_error: float
    tokens: int
    """How many were compared."""
    logprobs: tuple[float, ...]
    """The server's own, aligned with the canary's; NaN where it does not tell."""

    def __str__(self) -> str:
        return f"mean {self.mean_error:.2g}, max {self.max_error:.2g} over {self.tokens} tokens"


class ScoresTokens(Protocol):
    """What a canary is checked against: an `Endpoint`, or anything else that can score ids."""

    async def score(self, token_ids: Sequence[int], *, timeout_s: float = ...) -> list[float]:
        """Return the log-prob of each id given those before it, 0 for the first, NaN where that is not known.

        Raises: EndpointError.
        """
        ...


class _Header(msgspec.Struct):
    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict[str, str])


def canary_metadata(canary: Canary) -> dict[str, str]:
    """Return the canary as metadata of a safetensors file."""
    return {CANARY_KEY: msgspec.json.encode(canary).decode()}


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file from its header alone; empty when it has none.

    Raises: PublishError: the file cannot be read or is no safetensors file.
    """
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            return msgspec.json.decode(file.read(size), type=_Header).metadata
    except (OSError, struct.error, *DECODE_ERRORS) as error:
        raise PublishError(f"weights must be a whole safetensors file: {error} ({path}); publish it again") from error


def read_canary(path: Path) -> Canary | None:
    """Return the canary of a weights file; None when it carries none.

    Raises: PublishError: the file is no safetensors file, or its canary is garbled.
    """
    text = read_metadata(path).get(CANARY_KEY)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=Canary)
    except (RecordError, *DECODE_ERRORS) as error:
        raise PublishError(f"the canary of the weights must be readable: {error} ({path})") from error


async def measure_canary(endpoint: ScoresTokens, canary: Canary, *, timeout_s: float = 60.0) -> CanaryReport:
    """Have a server score the canary: one request. Raises: PublishError: it did not."""
    try:
        logprobs = (await endpoint.score(canary.token_ids, timeout_s=timeout_s))[1:]
    except EndpointError as error:
        raise PublishError(
            f"the server must score the canary of the weights: {error}; it takes echo with log-probs that are "
            "log-probs (vLLM: --logprobs-mode processed_logprobs); canary_tolerance=math.inf leaves the check out"
        ) from error
    report = _compare(logprobs, canary.logprobs)
    if report is None:
        raise PublishError(
            f"the server must score the canary of the weights: none of its {len(logprobs)} tokens is among the "
            "likeliest after those before it; let the learner take a likelier text, or leave the check out with "
            "canary_tolerance=math.inf"
        )
    return report


async def check_canary(
    endpoint: ScoresTokens,
    canary: Canary,
    tolerance: float,
    *,
    previous: Canary | None = None,
    is_tied: bool = False,
    timeout_s: float = 60.0,
) -> CanaryReport:
    """Require that a server answers like the weights that the canary came with.

    Args: tolerance: largest mean difference of log-probs, in nats. previous, is_tied: the canary of the weights before,
        and whether the model's head is its embedding: they only help to name the cause.
    Raises: PublishRefused: it does not; the message names the likely cause. PublishError: it could not be asked.
    """
    report = await measure_canary(endpoint, canary, timeout_s=timeout_s)
    if report.mean_error <= tolerance:
        return report
    raise PublishRefused(
        f"the server must answer like the weights it was given: expected log-probs within {tolerance:.2g} of the "
        f"learner's on average, got {report}; {_likely_cause(report, canary, previous, is_tied)}"
    )


def _compare(logprobs: Sequence[float], expected: Sequence[float]) -> CanaryReport | None:
    """Return how far both are apart where the server knows; None when it knows nothing."""
    errors = [abs(a - b) for a, b in zip(logprobs, expected, strict=True) if not math.isnan(a)]
    return CanaryReport(sum(errors) / len(errors), max(errors), len(errors), tuple(logprobs)) if errors else None


_PRECISION_ERROR = 0.3
"""Nats. Two precisions of the same weights differ by less, on average: bfloat16 against float32 by 0.01 to 0.05."""


def _likely_cause(report: CanaryReport, canary: Canary, previous: Canary | None, is_tied: bool) -> str:
    if is_tied:
        return (
            "the model ties its head to its embedding (tie_word_embeddings), and servers have kept the old head "
            "through an update (vLLM on CPU does): start server and learner from an untied copy, which "
            "turngate.learners.untie_folder(folder, target) writes, or train adapters"
        )
    if previous is not None and previous.token_ids == canary.token_ids:
        before = _compare(report.logprobs, previous.logprobs)
        if before is not None and before.mean_error < report.mean_error / 2:
            return f"it still answers like the weights before ({before}): the update had no effect"
    if report.mean_error < _PRECISION_ERROR:
        return (
            f"the difference is small: server and learner ({canary.dtype}) may compute in different precisions (vLLM: "
            "--dtype float32), or raise canary_tolerance"
        )
    return (
        "it serves another model or other weights, or log-probs that are not of temperature 1 over the whole vocabulary"
    )
