"""The main example, as its user runs it, at a tiny size."""

import argparse
import functools
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from turngate.learners import CloningConfig
from turngate.learners.recipes.shopping import shopping_policy

EXAMPLE = Path(__file__).parents[2] / "examples" / "shopping_async.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("shopping_async", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(run_dir: Path, **changes: object) -> argparse.Namespace:
    settings = {"seed": 1, "updates": 1, "max_staleness": 1, "evaluate": 8, "resume": False, "json": None}
    return argparse.Namespace(run_dir=str(run_dir), **(settings | changes))


def stopped(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("stopped_in", "go_on"),
    [
        ("shopping_policy", "nothing is kept, begin again"),
        ("improve", "go on with --resume --run-dir .*"),
    ],
)
def test_ctrl_c_says_how_to_go_on(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped_in: str, go_on: str
) -> None:
    monkeypatch.setattr(script, "shopping_policy", lambda *_, **__: None)
    monkeypatch.setattr(script, stopped_in, stopped)
    with pytest.raises(SystemExit, match=f"^\nstopped; .*{go_on}$"):
        script.main(arguments(tmp_path))


def test_the_script_warms_up_is_stopped_goes_on_measures_trains_and_reports(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = functools.partial(shopping_policy, config=CloningConfig(steps=20), settling=CloningConfig(steps=20))
    monkeypatch.setattr(script, "shopping_policy", tiny)
    run_dir, figures = tmp_path / "run", tmp_path / "figures.json"

    with monkeypatch.context() as patched:
        patched.setattr(script, "improve", stopped)
        with pytest.raises(SystemExit, match="stopped"):
            script.main(arguments(run_dir))
    script.main(arguments(run_dir, json=str(figures), resume=True))

    said = capsys.readouterr().out
    last = json.loads(said.splitlines()[-1])
    assert last == json.loads(figures.read_text())
    assert (last["updates"], last["episodes"], last["run_dir"]) == (1, 128, str(run_dir))
    assert "--- one episode before training ---" in said
    for name in ("config.json", "metrics.jsonl", "events.jsonl", "report.json", "progress.png"):
        assert (run_dir / name).stat().st_size > 0
