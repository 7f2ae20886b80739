"""What value functions are shown and what they may answer; values of others as plain numbers."""

import operator
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from typing import Protocol, cast

import msgspec

from turngate.envs.base import Snapshot, Task, ToolSpec
from turngate.runtime.errors import ConfigError, GuidanceError
from turngate.runtime.plain_numbers import plain_float
from turngate.runtime.types import Completion, Message

__all__ = ["DecisionPoint", "QFunction", "QValues", "checked_beta", "checked_values", "copied"]


class DecisionPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a value function may look at besides the candidates."""

    messages: Sequence[Message]
    """What the model was shown."""
    history: Sequence[Message] = ()
    """All messages of the episode so far."""
    tools: Sequence[ToolSpec] = ()
    task: Task | None = None
    """None where nobody knows it, as in a gateway."""
    turn: int = 0
    seed: int = 0
    """Root of the decision's streams; whatever a value function samples derives from it."""
    policy_version: int = 0
    policy_tokens: int = 0
    """Generated in the episode so far."""
    snapshot: Callable[[], Awaitable[Snapshot]] | None = None
    """Gives the environment's state before the action, from any task and as often as wanted, until the decision is
    made; None where there is no environment, or it has no snapshots."""


class QValues(msgspec.Struct, frozen=True):
    """What each candidate is worth."""

    values: Sequence[float]
    """One per candidate, on one scale; minus infinity forbids one."""
    version: int = 0
    """Of whatever gave them."""


class QFunction(Protocol):
    """Estimates what each of several actions is worth in one situation. A coroutine function will do.

    `needs_snapshots = True` on one says that it cannot do without an environment to branch from, `needs_token_ids =
    True` that it reads ids and no text: then nobody asks it where there are none.
    """

    async def __call__(self, point: DecisionPoint, candidates: Sequence[Completion], /) -> QValues | Sequence[float]:
        """Return one value per candidate, in their order. What it raises costs this decision its guidance."""
        ...


def checked_values(found: QValues, count: int) -> QValues:
    """Return values as plain numbers; as they came where there are not `count`. Raises: GuidanceError: no numbers."""
    values: object = found.values
    if isinstance(values, (str, bytes, Mapping, Set)):  # they have a length, and items that could be read as numbers
        raise GuidanceError(f"values must be numbers in the order of the candidates: got a {type(values).__name__}")
    version = operator.index(found.version)
    if len(found.values) != count:  # before converting: it could be endless
        return QValues(found.values, version)
    if any(isinstance(value, (str, bytes)) for value in cast(Sequence[object], found.values)):
        raise GuidanceError("values must be numbers: got texts")
    return QValues([float(value) for value in found.values], version)


def copied(completion: Completion) -> Completion:
    """Return a candidate as strangers are shown it: what they do to its lists does not change the record."""
    ids, logprobs, versions = list(completion.token_ids), list(completion.logprobs), list(completion.versions)
    return msgspec.structs.replace(completion, token_ids=ids, logprobs=logprobs, versions=versions)


def checked_beta(value: object, where: str) -> float:
    """Return beta. Raises: ConfigError: it is none."""
    beta = plain_float("beta", value, where)
    if not beta >= 0:
        raise ConfigError(f"beta must be at least 0: got {beta} ({where})")
    return beta
