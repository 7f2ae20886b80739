"""The math example runs as it stands, only shorter, and its run holds what the loop promises."""

import argparse
import importlib.util
import json
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from turngate.learners.cloning import CloningConfig
from turngate.learners.recipes.arithmetic import arithmetic_policy

PATH = Path(__file__).parents[2] / "examples" / "arithmetic_grpo.py"
FIGURES = ["success_before", "success_after", "episodes", "updates", "seconds", "run_dir"]


@pytest.fixture
def example(monkeypatch) -> ModuleType:
    """The script as a module, with a warm start of a second."""
    spec = importlib.util.spec_from_file_location("arithmetic_grpo", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    short = partial(arithmetic_policy, config=CloningConfig(steps=80, batch_size=16))
    monkeypatch.setattr(module, "arithmetic_policy", short)
    return module


def test_two_updates_from_one_script_keep_parity_the_bound_and_every_episode(example, tmp_path, capsys):
    run_dir = tmp_path / "run"
    args = argparse.Namespace(
        seed=1, updates=2, max_staleness=1, evaluate=16, run_dir=str(run_dir), json=str(tmp_path / "figures.json")
    )
    example.main(args)
    printed = capsys.readouterr().out
    figures = json.loads(printed.splitlines()[-1])

    assert list(figures) == FIGURES
    assert json.loads((tmp_path / "figures.json").read_text()) == figures
    assert figures["updates"] == 2
    assert figures["episodes"] == 2 * 16 * 16
    assert 0.0 <= figures["success_before"] <= 1.0
    assert 0.0 <= figures["success_after"] <= 1.0

    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["policy_version"] for row in rows] == [1, 2]
    assert max(row["lag_max"] for row in rows) <= 1
    assert rows[0]["parity_tokens"] == rows[0]["policy_tokens"] > 256  # the first batch is all fresh
    assert rows[0]["parity_max_abs"] < 1e-4
    assert "before training: held-out success" in printed


def test_the_script_says_what_its_last_line_holds(example):
    for name in FIGURES:
        assert name in example.__doc__
