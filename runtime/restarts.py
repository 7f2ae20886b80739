"""States reached through mistakes, kept to start episodes from again.

    group from task starts -> RestartStore.harvest -> RestartPoint -> RestartStore.draw -> restart group -> report

The start distribution becomes (1 - share) task starts + share of these states. Members of a restart group share one
state and form a group of their own; what led to the state is context to them, no loss falls on it.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from random import Random
from typing import Literal, NamedTuple, TypeAlias, get_args

import msgspec

from turngate.envs.base import End, Snapshot, Task
from turngate.runtime.answers import describe_error
from turngate.runtime.errors import ConfigError
from turngate.runtime.recorded_chat import RecordedChat, own_starts
from turngate.runtime.recovery import beta_learnability, mixed_with_uniform
from turngate.runtime.seeds import derive_seed
from turngate.runtime.types import Group, Message, RestartedFrom, Trajectory, Turn

__all__ = [
    "RestartPoint",
    "RestartReason",
    "RestartStatistics",
    "RestartStore",
    "Restarts",
    "check_restarts",
    "find_restart_points",
]

RestartReason: TypeAlias = Literal["invalid", "mistake", "injected", "value_drop", "failed_suffix"]
"""What the turn before the state was: invalid by the environment's word, a mistake by `Restarts.is_mistake`, injected,
followed by a drop in estimated value; or, for `failed_suffix`, any turn of an episode that failed."""

REASONS: tuple[RestartReason, ...] = get_args(RestartReason)


class Restarts(msgspec.Struct, frozen=True, kw_only=True):
    """How often and from which states episodes are started again."""

    share: float = 0.25
    """Probability that a group starts from a kept state, once there is one."""
    reasons: tuple[RestartReason, ...] = REASONS
    """Which states are kept; the first that applies names the state."""
    is_mistake: Callable[[Turn], bool] | None = None
    """Whether a turn was a mistake, for reason `mistake` and for the recovery metrics; reads `Turn.state`, say."""
    value_score: str | None = None
    """Name of the score that says what the history after a turn is worth, for reason `value_drop`; scorers give it."""
    value_drop: float = 0.2
    """Fall of that score from one turn to the next that counts as a mistake."""
    max_age: int = 8
    """Policy versions after which a state is forgotten: younger policies may not come there any more."""
    capacity: int = 256
    """States kept at most; the least learnable gives way."""
    floor: float = 0.1
    """Weight of the uniform distribution among the states, beside that of learnability."""

    def __post_init__(self) -> None:
        for name in ("share", "floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be between 0 and 1: got {getattr(self, name)} (Restarts)")
        if unknown := [reason for reason in self.reasons if reason not in REASONS]:
            raise ConfigError(f"reasons must be among {', '.join(REASONS)}: got {', '.join(unknown)} (Restarts)")
        if not self.value_drop > 0:
            raise ConfigError(f"value_drop must be positive: got {self.value_drop} (Restarts)")
        if self.max_age < 0 or self.capacity < 1:
            raise ConfigError(
                f"max_age must be 0 or more and capacity 1 or more: got {self.max_age}, {self.capacity} (Restarts)"
            )

    def finds_mistake(self, turn: Turn) -> bool:
        """Return what `is_mistake` says of a turn, False without one. Raises: ConfigError: it raised."""
        if self.is_mistake is None:
            return False
        try:
            return bool(self.is_mistake(turn))
        except Exception as error:  # whatever a function of the user's raises, it must be clear whose it is
            raise ConfigError(
                f"is_mistake must answer for every turn: got {describe_error(error)} (turn {turn.index}); a state "
                "is None where the environment gave none, or never answered"
            ) from error


def check_restarts(restarts: Restarts | None, scorers: Collection[str]) -> None:
    """Require that a scorer gives the values that restarts look at. Raises: ConfigError: none does."""
    if restarts is not None and restarts.value_score is not None and restarts.value_score not in scorers:
        raise ConfigError(
            f"the runtime must have a scorer for value_score: expected {restarts.value_score}, got "
            f"{', '.join(scorers) or 'none'}; pass Runtime(scorers=...) or correct the name (Restarts)"
        )


class RestartPoint(msgspec.Struct, frozen=True):
    """A state that an episode can be started from, and how it was reached."""

    task: Task
    snapshot: Snapshot
    messages: tuple[Message, ...]
    """The history until then; what the environment answered last is part of it."""
    restarted_from: RestartedFrom
    chat: RecordedChat | None = None
    """The ids behind the history, where they are known and whoever starts there can go on from them."""


class RestartStatistics(msgspec.Struct, frozen=True):
    """The store at one moment."""

    points: int
    by_reason: dict[str, int]
    tried: int
    """Points that a group was started from."""
    success_mean: float
    """Mean of the points' posterior success rates; 0 when there are none."""
    harvested: int
    drawn: int
    aged_out: int
    evicted: int
    """Since the start of the run: points found, groups started from one, points forgotten as too old, and points that
    gave way to others."""


class _Entry(msgspec.Struct):
    point: RestartPoint
    tries: int = 0
    successes: int = 0

    def score(self) -> float:
        return beta_learnability(self.successes, self.tries)


class _SavedEntry(msgspec.Struct):
    task_id: str  # a run is resumed with its tasks, which may be large
    snapshot: Snapshot
    messages: tuple[Message, ...]
    restarted_from: RestartedFrom
    tries: int
    successes: int


class _Saved(msgspec.Struct):
    entries: list[_SavedEntry]
    harvested: int
    drawn: int
    aged_out: int
    evicted: int


class RestartStore:
    """Keeps restart points: bounded, none too old, and more often drawn the less certain their outcome is."""

    # State.
    _entries: dict[tuple[str, int], _Entry]  # by origin and turn, in the order they came
    harvested: int
    drawn: int
    aged_out: int
    evicted: int

    def __init__(self, config: Restarts) -> None:
        """Start empty."""
        self.config = config
        self._entries = {}
        self.harvested = self.drawn = self.aged_out = self.evicted = 0

    def __repr__(self) -> str:
        return f"<RestartStore {len(self._entries)} of {self.config.capacity} points, {self.drawn} groups drawn>"

    def __len__(self) -> int:
        return len(self._entries)

    def harvest(self, group: Group) -> int:
        """Keep at most one state of each member of a group from a task's start, and return how many.

        Restarted episodes are not harvested: states would come from ever further away from any task's start.
        """
        count = 0
        for trajectory in group.trajectories:
            if points := find_restart_points(trajectory, self.config):
                pick = derive_seed(trajectory.seed, "restart point") % len(points)
                self._add(points[pick])
                count += 1
        self.harvested += count
        return count

    def draw(self, policy_version: int, random: Random) -> RestartPoint | None:
        """Return a state to start a group from, None for the task's start: by `share`, or for want of a state."""
        self._forget_old(policy_version)
        if random.random() >= self.config.share or not self._entries:
            return None
        entries = list(self._entries.values())
        weights = mixed_with_uniform([entry.score() for entry in entries], floor=self.config.floor)
        (entry,) = random.choices(entries, weights)
        self.drawn += 1
        return entry.point

    def report(self, point: RestartPoint, members: Iterable[Trajectory]) -> None:
        """Count what came of a group from this point; cut short is not a success."""
        entry = self._entries.get(_key(point))
        if entry is None:
            return  # forgotten in the meantime
        for member in members:
            entry.tries += 1
            entry.successes += member.end is End.success

    def discard(self, point: RestartPoint) -> None:
        """Forget a point, such as one that cannot be restored."""
        self._entries.pop(_key(point), None)

    def statistics(self) -> RestartStatistics:
        """Return the counts as they are now."""
        entries = list(self._entries.values())
        reasons = Counter(entry.point.restarted_from.reason for entry in entries)
        means = [(1 + entry.successes) / (2 + entry.tries) for entry in entries]
        return RestartStatistics(
            points=len(entries),
            by_reason=dict(reasons),
            tried=sum(entry.tries > 0 for entry in entries),
            success_mean=sum(means) / len(means) if means else 0.0,
            harvested=self.harvested,
            drawn=self.drawn,
            aged_out=self.aged_out,
            evicted=self.evicted,
        )

    def metrics(self) -> dict[str, float]:
        """Return the counts by the names of the run's metrics."""
        s = self.statistics()
        return {
            "restart_points": float(s.points),
            "restart_points_tried": float(s.tried),
            "restart_points_harvested": float(s.harvested),
            "restart_points_aged_out": float(s.aged_out),
            "restart_points_evicted": float(s.evicted),
            "restart_groups_drawn": float(s.drawn),
        }

    def to_bytes(self) -> bytes:
        """Return all of it, for a checkpoint; tasks by their ids."""
        entries = [
            _SavedEntry(p.task.id, p.snapshot, p.messages, p.restarted_from, entry.tries, entry.successes)
            for entry in self._entries.values()
            for p in (entry.point,)
        ]
        return msgspec.msgpack.encode(_Saved(entries, self.harvested, self.drawn, self.aged_out, self.evicted))

    def load_bytes(self, data: bytes, tasks: Iterable[Task]) -> None:
        """Go on from what `to_bytes` returned; states of tasks that are not among `tasks` any more are left out.

        Raises: ConfigError: it is something else; the store is as it was.
        """
        try:
            saved = msgspec.msgpack.decode(data, type=_Saved)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"saved restart states must be readable: {error}; resume from an older checkpoint, or delete the file "
                "of this one to start without any"
            ) from error
        by_id = {task.id: task for task in tasks}
        entries = [
            _Entry(RestartPoint(by_id[e.task_id], e.snapshot, e.messages, e.restarted_from), e.tries, e.successes)
            for e in saved.entries
            if e.task_id in by_id
        ]
        self._entries = {_key(entry.point): entry for entry in entries[-self.config.capacity :]}
        self.harvested, self.drawn = saved.harvested, saved.drawn
        self.aged_out, self.evicted = saved.aged_out, saved.evicted

    def _add(self, point: RestartPoint) -> None:
        if len(self._entries) >= self.config.capacity:
            del self._entries[min(self._entries, key=lambda key: self._entries[key].score())]  # the oldest of equals
            self.evicted += 1
        self._entries[_key(point)] = _Entry(point)

    def _forget_old(self, policy_version: int) -> None:
        for key, entry in list(self._entries.items()):
            if policy_version - entry.point.restarted_from.policy_version > self.config.max_age:
                del self._entries[key]
                self.aged_out += 1


def find_restart_points(trajectory: Trajectory, config: Restarts) -> list[RestartPoint]:
    """Return the states of an episode that are worth starting from; none if it was itself started from one.

    A state is what the environment was in before a turn, so the last turn's outcome is none; it needs its snapshot.
    """
    if trajectory.restarted_from is not None:
        return []
    points: list[RestartPoint] = []
    starts = own_starts(trajectory)
    oldest: int | None = None
    turns = trajectory.turns
    for earlier, before, turn, start in zip((None, *turns), turns, turns[1:], starts[1:], strict=False):
        oldest = before.version_sent if oldest is None else min(oldest, before.version_sent)
        reason = _reason(_Taken(trajectory, earlier, before, config))
        if reason is not None and turn.snapshot is not None:
            origin = RestartedFrom(trajectory.id, turn.index, oldest, reason, tuple(before.scores.items()))
            points.append(RestartPoint(trajectory.task, turn.snapshot, trajectory.messages[:start], origin))
    return points


class _Taken(NamedTuple):
    """A turn that led to a state, and the turn before it."""

    trajectory: Trajectory
    earlier: Turn | None
    turn: Turn
    config: Restarts


def _reason(taken: _Taken) -> RestartReason | None:
    return next((reason for reason in taken.config.reasons if _APPLIES[reason](taken)), None)


def _has_value_drop(taken: _Taken) -> bool:
    name = taken.config.value_score
    if name is None or taken.earlier is None:
        return False
    v_t, v_tp1 = taken.earlier.scores.get(name), taken.turn.scores.get(name)
    return v_t is not None and v_tp1 is not None and v_tp1 - v_t <= -taken.config.value_drop


_APPLIES: dict[RestartReason, Callable[[_Taken], bool]] = {
    "invalid": lambda taken: not taken.turn.valid,
    "mistake": lambda taken: taken.config.finds_mistake(taken.turn),
    "injected": lambda taken: taken.turn.injected,
    "value_drop": _has_value_drop,
    "failed_suffix": lambda taken: taken.trajectory.end in (End.failure, End.budget),
}


def _key(point: RestartPoint) -> tuple[str, int]:
    return point.restarted_from.origin, point.restarted_from.turn
