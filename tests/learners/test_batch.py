"""From records to tensors: every generated token exactly once, nothing else, in few and well-filled passes."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turngate.envs.base import End, Task
from turngate.learners.batch import TokenBatch, lay_out, length_sorted, microbatches, minibatches
from turngate.runtime.errors import ConfigError, LearnerError, RecordError
from turngate.runtime.types import NO_TURN, NO_VERSION, Batch, Group, Segment, Trajectory, Turn

TASK = Task("t")


def segment(
    mask: list[int],
    *,
    turn_ids: list[int] | None = None,
    versions: list[int] | None = None,
    logprobs: list[float] | None = None,
    ids: list[int] | None = None,
) -> Segment:
    n = len(mask)
    return Segment.of(
        ids or list(range(1, n + 1)),
        mask,
        logprobs or [-0.5 * m for m in mask],
        versions or [0 if m else NO_VERSION for m in mask],
        turn_ids or [0 if m else NO_TURN for m in mask],
    )


def trajectory(
    *segments: Segment, name: str = "a", trainable: bool = True, lengths: dict[int, int] | None = None
) -> Trajectory:
    """Return a trajectory whose turns are those its segments hold, unless told otherwise."""
    counted: dict[int, int] = {}
    for s in segments:
        for turn, m in zip(s.turn_values(), s.policy_mask, strict=True):
            if m:
                counted[turn] = counted.get(turn, 0) + 1
    turns = [Turn(index=i, segment=0, start=0, length=n, text="") for i, n in (lengths or counted).items()]
    return Trajectory(
        id=name,
        task=TASK,
        turns=tuple(turns),
        segments=segments,
        end=End.success,
        trainable=trainable,
        untrainable_because="" if trainable else "the server gave no log-probs",
    )


def batch_of(*trajectories: Trajectory, policy_version: int = 0, min_version: int = 0) -> Batch:
    group = Group(id="g", task=TASK, order=0, trajectories=trajectories)
    return Batch(groups=(group,), policy_version=policy_version, min_version=min_version)


def laid_out(*trajectories: Trajectory, keep: list[bool] | None = None, **versions: int) -> TokenBatch:
    return lay_out(batch_of(*trajectories, **versions), [keep or [True] * len(trajectories)], vocabulary_size=32)


def test_an_append_only_trajectory_is_one_row_cut_after_its_last_action() -> None:
    tokens = laid_out(trajectory(segment([0, 0, 1, 1, 0, 1, 0, 0], turn_ids=[-1, -1, 0, 0, -1, 1, -1, -1])))
    assert tokens.row_lengths == (6,)
    assert tokens.token_ids_N.tolist() == [1, 2, 3, 4, 5, 6]
    assert tokens.mask_N.tolist() == [False, False, True, True, False, True]
    assert tokens.behaviour_logprobs_N.tolist() == [0.0, 0.0, -0.5, -0.5, 0.0, -0.5]
    assert tokens.turn_ids_N.tolist() == [-1, -1, 0, 0, -1, 1]


def test_every_segment_is_a_row_and_keeps_its_trajectory() -> None:
    first, second = segment([0, 1]), segment([0, 0, 1], turn_ids=[-1, -1, 1])
    tokens = laid_out(trajectory(first, second), trajectory(segment([0, 1]), name="b"))
    assert tokens.row_trajectories == (0, 0, 1)
    assert tokens.row_ids_N.tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert tokens.trajectory_ids_N.tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert not tokens.is_one_row_per_trajectory


def test_members_that_are_not_kept_add_no_token() -> None:
    tokens = laid_out(trajectory(segment([0, 1])), trajectory(segment([0, 1]), name="b"), keep=[False, True])
    assert tokens.row_trajectories == (1,)
    assert tokens.trajectory_names == ("a", "b")


def test_tokens_older_than_the_bound_lose_their_mask_and_stay_for_values() -> None:
    old = segment([0, 1, 1], versions=[-1, 3, 3])
    mixed = segment([0, 1, 1], versions=[-1, 4, 5], turn_ids=[-1, 1, 1])
    tokens = laid_out(trajectory(old, mixed), policy_version=7, min_version=5)
    assert tokens.mask_N.tolist() == [False, False, False, False, False, True]
    assert tokens.generated_N.tolist() == [False, True, True, False, True, True]
    assert tokens.versions_N.tolist() == [-1, 3, 3, -1, 4, 5]
    passes = list(microbatches(tokens, [0, 1], 100))
    assert [micro.positions_P.tolist() for micro in passes] == [[5]]


def test_no_trained_token_at_all_is_an_empty_batch() -> None:
    tokens = laid_out(trajectory(segment([0, 1])), keep=[False])
    assert tokens.policy_tokens == 0
    assert minibatches(tokens, 2, torch.Generator()) == []


def test_a_token_in_two_segments_is_refused() -> None:
    doubled = trajectory(segment([0, 1, 1]), segment([0, 1, 1]), lengths={0: 2})
    with pytest.raises(
        RecordError, match=r"exactly one segment: expected \[2\] tokens, got \[4\].*trajectory a, turns \[0\]"
    ):
        laid_out(doubled)


def test_a_token_in_no_segment_is_refused() -> None:
    with pytest.raises(RecordError, match=r"expected \[3\] tokens, got \[2\]"):
        laid_out(trajectory(segment([0, 1, 1]), lengths={0: 3}))


def test_what_cannot_be_trained_on_is_refused_with_what_is_missing() -> None:
    with pytest.raises(LearnerError, match="the server gave no log-probs"):
        laid_out(trajectory(segment([0, 1]), trainable=False))


BAD: list[tuple[str, Callable[[], Segment]]] = [
    ("log-prob must be finite.*got nan", lambda: segment([0, 1], logprobs=[0.0, float("nan")])),
    ("log-prob must be finite.*got -inf", lambda: segment([0, 1], logprobs=[0.0, float("-inf")])),
    ("at most 0: got 0.5", lambda: segment([0, 1], logprobs=[0.0, 0.5])),
    ("vocabulary of 32: got 99", lambda: segment([0, 1], ids=[1, 99])),
    ("at most the learner's 0: got 3", lambda: segment([0, 1], versions=[-1, 3])),
    ("first token of a segment must be context", lambda: segment([1, 1])),
]


@pytest.mark.parametrize(("message", "make"), BAD)
def test_p17_records_that_cannot_be_are_refused_and_located(message: str, make: Callable[[], Segment]) -> None:
    with pytest.raises(RecordError, match=message + r".*trajectory a, turn -?\d, token \d"):
        laid_out(trajectory(make()))


def test_nan_behind_the_mask_is_nobodys_business() -> None:
    tokens = laid_out(trajectory(segment([0, 1, 0, 1], logprobs=[float("nan"), -1.0, float("nan"), -1.0])))
    assert tokens.behaviour_logprobs_N.tolist() == [0.0, -1.0, 0.0, -1.0]


def test_positions_are_named_by_trajectory_turn_and_place() -> None:
    tokens = laid_out(trajectory(segment([0, 1])), trajectory(segment([0, 0, 1], turn_ids=[-1, -1, 4]), name="b"))
    assert tokens.where(4) == "trajectory b, turn 4, token 2 of its segment"


lengths_lists = st.lists(st.integers(1, 60), min_size=1, max_size=40)


@given(lengths_lists, st.integers(1, 200))
def test_length_sorting_loses_nothing_and_respects_the_cap(lengths: list[int], cap: int) -> None:
    groups = length_sorted(lengths, cap)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[i] for i in group) <= cap


def test_a_cap_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="positive"):
        length_sorted([1], 0)


def many(lengths: list[int]) -> TokenBatch:
    """Return one row per length, every odd token trained; three rows of a kind belong to one trajectory."""
    rows = [[s % 2 for s in range(n + 1)] for n in lengths]
    made = []
    for start in range(0, len(rows), 3):
        parts = [
            segment(m, turn_ids=[i if x else -1 for x in m], ids=[5] * len(m))
            for i, m in enumerate(rows[start : start + 3])
        ]
        made.append(trajectory(*parts, name=f"t{start}"))
    return laid_out(*made)


@given(lengths_lists, st.integers(1, 300), st.integers(1, 5), st.integers(0, 10))
def test_p1_every_trained_token_is_in_exactly_one_pass(lengths: list[int], cap: int, parts: int, seed: int) -> None:
    tokens = many(lengths)
    dealt = minibatches(tokens, parts, torch.Generator().manual_seed(seed))
    seen: list[int] = []
    for rows in dealt:
        for micro in microbatches(tokens, rows, cap):
            seen += micro.positions_P.tolist()
            assert torch.equal(micro.packed.targets_M, tokens.token_ids_N[micro.positions_P])
    assert sorted(seen) == tokens.mask_N.nonzero().squeeze(-1).tolist()


@given(lengths_lists, st.integers(1, 300))
def test_whole_trajectories_share_a_pass_when_asked_to_and_nothing_else_changes(lengths: list[int], cap: int) -> None:
    tokens = many(lengths)
    rows = list(range(len(tokens.row_lengths)))
    passes = [m.positions_P for m in microbatches(tokens, rows, cap, whole_trajectories=True)]
    owners = [set(tokens.trajectory_ids_N[positions_P].tolist()) for positions_P in passes]
    assert sum(len(o) for o in owners) == len(set(tokens.row_trajectories))
    assert sorted(torch.cat(passes).tolist()) == tokens.mask_N.nonzero().squeeze(-1).tolist()
    for positions_P, owner in zip(passes, owners, strict=True):
        assert len(owner) == 1 or sum(tokens.row_lengths[r] for r in tokens.row_ids_N[positions_P].unique()) <= cap


@given(lengths_lists, st.integers(1, 5), st.integers(0, 10))
def test_minibatches_never_split_a_trajectory(lengths: list[int], parts: int, seed: int) -> None:
    tokens = many(lengths)
    dealt = minibatches(tokens, parts, torch.Generator().manual_seed(seed))
    owners = [{tokens.row_trajectories[row] for row in rows} for rows in dealt]
    assert sum(len(o) for o in owners) == len(set(tokens.row_trajectories))
    assert max(len(o) for o in owners) - min(len(o) for o in owners) <= 1


def test_the_same_generator_state_deals_the_same_way() -> None:
    tokens = many([5] * 12)
    one, other = (minibatches(tokens, 2, torch.Generator().manual_seed(3)) for _ in range(2))
    assert one == other
    assert one != minibatches(tokens, 2, torch.Generator().manual_seed(4))


def test_sums_by_trajectory_run_over_all_its_segments() -> None:
    tokens = laid_out(
        trajectory(segment([0, 1]), segment([0, 1], turn_ids=[-1, 1])), trajectory(segment([0, 1]), name="b")
    )
    values = torch.tensor([9.0, 1.0, 9.0, 2.0, 9.0, 4.0])
    assert tokens.sum_by_trajectory(values).tolist() == [3.0, 4.0]
