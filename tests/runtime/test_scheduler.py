import pytest

from turngate.envs.base import Task
from turngate.runtime.errors import ConfigError
from turngate.runtime.scheduler import Collection, TaskStream

TASKS = [Task(str(n)) for n in range(5)]


def _names(stream: TaskStream, n: int) -> list[str]:
    return [stream.next().id for _ in range(n)]


def test_every_epoch_holds_every_task_once_in_another_order() -> None:
    stream = TaskStream(TASKS, seed=3)
    first, second = _names(stream, 5), _names(stream, 5)
    assert sorted(first) == sorted(second) == ["0", "1", "2", "3", "4"]
    assert first != second


def test_a_stream_goes_on_from_any_position() -> None:
    whole = _names(TaskStream(TASKS, seed=3), 12)
    assert _names(TaskStream(TASKS, seed=3, position=7), 5) == whole[7:]


def test_requeued_tasks_go_first_and_move_no_position() -> None:
    stream = TaskStream(TASKS, seed=3, requeued=["4", "gone"])
    stream.requeue(TASKS[2])
    assert _names(stream, 2) == ["4", "2"]
    assert stream.position == 0


@pytest.mark.parametrize(("tasks", "says"), [([], "must not be empty"), ([Task("a"), Task("a")], "must be unique")])
def test_unusable_tasks_are_refused(tasks: list[Task], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TaskStream(tasks, seed=0)


def test_a_group_cannot_need_more_members_than_it_has() -> None:
    with pytest.raises(ConfigError, match="between 1 and group_size 4: got 5"):
        Collection(group_size=4, min_group=5)
