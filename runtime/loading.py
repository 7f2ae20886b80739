"""Objects named on a command line: `module:name` or `file.py:name`, and tasks from them or from JSON lines."""

import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import msgspec

from turngate.envs.base import Task
from turngate.runtime.agent import Agent, AgentOrEnv
from turngate.runtime.context import Context, full, last_turns
from turngate.runtime.errors import ConfigError
from turngate.runtime.json_ids import DECODE_ERRORS

__all__ = ["load_context", "load_env", "load_object", "load_tasks"]


def load_object(name: str, what: str) -> Any:
    """Return what `module:name` or `path/file.py:name` names; `what` is how errors call it.

    Modules are looked for in the current folder, too. Raises: ConfigError: there is none.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise ConfigError(f"{what} must be module:name or file.py:name: got {name!r}")
    found: Any = _module(place, what)
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            public = (
                ", ".join(n for n in vars(found) if not n.startswith("_"))[:200] if hasattr(found, "__dict__") else ""
            )
            raise ConfigError(f"{what} must exist: {place} has no {attribute!r}; it has {public}") from None
    return found


def load_env(name: str, options: Mapping[str, Any]) -> AgentOrEnv:
    """Return an environment factory, or an agent for `async def agent(session, task)`; `options` are passed to it.

    Raises: ConfigError: it is neither, or there is none.
    """
    found = load_object(name, "--env")
    if isinstance(found, Agent):
        if options:
            raise ConfigError(f"--env-options must go with an environment or a function: {name} is {found!r}")
        return found
    if not callable(found):
        raise ConfigError(f"--env must be an environment's class or an agent: {name} is {found!r:.80}")
    given: Any = functools.partial(found, **options) if options else found
    return Agent(given, name=name) if inspect.iscoroutinefunction(found) else cast(AgentOrEnv, given)


def load_tasks(name: str, count: int | None, seed: int) -> Sequence[Task]:
    """Return tasks from a JSON lines file, or from a list or function that `name` names.

    Args: count: at most so many; a function is called with (count, seed), so it then must be given.
    Raises: ConfigError: they are no tasks, or there are none.
    """
    if name.endswith((".jsonl", ".json")):
        found: Any = _tasks_in(Path(name))
    else:
        found = load_object(name, "--tasks")
        if callable(found):
            if count is None:
                raise ConfigError(f"--n must say how many tasks to make: {name} is a function of (n, seed)")
            found = _called(cast(Callable[[int, int], Any], found), count, seed, name)
    if not isinstance(found, Sequence) or not all(isinstance(task, Task) for task in found):
        raise ConfigError(f"--tasks must be a list of Task: {name} gave {found!r:.80}")
    tasks = found[:count]
    if not tasks:
        raise ConfigError(f"--tasks must hold at least one task: got none ({name}, n = {count})")
    return tasks


def load_context(name: str) -> Context:
    """Return a context function: `full`, `last_turns:3`, or `module:name`. Raises ConfigError."""
    if name == "full":
        return full()
    kind, _, number = name.partition(":")
    if kind == "last_turns":
        if not number.isdecimal():
            raise ConfigError(f"--context last_turns must come with a number: expected last_turns:3, got {name!r}")
        return last_turns(int(number))
    found = load_object(name, "--context")
    if not callable(found):
        raise ConfigError(f"--context must be full, last_turns:N, or a function of the history: got {found!r:.80}")
    return cast(Context, found)


def _module(place: str, what: str) -> ModuleType:
    try:
        if place.endswith(".py"):
            return _module_in(Path(place), what)
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
        return importlib.import_module(place)
    except ConfigError:
        raise
    except Exception as error:  # whatever a module of the user's raises
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{what} must be importable: got {type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        ) from error


def _module_in(path: Path, what: str) -> ModuleType:
    name = f"turngate_loaded_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"{what} must name a Python file: got none at {path}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python FILE.py` does: its neighbours can be imported
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    spec.loader.exec_module(module)
    return module


def _tasks_in(path: Path) -> list[Task]:
    tasks: list[Task] = []
    decode = msgspec.json.Decoder(Task).decode
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--tasks must be readable: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            tasks.append(decode(line))
        except (*DECODE_ERRORS, TypeError) as error:
            raise ConfigError(f"--tasks must hold one task a line: {error} ({path}:{number})") from error
    return tasks


def _called(make: Callable[[int, int], Any], count: int, seed: int, name: str) -> Any:
    try:
        return make(count, seed)
    except Exception as error:  # whatever a function of the user's raises
        raise ConfigError(f"--tasks must be a function of (n, seed): {name} raised {error!r:.200}") from error
