"""The comparison of credit assignments, as its user runs it, at a tiny size."""

import argparse
import functools
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from turngate.learners import CloningConfig
from turngate.learners.recipes.shopping import SHOPPING_METHODS, shopping_learner, shopping_policy
from turngate.runtime.errors import ConfigError, LearnerError

EXAMPLE = Path(__file__).parents[2] / "examples" / "credit.py"
METHODS = ["step_groups", "bilevel_gae"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module, with a warm start of seconds."""
    spec = importlib.util.spec_from_file_location("credit", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tiny = functools.partial(shopping_policy, config=CloningConfig(steps=20), settling=CloningConfig(steps=20))
    monkeypatch.setattr(module, "shopping_policy", tiny)
    return module


def arguments(run_dir: Path, **changes: object) -> argparse.Namespace:
    settings = {
        "methods": METHODS,
        "seeds": [3],
        "updates": 1,
        "evaluate": 4,
        "jobs": 1,
        "run_dir": str(run_dir),
        "warm_starts": None,
        "plot_only": False,
        "json": str(run_dir / "figures.json"),
    }
    return argparse.Namespace(**(settings | changes))


def write_result(folder: Path, method: str, seed: int, steps: list[float], success: list[float]) -> None:
    """Write what a finished run leaves behind."""
    (folder / f"{method}-seed{seed}").mkdir(parents=True)
    result = {
        "method": method,
        "seed": seed,
        "updates": len(steps),
        "success": success[-1],
        "recovery": None,
        "seconds": 7.0,
        "curve": {"env_steps": steps, "success": success},
    }
    (folder / f"{method}-seed{seed}" / "result.json").write_text(json.dumps(result))


def test_methods_train_from_one_warm_start_and_are_compared(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main(arguments(tmp_path))

    said = capsys.readouterr().out.splitlines()
    figures = json.loads(said[-1])
    assert figures == json.loads((tmp_path / "figures.json").read_text())
    assert (figures["updates"], figures["missing"], list(figures["methods"])) == (1, [], METHODS)
    steps = [method["steps"] for method in figures["methods"].values()]
    assert figures["equal_steps"] == min(steps) >= 128  # each of the 128 episodes has a turn at least
    assert said.count("warm start of seed 3: " + str(tmp_path / "warm-starts" / "seed3")) == 1
    for name in ("credit.png", "table.md", *(f"{method}-seed3/result.json" for method in METHODS)):
        assert (tmp_path / name).stat().st_size > 0
    for name in figures | figures["methods"]["step_groups"]:
        assert name in str(script.__doc__)

    # A second call finds both results and runs nothing.
    monkeypatch.setattr(script, "run", lambda *args: pytest.fail("ran again"))
    script.main(arguments(tmp_path))
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == figures


def test_runs_are_compared_where_the_one_with_the_fewest_steps_ended(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_result(tmp_path, "trajectory", 1, [100, 100], [0.0, 1.0])
    write_result(tmp_path, "trajectory", 2, [100, 300], [0.5, 0.5])
    write_result(tmp_path, "turn_gae", 1, [50, 50], [0.25, 0.75])

    script.main(arguments(tmp_path, methods=list(SHOPPING_METHODS), seeds=[1, 2], updates=2, plot_only=True))

    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    trajectory, turn_gae = figures["methods"].values()
    assert figures["equal_steps"] == 100
    assert (trajectory["seeds"], trajectory["success"], trajectory["steps"]) == (2, 0.75, 300)
    assert (trajectory["success_min"], trajectory["success_max"]) == (0.5, 1.0)
    assert (trajectory["success_at_equal_steps"], trajectory["area"]) == (0.25, 0.25)
    assert (turn_gae["success_at_equal_steps"], turn_gae["area"]) == (0.5, 0.5)
    assert (turn_gae["recovery"], turn_gae["seconds"]) == (None, 7.0)
    assert len(figures["missing"]) == 5
    table = (tmp_path / "table.md").read_text()
    assert "| turn-GAE PPO | 1 | 0.750 | 0.750 | 0.750 | 0.500 | 0.500 | - | 100 | 7 |" in table


def test_ctrl_c_says_how_to_go_on(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "warm_up", stopped)
    with pytest.raises(SystemExit, match=r"^\nstopped; the same command goes on from here$"):
        script.main(arguments(tmp_path))


def test_results_of_another_length_are_not_mixed_in(script: ModuleType, tmp_path: Path) -> None:
    write_result(tmp_path, "trajectory", 1, [100, 100], [0.0, 1.0])
    with pytest.raises(SystemExit, match="is of --updates 2, not 1"):
        script.main(arguments(tmp_path, methods=["trajectory"], seeds=[1]))


def test_a_run_whose_learner_gives_up_leaves_no_result_and_stops_no_other(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def gives_up(*args: object) -> None:
        raise LearnerError("effective sample size must be at least 0.05")

    monkeypatch.setattr(script, "improve", gives_up)
    script.run("turn_gae", 1, tmp_path / "model", tmp_path / "turn_gae-seed1", arguments(tmp_path))
    assert "turn_gae-seed1: no result: effective sample size" in capsys.readouterr().out
    assert not (tmp_path / "turn_gae-seed1" / "result.json").exists()


def test_every_method_has_a_learner_and_others_are_refused(tmp_path: Path) -> None:
    learners = [shopping_learner(method, tmp_path, 10, seed=2) for method in SHOPPING_METHODS]
    shared = ("off_policy", "surrogate", "clip", "epochs", "minibatches", "muon_lr", "adamw_lr", "schedule", "seed")
    assert len({repr([getattr(learner, name) for name in shared]) for learner in learners}) == 1
    assert len({repr(learner) for learner in learners}) == 4
    with pytest.raises(ConfigError, match="got 'tokens'"):
        shopping_learner("tokens", tmp_path, 10)


def test_every_piece_of_code_of_the_page_about_credit_runs_and_prints_what_the_page_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (EXAMPLE.parents[1] / "docs" / "credit.md").read_text()
    found = re.findall(r"^```python\n(.*?)^```$(?:\n\n```\n(.*?)^```$)?", page, re.MULTILINE | re.DOTALL)
    assert len(found) >= 8
    assert max(len(block.splitlines()) for block, _ in found) <= 9
    names: dict[str, object] = {}
    for block, shown in found:
        exec(block, names)
        assert capsys.readouterr().out == shown
