"""What value functions are shown and what they may answer, and how they are asked: none costs more than a decision."""

import asyncio
import operator
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from typing import NamedTuple, Protocol, TypeAlias, TypeVar, cast

import msgspec

from turngate.envs.base import Action, Snapshot, Task, ToolSpec
from turngate.runtime.answers import describe_error
from turngate.runtime.deadline import Deadline, DeadlineExceeded
from turngate.runtime.errors import ConfigError, GuidanceError, ToolError
from turngate.runtime.foreign import ForeignCalls
from turngate.runtime.plain_numbers import plain_float
from turngate.runtime.types import Completion, Message

__all__ = ["Candidates", "DecisionPoint", "QFunction", "QValues", "ValueCalls", "checked_beta"]

_WHY_CHARS = 1000
"""Of a failure's text in a record: what others raise may hold whole replies."""

T = TypeVar("T")


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


Candidates: TypeAlias = Callable[[DecisionPoint], Sequence[Action] | Awaitable[Sequence[Action]]]
"""Lists the actions of a situation. What it raises costs this decision its guidance."""


class Values(NamedTuple):
    """What came of asking."""

    q: Sequence[float] = ()
    version: int = 0
    why: str = ""
    """There are none; empty when there are."""


class ValueCalls:
    """Asks a value function, and what else a decision needs of the user's code, within the decision's deadline."""

    def __init__(self, q: QFunction, name: str, *, timeout_s: float, grace_s: float) -> None:
        """Hold whom to ask. Args: as of `Guidance`."""
        self.q, self.name, self._timeout_s, self._grace_s = q, name, timeout_s, grace_s

    async def values(self, point: DecisionPoint, completions: Sequence[Completion]) -> Values:
        """Return one value per candidate, or why there are none."""
        shown = tuple(_copied(completion) for completion in completions)

        async def ask() -> Values:
            found = await self.q(point, shown)
            return _checked(found if isinstance(found, QValues) else QValues(found), len(shown))

        found, why = await self.outcome_of(f"value function {self.name}", point, ask)
        return Values(why=why) if found is None else found

    async def outcome_of(
        self, what: str, point: DecisionPoint, ask: Callable[[], Awaitable[T]]
    ) -> tuple[T | None, str]:
        """Return (what code that is not ours gives in time, why it gave nothing)."""
        deadline = Deadline()
        calls = ForeignCalls(f"decision of turn {point.turn}", deadline, grace_s=self._grace_s)
        try:
            with deadline:
                deadline.set(asyncio.get_running_loop().time() + self._timeout_s, "values")
                return await calls.run(what, ToolError, ask), ""
        except Exception as error:  # the boundary: code of the user's costs a decision, not the episode
            if isinstance(error, DeadlineExceeded) and deadline.expired:
                return None, "timeout"
            return None, f"error: {describe_error(error)}"[:_WHY_CHARS]


def checked_beta(value: object, where: str) -> float:
    """Return beta. Raises: ConfigError: it is none."""
    beta = plain_float("beta", value, where)
    if not beta >= 0:
        raise ConfigError(f"beta must be at least 0: got {beta} ({where})")
    return beta


def _checked(found: QValues, count: int) -> Values:
    """Return values as plain numbers, one per candidate. Raises: GuidanceError: they are no numbers."""
    values: object = found.values
    if isinstance(values, (str, bytes, Mapping, Set)):  # they have a length, and items that could be read as numbers
        raise GuidanceError(f"values must be numbers in the order of the candidates: got a {type(values).__name__}")
    version = operator.index(found.version)
    if (given := len(found.values)) != count:  # before converting: it could be endless
        return Values(version=version, why=f"malformed: {given} values for {count} candidates")
    if any(isinstance(value, (str, bytes)) for value in cast(Sequence[object], found.values)):
        raise GuidanceError("values must be numbers: got texts")
    return Values([float(value) for value in found.values], version)


def _copied(completion: Completion) -> Completion:
    """Return a candidate as strangers are shown it: what they do to its lists does not change the record."""
    ids, logprobs, versions = list(completion.token_ids), list(completion.logprobs), list(completion.versions)
    return msgspec.structs.replace(completion, token_ids=ids, logprobs=logprobs, versions=versions)
