"""docs/branching.md stays true: its code runs, prints what is printed, and its environments pass the kit."""

import asyncio
import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from turngate.envs import Task
from turngate.envs.fakes import CoinFlipEnv
from turngate.envs.shopping import demonstrations
from turngate.runtime import Limits, Runtime
from turngate.runtime.branching import branch
from turngate.runtime.engine.model import ModelConfig, PolicyModel
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.testing import FakeEndpoint

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "branching.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$(?:\n\n```\n(.*?)^```$)?", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """All code of the page as one module, which another process can import: quietly, it answers on standard output."""
    quiet = "def print(*args): ...\n"
    (tmp_path / "page_branching.py").write_text(quiet + "\n".join(block for block, _ in BLOCKS))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "page_branching", raising=False)
    module = importlib.import_module("page_branching")
    del module.print
    return module


def test_every_piece_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "page_branching"}
    for block, shown in BLOCKS:
        exec(block, names)
        assert capsys.readouterr().out == shown


def test_the_script_runs_on_the_embedded_engine(
    page: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Tokenizer.train(message for chat in demonstrations(8, seed=1) for _, message in chat)
    PolicyModel(ModelConfig(vocab_size=len(tokenizer), width=32, layers=1, head_dim=8, mlp_width=32)).save(tmp_path)
    tokenizer.save(tmp_path / "tokenizer.json")

    asyncio.run(page.main(tmp_path))

    *turns, ledger = capsys.readouterr().out.splitlines()
    assert ledger.startswith("<BranchLedger ")
    assert sum(" Q 0.00  A +0.00 [-0.19, +0.19]" in line for line in turns) >= 1


async def test_functions_of_the_page_do_what_it_says(page: ModuleType) -> None:
    runtime = Runtime(FakeEndpoint(lambda messages: "heads"), limits=Limits(max_turns=9))
    trajectory = await runtime.rollout(lambda: CoinFlipEnv(4), Task("coin"), keep_snapshots=True)

    found = await page.branch_where_it_hesitated(runtime, lambda: CoinFlipEnv(4), trajectory)
    assert len(found.q) == 1
    assert 4 <= next(iter(found.q.values())).estimate.count <= 32

    texts = ["tails", "sing", "heads"]  # what cannot be understood costs a turn and is paid nothing
    assert await page.best_action(runtime, lambda: CoinFlipEnv(1), trajectory, 3, texts) in texts
    assert page.best_and_its_worth({"a": [1.0, 0.0, 1.0, 0.0], "b": [0.0, 1.0, 0.0, 1.0]})[1].mean == 0.0

    mean, error, between, _ = await page.split(runtime, lambda: CoinFlipEnv(4), trajectory, 0)
    assert 0 <= mean <= 4
    assert error >= 0
    assert between >= 0


async def test_branches_are_estimated_as_the_script_of_the_page_prints(page: ModuleType) -> None:
    runtime = Runtime(FakeEndpoint(lambda messages: "heads"), limits=Limits(max_turns=9))
    trajectory = await runtime.rollout(lambda: CoinFlipEnv(1), Task("coin"), keep_snapshots=True)
    found = await branch(runtime, lambda: CoinFlipEnv(1), trajectory, estimands=["Q", "V"], continuations=16)
    gain, (low, high) = found.advantage(0)
    assert low < gain < high


def test_environments_of_the_page_pass_the_kit(page: ModuleType) -> None:
    for kit in (page.TestNotebook(), page.TestReplayedDice()):
        for name in dir(kit):
            if name.startswith("test_"):
                getattr(kit, name)()
