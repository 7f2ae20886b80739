"""A run's metrics as a picture."""

import math
from pathlib import Path
from typing import Any

import msgspec

from turngate.runtime.errors import ConfigError

__all__ = ["plot_run"]

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


def _rows(path: Path) -> list[dict[str, Any]]:
    lines = path.read_bytes().splitlines() if path.exists() else []
    if not lines:
        raise ConfigError(f"plotting needs metrics: {path} is missing or empty; train first")
    return [msgspec.json.decode(line) for line in lines]
