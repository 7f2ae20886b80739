"""A run on disk, readable without this code.

config.json  metrics.jsonl (a row per update)  events.jsonl (a line per rollout, group, batch, publication)
trajectories/  checkpoints/  report.json
"""

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from turngate.runtime.errors import ConfigError
from turngate.runtime.files import write_atomically
from turngate.runtime.ledger import LedgerTotals
from turngate.runtime.transcript import write_trajectories
from turngate.runtime.types import Trajectory

__all__ = ["Progress", "RunFolder"]

_PARTIAL = ".partial-"
_KEEP_CHECKPOINTS = 2  # the newest may have been written just before a crash made it suspect


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run stands, as saved in each checkpoint beside the learner's own state."""

    update: int = 0
    """Updates done."""
    policy_version: int = 0
    ledger: LedgerTotals = LedgerTotals()
    task_position: int = 0
    requeued: tuple[str, ...] = ()
    """Ids of tasks whose groups were under way; they are drawn again first."""
    next_order: int = 0


class RunFolder:
    """Writes one run's files. A checkpoint appears whole under its final name or not at all."""

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        """Create the folder, or open it to go on.

        Raises: ConfigError: the folder already holds a run and `resume` is False.
        """
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.trajectories = path / "trajectories"
        if not resume and (path / "metrics.jsonl").exists():
            raise ConfigError(
                f"run folder must be new: {path} already holds a run; pass resume=True or another run_dir"
            )
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        for partial in self.checkpoints.glob(f"{_PARTIAL}*"):  # of a process that died while writing
            shutil.rmtree(partial, ignore_errors=True)
        self.trajectories.mkdir(exist_ok=True)
        self._encoder = msgspec.json.Encoder()

    def __repr__(self) -> str:
        return f"<RunFolder {self.path}>"

    def write_json(self, name: str, value: Any) -> Path:
        """Write `value` as readable JSON; replaces the file as a whole."""
        target = self.path / name
        write_atomically(target, msgspec.json.format(self._encoder.encode(value), indent=2) + b"\n")
        return target

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        with (self.path / "metrics.jsonl").open("ab") as file:
            file.write(self._encoder.encode(row) + b"\n")

    def rewind_metrics(self, update: int) -> list[dict[str, Any]]:
        """Remove rows after `update`, which describe updates that a crash undid, and return the others."""
        target = self.path / "metrics.jsonl"
        if not target.exists():
            return []
        whole = [line for line in target.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        rows: list[dict[str, Any]] = [row for line in whole if (row := msgspec.json.decode(line))["update"] <= update]
        write_atomically(target, b"".join(self._encoder.encode(row) + b"\n" for row in rows))
        return rows

    def write_trajectories(self, name: str, trajectories: Iterable[Trajectory]) -> Path:
        """Write trajectories/<name>.jsonl."""
        target = self.trajectories / f"{name}.jsonl"
        write_trajectories(target, trajectories)
        return target

    def begin_checkpoint(self) -> Path:
        """Return a new empty folder to write a checkpoint into; `commit_checkpoint` makes it count."""
        return Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=self.checkpoints))

    def commit_checkpoint(self, partial: Path, progress: Progress) -> Path:
        """Give a complete checkpoint its final name and remove all but the newest."""
        write_atomically(partial / "progress.json", msgspec.json.encode(progress))
        final = self.checkpoints / f"update-{progress.update:06d}"
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in self._complete()[:-_KEEP_CHECKPOINTS]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def latest_checkpoint(self) -> tuple[Path, Progress] | None:
        """Return the newest complete checkpoint, or None."""
        for folder in reversed(self._complete()):
            try:
                return folder, msgspec.json.decode((folder / "progress.json").read_bytes(), type=Progress)
            except msgspec.MsgspecError:
                continue  # damaged by whatever stopped the machine: the one before it is whole
        return None

    def _complete(self) -> list[Path]:
        return sorted(p for p in self.checkpoints.glob("update-*") if (p / "progress.json").exists())
