"""Judgements of an episode's turns by code that is not ours: process reward models, progress measures, judges.

A scorer looks at a finished episode and says for each turn how the history after it stands. What it says goes to
`Turn.scores`, apart from the environment's rewards: a learner may use it, returns and evaluations never do.
"""

import asyncio
import hashlib
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, cast

import anyio
import msgspec

from turngate.runtime.answers import describe_error, writable
from turngate.runtime.deadline import Deadline, DeadlineExceeded
from turngate.runtime.errors import ConfigError, MalformedReply, ToolError
from turngate.runtime.events import Events, ScoringFailed
from turngate.runtime.foreign import ForeignCalls
from turngate.runtime.lru import LRU
from turngate.runtime.opening import opening_messages
from turngate.runtime.slots import Slots
from turngate.runtime.types import Trajectory, Turn
from turngate.runtime.unwrap import single_errors

__all__ = ["ScoreTurns", "Scorer", "ScorerSet", "ScorerStatistics", "content_key"]

_log = logging.getLogger("turngate.scorers")


ScoreTurns: TypeAlias = Callable[[Trajectory], Awaitable[Sequence[float]]]
"""A coroutine function that scores the turns of an episode: see `Scorer`."""


class Scorer(Protocol):
    """Scores the turns of an episode.

    Must be a function of what the episode holds: equal episodes are asked about once. What blocks the event loop
    belongs in a thread.
    """

    @property
    def name(self) -> str:
        """Key of its scores in `Turn.scores`."""
        ...

    async def __call__(self, trajectory: Trajectory) -> Sequence[float]:
        """Return one score per turn, of the history after it; NaN for a turn that cannot be told."""
        ...


class ScorerStatistics(msgspec.Struct, frozen=True):
    """What one scorer has done so far."""

    in_flight: int
    scored: int
    """Episodes it was asked about and scored in full."""
    cached: int
    """Episodes like one it had scored before."""
    failed: Mapping[str, int]
    """Episodes that lack some or all of its scores, by reason: `error`, `timeout`, `malformed`, `not_finite`."""
    last_failure: str
    latency_mean_s: float
    """Over the episodes scored in full."""


class ScorerSet:
    """Scorers that run side by side on every finished episode. One that fails costs its own scores and nothing else.

    runtime = Runtime(endpoint, scorers=ScorerSet([JudgeEndpoint(server)], deadline_s=30.0))
    runtime = Runtime(endpoint, scorers=ScorerSet({"progress": progress_of}))
    """

    # Changed by calls: the tallies, the cache, and the slots.

    def __init__(
        self,
        scorers: Iterable[Scorer] | Mapping[str, ScoreTurns],
        *,
        deadline_s: float = 120.0,
        max_concurrent: int = 32,
        cache_size: int = 4096,
        grace_s: float = 10.0,
        key: Callable[[Trajectory], Hashable] | None = None,
    ) -> None:
        """Hold the scorers.

        Args: scorers: objects with names of their own, or coroutine functions by name.
            deadline_s: of one call, from when its turn has come; there are no retries.
            max_concurrent: calls at a time, over all scorers and episodes; the others wait.
            cache_size: answers that are remembered, each of one scorer on one episode; the least recently used go, and
            0 turns it off.
            grace_s: a call that ignores its cancellation longer than this is left behind.
            key: what episodes with equal scores have in common, None for one that is like no other; by default
            `content_key`.
        Raises: ConfigError: two scorers have one name, or a limit cannot work.
        """
        self._scorers = _named(scorers)
        names = [name for name, _ in self._scorers]
        if len(set(names)) != len(names) or "" in names:
            raise ConfigError(f"scorers must have names of their own: got {names}; they are the keys of the scores")
        for what, value in (("deadline_s", deadline_s), ("grace_s", grace_s)):
            if not value > 0:
                raise ConfigError(f"{what} must be positive: got {value} (ScorerSet)")
        self._deadline_s, self._grace_s = deadline_s, grace_s
        self._slots = Slots(max_concurrent)
        self._cache: LRU[tuple[float, ...]] = LRU(cache_size)
        self._key = key or content_key
        self._tallies = {name: _Tally() for name in names}

    def __repr__(self) -> str:
        failed = sum(sum(tally.failed.values()) for tally in self._tallies.values())
        scored = sum(tally.scored + tally.cached for tally in self._tallies.values())
        return f"<ScorerSet {', '.join(self.names) or 'empty'}: {scored} scored, {failed} failed, {self._slots!r}>"

    @property
    def names(self) -> tuple[str, ...]:
        """The scores that episodes get."""
        return tuple(self._tallies)

    def statistics(self) -> dict[str, ScorerStatistics]:
        """Return what each scorer has done, by name."""
        return {name: tally.statistics() for name, tally in self._tallies.items()}

    async def score(self, trajectory: Trajectory, *, events: Events | None = None) -> Trajectory:
        """Return the trajectory with every scorer's word on every turn in `Turn.scores`.

        A turn whose score is missing lacks the name: the scorer failed, was late, or said NaN; the events are told.
        Cancelled: so are the scorers, and nothing is left behind.
        """
        if not self._scorers or not trajectory.turns:
            return trajectory
        key = self._key_of(trajectory)
        # Taken now: scorers are handed the record itself, and what they do to its dicts is no reward.
        before = [(dict(turn.rewards), dict(turn.scores)) for turn in trajectory.turns]
        found: dict[str, tuple[float, ...]] = {}

        async def score_one(name: str, scorer: ScoreTurns) -> None:
            try:
                found[name] = await self._scores(name, scorer, trajectory, key)
            except _Failed as failure:
                self._record(name, trajectory, failure, events)
                found[name] = failure.scores

        with single_errors():
            async with anyio.create_task_group() as tg:
                for name, scorer in self._scorers:
                    tg.start_soon(score_one, name, scorer)
        turns: list[Turn] = []
        for t, (turn, (rewards, scores)) in enumerate(zip(trajectory.turns, before, strict=True)):
            said = {name: found[name][t] for name in self.names if t < len(found[name])}
            scores |= {name: score for name, score in said.items() if math.isfinite(score)}
            turns.append(msgspec.structs.replace(turn, rewards=rewards, scores=scores))
        return msgspec.structs.replace(trajectory, turns=tuple(turns))

    def _key_of(self, trajectory: Trajectory) -> Hashable:
        try:
            key = self._key(trajectory)
            hash(key)
        except Exception as error:
            # A recorded boundary: the key is the user's, and what it reads the environment's. Asking twice is safe.
            _log.debug("trajectory %s has no cache key: %s", trajectory.id, describe_error(error))
            return None
        return key

    async def _scores(self, name: str, scorer: ScoreTurns, trajectory: Trajectory, key: Hashable) -> tuple[float, ...]:
        """Return one scorer's scores, remembered or new. Raises: _Failed: some or all are missing."""
        tally = self._tallies[name]
        cached = self._cache.get((name, key)) if key is not None else None
        if cached is not None and len(cached) == len(trajectory.turns):
            tally.cached += 1
            return cached
        async with self._slots.hold():
            began_s = asyncio.get_running_loop().time()
            tally.in_flight += 1
            try:
                said = await self._ask(name, scorer, trajectory)
            finally:
                tally.in_flight -= 1
        scores = _one_per_turn(said, len(trajectory.turns))
        if missing := [t for t, score in enumerate(scores) if not math.isfinite(score)]:
            got = {t: scores[t] for t in missing[:4]}
            raise _Failed("not_finite", f"scores must be finite: got {got} by turn", scores)
        tally.scored += 1
        tally.seconds += asyncio.get_running_loop().time() - began_s
        if key is not None:
            self._cache.put((name, key), scores)
        return scores

    async def _ask(self, name: str, scorer: ScoreTurns, trajectory: Trajectory) -> Any:
        """Call a scorer within the deadline; whatever goes wrong is a _Failed."""
        deadline = Deadline()
        calls = ForeignCalls(f"trajectory {trajectory.id}", deadline, grace_s=self._grace_s)
        try:
            with deadline:
                deadline.set(asyncio.get_running_loop().time() + self._deadline_s, name)
                return await calls.run(f"scorer {name}", ToolError, scorer, trajectory)
        except Exception as error:
            # A recorded boundary: whatever a scorer raises, the episode is as good as before.
            if isinstance(error, DeadlineExceeded) and deadline.expired:
                what = f"it must answer within {self._deadline_s:g} s: it did not (deadline_s)"
                raise _Failed("timeout", what) from error
            kinds = (("timeout", TimeoutError), ("malformed", MalformedReply))
            reason = next((reason for reason, kind in kinds if isinstance(error, kind)), "error")
            raise _Failed(reason, f"{type(error).__name__}: {error}") from error

    def _record(self, name: str, trajectory: Trajectory, failure: "_Failed", events: Events | None) -> None:
        tally = self._tallies[name]
        is_first = not tally.failed
        tally.failed[failure.reason] = tally.failed.get(failure.reason, 0) + 1
        tally.last_failure = writable(f"{failure.reason}: {failure} (scorer {name}, trajectory {trajectory.id})")
        if is_first:  # the others are counted: a judge that is down fails every episode
            _log.warning("scoring failed, from now on only counted: %s", tally.last_failure)
        if events is not None and (tell := events.scoring_failed) is not None:
            tell(ScoringFailed(trajectory.id, name, failure.reason, tally.last_failure))


def content_key(trajectory: Trajectory) -> bytes:
    """Return a digest of all that an episode shows: task, opening, what was said and answered, tokens, states, end.

    Ids, seeds, times, log-probs and versions are left out, so siblings that did the same are alike.
    """
    turns = [
        (
            t.text,
            [(c.name, c.arguments) for c in t.tool_calls],
            t.observation,
            t.rewards,
            t.valid,
            t.state,
            t.stop_reason,
        )
        for t in trajectory.turns
    ]
    tokens = [(s.token_ids, s.turn_ids) for s in trajectory.segments]
    shown = (trajectory.task, opening_messages(trajectory), turns, tokens, trajectory.end)
    return hashlib.blake2b(_encode(shown), digest_size=16).digest()


def _plain(value: Any) -> Any:
    """Make NumPy's scalars and arrays in a state comparable; anything else is not: its text may leave things out."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"a {type(value).__name__} in the state cannot be compared")
    return value.tolist()


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode


class _Tally:
    """The mutable counts of one scorer."""

    __slots__ = ("cached", "failed", "in_flight", "last_failure", "scored", "seconds")

    def __init__(self) -> None:
        self.in_flight = self.scored = self.cached = 0
        self.failed: dict[str, int] = {}
        self.last_failure, self.seconds = "", 0.0

    def statistics(self) -> ScorerStatistics:
        mean_s = self.seconds / self.scored if self.scored else 0.0
        return ScorerStatistics(self.in_flight, self.scored, self.cached, dict(self.failed), self.last_failure, mean_s)


class _Failed(Exception):
    """A scorer gave no usable scores, for a named reason."""

    def __init__(self, reason: str, what: str, scores: tuple[float, ...] = ()) -> None:
        super().__init__(what)
        self.reason, self.scores = reason, scores


def _named(scorers: Iterable[Scorer] | Mapping[str, ScoreTurns]) -> tuple[tuple[str, ScoreTurns], ...]:
    if isinstance(scorers, Mapping):
        return tuple(cast(Mapping[str, ScoreTurns], scorers).items())
    return tuple((_name_of(scorer), scorer) for scorer in scorers)


def _name_of(scorer: Scorer) -> str:
    name: Any = getattr(scorer, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"a scorer must have a name: got {name!r} ({scorer!r:.80}); it is the key of its scores")
    return name


def _one_per_turn(said: Any, turns: int) -> tuple[float, ...]:
    """Return what a scorer said as floats. Raises: _Failed: it is not one number per turn."""
    try:
        if isinstance(said, str | bytes | Mapping):
            raise TypeError(f"expected a sequence of numbers, got {type(said).__name__}")
        # At most one too many: it could be endless.
        values = list(itertools.islice(cast(Iterable[Any], said), turns + 1))
        if any(isinstance(value, str | bytes) for value in values):
            raise TypeError("expected numbers, got text")
        scores = tuple(float(value) for value in values)
    except Exception as error:
        # A recorded boundary: iterating and converting run the scorer's own code.
        raise _Failed("malformed", f"scores must be one number per turn: {describe_error(error)}") from error
    if len(scores) != turns:
        got = len(scores) if len(scores) < turns else f"more than {turns}"
        raise _Failed("malformed", f"scores must be one number per turn: expected {turns}, got {got}")
    return scores
