"""What happens during a run, as typed values; progress bars, metrics, journals and viewers subscribe to them.

The runtime knows no subscriber. Each event type has one slot that is None while nobody listens, and call sites guard:

    if (tell := events.turn_finished) is not None:
        tell(TurnFinished(...))

so an event that nobody hears costs about 20 ns and is never built.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar, TypeAlias, TypeVar

import msgspec

from turngate.runtime.types import Group, Trajectory, Turn

__all__ = [
    "BatchTaken",
    "EvaluationFinished",
    "Event",
    "EventStream",
    "Events",
    "GroupDropped",
    "GroupFinished",
    "RolloutFinished",
    "RolloutStarted",
    "ScoringFailed",
    "TurnFinished",
    "UpdateFinished",
    "WeightsPublished",
]

_log = logging.getLogger("turngate.events")


class RolloutStarted(msgspec.Struct, frozen=True):
    """An episode is about to reset its environment."""

    trajectory_id: str
    group_id: str
    member: int
    task_id: str


class TurnFinished(msgspec.Struct, frozen=True):
    """One action was sampled and executed."""

    trajectory_id: str
    turn: Turn


class RolloutFinished(msgspec.Struct, frozen=True):
    """An episode ended, in whatever way; its environment is closed."""

    trajectory: Trajectory


class ScoringFailed(msgspec.Struct, frozen=True):
    """A scorer left some or all turns of an episode without its score; the episode is as good as before."""

    trajectory_id: str
    scorer: str
    reason: str
    """`error`, `timeout`, `malformed`, `not_finite`."""
    error: str
    """What happened, in words."""


class GroupFinished(msgspec.Struct, frozen=True):
    """All members of a group have ended and the group was offered to the buffer."""

    group: Group


class GroupDropped(msgspec.Struct, frozen=True):
    """A group will never be trained on."""

    group_id: str
    task_id: str
    reason: str
    """`stale`, `group_incomplete`, ...: the ledger counts by it."""
    rollouts: int
    policy_tokens: int
    staleness: int = 0
    """Learner version minus the oldest token's version, when dropped as stale."""


class BatchTaken(msgspec.Struct, frozen=True):
    """The learner took a batch from the buffer."""

    policy_version: int
    groups: int
    rollouts: int
    policy_tokens: int
    staleness_min: int
    staleness_mean: float
    """Mean over policy tokens."""
    staleness_max: int
    waited_s: float
    """Seconds the learner waited for it."""


class UpdateFinished(msgspec.Struct, frozen=True):
    """The learner took one policy update."""

    policy_version: int
    """The version that the update made."""
    metrics: dict[str, float]
    seconds: float


class WeightsPublished(msgspec.Struct, frozen=True):
    """A weight set serves at the endpoint."""

    policy_version: int
    seconds: float
    """From the start of writing until the server answered."""


class EvaluationFinished(msgspec.Struct, frozen=True):
    """A set of tasks was played without training on them."""

    name: str
    policy_version: int
    episodes: int
    successes: int
    reward_mean: float
    seconds: float


Event: TypeAlias = (
    RolloutStarted
    | TurnFinished
    | RolloutFinished
    | ScoringFailed
    | GroupFinished
    | GroupDropped
    | BatchTaken
    | UpdateFinished
    | WeightsPublished
    | EvaluationFinished
)

E = TypeVar("E", bound=Event)


class Events:
    """The slots, one per event type. Not thread safe: emit and subscribe on the event loop."""

    # Changed by subscribing: the slots and _subscribers. Changed by emitting: failures.
    __slots__ = (
        "_subscribers",
        "batch_taken",
        "evaluation_finished",
        "failures",
        "group_dropped",
        "group_finished",
        "rollout_finished",
        "rollout_started",
        "scoring_failed",
        "turn_finished",
        "update_finished",
        "weights_published",
    )

    SLOTS: ClassVar[dict[type, str]] = {
        RolloutStarted: "rollout_started",
        TurnFinished: "turn_finished",
        RolloutFinished: "rollout_finished",
        ScoringFailed: "scoring_failed",
        GroupFinished: "group_finished",
        GroupDropped: "group_dropped",
        BatchTaken: "batch_taken",
        UpdateFinished: "update_finished",
        WeightsPublished: "weights_published",
        EvaluationFinished: "evaluation_finished",
    }
    """The slot of each event type."""

    def __init__(self) -> None:
        self.rollout_started: Callable[[RolloutStarted], None] | None = None
        self.turn_finished: Callable[[TurnFinished], None] | None = None
        self.rollout_finished: Callable[[RolloutFinished], None] | None = None
        self.scoring_failed: Callable[[ScoringFailed], None] | None = None
        self.group_finished: Callable[[GroupFinished], None] | None = None
        self.group_dropped: Callable[[GroupDropped], None] | None = None
        self.batch_taken: Callable[[BatchTaken], None] | None = None
        self.update_finished: Callable[[UpdateFinished], None] | None = None
        self.weights_published: Callable[[WeightsPublished], None] | None = None
        self.evaluation_finished: Callable[[EvaluationFinished], None] | None = None
        self.failures = 0
        """Exceptions raised by subscribers: logged, counted, never passed on."""
        self._subscribers: dict[type, tuple[Callable[[Any], None], ...]] = dict.fromkeys(self.SLOTS, ())

    def __repr__(self) -> str:
        heard = [f"{name} x{len(self._subscribers[kind])}" for kind, name in self.SLOTS.items() if getattr(self, name)]
        return f"<Events {', '.join(heard) or 'unheard'}, {self.failures} subscriber failures>"

    def subscribe(self, kind: type[E], subscriber: Callable[[E], None]) -> Callable[[], None]:
        """Call `subscriber` inline with every event of exactly this type; returns a function that unsubscribes.

        A subscriber runs on the event loop in the middle of whatever happened: it must be quick. What it raises is
        logged and counted in `failures`.
        """
        self._set(kind, (*self._subscribers[kind], subscriber))

        def unsubscribe() -> None:
            left = list(self._subscribers[kind])
            if subscriber in left:
                left.remove(subscriber)
                self._set(kind, tuple(left))

        return unsubscribe

    def stream(self, *kinds: type[Event], size: int = 1024) -> "EventStream":
        """Return an asynchronous iterator over events of these types (all, when none is named).

        It holds at most `size` events; when its reader falls behind, the oldest go and are counted in `dropped`.
        """
        stream = EventStream(size)
        for kind in kinds or tuple(self.SLOTS):
            stream.on_close.append(self.subscribe(kind, stream.put))
        return stream

    def _set(self, kind: type, subscribers: tuple[Callable[[Any], None], ...]) -> None:
        self._subscribers[kind] = subscribers
        setattr(self, self.SLOTS[kind], self._fan_out(subscribers) if subscribers else None)

    def _fan_out(self, subscribers: tuple[Callable[[Any], None], ...]) -> Callable[[Any], None]:
        def tell(event: Any) -> None:
            for subscriber in subscribers:
                try:
                    subscriber(event)
                except Exception:
                    # A recorded boundary: a broken progress bar must not end a run that has gone on for days.
                    self.failures += 1
                    _log.exception("subscriber %r failed on %s", subscriber, type(event).__name__)

        return tell


class EventStream:
    """A bounded ring between the runtime and one asynchronous reader. Made by `Events.stream`."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size must be positive: expected >= 1, got {size}")
        self.dropped = 0
        """Events lost because the reader was slower than the run."""
        self.on_close: list[Callable[[], None]] = []
        self._ring: deque[Event] = deque(maxlen=size)
        self._reader: asyncio.Future[None] | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<EventStream {len(self._ring)} of {self._ring.maxlen} waiting, {self.dropped} dropped>"

    def put(self, event: Event) -> None:
        """Add an event, pushing out the oldest when full."""
        if len(self._ring) == self._ring.maxlen:
            self.dropped += 1
        self._ring.append(event)
        self._wake()

    def close(self) -> None:
        """Stop listening. The reader gets what is in the ring, then the iteration ends."""
        self._closed = True
        while self.on_close:
            self.on_close.pop()()
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        """Wait for the next event. A cancelled wait loses nothing."""
        while not self._ring:
            if self._closed:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._ring.popleft()
