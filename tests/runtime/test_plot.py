from pathlib import Path

import pytest

from turngate.runtime.comparison import RunCurve
from turngate.runtime.errors import ConfigError
from turngate.runtime.plot import _bands, plot_bands, plot_run, plot_success
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


def test_runs_are_drawn_as_bands(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curves = {"one": [([0.0, 1.0], [0.0, 1.0]), ([0.0, 2.0], [0.5, 0.5])], "other": [([0.0, 3.0], [1.0, 0.0])]}
    target = plot_bands(tmp_path / "bands.png", {"steps": curves, "updates": curves}, unit="success")
    assert target.read_bytes().startswith(b"\x89PNG")
    runs = {"one": [RunCurve([10.0, 10.0], [0.0, 1.0])], "other": [RunCurve([5.0, 10.0], [0.0, 1.0])]}
    assert plot_success(tmp_path / "success.png", runs, updates=2).read_bytes().startswith(b"\x89PNG")


def test_a_band_is_compared_at_equal_positions_up_to_the_end_of_the_shortest_curve() -> None:
    pytest.importorskip("numpy")
    curves = {"one": [([0.0, 1.0], [0.0, 1.0]), ([0.0, 2.0], [0.5, 0.5])], "other": [([0.0, 4.0], [1.0, 0.0])]}
    bands = _bands(curves, "steps")
    for positions, *_ in bands.values():
        assert (positions[0], positions[-1]) == (0.0, 1.0)
    ends = {name: tuple(float(series[-1]) for series in band[1:]) for name, band in bands.items()}
    assert ends == {"one": (0.75, 0.5, 1.0), "other": (0.75, 0.75, 0.75)}


@pytest.mark.parametrize(
    ("curves", "message"),
    [
        ({"one": []}, "some have none"),
        ({"one": [([], [])]}, "some have none"),
        ({"one": [([0.0, 1.0], [0.0, 0.0]), ([2.0, 3.0], [0.0, 0.0])]}, "must overlap"),
    ],
)
def test_curves_that_cannot_be_compared_are_refused(curves, message: str) -> None:
    pytest.importorskip("numpy")
    with pytest.raises(ConfigError, match=message):
        _bands(curves, "steps")
