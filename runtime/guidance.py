"""A guided policy: draw a few actions from the base, ask what each is worth, choose with softmax(beta Q).

    messages -> N draws of the base -> Q of each -> weights -> one of them, and a record of how it was chosen

Draws come from the base policy, so they are weighted by exp(beta Q) alone, duplicates kept; `selection` has the
mathematics, `enumeration` the other case, in which somebody lists all actions. Where values fail, the first draw is
taken, which is what the base alone would have done, and the record says so.
"""

import asyncio
import copy
import time
from collections.abc import Callable, Sequence
from typing import Self, TypeAlias

import msgspec

from turngate.runtime.answers import describe_error
from turngate.runtime.base_draw import Draw
from turngate.runtime.conversation import token_mode_of
from turngate.runtime.enumeration import NoDecision, choose_enumerated
from turngate.runtime.errors import ConfigError, EndpointError, GuidanceError
from turngate.runtime.guidance_tally import GuidanceStatistics, GuidanceTally
from turngate.runtime.guided_types import written_beta
from turngate.runtime.plain_numbers import plain_float, plain_int
from turngate.runtime.seeds import derive_seed
from turngate.runtime.selection import Strength, log_selection_weight, pick, selection_probs
from turngate.runtime.types import Candidate, Completion, Decision
from turngate.runtime.value_functions import (
    Candidates,
    DecisionPoint,
    QFunction,
    QValues,
    ValueCalls,
    Values,
    checked_beta,
)

__all__ = ["Beta", "Candidates", "DecisionPoint", "Draw", "Guidance", "GuidanceStatistics", "QFunction", "QValues"]

_NO_SNAPSHOTS = "no snapshots: the values need an environment with snapshots to branch from"
_NO_IDS = "no token ids: the values are read from ids, which this endpoint does not give (token mode 'text')"

Beta: TypeAlias = float | Callable[[int], float]
"""Weight of the values, or a schedule of it by policy version."""


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
        for what, seconds in (("timeout_s", timeout_s), ("grace_s", grace_s)):
            if not seconds > 0:
                raise ConfigError(f"{what} must be positive: got {seconds} (Guidance)")
        if length_normalised and candidates is None:
            raise ConfigError(
                "length_normalised must come with candidates: draws are not weighted by log pi (Guidance)"
            )
        self.candidates, self._length_normalised = candidates, length_normalised
        name = name or str(getattr(q, "name", "") or getattr(q, "__name__", type(q).__name__))
        self._calls = ValueCalls(q, name, timeout_s=timeout_s, grace_s=grace_s)
        self.tally = GuidanceTally()
        self._settle(beta, draws, floor, max_kl)

    def __repr__(self) -> str:
        how = "enumerated" if self.candidates is not None else f"{self.draws} draws"
        return f"<Guidance {self.name}, beta {self.beta}, {how}, {self.tally.guided}/{self.tally.decisions} guided>"

    @property
    def q(self) -> QFunction:
        """The value function."""
        return self._calls.q

    @property
    def name(self) -> str:
        """What records call it."""
        return self._calls.name

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
        strength = Strength(beta, self.floor, self.max_kl)
        if self.candidates is not None:
            return await self._choose_listed(self.candidates, draw, point, strength)
        if why := self._cannot_ask(draw, point):  # and so nothing is drawn to be thrown away
            self.tally.tell_once(f"decisions are not guided, the base acts alone: {why} ({self.name})")
            return await self._fall_back(draw, point, strength, why)
        # 1. Draw; all of them, duplicates included.
        completions, missing = await self._draw(draw, point.seed)
        # 2. Ask what they are worth.
        began_s = time.monotonic()
        values = Values(why=missing) if missing else await self._calls.values(point, completions)
        value_s = time.monotonic() - began_s
        # 3. Choose, and say how.
        chosen, decision = self._decide(completions, values, strength, point.seed)
        return self._decided(completions[chosen], msgspec.structs.replace(decision, seconds=value_s))

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

    async def _choose_listed(
        self, listing: Candidates, draw: Draw, point: DecisionPoint, strength: Strength
    ) -> Completion:
        try:
            chosen = await choose_enumerated(
                self._calls, listing, draw, point, strength, length_normalised=self._length_normalised
            )
        except NoDecision as error:
            return await self._fall_back(draw, point, strength, str(error))
        assert chosen.decision is not None
        return self._decided(chosen, chosen.decision)

    async def _fall_back(self, draw: Draw, point: DecisionPoint, strength: Strength, why: str) -> Completion:
        """Return what the base does where nothing can guide it; one draw, flagged."""
        self.tally.drawn(1)
        completion = await draw(point.seed)
        _, decision = self._decide([completion], Values(why=why), strength, point.seed)
        return self._decided(completion, decision)

    def _decided(self, chosen: Completion, decision: Decision) -> Completion:
        self.tally.decided(decision)
        return msgspec.structs.replace(chosen, decision=decision)

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

    def _decide(
        self, completions: Sequence[Completion], values: Values, strength: Strength, seed: int
    ) -> tuple[int, Decision]:
        """Return which draw is taken, and the record of it; without values the first, as the base alone would."""
        q, version, fallback = values
        weights, chosen = [1.0] + [0.0] * (len(completions) - 1), 0
        beta, log_selection = strength.beta, 0.0
        if not fallback:
            try:
                beta = strength.within_budget([0.0] * len(q), q)
                weights = selection_probs(q, beta, floor=strength.floor)
            except GuidanceError as error:
                fallback = f"values: {error}"
            else:
                chosen = pick(weights, seed)
                log_selection = log_selection_weight(weights, chosen)  # cannot raise: never one of weight 0
        known: Sequence[float | None] = q or [None] * len(completions)
        return chosen, Decision(
            candidates=tuple(map(Candidate.of, completions, known, weights)),
            chosen=chosen,
            beta=written_beta(beta),
            floor=strength.floor,
            log_selection=log_selection,
            source=self.name,
            value_version=version,
            fallback=fallback,
        )
