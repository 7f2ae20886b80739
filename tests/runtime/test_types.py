from typing import Any

import msgspec
import pytest

from turngate.envs.base import End, Task
from turngate.runtime.errors import ConfigError
from turngate.runtime.guidance import Guidance
from turngate.runtime.types import NO_TURN, NO_VERSION, Group, Sampling, Segment, TokenGuidance, Trajectory, Turn

SEGMENT = Segment.of([5, 6, 7, 8], [0, 1, 1, 0], [0, -0.5, -1.25, 0], [-1, 3, 4, -1], [-1, 0, 0, -1])


def _trajectory(**fields: object) -> Trajectory:
    return msgspec.structs.replace(Trajectory(id="a", task=Task("t"), end=End.success), **fields)


def test_a_segment_gives_back_what_it_was_built_from() -> None:
    assert len(SEGMENT) == 4
    assert list(SEGMENT.ids()) == [5, 6, 7, 8]
    assert list(SEGMENT.policy_mask) == [0, 1, 1, 0]
    assert list(SEGMENT.logprob_values()) == [0, -0.5, -1.25, 0]
    assert list(SEGMENT.version_values()) == [NO_VERSION, 3, 4, NO_VERSION]
    assert list(SEGMENT.turn_values()) == [NO_TURN, 0, 0, NO_TURN]


def test_misaligned_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one length: got \[1, 2\]"):
        Segment.of([1, 2], [1], [0.0], [0], [0])


def test_a_trajectory_survives_both_encodings() -> None:
    turn = Turn(index=0, segment=0, start=1, length=2, text="buy", rewards={"outcome": 1.0, "turn_cost": -0.25})
    trajectory = _trajectory(turns=(turn,), segments=(SEGMENT,))
    assert msgspec.json.decode(msgspec.json.encode(trajectory), type=Trajectory) == trajectory
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(trajectory), type=Trajectory) == trajectory


def test_the_gold_outcome_is_kept_apart_from_shaping() -> None:
    turns = (
        Turn(index=0, segment=0, start=0, length=1, text="a", rewards={"turn_cost": -0.25}),
        Turn(index=1, segment=0, start=2, length=3, text="b", rewards={"outcome": 1.0, "turn_cost": -0.25}),
    )
    trajectory = _trajectory(turns=turns)
    assert (trajectory.reward, trajectory.outcome, trajectory.policy_tokens) == (0.5, 1.0, 4)


def test_version_ranges_ignore_context_and_empty_members() -> None:
    full, empty = _trajectory(segments=(SEGMENT,)), _trajectory()
    assert full.version_range() == (3, 4)
    assert empty.version_range() == (NO_VERSION, NO_VERSION)
    assert Group(id="g", task=Task("t"), order=0, trajectories=(empty, full)).version_range() == (3, 4)


@pytest.mark.parametrize("end", list(End))
def test_every_end_is_of_exactly_one_kind(end: End) -> None:
    assert end.is_terminal + end.is_truncation + end.is_failure == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"max_tokens": 0},
        {"stop": "word"},
    ],
    ids=str,
)
def test_sampling_that_no_server_could_do_is_refused(wrong: dict[str, float]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=rf"^{name} must be .*got {value!r} \(Sampling\)"):
        msgspec.structs.replace(Sampling(), **wrong)


async def _worthless(point: object, candidates: list[Any]) -> list[float]:
    return [0.0] * len(candidates)


def test_what_chooses_whole_actions_is_no_way_of_sampling_tokens() -> None:
    wrong: Any = Guidance(_worthless, beta=1.0)
    with pytest.raises(ConfigError, match=r"guidance must be TokenGuidance\(...\) or None: .*Runtime\(guidance="):
        Sampling(guidance=wrong)
    assert Sampling(guidance=TokenGuidance(beta=1.0)).guidance is not None


def test_greedy_and_truncated_sampling_are_allowed() -> None:
    assert Sampling(temperature=0, top_p=0.1, top_k=1, max_tokens=1).max_tokens == 1
