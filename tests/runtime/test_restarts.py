"""Which states are kept to start from, which of them are drawn, and when they are forgotten."""

from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest

from turngate.envs.base import End, Snapshot, Task
from turngate.runtime.errors import ConfigError
from turngate.runtime.restarts import RestartPoint, Restarts, RestartStore, check_restarts, find_restart_points
from turngate.runtime.types import Group, Message, RestartedFrom, Trajectory, Turn

TASK = Task("t", "Find it.", {"color": "red"})


def turn(index: int, **fields: Any) -> Turn:
    snapshot = Snapshot("test", bytes([index]))
    return Turn(index=index, segment=0, start=0, length=1, text=f"a{index}", snapshot=snapshot, **fields)


def episode(*turns: Turn, end: End = End.success, **fields: Any) -> Trajectory:
    messages = [Message("system", "s"), Message("user", "q")]
    for t in turns:
        messages += [Message("assistant", t.text), Message("tool", "r"), Message("user", f"o{t.index}")]
    return Trajectory(**({"id": "e", "task": TASK, "turns": turns, "messages": tuple(messages), "end": end} | fields))


def group(*trajectories: Trajectory) -> Group:
    return Group(id="g", task=TASK, order=0, trajectories=trajectories)


def turns_found(trajectory: Trajectory, **config: Any) -> list[tuple[int, str]]:
    points = find_restart_points(trajectory, Restarts(**config))
    return [(p.restarted_from.turn, p.restarted_from.reason) for p in points]


def test_a_state_follows_the_mistake_and_holds_the_history_until_then() -> None:
    trajectory = episode(turn(0), turn(1, valid=False, version_sent=3), turn(2, version_sent=4), turn(3))
    (point,) = find_restart_points(trajectory, Restarts())
    assert point.restarted_from == RestartedFrom("e", 2, 0, "invalid")
    assert point.snapshot.data == b"\x02"  # the state before turn 2, which turn 1 left behind
    assert [m.content for m in point.messages] == ["s", "q", "a0", "r", "o0", "a1", "r", "o1"]
    assert point.task == TASK


def test_every_kind_of_mistake_is_found_and_named() -> None:
    turns = (turn(0, valid=False), turn(1, injected=True), turn(2, state={"violates": 1}, scores={"v": 0.9}),
             turn(3, scores={"v": 0.5}), turn(4), turn(5))  # fmt: skip
    config: dict[str, Any] = {"is_mistake": lambda t: bool(t.state), "value_score": "v", "value_drop": 0.4}
    assert turns_found(episode(*turns), **config) == [
        (1, "invalid"),
        (2, "injected"),
        (3, "mistake"),
        (4, "value_drop"),
    ]
    assert turns_found(episode(*turns, end=End.failure), reasons=("failed_suffix",)) == [
        (n, "failed_suffix") for n in (1, 2, 3, 4, 5)
    ]
    assert turns_found(episode(*turns), reasons=("failed_suffix",)) == []
    assert turns_found(episode(*turns, end=End.turn_limit), reasons=("failed_suffix",)) == []


def test_a_fall_in_value_is_seen_where_both_values_are_known_and_it_is_deep_enough() -> None:
    scores: list[dict[str, float]] = [{"v": 0.8}, {"v": 0.5}, {"v": 0.31}, {}, {"v": 0.0}, {"v": 0.0}]
    trajectory = episode(*(turn(i, scores=s) for i, s in enumerate(scores)))
    # 0.8 to 0.5 is 0.3, 0.5 to 0.31 is 0.19; nothing is known after turn 3, and of the start.
    assert turns_found(trajectory, value_score="v") == [(2, "value_drop")]
    assert turns_found(trajectory, value_score="other") == turns_found(trajectory) == []


def test_values_that_no_scorer_gives_are_refused() -> None:
    check_restarts(Restarts(value_score="v"), ("v", "w"))
    check_restarts(Restarts(), ())
    check_restarts(None, ())
    with pytest.raises(ConfigError, match=r"a scorer for value_score: expected v, got w"):
        check_restarts(Restarts(value_score="v"), ("w",))


def test_a_question_about_mistakes_that_raises_is_told_from_our_errors() -> None:
    def asks(turn: Turn) -> bool:
        raise KeyError("violates")

    with pytest.raises(ConfigError, match=r"is_mistake must answer for every turn: got KeyError.*\(turn 0\)"):
        find_restart_points(episode(turn(0), turn(1)), Restarts(is_mistake=asks))
    assert not Restarts().finds_mistake(turn(0))


def test_the_last_turns_mistake_leads_to_no_state_to_start_from() -> None:
    assert turns_found(episode(turn(0), turn(1, valid=False))) == []
    assert turns_found(episode()) == []


def test_without_snapshots_there_is_nothing_to_start_from() -> None:
    turns = [msgspec.structs.replace(t, snapshot=None) for t in (turn(0, valid=False), turn(1))]
    assert turns_found(episode(*turns)) == []


def test_restarted_episodes_are_not_started_from_again() -> None:
    origin = RestartedFrom("x", 2, 0, "invalid")
    assert turns_found(episode(turn(0, valid=False), turn(1), restarted_from=origin)) == []


def test_a_state_is_as_old_as_the_oldest_policy_that_led_to_it() -> None:
    turns = (turn(0, version_sent=5), turn(1, version_sent=4, valid=False), turn(2, version_sent=9))
    (point,) = find_restart_points(episode(*turns), Restarts())
    assert point.restarted_from.policy_version == 4


# The store.


def fill(store: RestartStore, *ids: str, version: int = 0) -> None:
    for name in ids:
        assert store.harvest(group(episode(turn(0, valid=False, version_sent=version), turn(1), id=name))) == 1


def drawn(store: RestartStore, version: int = 0, seed: int = 0) -> str | None:
    point = store.draw(version, Random(seed))
    return None if point is None else point.restarted_from.origin


def find(store: RestartStore, origin: str) -> RestartPoint:
    return next(
        p for n in range(999) if (p := store.draw(0, Random(n))) is not None and p.restarted_from.origin == origin
    )


def test_each_member_gives_one_state_at_most() -> None:
    store = RestartStore(Restarts())
    bad = episode(turn(0, valid=False), turn(1, valid=False), turn(2), id="a")
    assert store.harvest(group(bad, msgspec.structs.replace(bad, id="b"), episode(turn(0), turn(1), id="c"))) == 2
    assert (len(store), store.statistics().harvested) == (2, 2)
    assert store.statistics().by_reason == {"invalid": 2}


def test_the_share_of_groups_that_start_from_a_kept_state_is_as_asked() -> None:
    store = RestartStore(Restarts(share=0.25))
    assert drawn(store) is None  # nothing is kept yet
    fill(store, "a")
    random = Random(1)
    count = sum(store.draw(0, random) is not None for _ in range(2000))
    assert 430 < count < 570
    assert store.drawn == count
    always = RestartStore(Restarts(share=1.0))
    fill(always, "a")
    assert drawn(always) == "a"


def test_states_are_forgotten_when_the_policy_has_moved_on() -> None:
    store = RestartStore(Restarts(share=1.0, max_age=3))
    fill(store, "a", version=2)
    assert drawn(store, version=5) == "a"
    assert drawn(store, version=6) is None
    assert (len(store), store.statistics().aged_out) == (0, 1)


def test_what_is_neither_solved_nor_hopeless_is_drawn_most() -> None:
    store = RestartStore(Restarts(share=1.0, floor=0.0))
    fill(store, "solved", "open")
    for end, origin in ((End.success, "solved"), (End.success, "open"), (End.failure, "open")):
        store.report(find(store, origin), [episode(end=end)] * 4)
    # (1 + 4) / (6 * 7) = 5/42 for 4 of 4, 25/110 for 4 of 8.
    counts = Counter(drawn(store, seed=seed) for seed in range(4000))
    assert counts["open"] / 4000 == pytest.approx((25 / 110) / (25 / 110 + 5 / 42), abs=0.03)
    assert store.statistics().tried == 2


def test_a_floor_keeps_every_state_in_play() -> None:
    store = RestartStore(Restarts(share=1.0, floor=1.0))
    fill(store, "hopeless", "open")
    store.report(find(store, "hopeless"), [episode(end=End.failure)] * 50)
    counts = Counter(drawn(store, seed=seed) for seed in range(2000))
    assert counts["hopeless"] == pytest.approx(1000, abs=100)


def test_a_full_store_gives_up_what_is_least_worth_trying() -> None:
    store = RestartStore(Restarts(share=1.0, capacity=2))
    fill(store, "hopeless", "new")
    store.report(find(store, "hopeless"), [episode(end=End.failure)] * 8)
    fill(store, "newer")
    assert {drawn(store, seed=seed) for seed in range(50)} == {"new", "newer"}
    fill(store, "newest")  # among equals the oldest goes
    assert {drawn(store, seed=seed) for seed in range(50)} == {"newer", "newest"}
    assert (len(store), store.statistics().evicted) == (2, 2)


def test_being_cut_short_is_no_success() -> None:
    store = RestartStore(Restarts(share=1.0))
    fill(store, "a")
    store.report(find(store, "a"), [episode(end=End.turn_limit), episode(end=End.success)])
    assert store.statistics().success_mean == pytest.approx(2 / 4)


def test_news_of_a_forgotten_state_is_no_error() -> None:
    store = RestartStore(Restarts(share=1.0))
    fill(store, "a")
    point = find(store, "a")
    store.discard(point)
    store.discard(point)
    store.report(point, [episode()])
    assert len(store) == 0


def test_a_store_goes_on_from_its_bytes() -> None:
    store = RestartStore(Restarts(share=1.0))
    fill(store, "a", "b")
    store.report(find(store, "b"), [episode()] * 4)
    again = RestartStore(Restarts(share=1.0))
    again.load_bytes(store.to_bytes(), [Task("other"), TASK])
    assert again.statistics() == store.statistics()
    assert find(again, "b") == find(store, "b")
    assert [drawn(again, seed=n) for n in range(20)] == [drawn(store, seed=n) for n in range(20)]
    smaller = RestartStore(Restarts(capacity=1))
    smaller.load_bytes(store.to_bytes(), [TASK])
    assert len(smaller) == 1
    elsewhere = RestartStore(Restarts())
    elsewhere.load_bytes(store.to_bytes(), [Task("other")])
    assert len(elsewhere) == 0


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-3], lambda data: b"\x80" + data])
def test_bytes_of_something_else_are_refused_and_change_nothing(damage: Any) -> None:
    store = RestartStore(Restarts())
    fill(store, "a")
    data, before = store.to_bytes(), store.statistics()
    with pytest.raises(ConfigError, match="saved restart states must be readable"):
        store.load_bytes(damage(data), [TASK])
    assert store.statistics() == before


def test_state_can_be_read() -> None:
    store = RestartStore(Restarts(capacity=9))
    fill(store, "a")
    assert repr(store) == "<RestartStore 1 of 9 points, 0 groups drawn>"
    assert store.metrics()["restart_points"] == 1.0


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"share": 1.5}, "share must be between 0 and 1"),
        ({"floor": float("nan")}, "floor must be between 0 and 1"),
        ({"reasons": ("bored",)}, "reasons must be among invalid, mistake.* got bored"),
        ({"value_drop": 0.0}, "value_drop must be positive"),
        ({"max_age": -1}, "max_age must be 0 or more"),
        ({"capacity": 0}, "capacity 1 or more"),
    ],
)
def test_restarts_that_cannot_work_are_refused(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Restarts(**bad)
