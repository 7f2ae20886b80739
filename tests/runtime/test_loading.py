import functools
import sys

import pytest

from turngate.envs.arithmetic import ArithmeticEnv
from turngate.envs.base import Task
from turngate.envs.shopping import ShoppingEnv
from turngate.runtime.agent import Agent
from turngate.runtime.context import full
from turngate.runtime.errors import ConfigError
from turngate.runtime.loading import load_context, load_env, load_object, load_tasks


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from turngate.envs.base import Task\n"
        "from turngate.runtime.agent import Agent\n"
        "async def solve(session, task, hint=''): return 1.0\n"
        "ready = Agent(solve, max_turns=3)\n"
        "TASKS = [Task(str(i)) for i in range(5)]\n"
        "def make(n, seed): return [Task(f'{seed}-{i}') for i in range(n)]\n"
        "def broken(): return []\n"
        "number = 7\n"
    )
    return path


def test_modules_and_files_are_named_alike(script):
    assert load_env("turngate.envs.shopping:ShoppingEnv", {}) is ShoppingEnv
    assert load_object(f"{script}:number", "--env") == 7
    with_options = load_env("turngate.envs.shopping:ShoppingEnv", {"instructions": True})
    assert isinstance(with_options, functools.partial)
    assert with_options.keywords == {"instructions": True}


def test_modules_in_the_current_folder_are_found(script, monkeypatch):
    monkeypatch.chdir(script.parent)
    monkeypatch.setattr("sys.path", ["elsewhere"])
    assert load_object("mine:number", "--env") == 7


def test_a_file_imports_its_neighbours_as_a_script_does(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    (tmp_path / "neighbour_of_it.py").write_text("number = 8\n")
    (tmp_path / "it.py").write_text("from neighbour_of_it import number\n")
    assert load_object(f"{tmp_path / 'it.py'}:number", "--env") == 8
    sys.modules.pop("neighbour_of_it")


def test_coroutine_functions_are_agents(script):
    agent, ready = load_env(f"{script}:solve", {"hint": "x"}), load_env(f"{script}:ready", {})
    assert isinstance(agent, Agent)
    assert isinstance(agent.fn, functools.partial)
    assert agent.fn.keywords == {"hint": "x"}
    assert isinstance(ready, Agent)
    assert ready.max_turns == 3
    with pytest.raises(ConfigError, match="--env-options"):
        load_env(f"{script}:ready", {"hint": "x"})


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("turngate.envs.shopping", "module:name"),
        ("turngate.envs.shopping:Shoop", "has no 'Shoop'"),
        ("no.such.module:x", "ModuleNotFoundError"),
        ("none.py:x", "got none at none.py"),
        ("turngate.envs.shopping:__doc__", "class or an agent"),
    ],
)
def test_what_cannot_be_loaded_is_explained(name, told):
    with pytest.raises(ConfigError, match=told.replace(".", r"\.")):
        load_env(name, {})


def test_a_file_that_raises_is_explained_with_its_line(tmp_path):
    (tmp_path / "bad.py").write_text("x = 1\nprint(y)\n")
    with pytest.raises(ConfigError, match=r"NameError: name 'y' is not defined \(.*bad\.py:2\)"):
        load_env(f"{tmp_path / 'bad.py'}:x", {})


def test_tasks_come_from_functions_lists_and_files(script, tmp_path):
    assert [t.id for t in load_tasks(f"{script}:make", 2, 9)] == ["9-0", "9-1"]
    assert len(load_tasks(f"{script}:TASKS", None, 0)) == 5
    assert len(load_tasks(f"{script}:TASKS", 2, 0)) == 2
    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "data": {"x": 1}}\n\n{"id": "b"}\n')
    assert load_tasks(str(tmp_path / "tasks.jsonl"), None, 0) == [Task("a", data={"x": 1}), Task("b")]


@pytest.mark.parametrize(
    ("name", "count", "told"),
    [
        ("make", None, "--n must say"),
        ("broken", 1, "raised TypeError"),
        ("number", 1, "list of Task"),
        ("TASKS", 0, "none"),
    ],
)
def test_tasks_that_are_none_are_explained(script, name, count, told):
    with pytest.raises(ConfigError, match=told):
        load_tasks(f"{script}:{name}", count, 0)


@pytest.mark.parametrize("line", ["{", '{"prompt": "no id"}', '{"id": 7}', "[]"])
def test_a_line_that_is_no_task_is_explained_with_its_number(tmp_path, line):
    (tmp_path / "tasks.jsonl").write_text(f'{{"id": "a"}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"tasks\.jsonl:2"):
        load_tasks(str(tmp_path / "tasks.jsonl"), None, 0)


def test_contexts_have_short_names():
    assert repr(load_context("full")) == repr(full())
    assert "3" in repr(load_context("last_turns:3"))
    named: object = load_context("turngate.envs.arithmetic:ArithmeticEnv")
    assert named is ArithmeticEnv
    with pytest.raises(ConfigError, match="last_turns:3"):
        load_context("last_turns:few")
