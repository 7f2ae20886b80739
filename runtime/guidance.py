"""A guided policy: draw a few actions from the base, ask what each is worth, choose with softmax(beta Q).

    messages -> N draws of the base -> Q of each -> weights -> one of them, and a record of how it was chosen

Draws come from the base policy, so they are weighted by exp(beta Q) alone, duplicates kept; `selection` has the
mathematics. Where values fail, the first draw is taken, which is what the base alone would have done, and the record
says so.
"""

import asyncio
import logging
import math
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Protocol, TypeAlias

import msgspec

from turngate.envs.base import Snapshot, Task, ToolSpec
from turngate.runtime.answers import describe_error
from turngate.runtime.errors import ConfigError, EndpointError, GuidanceError
from turngate.runtime.seeds import derive_seed
from turngate.runtime.selection import beta_for_kl, log_selection_weight, selection_probs
from turngate.runtime.types import Candidate, Completion, Decision, Message

__all__ = ["Beta", "DecisionPoint", "Draw", "Guidance", "GuidanceStatistics", "QFunction", "QValues"]

Beta: TypeAlias = float | Callable[[int], float]
"""Weight of the values, or a schedule of it by policy version."""
Draw: TypeAlias = Callable[[int], Awaitable[Completion]]
"""Samples one action of the base policy with a seed."""


_WARN_AFTER = 16
"""Decisions without any guidance after which somebody should be told: single failures are in the records."""
_log = logging.getLogger("turngate.guidance")


class DecisionPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a value function may look at besides the candidates."""

    messages: Sequence[Message]
    """What the model was shown."""
    history: Sequence[Message] = ()
    """All messages of the episode so far; a live view, do not keep it."""
    tools: Sequence[ToolSpec] = ()
    task: Task | None = None
    """None where nobody knows it, as in a gateway."""
    turn: int = 0
    seed: int = 0
    """Root of the decision's streams; whatever a value function samples derives from it."""
    policy_version: int = 0
    snapshot: Callable[[], Awaitable[Snapshot]] | None = None
    """Takes the environment's state before the action; None where there is no environment, or it has no snapshots."""


class QValues(msgspec.Struct, frozen=True):
    """What each candidate is worth."""

    values: Sequence[float]
    """One per candidate, on one scale; minus infinity forbids one."""
    version: int = 0
    """Of whatever gave them."""


class QFunction(Protocol):
    """Estimates what each of several actions is worth in one situation. A coroutine function will do."""

    async def __call__(self, point: DecisionPoint, candidates: Sequence[Completion], /) -> QValues | Sequence[float]:
        """Return one value per candidate, in their order. What it raises costs this decision its guidance."""
        ...


class GuidanceStatistics(msgspec.Struct, frozen=True):
    """What guidance has done so far; means are over decisions that values chose, NaN before the first."""

    decisions: int
    guided: int
    fallbacks: dict[str, int]
    """Decisions that the base made, by reason."""
    draws: int
    distinct_mean: float
    """Different actions among the draws of a decision."""
    kl_mean: float
    """KL of the choice among the draws from a uniform one: what guidance moved, as far as N draws can show."""
    value_s: float
    """Seconds spent on values."""


class Guidance:
    """Chooses among draws of the base policy by their values.

        runtime = Runtime(endpoint, guidance=Guidance(CriticQ.of(engine), beta=5.0, draws=8))

    One object serves any number of episodes at once.
    """

    # Changed by choose(): the tallies.

    def __init__(
        self,
        q: QFunction,
        *,
        beta: Beta,
        draws: int = 8,
        floor: float = 0.0,
        max_kl: float | None = None,
        timeout_s: float = 10.0,
        name: str = "",
    ) -> None:
        """Hold the settings.

        Args: beta: 0 is the base policy itself, drawn once; infinity takes the best draw. A function of the policy
                version is a schedule.
            draws: actions drawn per decision.
            floor: mixed in uniformly; keeps every draw possible, so that greedy choices can be corrected for.
            max_kl: beta is lowered, decision by decision, until the choice is at most so far from a uniform one.
            timeout_s: for the values of one decision; later ones are not waited for.
            name: what records call the source; by default the value function's own.
        Raises: ConfigError: a setting cannot work.
        """
        if not callable(beta) and not beta >= 0:
            raise ConfigError(f"beta must be at least 0: got {beta} (Guidance)")
        if draws < 1:
            raise ConfigError(f"draws must be 1 or more: got {draws} (Guidance)")
        if not 0 <= floor <= 1:
            raise ConfigError(f"floor must be between 0 and 1: got {floor} (Guidance)")
        if max_kl is not None and not max_kl >= 0:
            raise ConfigError(f"max_kl must be at least 0: got {max_kl} (Guidance)")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s must be positive: got {timeout_s} (Guidance)")
        self.q, self.beta, self.draws, self.floor, self.max_kl = q, beta, draws, floor, max_kl
        self.timeout_s = timeout_s
        self.name = name or str(getattr(q, "name", "") or getattr(q, "__name__", type(q).__name__))
        self._decisions = self._guided = self._drawn = self._distinct = 0
        self._kl = self._value_s = 0.0
        self._fallbacks: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Guidance {self.name}, beta {self.beta}, {self.draws} draws, {self._guided}/{self._decisions} guided>"

    @property
    def is_greedy(self) -> bool:
        """Whether it may take the best draw for certain; no policy gradient can learn from that."""
        return self.beta == math.inf and self.floor == 0.0 and self.max_kl is None

    def statistics(self) -> GuidanceStatistics:
        """Return the tallies as they are now."""
        guided = self._guided or math.nan
        return GuidanceStatistics(
            decisions=self._decisions,
            guided=self._guided,
            fallbacks=dict(self._fallbacks),
            draws=self._drawn,
            distinct_mean=self._distinct / guided,
            kl_mean=self._kl / guided,
            value_s=self._value_s,
        )

    async def choose(self, draw: Draw, point: DecisionPoint) -> Completion:
        """Return the chosen action, with the decision on it.

        The first draw has the seed that the base alone would have used, and beta 0 is the base path itself, bit for
        bit. Cancelled: so are draws and values, and nothing is left behind.
        Raises: EndpointError, as the base alone would have: the first draw failed.
        """
        beta = self.beta(point.policy_version) if callable(self.beta) else self.beta
        self._decisions += 1
        if beta == 0:
            self._drawn += 1
            return await draw(point.seed)
        # 1. Draw; all of them, duplicates included.
        completions, missing = await self._draw(draw, point.seed)
        # 2. Ask what they are worth.
        began_s = time.monotonic()
        q, version, fallback = await self._values(point, completions) if not missing else ((), 0, missing)
        value_s = time.monotonic() - began_s
        # 3. Choose, and say how.
        chosen, decision = self._decide(completions, q, beta, fallback, point.seed)
        decision = msgspec.structs.replace(decision, value_version=version, seconds=value_s)
        self._count(decision, completions, value_s)
        return msgspec.structs.replace(completions[chosen], decision=decision)

    async def _draw(self, draw: Draw, seed: int) -> tuple[list[Completion], str]:
        """Return the draws, and what is missing of them; the first is what the base alone would have drawn."""
        seeds = [seed, *(derive_seed(seed, "draw", index) for index in range(1, self.draws))]
        found = await asyncio.gather(*(draw(one) for one in seeds), return_exceptions=True)
        first = found[0]
        if isinstance(first, BaseException):
            raise first
        for other in found[1:]:
            if isinstance(other, BaseException) and not isinstance(other, EndpointError):
                raise other
        drawn = [one for one in found if isinstance(one, Completion)]
        return drawn, "a draw failed" if len(drawn) < len(found) else ""

    async def _values(
        self, point: DecisionPoint, completions: Sequence[Completion]
    ) -> tuple[Sequence[float], int, str]:
        """Return (values, their version, why there are none)."""
        try:
            async with asyncio.timeout(self.timeout_s):
                found = await self.q(point, completions)
            values = found if isinstance(found, QValues) else QValues(found)
            q = [float(value) for value in values.values]
        except TimeoutError:
            return (), 0, "timeout"
        except Exception as error:  # the boundary: a value function of the user's costs a decision, not the episode
            return (), 0, f"error: {describe_error(error)}"
        if len(q) != len(completions):
            return (), values.version, f"malformed: {len(q)} values for {len(completions)} candidates"
        return q, values.version, ""

    def _decide(
        self, completions: Sequence[Completion], q: Sequence[float], beta: float, fallback: str, seed: int
    ) -> tuple[int, Decision]:
        weights, chosen = [1.0] + [0.0] * (len(completions) - 1), 0
        log_selection = 0.0
        if not fallback:
            try:
                if self.max_kl is not None:
                    beta = min(beta, beta_for_kl([0.0] * len(q), q, self.max_kl))
                weights = selection_probs(q, beta, floor=self.floor)
            except GuidanceError as error:
                fallback = f"values: {error}"
            else:
                uniform = Random(derive_seed(seed, "selection")).random()
                chosen = _at(weights, uniform)
                log_selection = log_selection_weight(weights, chosen)
        known = q if len(q) == len(completions) else [None] * len(completions)
        candidates = tuple(_candidate(c, v, w) for c, v, w in zip(completions, known, weights, strict=True))
        return chosen, Decision(
            candidates=candidates,
            chosen=chosen,
            beta=beta if math.isfinite(beta) else -1.0,
            floor=self.floor,
            log_selection=log_selection,
            source=self.name,
            fallback=fallback,
        )

    def _count(self, decision: Decision, completions: Sequence[Completion], value_s: float) -> None:
        self._drawn += len(completions)
        self._value_s += value_s
        if decision.fallback:
            self._fallbacks[decision.fallback.partition(":")[0]] += 1
            if self._guided == 0 and self._fallbacks.total() == _WARN_AFTER:
                _log.warning(
                    f"no decision of the first {_WARN_AFTER} was guided, the base acts alone: {decision.fallback}"
                )
            return
        self._guided += 1
        self._distinct += decision.distinct
        weights = [candidate.weight for candidate in decision.candidates]
        self._kl += math.fsum(w * math.log(w * len(weights)) for w in weights if w > 0)


def _candidate(completion: Completion, q: float | None, weight: float) -> Candidate:
    return Candidate(
        text=completion.text,
        tool_calls=completion.tool_calls,
        token_ids=array("i", completion.token_ids).tobytes(),
        logprobs=array("f", completion.logprobs).tobytes(),
        q=q if q is not None and math.isfinite(q) else None,
        weight=weight,
    )


def _at(weights: Sequence[float], uniform: float) -> int:
    """Return where the cumulated weights pass `uniform`; never a draw of weight 0."""
    total = 0.0
    last = 0
    for index, weight in enumerate(weights):
        if weight > 0:
            total += weight
            last = index
            if uniform < total:
                return index
    return last
