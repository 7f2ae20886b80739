"""The documentation stays true: the page about one rollout, and the code that readers copy."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

MAX_FILES, MAX_HOPS = 8, 15
TYPE_HOMES = ("envs/base.py", "runtime/types.py", "runtime/scheduler.py", "learners/batch.py")
HOP = re.compile(r"^### (\d+)\. `([^`]+)` · `([^`]+)` → (.+)$", re.MULTILINE)

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class Hop(NamedTuple):
    number: int
    file: str
    function: str
    flows: str


def hops() -> list[Hop]:
    found = HOP.findall((DOCS / "one-rollout.md").read_text())
    return [Hop(int(number), file, function, flows) for number, file, function, flows in found]


@cache
def functions_of(file: str) -> dict[str, FunctionNode]:
    """Return the functions and methods of a module by qualified name."""
    found: dict[str, FunctionNode] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, FunctionNode):
                found[prefix + child.name] = child
            elif isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse((ROOT / file).read_text()), "")
    return found


def names_called(function: FunctionNode) -> set[str]:
    """Return the last names of whatever a function calls or hands to a call."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    nodes = [node for call in calls for node in (call.func, *call.args)]
    return {n.attr if isinstance(n, ast.Attribute) else n.id for n in nodes if isinstance(n, ast.Attribute | ast.Name)}


def names_reached(file: str, function: str) -> set[str]:
    """Return the names a function calls, itself or through functions of its own file."""
    functions = functions_of(file)
    by_name: dict[str, list[FunctionNode]] = {}
    for qualified, node in functions.items():
        by_name.setdefault(qualified.rpartition(".")[2], []).append(node)
    reached: set[str] = set()
    new = names_called(functions[function])
    while new:
        reached |= new
        new = {name for known in new for node in by_name.get(known, ()) for name in names_called(node)} - reached
    return reached


def test_the_page_about_one_rollout_is_short_enough_to_follow() -> None:
    found = hops()

    assert [hop.number for hop in found] == list(range(1, len(found) + 1))
    assert 10 <= len(found) <= MAX_HOPS
    assert len({hop.file for hop in found}) <= MAX_FILES
    assert found[0].file.startswith("examples/")
    assert "backward" in names_called(functions_of(found[-1].file)[found[-1].function])


@pytest.mark.parametrize("hop", hops(), ids=lambda hop: f"{hop.number}-{hop.function}")
def test_every_hop_exists_and_is_called_by_one_before_it(hop: Hop) -> None:
    assert hop.function in functions_of(hop.file), f"{hop.file} has no {hop.function}"

    name = hop.function.rpartition(".")[2]
    before = [earlier for earlier in hops() if earlier.number < hop.number]
    assert not before or any(name in names_reached(earlier.file, earlier.function) for earlier in before)


def test_every_type_that_flows_is_declared() -> None:
    declared = {
        node.name
        for file in TYPE_HOMES
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.ClassDef)
    }
    flowing = {name for hop in hops() for name in re.findall(r"[A-Z]\w+", hop.flows)}

    assert {"Task", "Completion", "Segment", "Trajectory", "Group", "Batch"} <= flowing
    assert flowing <= declared


@pytest.mark.parametrize("page", sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]), ids=str)
def test_files_and_links_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    links = [target for target in re.findall(r"\]\(([^)#\s]+)\)", text) if "://" not in target]
    files = re.findall(
        r"`((?!docs/adr/N)(?:envs|runtime|learners|examples|benchmarks|docs|tests)/[\w./-]*\w\.(?:py|md))`", text
    )

    assert [target for target in links if not (page.parent / target).exists()] == []
    assert [name for name in files if not (ROOT / name).exists()] == []
