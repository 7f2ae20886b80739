"""Guidance of a frozen shopping policy, as its user runs it, at a tiny size."""

import argparse
import functools
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from turngate.learners import CloningConfig
from turngate.learners.recipes.shopping import shopping_policy

EXAMPLE = Path(__file__).parents[2] / "examples" / "guided_shopping.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module, with a warm start of seconds."""
    spec = importlib.util.spec_from_file_location("guided_shopping", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tiny = functools.partial(shopping_policy, config=CloningConfig(steps=4), settling=CloningConfig(steps=4))
    monkeypatch.setattr(module, "shopping_policy", tiny)
    monkeypatch.setattr(module, "MC_DRAWS", 2)
    monkeypatch.setattr(module, "MC_CONTINUATIONS", 1)
    return module


def arguments(run_dir: Path, **changes: object) -> argparse.Namespace:
    settings = {
        "seeds": [3],
        "episodes": 24,
        "tasks": 4,
        "betas": [5.0],
        "draws": 2,
        "top_k": 3,
        "mc_tasks": 1,
        "compare": 2,
        "run_dir": str(run_dir),
        "plot_only": False,
        "json": str(run_dir / "figures.json"),
    }
    return argparse.Namespace(**(settings | changes))


def test_a_run_leaves_table_plot_and_figures_and_is_not_repeated(script, tmp_path, capsys, monkeypatch):
    script.main(arguments(tmp_path))
    last = capsys.readouterr().out.splitlines()[-1]
    told = json.loads(last)
    assert json.loads((tmp_path / "figures.json").read_text()) == told
    assert [(row["method"], row["beta"]) for row in told["cells"]] == [
        ("base", 0.0),
        ("turn", 5.0),
        ("token", 5.0),
        ("monte carlo", 5.0),
    ]
    turn = told["cells"][1]
    assert turn["distinct"] >= 1
    assert turn["tokens"] > 0
    assert (tmp_path / "guided.png").stat().st_size > 1000
    assert (tmp_path / "table.md").read_text().startswith("| method | beta |")

    def again(*ignored):
        raise AssertionError("what is done must not be run again")

    monkeypatch.setattr(script, "measure", again)
    monkeypatch.setattr(script, "teach_critic", again)
    monkeypatch.setattr(script, "compare_with_branches", again)
    script.main(arguments(tmp_path))
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == told


def test_figures_of_other_settings_are_not_mixed(script, tmp_path):
    script.require_same_settings(tmp_path / "seed3", arguments(tmp_path, mc_tasks=0))
    script.require_same_settings(tmp_path / "seed3", arguments(tmp_path, betas=[1.0, 2.0]))
    script.require_same_settings(tmp_path / "seed3", arguments(tmp_path, compare=0))
    with pytest.raises(SystemExit, match=r"other settings: episodes 24, not 48; mc_tasks 1, not 2\. Choose"):
        script.main(arguments(tmp_path, episodes=48, mc_tasks=2))


def test_nothing_is_compared_where_nothing_was_measured(script, tmp_path):
    with pytest.raises(SystemExit, match="nothing is measured yet in "):
        script.main(arguments(tmp_path / "runs", plot_only=True))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("odd", ["0", "-1", "nan", "inf"])
def test_options_are_read_as_what_they_must_be(script, odd):
    for read in (script.positive, script.count):
        with pytest.raises(argparse.ArgumentTypeError, match=f"must be above 0: got {odd}"):
            read(odd)
    assert (script.positive("0.5"), script.count("1")) == (0.5, 1)


def test_ctrl_c_says_how_to_go_on(script, tmp_path, monkeypatch):
    def stopped(*ignored):
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "run_seed", stopped)
    with pytest.raises(SystemExit, match="the same command goes on"):
        script.main(arguments(tmp_path))


def test_more_betas_are_added_to_what_is_there(script, tmp_path):
    cell = script.Cell(method="base", beta=0.0, successes=1, scored=4, kl=0.0, tokens=9.0)
    better = script.Cell(method="turn", beta=5.0, successes=3, scored=4, kl=0.5, distinct=2.0, tokens=70.0)
    for seed, cells in ((1, [better, cell]), (2, [cell])):
        folder = tmp_path / f"seed{seed}"
        folder.mkdir()
        (folder / "cells.jsonl").write_bytes(b"".join(script.msgspec.json.encode(c) + b"\n" for c in cells))
    rows = script.summarise([script.cells_of(tmp_path / "seed1"), script.cells_of(tmp_path / "seed2")])
    assert [(row["seeds"], row["success"], row["gain"]) for row in rows] == [(2, 0.25, 0.0), (1, 0.75, 0.5)]
    assert rows[0]["gain_se"] == 0.0
    assert rows[1]["gain_se"] is None


def test_what_does_not_vary_has_no_correlation(script):
    assert script.correlation([1.0, 1.0], [0.0, 1.0]) is None
    assert script.mean([None, None]) is None
