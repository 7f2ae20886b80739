"""A run's metrics as a picture, and several runs as bands."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from turngate.runtime.comparison import RunCurve
from turngate.runtime.errors import ConfigError

__all__ = ["Curve", "plot_bands", "plot_run", "plot_success"]

Curve: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""Positions, ascending, and the values there."""

_PANELS = (
    ("success", "success of the training batch", (("success", "success"),)),
    ("staleness of consumed tokens", "policy versions", (("lag_mean", "mean"), ("lag_max", "maximum"))),
    ("throughput", "episodes per second", (("episodes_per_s", "episodes/s"),)),
    ("utilisation", "share of wall time", (("learner_busy_share", "learner"), ("slots_busy_share", "rollout slots"))),
)


def plot_run(run_dir: str | Path, *, marks: dict[str, float] | None = None) -> Path:
    """Draw metrics.jsonl of a run folder to progress.png and return its path.

    Args: marks: horizontal lines in the success panel, such as held-out success before and after, by name.
    Raises: ConfigError: the folder holds no metrics.
    """
    from matplotlib.figure import Figure  # drawing is for the end of a run: importing it costs most of a second

    folder = Path(run_dir)
    rows = _rows(folder / "metrics.jsonl")
    updates = [row["update"] for row in rows]
    figure = Figure(figsize=(11, 7), layout="constrained")
    for axes, (title, unit, series) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        for key, label in series:
            values = [math.nan if row[key] is None else row[key] for row in rows]  # JSON has no NaN: a gap
            axes.plot(updates, values, label=label, linewidth=1.2)
        if title == "success":
            for position, (label, value) in enumerate((marks or {}).items()):
                axes.axhline(
                    value, linestyle="--", linewidth=1, color=f"C{position + 1}", label=f"{label}: {value:.2f}"
                )
            axes.set_ylim(0, 1)
        axes.set(title=title, xlabel="policy update", ylabel=unit)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    target = folder / "progress.png"
    figure.savefig(target, dpi=120)
    return target


def plot_success(target: str | Path, runs: Mapping[str, Sequence[RunCurve]], *, updates: int) -> Path:
    """Draw the success of runs by name, against environment steps and against updates, and return the picture's path.

    Args: updates: of how many, the latest, a point is the mean.
    """
    by_steps: dict[str, list[Curve]] = {}
    by_updates: dict[str, list[Curve]] = {}
    for name, of_name in runs.items():
        smooth = [run.smooth(updates) for run in of_name]
        by_steps[name] = [(run.steps, y) for run, y in zip(of_name, smooth, strict=True)]
        by_updates[name] = [(range(1, len(y) + 1), y) for y in smooth]
    panels = {"environment steps": by_steps, "policy updates": by_updates}
    return plot_bands(target, panels, unit="success of training rollouts", y_range=(0, 1))


def plot_bands(
    target: str | Path,
    panels: Mapping[str, Mapping[str, Sequence[Curve]]],
    *,
    unit: str,
    title: str = "",
    y_range: tuple[float, float] | None = None,
) -> Path:
    """Draw each name's curves as their mean and a band from the lowest to the highest, and return the picture's path.

    A panel ends where its shortest curve does and begins where the last one begins: beyond that, names would be
    compared at unequal positions, and a mean would jump where one of its curves ends. Between positions curves are
    straight.
    Args: panels: by the label of their horizontal axis; in each, the curves of all runs by name. unit: label of the
    vertical axis.
    Raises: ConfigError: a name has no curve, a curve is empty, or curves of a panel do not overlap.
    """
    from matplotlib.figure import Figure  # see plot_run

    figure = Figure(figsize=(6.5 * len(panels), 5), layout="constrained")
    for axes, (label, curves) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True):
        for number, (name, (positions, mean, low, high)) in enumerate(_bands(curves, label).items()):
            axes.fill_between(positions, low, high, color=f"C{number}", alpha=0.15, linewidth=0)
            axes.plot(positions, mean, color=f"C{number}", linewidth=1.5, label=name)
        axes.set(title=title, xlabel=label, ylabel=unit, ylim=y_range)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    path = Path(target)
    figure.savefig(path, dpi=120)
    return path


_BAND_POINTS = 400
"""Positions of a band; finer than a screen shows."""


def _bands(curves: Mapping[str, Sequence[Curve]], label: str) -> dict[str, tuple[Any, Any, Any, Any]]:
    """Return positions, mean, lowest and highest value of each name's curves, over what all curves cover."""
    import numpy as np  # in the extra `train`, as matplotlib is

    every = [curve for runs in curves.values() for curve in runs]
    if not all(curves.values()) or not all(len(positions) for positions, _ in every):
        raise ConfigError(f"every name must have curves with points in them: some have none (panel {label!r})")
    start, end = max(x[0] for x, _ in every), min(x[-1] for x, _ in every)
    if start > end:
        raise ConfigError(f"curves must overlap: one begins at {start}, one ends at {end} (panel {label!r})")
    grid = np.linspace(start, end, _BAND_POINTS)
    bands: dict[str, tuple[Any, Any, Any, Any]] = {}
    for name, runs in curves.items():
        values = np.stack([np.interp(grid, x, y) for x, y in runs])
        bands[name] = grid, values.mean(0), values.min(0), values.max(0)
    return bands


def _rows(path: Path) -> list[dict[str, Any]]:
    lines = path.read_bytes().splitlines() if path.exists() else []
    if not lines:
        raise ConfigError(f"plotting needs metrics: {path} is missing or empty; train first")
    return [msgspec.json.decode(line) for line in lines]
