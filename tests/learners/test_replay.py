"""A replay store keeps whole trajectories, never hands out one that is too old, and survives a restart exactly."""

import math
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turngate.envs.base import End, Snapshot, Task
from turngate.learners.batch import lay_out
from turngate.learners.replay import ReplayConfig, ReplayStore, as_batch, trajectory_lag
from turngate.runtime.errors import ConfigError, LearnerError
from turngate.runtime.types import NO_VERSION, Segment, Trajectory, Turn


def make(name: str, version: int = 0, *, tokens: int = 2, end: End = End.success, trainable: bool = True) -> Trajectory:
    """Return a one-turn trajectory; its first token is of `version`, later ones of the next."""
    versions = [NO_VERSION] + [version + (i > 0) for i in range(tokens)]
    mask, ids = [0] + [1] * tokens, [-1] + [0] * tokens
    segment = Segment.of([1] * (tokens + 1), mask, [0.0] + [-0.5] * tokens, versions, ids)
    turn = Turn(
        index=0, segment=0, start=1, length=tokens, text="go", rewards={"outcome": 1.0, "cost": -0.25},
        snapshot=Snapshot("toy", b"\x00\xff"), state={"at": 3},
    )  # fmt: skip
    return Trajectory(id=name, task=Task("t"), turns=(turn,), segments=(segment,), end=end, trainable=trainable)


def store(**options: object) -> ReplayStore:
    return ReplayStore(ReplayConfig(**{"start_after": 1, **options}))


def drawn(replay: ReplayStore, n: int, *, version: int = 0, seed: int = 0) -> list[str]:
    return [t.id for t in replay.sample(n, torch.Generator().manual_seed(seed), policy_version=version)]


def test_trajectories_come_back_whole() -> None:
    replay, trajectory = store(), make("a")
    assert replay.put([trajectory], 0) == 1
    assert replay.sample(1, torch.Generator(), policy_version=0) == [trajectory]


def test_a_draw_holds_no_trajectory_twice_and_all_when_it_asks_for_more() -> None:
    replay = store()
    replay.put([make(str(i)) for i in range(5)], 0)
    assert sorted(drawn(replay, 9)) == ["0", "1", "2", "3", "4"]
    assert len(set(drawn(replay, 3))) == 3
    assert drawn(replay, 0) == []
    assert drawn(store(), 3) == []


def test_draws_are_uniform_without_kappa() -> None:
    replay, generator = store(), torch.Generator().manual_seed(0)
    replay.put([make(str(i), version=i) for i in range(4)], 4)
    counts = Counter(t.id for _ in range(4000) for t in replay.sample(1, generator, policy_version=4))
    # Standard deviation of each count: 27.
    assert all(abs(count - 1000) < 120 for count in counts.values())


def test_draws_follow_kappa_to_the_lag() -> None:
    replay, generator = store(kappa=0.5), torch.Generator().manual_seed(0)
    replay.put([make("old", version=0), make("young", version=2)], 2)
    counts = Counter(t.id for _ in range(4000) for t in replay.sample(1, generator, policy_version=2))
    # 1 to 4; standard deviation 25.
    assert abs(counts["old"] - 800) < 110


def test_weights_that_would_underflow_still_draw_everything() -> None:
    replay = store(kappa=0.01, max_lag=10_000)
    replay.put([make(str(i), version=i) for i in range(3)], 5000)
    assert sorted(drawn(replay, 3, version=9000)) == ["0", "1", "2"]


def test_the_oldest_token_decides_and_equality_passes() -> None:
    replay, trajectory = store(max_lag=3), make("a", version=4)
    replay.put([trajectory], 5)
    assert trajectory_lag(trajectory, 7) == 3
    assert drawn(replay, 1, version=7) == ["a"]
    assert drawn(replay, 1, version=8) == []
    assert len(replay) == 1
    assert replay.evict(7) == 0
    assert replay.evict(8) == 1
    assert replay.statistics().evicted_old == 1


def test_what_came_first_leaves_first_when_there_are_too_many() -> None:
    replay = store(capacity_trajectories=2)
    replay.put([make("a"), make("b"), make("c")], 0)
    assert sorted(drawn(replay, 3)) == ["b", "c"]
    assert replay.statistics().evicted_full == 1


def test_capacity_may_count_generated_tokens() -> None:
    replay = store(capacity_trajectories=None, capacity_tokens=10)
    replay.put([make("a", tokens=4), make("b", tokens=4), make("c", tokens=6), make("huge", tokens=11)], 0)
    assert sorted(drawn(replay, 3)) == ["b", "c"]
    s = replay.statistics()
    assert (s.policy_tokens, s.refused_large, s.evicted_full) == (10, 1, 1)


def test_what_teaches_nothing_is_refused_and_counted_by_reason() -> None:
    replay = store(max_lag=2)
    empty = msgspec.structs.replace(make("empty"), turns=(), segments=())
    refused = [
        make("crashed", end=End.env_error),
        make("blind", trainable=False),
        empty,
        make("ancient", version=0),
    ]
    assert replay.put([*refused, make("kept", version=5), make("kept", version=5)], 6) == 1
    s = replay.statistics()
    assert (s.refused_failed, s.refused_untrainable, s.refused_old, s.refused_duplicate) == (1, 2, 1, 1)
    assert (s.taken, s.trajectories) == (1, 1)


def test_truncated_episodes_are_kept() -> None:
    replay = store()
    assert replay.put([make("cut", end=End.turn_limit)], 0) == 1


def test_replay_starts_when_enough_is_there() -> None:
    replay = store(start_after=2)
    replay.put([make("a")], 0)
    assert not replay.is_ready
    replay.put([make("b")], 0)
    assert replay.is_ready


def test_data_from_the_future_is_refused() -> None:
    replay = store()
    replay.put([make("a", version=3)], 3)
    with pytest.raises(LearnerError, match="policy_version must be at least that of the data"):
        drawn(replay, 1, version=2)


def test_a_restart_goes_on_exactly(tmp_path: Path) -> None:
    replay, generator = store(kappa=0.7, capacity_trajectories=6), torch.Generator().manual_seed(3)
    replay.put([make(str(i), version=i % 3) for i in range(8)], 4)
    replay.sample(3, generator, policy_version=4)
    replay.save(tmp_path)
    luck = generator.get_state()
    restored = store(kappa=0.7, capacity_trajectories=6)
    restored.restore(tmp_path)
    assert restored.statistics() == replay.statistics()
    again = torch.Generator()
    again.set_state(luck)
    for version in (4, 5):
        assert restored.sample(4, again, policy_version=version) == replay.sample(4, generator, policy_version=version)
    more = [make(f"new{i}", version=4) for i in range(3)]
    for one in (replay, restored):
        one.put(more, 5)
    assert drawn(restored, 9, version=5) == drawn(replay, 9, version=5)
    assert repr(restored) == repr(replay)


def test_restoring_into_less_room_keeps_the_latest(tmp_path: Path) -> None:
    replay = store()
    replay.put([make(str(i)) for i in range(4)], 0)
    replay.save(tmp_path)
    small = store(capacity_trajectories=2)
    small.restore(tmp_path)
    assert sorted(drawn(small, 4)) == ["2", "3"]


@pytest.mark.parametrize("content", [None, b"", b"garbage", msgspec.msgpack.encode([9, [], {}])])
def test_a_file_that_cannot_be_read_leaves_the_store_as_it_was(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "replay.msgpack").write_bytes(content)
    replay = store()
    replay.put([make("a")], 0)
    with pytest.raises(LearnerError, match="replay must"):
        replay.restore(tmp_path)
    assert drawn(replay, 1) == ["a"]


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    saved = {"format": 99, "entries": [], "counts": {}}
    (tmp_path / "replay.msgpack").write_bytes(msgspec.msgpack.encode(saved))
    with pytest.raises(LearnerError, match="replay must have format 1: got 99"):
        store().restore(tmp_path)


def test_drawn_trajectories_lay_out_as_a_batch_of_groups_of_one() -> None:
    replay = store()
    replay.put([make("a", tokens=2), make("b", tokens=3)], 0)
    batch = as_batch(replay.sample(2, torch.Generator(), policy_version=1), policy_version=1)
    tokens = lay_out(batch, [[True], [True]], vocabulary_size=2)
    assert tokens.policy_tokens == 5
    assert sorted(tokens.trajectory_names) == ["a", "b"]
    assert tokens.group_ids_N.unique().tolist() == [0, 1]


def test_repr_says_what_is_there() -> None:
    replay = store()
    assert repr(replay) == "<ReplayStore 0 trajectories, 0 tokens, empty>"
    replay.put([make("a", version=2), make("b", version=5, tokens=3)], 6)
    assert repr(replay) == "<ReplayStore 2 trajectories, 5 tokens, versions 2-5>"


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5), st.integers(1, 6)), max_size=12),
    st.integers(0, 6),
    st.integers(1, 5),
    st.integers(5, 15),
)
def test_no_draw_is_too_old_nothing_is_lost_or_doubled_and_the_bounds_hold(
    arrivals: list[tuple[int, int, int]], max_lag: int, trajectories: int, tokens: int
) -> None:
    replay = store(max_lag=max_lag, capacity_trajectories=trajectories, capacity_tokens=tokens)
    offered = 0
    for version, (lag, length, count) in enumerate(arrivals, start=1):
        born = max(0, version - 1 - lag)
        replay.put([make(f"{version}-{i}", version=born, tokens=length) for i in range(count)], version - 1)
        offered += count
        got = replay.sample(3, torch.Generator().manual_seed(version), policy_version=version)
        assert all(trajectory_lag(t, version) <= max_lag for t in got)
        assert len({t.id for t in got}) == len(got)
        replay.evict(version)
        s = replay.statistics()
        assert s.trajectories <= trajectories
        assert s.policy_tokens <= tokens
        assert s.taken == s.trajectories + s.evicted_full + s.evicted_old
        assert offered == s.taken + s.refused_old + s.refused_large


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"capacity_trajectories": None}, "capacity must be bounded"),
        ({"capacity_trajectories": 0}, "capacity_trajectories must be 1 or more"),
        ({"start_after": 900}, "replay would never start"),
        ({"max_lag": -1}, "max_lag must be 0 or more"),
        ({"kappa": 0.0}, "kappa must be above 0"),
        ({"target_tau": 1.5}, "target_tau must be above 0"),
        ({"lam": math.nan}, "lam must lie"),
        ({"min_ess_ratio": 2.0}, "min_ess_ratio must lie"),
        ({"target": "td"}, "target must be one of auto"),
        ({"ess_level": "token"}, "ess_level must be turn or trajectory"),
        ({"rho_bar": 1.0, "c_bar": None}, "rho_bar must be at least c_bar"),
    ],
)
def test_configurations_that_cannot_work_say_why(options: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ReplayConfig(**options)
