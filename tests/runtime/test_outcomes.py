"""Success is the policy's own, from the task's start; everything else has figures of its own."""

import io
import math
from pathlib import Path
from typing import Any

import msgspec

from turngate.envs.base import End, Task
from turngate.runtime.outcomes import is_clean_root, outcome_row, recovery_row
from turngate.runtime.plot import plot_run
from turngate.runtime.types import RestartedFrom, Trajectory, Turn

ORIGIN = RestartedFrom("x", 3, 0, "mistake")


def turn(index: int, **fields: Any) -> Turn:
    return Turn(index=index, segment=0, start=0, length=0 if fields.get("injected") else 2, text="", **fields)


def episode(end: End, *turns: Turn, restarted: bool = False) -> Trajectory:
    return Trajectory(id="a", task=Task("t"), end=end, turns=turns, restarted_from=ORIGIN if restarted else None)


BATCH = [
    episode(End.success, turn(0), turn(1)),
    episode(End.failure, turn(0), turn(1, valid=False), turn(2), turn(3)),
    episode(End.success, turn(0, state={"violates": 1}), turn(1), restarted=True),
    episode(End.success, turn(0), restarted=True),
    episode(End.success, turn(0, injected=True), turn(1), turn(2)),
]


def test_b8_3_success_from_restarts_is_not_success() -> None:
    # Restarted episodes begin further along: mixed in, they lift "success" without a better policy.
    clean = [t for t in BATCH if is_clean_root(t)]
    assert clean == BATCH[:2]
    assert outcome_row(clean) == {"success": 0.5, "reward": 0.0, "truncated": 0.0, "turns": 3.0, "tokens": 6.0}
    row = recovery_row(BATCH)
    assert (row["restart_share"], row["restart_success"], row["restart_turns"]) == (0.4, 1.0, 1.5)
    assert (row["injected_share"], row["injected_success"]) == (0.2, 1.0)


def test_mistakes_are_counted_in_episodes_from_task_starts() -> None:
    row = recovery_row(BATCH)
    assert row["mistake_rate"] == 1 / 8  # the policy's own turns: 2 + 4 + 2
    assert row["recovery_rate"] == 1 / 2
    assert (row["recovery_rate_injected"], row["recovery_rate_self_inflicted"]) == (1.0, 0.0)
    assert row["clean_success"] == 1.0


def test_a_predicate_adds_mistakes_to_the_invalid_ones() -> None:
    shopped = episode(End.success, turn(0, state={"violates": 1}), turn(1))
    assert recovery_row([shopped])["mistake_rate"] == 0.0
    row = recovery_row([shopped], lambda t: bool((t.state or {}).get("violates")))
    assert (row["mistake_rate"], row["recovery_rate"]) == (0.5, 1.0)
    assert math.isnan(row["clean_success"])


def test_figures_of_restarts_and_injections_are_there_only_when_there_are_some() -> None:
    assert set(recovery_row(BATCH[:2])) == {"mistake_rate", "recovery_rate", "clean_success"}


def test_a_batch_of_restarts_alone_has_no_success_and_leaves_a_gap_in_the_plot(tmp_path: Path) -> None:
    success = outcome_row([t for t in BATCH[2:4] if is_clean_root(t)])["success"]
    assert math.isnan(success)
    row = dict.fromkeys(("lag_mean", "lag_max", "episodes_per_s", "learner_busy_share", "slots_busy_share"), 1.0)
    out = io.BytesIO()
    for update, value in enumerate((0.5, success, 0.75)):
        out.write(msgspec.json.encode(row | {"update": update, "success": value}) + b"\n")
    (tmp_path / "metrics.jsonl").write_bytes(out.getvalue())
    assert plot_run(tmp_path).exists()
