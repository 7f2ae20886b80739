"""The house: links, one import name per part, a complete wheel, a light import, commands that exist."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "turngate"
PARTS = ("envs", "runtime", "learners")

# What a user who only records agents must not pay for.
HEAVY = {"matplotlib", "numpy", "openai", "ray", "torch", "transformers"}

# The libraries that `turngate.runtime` is built on; its own import may cost as much again.
# On a laptop these take about 0.12 s, so the bound keeps the whole import below 0.3 s there.
BASELINE_IMPORT = "import aiohttp, anyio, msgspec"
MAX_IMPORT_RATIO = 2.0

CPU_TIME_OF = "import time; start = time.process_time(); {}; print(time.process_time() - start)"


def run_python(code: str, *, cwd: Path = PACKAGE.parent) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)


def files_under(folder: Path, name: str) -> set[str]:
    """Return the paths that a wheel must hold for `folder`, which it calls `name`."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    kept = (path for path in paths if "__pycache__" not in path.parts and not path.name.startswith("."))
    return {f"{name}/{path.as_posix()}" for path in kept}


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Build a wheel from a copy, so that no leftovers of older builds get in, and return the names of its files."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("src", *PARTS):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    out = tmp_path_factory.mktemp("wheel")
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(out), "."]
    subprocess.run([sys.executable, *command], cwd=copy, check=True, timeout=300)
    (wheel,) = out.glob("turngate-*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.parametrize("part", PARTS)
def test_link_is_relative_and_leads_to_the_folder(part: str) -> None:
    link = PACKAGE / part

    assert link.is_symlink()
    assert os.readlink(link) == f"../../{part}"
    assert link.resolve() == ROOT / part


@pytest.mark.parametrize("part", PARTS)
def test_bare_import_is_refused_and_names_the_right_one(part: str) -> None:
    result = run_python(f"import {part}", cwd=ROOT)

    assert result.returncode != 0
    assert f"ImportError: import turngate.{part}, not {part}" in result.stderr


@pytest.mark.parametrize("part", PARTS)
def test_every_exported_name_exists_once(part: str) -> None:
    module = importlib.import_module(f"turngate.{part}")

    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert len(set(module.__all__)) == len(module.__all__)


def test_wheel_holds_exactly_the_files_of_the_folders(wheel_names: set[str]) -> None:
    own = {f"turngate/{path.name}" for path in PACKAGE.iterdir() if path.is_file() and not path.name.startswith(".")}
    expected = own.union(*(files_under(ROOT / part, f"turngate/{part}") for part in PARTS))

    assert {name for name in wheel_names if ".dist-info/" not in name} == expected
    assert "turngate/py.typed" in expected


def test_importing_the_runtime_loads_nothing_heavy() -> None:
    result = run_python(f"import sys, turngate.runtime; print(*{HEAVY!r}.intersection(sys.modules))")

    assert result.stderr == ""
    assert result.stdout.split() == []


def test_no_module_of_runtime_or_envs_imports_torch_at_top_level() -> None:
    code = """
import importlib, pkgutil, sys, turngate.envs, turngate.runtime
for part in (turngate.envs, turngate.runtime):
    for module in pkgutil.walk_packages(part.__path__, part.__name__ + "."):
        if not module.name.startswith("turngate.runtime.engine"):
            importlib.import_module(module.name)
        if "torch" in sys.modules:
            sys.exit(f"{module.name} imports torch")
"""
    result = run_python(code)

    assert result.returncode == 0, result.stderr


def test_what_needs_torch_names_the_extra_where_there_is_none() -> None:
    for code, told in (
        ("import turngate.learners", "ModuleNotFoundError: turngate.learners needs the extra train"),
        (
            "from turngate.runtime import cli; sys.exit(cli.main(['serve', 'x']))",
            "turngate serve needs the extra train",
        ),
    ):
        hidden = """
import sys
from importlib.machinery import PathFinder
class WithoutTorch(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == "torch" else super().find_spec(name, path, target)
sys.meta_path = [WithoutTorch if finder is PathFinder else finder for finder in sys.meta_path]
"""
        assert told in run_python(hidden + code).stderr.splitlines()[-1]


def test_importing_the_runtime_costs_little_more_than_its_libraries() -> None:
    # The least of interleaved tries, in CPU time: other processes on the machine change neither.
    times: dict[str, list[float]] = {BASELINE_IMPORT: [], "import turngate.runtime": []}
    for _ in range(3):
        for statement, taken in times.items():
            taken.append(float(run_python(CPU_TIME_OF.format(statement)).stdout))
    baseline, ours = (min(taken) for taken in times.values())

    assert ours / baseline <= MAX_IMPORT_RATIO


def test_module_and_script_run_the_same_command_line() -> None:
    script = Path(sys.executable).with_name("turngate")
    commands = ([sys.executable, "-m", "turngate", "--help"], [str(script), "--help"])
    outputs = [subprocess.run(c, capture_output=True, text=True, check=True, timeout=120).stdout for c in commands]

    assert "usage: turngate" in outputs[0]
    assert outputs[0] == outputs[1]


def test_commands_in_the_readme_exist_in_the_makefile() -> None:
    commands = set(re.findall(r"\bmake ([a-z]+)\b(?=\s*#|\s*$|`)", (ROOT / "README.md").read_text(), re.MULTILINE))
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

    assert {"demo", "test"} <= commands
    assert commands <= targets
