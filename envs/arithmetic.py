"""Math RLVR as one-turn episodes: a prompt, one completion with shown work, an exact verifier.

The same contract as any agent environment, so the same loop and the same loss train on it.
"""

import hashlib
import random
import re
from typing import Literal

import msgspec

from turngate.envs.base import Action, End, Observation, Snapshot, Step, Task

__all__ = [
    "LEVELS",
    "ArithmeticEnv",
    "Level",
    "Problem",
    "demonstrations",
    "held_out_tasks",
    "make_task",
    "split_of",
    "train_tasks",
    "work_through",
]

Split = Literal["train", "held_out"]

_ANSWER = re.compile(r"(?s).*\bAnswer: (\d+)\.?")
_HELD_OUT_SHARE = 0.2
_SALT = b"turngate-arithmetic-1"


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """How hard problems are."""

    digits: int
    """Digits of the first operand, and of the second unless it is a factor."""
    operations: tuple[Literal["+", "-", "*"], ...]
    """`-` never goes below zero; the second factor of `*` has one digit."""


LEVELS = {
    "add2": Level(digits=2, operations=("+",)),
    "add3": Level(digits=3, operations=("+",)),
    "add4": Level(digits=4, operations=("+",)),
    "sub2": Level(digits=2, operations=("-",)),
    "mul2": Level(digits=2, operations=("*",)),
    "mixed3": Level(digits=3, operations=("+", "-", "*")),
}


class Problem(msgspec.Struct, frozen=True):
    """One calculation; what `Task.data` of an arithmetic task holds."""

    left: int
    operation: Literal["+", "-", "*"]
    right: int

    @property
    def answer(self) -> int:
        """The exact result."""
        if self.operation == "+":
            return self.left + self.right
        return self.left - self.right if self.operation == "-" else self.left * self.right

    def __str__(self) -> str:
        return f"{self.left}{self.operation}{self.right}"


class ArithmeticEnv:
    """One calculation per episode. `outcome` is 1 if the completion ends in `Answer: ` and the exact number.

    Mutable state: `_problem`, None before `reset` and after `aclose`.
    """

    kind = "turngate.arithmetic"
    deterministic_step = True

    def __init__(self) -> None:
        self._problem: Problem | None = None

    async def reset(self, task: Task, seed: int) -> Observation:
        """Pose the problem; there is no luck in it."""
        self._problem = msgspec.convert(task.data, Problem)
        return Observation(task.prompt)

    async def step(self, action: Action) -> Step:
        """Verify the completion and end the episode. A completion without an answer is invalid."""
        problem = self._running()
        found = _ANSWER.fullmatch(action.text.strip())
        right = found is not None and found[1] == str(problem.answer)
        end = End.success if right else End.failure
        state = {"problem": str(problem), "answer": problem.answer}
        return Step(Observation(), {"outcome": float(right)}, end, valid=found is not None, state=state)

    async def aclose(self) -> None:
        """Release the episode."""
        self._problem = None

    async def snapshot(self) -> Snapshot:
        """Return the state as bytes."""
        return Snapshot(self.kind, msgspec.json.encode(self._running()))

    async def restore(self, snapshot: Snapshot, seed: int) -> None:
        """Return to `snapshot`."""
        if snapshot.kind != self.kind:
            raise ValueError(
                f"snapshot must be of kind {self.kind!r}: got {snapshot.kind!r}; restore it where it is from"
            )
        self._problem = msgspec.json.decode(snapshot.data, type=Problem)

    def _running(self) -> Problem:
        if self._problem is None:
            raise RuntimeError("step and snapshot must come after reset: no episode is running; call reset first")
        return self._problem


def make_task(problem: Problem) -> Task:
    """Build the task of a problem; equal problems have equal ids."""
    return Task(id=f"math-{problem}", prompt=f"Compute {problem}.", data=msgspec.to_builtins(problem))


def split_of(problem: Problem) -> Split:
    """Return which split a problem belongs to. Swapping the operands of a sum or product does not change it."""
    operands = [problem.left, problem.right]
    if problem.operation != "-":
        operands.sort()
    text = f"{operands[0]}{problem.operation}{operands[1]}"
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=_SALT).digest()
    return "held_out" if int.from_bytes(digest, "big") < _HELD_OUT_SHARE * 2**64 else "train"


def train_tasks(n: int, seed: int, level: Level = LEVELS["add2"]) -> list[Task]:
    """Return `n` distinct tasks to train on. Raises ValueError when the level has no `n` problems."""
    return [make_task(problem) for problem in _problems("train", n, seed, level)]


def held_out_tasks(n: int, seed: int, level: Level = LEVELS["add2"]) -> list[Task]:
    """Return `n` distinct tasks that no training split holds. Raises ValueError when the level has no `n` problems."""
    return [make_task(problem) for problem in _problems("held_out", n, seed, level)]


def _problems(split: Split, n: int, seed: int, level: Level) -> list[Problem]:
    rng = random.Random(f"arithmetic {split} {seed}")
    problems: dict[Problem, None] = {}
    misses = 0
    while len(problems) < n:
        problem = _draw(rng, level)
        if split_of(problem) == split and problem not in problems:
            problems[problem] = None
            misses = 0
            continue
        misses += 1
        if misses > 2000:  # at most about one problem in 2,000 is left
            raise ValueError(f"n must not exceed the split's problems: expected <= {len(problems)}, got {n}; ask for "
                             f"fewer or for a level with more digits than {level}")  # fmt: skip
    return list(problems)


def _draw(rng: random.Random, level: Level) -> Problem:
    operation = rng.choice(level.operations)
    low, high = 10 ** (level.digits - 1), 10**level.digits - 1
    left, right = rng.randint(low, high), rng.randint(low, high)
    if operation == "*":
        right = rng.randint(2, 9)
    elif operation == "-":
        left, right = max(left, right), min(left, right)
    return Problem(left, operation, right)


def work_through(problem: Problem, rng: random.Random, *, drop_rate: float = 0.0) -> str:
    """Solve a problem in writing, column by column from the right, forgetting each carry with `drop_rate`.

    For 57+68: `7+8=15, 5+6+1=12. Answer: 125`; a worker who forgets the first carry writes `5+6=11. Answer: 115`.
    """
    width = len(str(problem.left))
    uppers = [int(digit) for digit in reversed(str(problem.left))]
    lowers = [problem.right] * width if problem.operation == "*" else [
        int(digit) for digit in reversed(str(problem.right).zfill(width))]  # fmt: skip
    columns: list[str] = []
    digits: list[int] = []
    carry = 0
    for upper, lower in zip(uppers, lowers, strict=True):
        text, value, carry = _column(problem.operation, upper, lower, carry)
        columns.append(text)
        digits.append(value % 10)
        if carry and rng.random() < drop_rate:
            carry = 0
    leading = str(carry) if carry else ""  # never a borrow: the left operand is not the smaller one
    answer = int(leading + "".join(str(digit) for digit in reversed(digits)))
    return f"{', '.join(columns)}. Answer: {answer}"


def _column(operation: str, upper: int, lower: int, carry: int) -> tuple[str, int, int]:
    """Return one column's text, its value, and what it carries (or borrows) to the left."""
    if operation == "-":
        borrow = int(upper - lower - carry < 0)
        value = 10 * borrow + upper - lower - carry
        sign, upper = "-", 10 * borrow + upper
    else:
        value = (upper + lower if operation == "+" else upper * lower) + carry
        sign, borrow = "+", value // 10
    extra = f"{sign}{carry}" if carry else ""
    return f"{upper}{operation}{lower}{extra}={value}", value, borrow


def demonstrations(
    n: int, seed: int, level: Level = LEVELS["add2"], *, drop_rate: float = 0.6
) -> list[list[tuple[str, str]]]:
    """Return `n` (role, content) dialogues of a worker who forgets carries, on training problems, right or wrong."""
    rng = random.Random(f"arithmetic worker {seed}")
    tasks = train_tasks(n, seed, level)
    return [
        [
            ("user", task.prompt),
            ("assistant", work_through(msgspec.convert(task.data, Problem), rng, drop_rate=drop_rate)),
        ]
        for task in tasks
    ]
