"""The verifier is exact, the worker's carries are the only mistakes, the splits are disjoint."""

import random
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngate.envs.arithmetic import (
    LEVELS,
    ArithmeticEnv,
    Level,
    Problem,
    demonstrations,
    held_out_tasks,
    make_task,
    split_of,
    train_tasks,
    work_through,
)
from turngate.envs.base import Action, End
from turngate.envs.testing import SnapshotEnvConformance


class TestConformance(SnapshotEnvConformance):
    def make_env(self):
        return ArithmeticEnv()

    def make_task(self):
        return make_task(Problem(57, "+", 68))

    def make_actions(self):
        return [Action("7+8=15, 5+6+1=12. Answer: 125")]


async def grade(problem, text):
    env = ArithmeticEnv()
    await env.reset(make_task(problem), 0)
    return await env.step(Action(text))


@pytest.mark.parametrize(
    ("text", "outcome", "valid"),
    [
        ("7+8=15, 5+6+1=12. Answer: 125", 1.0, True),
        ("Answer: 125.", 1.0, True),
        ("Answer: 125\n", 1.0, True),
        ("Answer: 124", 0.0, True),
        ("Answer: 0125", 0.0, True),
        ("Answer: 125, or so", 0.0, False),
        ("Answer: 125 Answer: 126", 0.0, True),
        ("Answer: 124 Answer: 125", 1.0, True),
        ("answer: 125", 0.0, False),
        ("125", 0.0, False),
        ("Answer: -125", 0.0, False),
        ("", 0.0, False),
    ],
)
async def test_only_the_exact_final_answer_counts(text, outcome, valid):
    step = await grade(Problem(57, "+", 68), text)
    assert (step.rewards, step.valid) == ({"outcome": outcome}, valid)
    assert step.end is (End.success if outcome else End.failure)


def test_prompt_and_id_name_the_problem():
    task = make_task(Problem(57, "+", 68))
    assert (task.id, task.prompt) == ("math-57+68", "Compute 57+68.")
    assert task.data == {"left": 57, "operation": "+", "right": 68}


@pytest.mark.parametrize(
    ("problem", "work"),
    [
        (Problem(57, "+", 68), "7+8=15, 5+6+1=12. Answer: 125"),
        (Problem(12, "+", 34), "2+4=6, 1+3=4. Answer: 46"),
        (Problem(999, "+", 101), "9+1=10, 9+0+1=10, 9+1+1=11. Answer: 1100"),
        (Problem(52, "-", 38), "12-8=4, 5-3-1=1. Answer: 14"),
        (Problem(300, "-", 299), "10-9=1, 10-9-1=0, 3-2-1=0. Answer: 1"),
        (Problem(47, "*", 8), "7*8=56, 4*8+5=37. Answer: 376"),
    ],
)
def test_work_is_shown_column_by_column(problem, work):
    assert work_through(problem, random.Random(0)) == work


@pytest.mark.parametrize(
    ("problem", "work"),
    [
        (Problem(57, "+", 68), "7+8=15, 5+6=11. Answer: 15"),
        (Problem(52, "-", 38), "12-8=4, 5-3=2. Answer: 24"),
        (Problem(47, "*", 8), "7*8=56, 4*8=32. Answer: 26"),
    ],
)
def test_a_worker_who_always_forgets_drops_every_carry(problem, work):
    assert work_through(problem, random.Random(0), drop_rate=1.0) == work


@given(st.integers(0, 9999), st.integers(0, 9999), st.sampled_from("+-*"))
def test_a_careful_worker_is_always_right(a, b, operation):
    left, right = max(a, b), min(a, b) % (10 if operation == "*" else 10_000)
    problem = Problem(left, operation, right)
    assert work_through(problem, random.Random(0)).endswith(f" Answer: {problem.answer}")


@given(st.integers(0, 999), st.integers(0, 999), st.sampled_from("+-"), st.integers())
def test_every_column_of_a_forgetful_worker_is_correct_by_itself(a, b, operation, seed):
    work = work_through(Problem(max(a, b), operation, min(a, b)), random.Random(seed), drop_rate=0.5)
    for column, value in re.findall(r"([\d+-]+)=(\d+)", work):
        assert eval(column) == int(value)


def test_levels_have_the_digits_and_operations_they_promise():
    for level in LEVELS.values():
        tasks = train_tasks(200, 3, level)
        problems = [msgspec.convert(task.data, Problem) for task in tasks]
        assert {problem.operation for problem in problems} == set(level.operations)
        assert all(len(str(problem.left)) == level.digits for problem in problems)
        assert all(problem.answer >= 0 for problem in problems)


def test_splits_are_disjoint_and_hold_a_fifth_out():
    every = [Problem(a, "+", b) for a in range(10, 100) for b in range(10, 100)]
    held_out = {problem for problem in every if split_of(problem) == "held_out"}
    assert 0.15 < len(held_out) / len(every) < 0.25
    assert {task.id for task in train_tasks(5000, 0)}.isdisjoint(task.id for task in held_out_tasks(1000, 0))


def test_swapped_operands_are_in_the_same_split():
    assert all(
        split_of(Problem(a, op, b)) == split_of(Problem(b, op, a))
        for a in range(10, 60)
        for b in range(9)
        for op in "+*"
    )


def test_tasks_are_distinct_and_depend_on_the_seed():
    first, second = train_tasks(500, 1), train_tasks(500, 2)
    assert len({task.id for task in first}) == 500
    assert first == train_tasks(500, 1)
    assert first != second
    assert train_tasks(700, 1)[:500] == first


def test_asking_for_more_problems_than_there_are_says_how_many_there_are():
    level = Level(digits=1, operations=("-",))
    with pytest.raises(ValueError, match=r"expected <= \d+, got 500"):
        train_tasks(500, 0, level)


def test_demonstrations_of_a_forgetful_worker_are_often_wrong():
    rows = demonstrations(2000, 0, drop_rate=0.6)
    assert [role for role, _ in rows[0]] == ["user", "assistant"]
    right = 0
    for (_, prompt), (_, work) in rows:
        left, right_operand = re.findall(r"\d+", prompt)
        right += work.endswith(f"Answer: {int(left) + int(right_operand)}")
    assert 0.42 < right / 2000 < 0.53
