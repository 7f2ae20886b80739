"""A guided policy: draw a few actions from the base, ask what each is worth, choose with softmax(beta Q).

    messages -> N draws of the base -> Q of each -> weights -> one of them, and a record of how it was chosen

Draws come from the base policy, so they are weighted by exp(beta Q) alone, duplicates kept; `selection` has the
mathematics, `enumeration` the other case, in which somebody lists all actions. Where values fail, the first draw is
taken, which is what the base alone would have done, and the record says so.
"""

import asyncio
import copy
import math
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self, TypeAlias, TypeVar, cast

import msgspec

from turngate.envs.base import Action
from turngate.runtime.answers import describe_error
from turngate.runtime.conversation import token_mode_of
from turngate.runtime.deadline import Deadline, DeadlineExceeded
from turngate.runtime.errors import ConfigError, EndpointError, GuidanceError, ToolError
from turngate.runtime.foreign import ForeignCalls
from turngate.runtime.guidance_tally import GuidanceStatistics, GuidanceTally
from turngate.runtime.plain_numbers import plain_float, plain_int
from turngate.runtime.seeds import derive_seed
from turngate.runtime.selection import beta_for_kl, log_selection_weight, pick, selection_probs
from turngate.runtime.types import Candidate, Completion, Decision
from turngate.runtime.value_functions import (
    DecisionPoint,
    QFunction,
    QValues,
    checked_beta,
    checked_values,
    copied,
)

__all__ = ["Beta", "Candidates", "DecisionPoint", "Draw", "Guidance", "GuidanceStatistics", "QFunction", "QValues"]

_NO_SNAPSHOTS = "no snapshots: the values need an environment with snapshots to branch from"
_NO_IDS = "no token ids: the values are read from ids, which this endpoint does not give (token mode 'text')"
_WHY_CHARS = 1000
"""Of a failure's text in a record: what others raise may hold whole replies."""
_BUDGET_BETA = 1e12
"""Where every beta is within the KL budget: as good as infinite, without the choice counting as greedy by intent."""

T = TypeVar("T")
Beta: TypeAlias = float | Callable[[int], float]
"""Weight of the values, or a schedule of it by policy version."""
Draw: TypeAlias = Callable[[int], Awaitable[Completion]]
"""Samples one action of the base policy with a seed."""


Candidates: TypeAlias = Callable[[DecisionPoint], Sequence[Action] | Awaitable[Sequence[Action]]]
"""Lists the actions of a situation. What it raises costs this decision its guidance."""


class Guidance:
    """Chooses among draws of the base policy by their values.

        runtime = Runtime(endpoint, guidance=Guidance(CriticQ.of(engine), beta=5.0, draws=8))

    One object serves any number of episodes at once.
    """

    # Changed by choose(): the tally.

    def __init__(
        self,
        q: QFunction,
        *,
        beta: Beta,
        draws: int = 8,
        floor: float = 0.0,
        max_kl: float | None = None,
        timeout_s: float = 10.0,
        grace_s: float = 5.0,
        candidates: Candidates | None = None,
        length_normalised: bool = False,
        name: str = "",
    ) -> None:
        """Hold the settings.

        Args: beta: 0 is the base policy itself, drawn once; infinity takes the best draw. A function of the policy
                version is a schedule.
            draws: actions drawn per decision.
            floor: mixed in uniformly; keeps every draw possible, so that greedy choices can be corrected for.
            max_kl: beta is lowered, decision by decision, until the choice is at most so far from a uniform one.
            timeout_s: for the values of one decision; later ones are not waited for.
            grace_s: values that ignore their cancellation longer than this are left behind.
            candidates: lists the actions of a situation, which are then weighted by softmax(log pi + beta Q) in place
                of draws; see `enumeration`. Beta 0 is then the base policy restricted to them.
            length_normalised: with `candidates` alone: log pi is divided by the action's number of tokens, which is
                another target.
            name: what records call the source; by default the value function's own.
        Raises: ConfigError: a setting cannot work.
        """
        asked: object = q
        if not callable(asked) or isinstance(asked, type):
            raise ConfigError(f"q must be a coroutine function of (point, candidates): got {q!r:.80} (Guidance)")
        self.q, self.timeout_s, self.grace_s = q, timeout_s, grace_s
        self.candidates, self.length_normalised = candidates, length_normalised
        self.name = name or str(getattr(q, "name", "") or getattr(q, "__name__", type(q).__name__))
        self.tally = GuidanceTally()
        self._settle(beta, draws, floor, max_kl)

    def __repr__(self) -> str:
        how = "enumerated" if self.candidates is not None else f"{self.draws} draws"
        return f"<Guidance {self.name}, beta {self.beta}, {how}, {self.tally.guided}/{self.tally.decisions} guided>"

    @property
    def is_greedy(self) -> bool:
        """Whether it may take the best draw for certain; no policy gradient can learn from that."""
        return self.beta == math.inf and self.floor == 0.0 and self.max_kl is None

    def statistics(self) -> GuidanceStatistics:
        """Return the tallies as they are now."""
        return self.tally.statistics()

    def variant(
        self,
        *,
        beta: float | None = None,
        draws: int | None = None,
        floor: float | None = None,
        max_kl: float | None = None,
    ) -> Self:
        """Return the same guidance with other settings; tallies are shared. Raises: ConfigError: one cannot work."""
        found = copy.copy(self)
        found._settle(
            self.beta if beta is None else beta,
            self.draws if draws is None else draws,
            self.floor if floor is None else floor,
            self.max_kl if max_kl is None else max_kl,
        )
        return found

    def _settle(self, beta: Beta, draws: int, floor: float, max_kl: float | None) -> None:
        """Hold the settings that vary, as plain numbers: they go into records, which know no NumPy."""
        self.beta = beta if callable(beta) else checked_beta(beta, "Guidance")
        self.draws, self.floor = plain_int("draws", draws, "Guidance"), plain_float("floor", floor, "Guidance")
        self.max_kl = None if max_kl is None else plain_float("max_kl", max_kl, "Guidance")
        if self.draws < 1:
            raise ConfigError(f"draws must be 1 or more: got {self.draws} (Guidance)")
        if not 0 <= self.floor <= 1:
            raise ConfigError(f"floor must be between 0 and 1: got {self.floor} (Guidance)")
        if self.max_kl is not None and not self.max_kl >= 0:
            raise ConfigError(f"max_kl must be at least 0: got {self.max_kl} (Guidance)")
        for what in ("timeout_s", "grace_s"):
            if not getattr(self, what) > 0:
                raise ConfigError(f"{what} must be positive: got {getattr(self, what)} (Guidance)")
        if self.length_normalised and self.candidates is None:
            raise ConfigError(
                "length_normalised must come with candidates: draws are not weighted by log pi (Guidance)"
            )

    async def choose(self, draw: Draw, point: DecisionPoint) -> Completion:
        """Return the chosen action, with the decision on it.

        The first draw has the seed that the base alone would have used, and beta 0 is the base path itself, bit for
        bit. Cancelled: so are draws and values, and nothing is left behind.
        Raises: EndpointError, as the base alone would have: the first draw failed. ConfigError: the schedule gives no
        beta, or actions cannot be enumerated here.
        """
        beta = self.beta_at(point.policy_version)
        if beta == 0 and self.candidates is None:
            self.tally.drawn(1)
            return await draw(point.seed)
        # Others are shown lists of their own: what they do to them changes neither the draws nor the episode.
        point = msgspec.structs.replace(point, messages=tuple(point.messages), history=tuple(point.history))
        if self.candidates is not None:
            from turngate.runtime.enumeration import choose_enumerated  # late: it imports this module

            # Through Any: in a cycle of imports type checkers take this file and its link for two modules.
            guidance, listing, here = cast(Any, self), cast(Any, self.candidates), cast(Any, point)
            return await choose_enumerated(guidance, listing, draw, here, beta)
        if why := self._cannot_ask(draw, point):  # and so nothing is drawn to be thrown away
            self.tally.tell_once(f"decisions are not guided, the base acts alone: {why} ({self.name})")
            return await self.fall_back(draw, point, beta, why)
        # 1. Draw; all of them, duplicates included.
        completions, missing = await self._draw(draw, point.seed)
        # 2. Ask what they are worth.
        began_s = time.monotonic()
        q, version, fallback = await self.values(point, completions) if not missing else ((), 0, missing)
        value_s = time.monotonic() - began_s
        # 3. Choose, and say how.
        chosen, decision = self._decide(completions, q, beta, fallback, point.seed)
        decision = msgspec.structs.replace(decision, value_version=version, seconds=value_s)
        self.tally.decided(decision)
        return msgspec.structs.replace(completions[chosen], decision=decision)

    def beta_at(self, policy_version: int) -> float:
        """Return the beta of one version. Raises: ConfigError: the schedule gives none."""
        if not callable(self.beta):
            return self.beta
        where = f"Guidance, from its schedule at policy version {policy_version}"
        try:
            beta: object = self.beta(policy_version)
        except Exception as error:  # the boundary: the schedule is the user's, and so is what it raises
            raise ConfigError(f"beta must be at least 0: got {describe_error(error)} ({where})") from error
        return checked_beta(beta, where)

    async def fall_back(self, draw: Draw, point: DecisionPoint, beta: float, why: str) -> Completion:
        """Return what the base does where nothing can guide it; one draw, flagged."""
        self.tally.drawn(1)
        completion = await draw(point.seed)
        _, decision = self._decide([completion], (), beta, why, point.seed)
        self.tally.decided(decision)
        return msgspec.structs.replace(completion, decision=decision)

    def within_budget(self, beta: float, base_logprobs: Sequence[float], q: Sequence[float]) -> float:
        """Return beta, lowered to the KL budget if there is one. Raises: GuidanceError: nothing can be chosen."""
        if self.max_kl is None:
            return beta
        return min(beta, beta_for_kl(base_logprobs, q, self.max_kl), _BUDGET_BETA)

    def _cannot_ask(self, draw: Draw, point: DecisionPoint) -> str:
        """Return what the value function needs and nobody has here; empty when it can be asked."""
        if point.snapshot is None and getattr(self.q, "needs_snapshots", False):
            return _NO_SNAPSHOTS
        is_text = token_mode_of(getattr(draw, "endpoint", None)) == "text"
        return _NO_IDS if is_text and getattr(self.q, "needs_token_ids", False) else ""

    async def _draw(self, draw: Draw, seed: int) -> tuple[list[Completion], str]:
        """Return the draws, and what is missing of them; the first is what the base alone would have drawn."""
        seeds = [seed, *(derive_seed(seed, "draw", index) for index in range(1, self.draws))]
        self.tally.drawn(len(seeds))
        tasks = [asyncio.ensure_future(draw(one)) for one in seeds]
        try:
            await tasks[0]  # what it raises nobody has to wait for longer than the base alone would
            found = await asyncio.gather(*tasks, return_exceptions=True)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        for other in found:
            if isinstance(other, BaseException) and not isinstance(other, EndpointError):
                raise other
        failed = sorted({type(one).__name__ for one in found if isinstance(one, BaseException)})
        return [one for one in found if isinstance(one, Completion)], f"a draw failed: {failed[0]}" if failed else ""

    async def values(self, point: DecisionPoint, completions: Sequence[Completion]) -> tuple[Sequence[float], int, str]:
        """Return (values, their version, why there are none)."""

        shown = tuple(copied(completion) for completion in completions)

        async def ask() -> QValues:
            found = await self.q(point, shown)
            return checked_values(found if isinstance(found, QValues) else QValues(found), len(shown))

        found, why = await self.outcome_of(f"value function {self.name}", point, ask)
        if found is None:
            return (), 0, why
        if (count := len(found.values)) != len(completions):
            return (), found.version, f"malformed: {count} values for {len(completions)} candidates"
        return found.values, found.version, ""

    async def outcome_of(
        self, what: str, point: DecisionPoint, ask: Callable[[], Awaitable[T]]
    ) -> tuple[T | None, str]:
        """Return (what code that is not ours gives within the decision's deadline, why it gave nothing)."""
        deadline = Deadline()
        calls = ForeignCalls(f"decision of turn {point.turn}", deadline, grace_s=self.grace_s)
        try:
            with deadline:
                deadline.set(asyncio.get_running_loop().time() + self.timeout_s, "values")
                return await calls.run(what, ToolError, ask), ""
        except Exception as error:  # the boundary: code of the user's costs a decision, not the episode
            if isinstance(error, DeadlineExceeded) and deadline.expired:
                return None, "timeout"
            return None, f"error: {describe_error(error)}"[:_WHY_CHARS]

    def _decide(
        self, completions: Sequence[Completion], q: Sequence[float], beta: float, fallback: str, seed: int
    ) -> tuple[int, Decision]:
        weights, chosen = [1.0] + [0.0] * (len(completions) - 1), 0
        log_selection = 0.0
        if not fallback:
            try:
                beta = self.within_budget(beta, [0.0] * len(q), q)
                weights = selection_probs(q, beta, floor=self.floor)
            except GuidanceError as error:
                fallback = f"values: {error}"
            else:
                chosen = pick(weights, seed)
                log_selection = log_selection_weight(weights, chosen)  # cannot raise: never one of weight 0
        known = q if len(q) == len(completions) else [None] * len(completions)
        candidates = tuple(candidate_of(c, v, w) for c, v, w in zip(completions, known, weights, strict=True))
        return chosen, Decision(
            candidates=candidates,
            chosen=chosen,
            beta=beta if math.isfinite(beta) else -1.0,
            floor=self.floor,
            log_selection=log_selection,
            source=self.name,
            fallback=fallback,
        )


def candidate_of(completion: Completion, q: float | None, weight: float) -> Candidate:
    """Return one candidate as the record has it."""
    return Candidate(
        text=completion.text,
        tool_calls=completion.tool_calls,
        token_ids=array("i", completion.token_ids).tobytes(),
        logprobs=array("f", completion.logprobs).tobytes(),
        q=q if q is not None and math.isfinite(q) else None,
        weight=weight,
    )
