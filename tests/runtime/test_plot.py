from pathlib import Path

import pytest

from turngate.runtime.errors import ConfigError
from turngate.runtime.plot import plot_run
from turngate.runtime.run_folder import RunFolder

ROW = {
    "success": 0.5,
    "lag_mean": 0.5,
    "lag_max": 1.0,
    "episodes_per_s": 10.0,
    "learner_busy_share": 0.5,
    "slots_busy_share": 0.9,
}


def test_a_run_is_drawn_as_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = RunFolder(tmp_path)
    for update in range(3):
        folder.append_metrics({"update": update, **ROW})
    target = plot_run(tmp_path, marks={"before": 0.2})
    assert target.read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_metrics_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is missing or empty"):
        plot_run(tmp_path)
