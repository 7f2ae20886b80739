"""Where a critic is read on recorded episodes, and what it is trained towards there."""

from collections.abc import Sequence
from typing import Any

from turngate.envs.base import End, Task
from turngate.learners.turns import recorded_rewards
from turngate.learners.value_rows import FitRow, Reader, branches_by_trajectory, episode_rows
from turngate.runtime.branching import Branches, TurnBranches
from turngate.runtime.monte_carlo import estimate
from turngate.runtime.types import RestartedFrom, Segment, Trajectory, Turn


def segment(*parts: tuple[int | None, int]) -> Segment:
    """Return a segment of (turn, number of tokens) parts; turn None is context."""
    turns = [-1 if turn is None else turn for turn, count in parts for _ in range(count)]
    mask = [int(turn >= 0) for turn in turns]
    ids = list(range(2, 2 + len(turns)))
    return Segment.of(ids, mask, [-0.5 * m for m in mask], [m - 1 for m in mask], turns)


def episode(segments: Sequence[Segment], rewards: Sequence[float], **fields: Any) -> Trajectory:
    """Return an episode whose turn t lies in the segment that holds its id."""
    turns = []
    for index, reward in enumerate(rewards):
        number = next((n for n, s in enumerate(segments) if index in s.turn_values()), 0)
        ids = list(segments[number].turn_values())
        length = ids.count(index)
        start = ids.index(index) if length else 0
        paid = {"outcome": reward} if reward else {}
        turns.append(Turn(index=index, segment=number, start=start, length=length, text="", rewards=paid))
    settings = {"id": "t", "task": Task("task"), "end": End.success} | fields
    return Trajectory(turns=tuple(turns), segments=tuple(segments), **settings)


def rows_of(trajectory: Trajectory, *, kind: Any = "scalar", context: int = 128, **options: Any) -> list[FitRow]:
    return episode_rows(trajectory, Reader(kind, context, 128), rewards=recorded_rewards, **options)


def places(trajectory: Trajectory, number: int = 0, branches: Branches | None = None, context: int = 128) -> Any:
    """Return (positions, targets, whether behind an action, turns) of one segment."""
    rows = rows_of(trajectory, branches=branches, context=context)
    row = next(row for row in rows if set(row.turns_P) <= set(trajectory.segments[number].turn_values()))
    at = row.mask_T.nonzero()[0].tolist()
    return at, row.targets_P.tolist(), row.is_end_P.tolist(), row.turns_P.tolist()


# --- targets


def test_every_sampled_token_and_the_place_behind_each_action_has_the_reward_to_go() -> None:
    # context 0-1, action 2-3, answer 4, action 5-6: values stand before tokens 2, 3, behind 3, before 5, 6, behind 6.
    found = places(episode([segment((None, 2), (0, 2), (None, 1), (1, 2))], [0.25, 1.0]))
    at, targets, ends, turns = found
    assert at == [2, 3, 4, 5, 6, 7]
    assert targets == [1.25, 1.25, 1.25, 1.0, 1.0, 1.0]
    assert ends == [False, False, True, False, False, True]
    assert turns == [0, 0, 0, 1, 1, 1]


def test_an_action_that_follows_at_once_takes_the_place_between() -> None:
    at, targets, ends, _ = places(episode([segment((None, 1), (0, 1), (1, 1))], [0.25, 1.0]))
    assert (at, targets, ends) == ([1, 2, 3], [1.25, 1.0, 1.0], [False, False, True])


def test_each_segment_has_the_targets_of_its_own_turns() -> None:
    made = episode([segment((None, 2), (0, 1)), segment((None, 3), (1, 2))], [0.5, 2.0])
    assert places(made, 0)[1] == [2.5, 2.5]
    assert places(made, 1)[1] == [2.0, 2.0, 2.0]
    assert len(rows_of(episode([segment((None, 2), (0, 1)), segment((None, 4))], [0.5]))) == 1


def test_a_restarted_episode_has_targets_for_its_own_turns_alone() -> None:
    # What happened before the restart is context; the turn that something else chose has no tokens, and its pay is
    # nobody's.
    origin = RestartedFrom("root", 3, 0, "branch")
    made = episode([segment((None, 5), (1, 2))], [0.5, 1.0], restarted_from=origin)
    at, targets, *_ = places(made)
    assert (at, targets) == ([5, 6, 7], [1.0, 1.0, 1.0])


def test_what_does_not_fit_the_context_is_left_out() -> None:
    made = episode([segment((None, 2), (0, 2), (None, 1), (1, 2))], [0.25, 1.0])
    assert places(made, context=6)[0] == [2, 3, 4, 5]
    assert rows_of(made, context=2) == []


# --- targets from branches


def branched(trajectory: Trajectory, q: dict[int, list[float]], v: dict[int, list[float]]) -> Branches:
    def side(kind: Any, of: dict[int, list[float]]) -> dict[int, TurnBranches]:
        return {t: TurnBranches(turn=t, estimand=kind, estimate=estimate(r), trajectories=()) for t, r in of.items()}

    return Branches(trajectory=trajectory, q=side("Q", q), v=side("V", v))


def test_means_over_continuations_take_the_place_of_the_one_return() -> None:
    made = episode([segment((None, 2), (0, 2), (None, 1), (1, 2))], [0.0, 1.0])
    found = branched(made, {0: [1.0, 0.0, 0.0, 0.0]}, {0: [1.0, 0.0], 1: [1.0, 1.0, 0.0, 1.0]})
    at, targets, *_ = places(made, branches=found)
    # V before each turn's first token; Q on the prefixes of the action and behind it; returns where nobody looked.
    assert dict(zip(at, targets, strict=True)) == {2: 0.5, 3: 0.25, 4: 0.25, 5: 0.75, 6: 1.0, 7: 1.0}


def test_a_turn_whose_continuations_all_failed_keeps_its_return() -> None:
    made = episode([segment((None, 2), (0, 1))], [1.0])
    assert places(made, branches=branched(made, {0: []}, {0: []}))[1] == [1.0, 1.0]


def test_branches_of_one_episode_add_up_and_a_turn_with_either_value_counts_once() -> None:
    made = episode([segment((None, 2), (0, 2), (None, 1), (1, 2))], [0.0, 1.0])
    only_v, only_q = branched(made, {}, {0: [0.25]}), branched(made, {1: [0.5]}, {})
    both = branches_by_trajectory([only_v, only_q], [made])["t"]
    (row,) = rows_of(made, branches=both)
    assert row.branched == 2
    assert row.targets_P.tolist() == [0.25, 1.0, 1.0, 0.5, 0.5, 0.5]
