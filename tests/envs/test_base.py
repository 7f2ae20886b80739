"""The values that an environment is made of."""

from typing import Any

import pytest

from turngate.envs.base import Task


def test_a_task_takes_its_id_and_prompt_by_position() -> None:
    assert Task("a", "Say it.") == Task(id="a", prompt="Say it.", data={})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("a", {"n": 1}),
            r"prompt must be a str: got dict \{'n': 1\}; name the arguments: Task\('a', data=\{\.\.\.\}\)",
        ),
        ((7,), "id must be a str: got int 7"),
        (("a", "", [1]), r"data must be a dict: got list \[1\]"),
    ],
)
def test_a_task_of_wrong_types_says_which_field(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(TypeError, match=f"{says}$"):
        Task(*arguments)
