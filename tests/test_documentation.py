"""The documentation stays true: the page about one rollout, and the code that readers copy."""

import ast
import asyncio
import importlib
import inspect
import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest

from turngate.envs import End, Task
from turngate.envs.shopping import ShoppingEnv, demonstrations, running_example
from turngate.learners import GRPO, PPO
from turngate.runtime import (
    Batch,
    Buffer,
    Endpoint,
    EvaluationFinished,
    Events,
    Group,
    Ledger,
    RolloutFinished,
    Runtime,
    StalenessLimit,
    Trajectory,
    UpdateFinished,
    render_transcript,
    run_rollout,
    train,
)
from turngate.runtime.engine import Engine
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.events import BatchTaken, GroupDropped, GroupFinished, WeightsPublished
from turngate.runtime.gauges import RunGauges
from turngate.runtime.metrics import LoopLagMeter, MetricsWriter
from turngate.runtime.restarts import Restarts, RestartStore
from turngate.runtime.slots import Slots
from turngate.runtime.testing import FakeEndpoint
from turngate.runtime.transcript import write_trajectories

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

MAX_FILES, MAX_HOPS = 8, 15
TYPE_HOMES = ("envs/base.py", "runtime/types.py", "runtime/scheduler.py", "learners/batch.py")
HOP = re.compile(r"^### (\d+)\. `([^`]+)` · `([^`]+)` → (.+)\n+(?:Reached via `([^`]+)` · `([^`]+)`)?", re.MULTILINE)

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class Hop(NamedTuple):
    number: int
    file: str
    function: str
    flows: str
    via_file: str
    via_function: str

    @property
    def callers(self) -> list[tuple[str, str]]:
        """Functions by which this hop may be reached, as (file, function)."""
        if self.via_file:
            # Any function of the carrier's module: between threads and processes there is no call to follow.
            return [(self.via_file, function) for function in functions_of(self.via_file)]
        return [(hop.file, hop.function) for hop in hops() if hop.number < self.number]


def hops() -> list[Hop]:
    found = HOP.findall((DOCS / "one-rollout.md").read_text())
    return [Hop(int(number), *rest) for number, *rest in found]


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


def calls(file: str, function: str, called: str) -> bool:
    return called.rpartition(".")[2] in names_reached(file, function)


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

    if hop.number > 1:
        assert any(calls(file, function, hop.function) for file, function in hop.callers)
    if hop.via_file:
        before = [earlier for earlier in hops() if earlier.number < hop.number]
        assert any(calls(earlier.file, earlier.function, hop.via_function) for earlier in before)


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


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def imported(block: str) -> dict[str, Any]:
    """Run the import statements of a block and return the names they bind."""
    names: dict[str, Any] = {}
    statements = [node for node in ast.parse(block).body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(statements, []), "<imports>", "exec"), names)
    return names


def resolved(node: ast.expr, names: dict[str, Any]) -> Any:
    """Return what an expression of names and attributes stands for; None when the page alone cannot say."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(resolved(node.value, names), node.attr, None)
    return None


def misfits(source: str) -> list[str]:
    """Return the calls of a script that the functions of Turngate would refuse, by their signatures."""
    names = imported(source) | {"runtime": Runtime, "engine": Engine, "endpoint": Endpoint}
    found: list[str] = []
    for call in ast.walk(ast.parse(source)):
        target = resolved(call.func, names) if isinstance(call, ast.Call) else None
        if target is None or not getattr(target, "__module__", "").startswith("turngate."):
            continue
        # A method reached through its class lacks only `self`.
        is_method = inspect.isfunction(target) and "." in target.__qualname__
        args = [None] * (len(call.args) + is_method)
        try:
            inspect.signature(target).bind(*args, **{keyword.arg: None for keyword in call.keywords if keyword.arg})
        except TypeError as error:
            found.append(f"{ast.unparse(call)}: {error}")
        except ValueError:
            continue  # an exception of the standard library's kind: it has no signature, and takes a message
    return found


SCRIPTS = {
    **{f"README {n}": block for n, block in enumerate(python_blocks(ROOT / "README.md"))},
    **{path.name: path.read_text() for path in sorted((ROOT / "examples").glob("*.py"))},
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_import_what_exists_and_call_it_as_it_is_declared(name: str) -> None:
    assert misfits(SCRIPTS[name]) == []


def test_a_call_that_does_not_fit_is_found() -> None:
    script = "from turngate.runtime import Limits, train\ntrain(1, 2, 3, learner=4)\nLimits(turns=3)\n"

    assert len(misfits(script)) == 2


def test_the_environment_of_the_readme_is_the_one_of_the_example() -> None:
    def guess(source: str) -> str:
        return next(ast.unparse(n) for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "Lock")

    example = (ROOT / "examples" / "own_env.py").read_text()
    blocks = [block for block in python_blocks(ROOT / "README.md") if "class Lock" in block]

    assert [guess(block) for block in blocks] == [guess(example)]
    assert len([line for line in example.splitlines() if line.strip()]) <= 40


def test_the_page_about_environments_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = DOCS / "environments.md"
    scripts = [block for block in python_blocks(page) if "print(" in block]
    library = [block for block in python_blocks(page) if block not in scripts]
    shown = re.findall(r"^```\n(trajectory.*?)```$", page.read_text(), re.MULTILINE | re.DOTALL)
    # A module of its own: the kit restores snapshots in another process, which must be able to import it.
    (tmp_path / "page_environments.py").write_text("\n".join(library))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("page_environments")

    for script in scripts:
        exec(script, vars(module))

    assert capsys.readouterr().out == "".join(shown)
    for kit in (module.TestGuess(), module.TestSavableGuess(), module.TestLibrary()):
        for name in dir(kit):
            if name.startswith("test_"):
                getattr(kit, name)()


class Exchange(NamedTuple):
    """A request of a page and the reply printed below it."""

    url: str
    body: str | None
    reply: Any


def exchanges(page: Path) -> list[Exchange]:
    found = re.findall(r"^```sh\n(curl .*?)```\n\n```json\n(.*?)```$", page.read_text(), re.MULTILINE | re.DOTALL)
    commands = [(shlex.split(command), json.loads(reply)) for command, reply in found]
    return [Exchange(c[1], c[c.index("-d") + 1] if "-d" in c else None, reply) for c, reply in commands]


def missing_keys(shown: Any, real: Any, path: str = "") -> list[str]:
    """Return the paths of what a page shows and the real reply does not hold."""
    if isinstance(shown, dict):
        absent = [f"{path}.{key}" for key in shown if key not in real]
        return absent + [
            p for key in shown if key in real for p in missing_keys(shown[key], real[key], f"{path}.{key}")
        ]
    if isinstance(shown, list) and isinstance(real, list) and shown and real:
        return missing_keys(shown[0], real[0], f"{path}[0]")
    return []


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from turngate.runtime.engine.model import ModelConfig, PolicyModel

    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer.train(message for chat in demonstrations(8, seed=1) for _, message in chat)
    PolicyModel(ModelConfig(vocab_size=len(tokenizer), width=32, layers=1, head_dim=8, mlp_width=32)).save(folder)
    tokenizer.save(folder / "tokenizer.json")
    return folder


async def test_the_engine_answers_as_its_page_says(model_folder: Path) -> None:
    page = exchanges(DOCS / "engine.md")
    assert len(page) == 7

    async with Engine.start(model_folder, mode="thread", policy_version=7) as engine, aiohttp.ClientSession() as http:
        for url, body, shown in page:
            url = url.replace("http://127.0.0.1:8000", engine.url)
            if body is None:
                request = http.get(url)
            else:
                body = body.replace("/path/to", str(model_folder))
                request = http.post(url, data=body, headers={"Content-Type": "application/json"})
            async with request as reply:
                real = await reply.json()
            assert missing_keys(shown, real) == [], url
            if "error" in shown:
                assert (reply.status, real) == (409 if "weights" in url else 400, shown)
            else:
                assert reply.status == 200, real
        scored = next(exchange.reply for exchange in page if "echo" in (exchange.body or ""))
        assert scored["choices"][0]["logprobs"]["tokens"] == ["<|user|>", "F", "<|end|>", "<|assistant|>"]


async def test_the_evaluation_of_the_readme_runs(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = next(block for block in python_blocks(ROOT / "README.md") if "connect(" in block)

    async with Engine.start(model_folder, mode="thread", model_name="my-model") as engine:
        script = script.replace("http://127.0.0.1:8000", engine.url).replace("held_out_tasks(64", "held_out_tasks(2")
        names: dict[str, Any] = {"__name__": "readme"}
        exec(script, names)
        await names["main"]()

    said = capsys.readouterr().out
    assert "(n = 2)" in said
    assert "You are shopping." in said


def test_every_decision_is_listed_and_says_what_it_costs() -> None:
    index = (DOCS / "adr" / "README.md").read_text()
    pages = sorted((DOCS / "adr").glob("[0-9]*.md"))

    assert [page.name for page in pages if f"]({page.name})" not in index] == []
    for page in pages:
        found = re.findall(r"^\*\*(.+?)\.\*\*", page.read_text(), re.MULTILINE)
        assert found == ["Context", "Choice", "What we give up"], page.name


def test_every_shape_letter_in_the_code_is_explained() -> None:
    explained = set(re.findall(r"^\| `([A-Z])` \|", (DOCS / "notation.md").read_text(), re.MULTILINE))
    files = [*(ROOT / "learners").rglob("*.py"), *(ROOT / "runtime").rglob("*.py")]
    names = {
        name
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        for name in (getattr(node, "id", ""), getattr(node, "arg", ""), getattr(node, "attr", ""))
        if isinstance(name, str)
    }
    used = {letter for name in names if (found := re.fullmatch(r"[a-z].*_([A-Z]{1,4})1?", name)) for letter in found[1]}

    assert used <= explained


def test_recorded_trajectories_read_as_their_page_says(tmp_path: Path) -> None:
    page = DOCS / "records.md"
    names: dict[str, Any] = {}
    for block in python_blocks(page):
        exec(block, names)
    shown = re.search(r"^```\n(trajectory.*?)```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert shown is not None
    actions = re.findall(r"^  turn \d  (.+)$", shown[1], re.MULTILINE)

    trajectory = asyncio.run(run_rollout(ShoppingEnv, running_example(), FakeEndpoint(actions), seed=3))
    write_trajectories(tmp_path / "t.jsonl", [trajectory])

    # Tokens and versions depend on the server; the story does not.
    assert render_transcript(trajectory).splitlines()[:-1] == shown[1].splitlines()[:-1]
    assert names["sampled"](tmp_path / "t.jsonl") == [trajectory.policy_tokens]
    Tokenizer([]).save(tmp_path / "tokenizer.json")  # its ids are bytes, as the fake endpoint's
    assert names["show_first"](tmp_path / "t.jsonl", tmp_path).startswith(
        f"segment 0: {len(trajectory.segments[0])} tokens, {trajectory.policy_tokens} sampled\n"
    )
    (segments,) = names["read"](tmp_path / "t.jsonl")
    assert [list(s["token_ids"]) for s in segments] == [list(s.ids()) for s in trajectory.segments]
    assert [list(s["logprobs"]) for s in segments] == [list(s.logprob_values()) for s in trajectory.segments]


def test_the_events_of_a_run_have_the_documented_fields(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    (script,) = [block for block in python_blocks(DOCS / "records.md") if "def ends(" in block]
    exec(script, names)
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", (DOCS / "records.md").read_text(), re.MULTILINE)
    table = {event: set(re.findall(r"`(\w+)`", fields)) for event, fields in rows}
    trajectory = Trajectory(id="a", task=Task("t"), end=End.env_error, error="KeyError: 'secret'")
    told: list[Any] = [
        RolloutFinished(trajectory),
        RolloutFinished(msgspec.structs.replace(trajectory, end=End.success, error="")),
        RolloutFinished(trajectory),
        GroupFinished(Group(id="g0", task=Task("t"), order=0, trajectories=(trajectory,))),
        GroupDropped("g0", "t", "stale", 1, 2),
        BatchTaken(0, 1, 1, 1, 0, 0.0, 0, 0.0),
        UpdateFinished(1, {}, 0.1),
        WeightsPublished(1, 0.1),
        EvaluationFinished("after", 1, 1, 1, 1.0, 0.1),
    ]

    events = Events()
    with MetricsWriter(tmp_path / "events.jsonl", events):
        for event in told:
            getattr(events, Events.SLOTS[type(event)])(event)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event":"rollout_fin')  # still being written
    written = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()[:-1]]

    assert names["ends"](tmp_path) == [("env_error KeyError: 'secret'", 2), ("success", 1)]
    for row in written:
        fields = row.keys() - {"event", "time_s"}
        assert fields == table[row["event"]], row["event"]


def documented_metrics(heading: str) -> set[str]:
    """Return the names in the first column of the table under a heading of the page about metrics."""
    section = (DOCS / "metrics.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.+?`) \|", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(.+?)`", cell)}


def test_the_metrics_of_an_update_are_the_documented_ones() -> None:
    recovery = documented_metrics("Recovery")
    ledger = Ledger()
    ledger.draw("r")
    ledger.drop("r", "stale")
    row = RunGauges(Slots(1), LoopLagMeter()).row(
        Batch(groups=(), policy_version=0), Buffer(groups_per_batch=1, limit=StalenessLimit()), ledger
    )
    told = {"update", "policy_version", "rollouts_dropped_<reason>", *row} - {"rollouts_dropped_stale"}

    assert documented_metrics("The run") == told - {"mistake_rate", "recovery_rate", "clean_success"}
    assert {"mistake_rate", "recovery_rate", "clean_success"} <= told & recovery
    assert RestartStore(Restarts()).metrics().keys() <= recovery


def test_the_knobs_of_the_readme_exist_with_these_defaults() -> None:
    homes = {"train": train, "Runtime": Runtime, "GRPO": GRPO, "PPO": PPO}
    rows = re.findall(r"^\| `(\w+)\((.+?)\)` \| (.*?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) >= 10

    for home, arguments, shown in rows:
        parameters = inspect.signature(homes[home]).parameters
        names = re.findall(r"(\w+)=", re.sub(r"=\w+\(\.\.\.\)", "=", arguments))
        assert [name for name in names if name not in parameters] == []
        defaults = [re.sub(r"[`\"]", "", part) for part in shown.split(", ")]
        for name, default in zip(names, defaults, strict=False):
            if parameters[name].default is not None and home not in ("GRPO", "PPO"):
                assert str(parameters[name].default) == default, name
