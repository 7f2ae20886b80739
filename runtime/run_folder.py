"""A run on disk, readable without this code.

config.json  metrics.jsonl (a row per update)  events.jsonl (a line per rollout, group, batch, publication)
trajectories/  checkpoints/  report.json
"""

import shutil
import uuid
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

# What a checkpoint folder is called before and after it counts. A process may be killed between any two renames: a
# partial with its progress.json and a replaced one are whole, a discarded one may be half deleted.
_PARTIAL, _REPLACED, _DISCARDED = ".partial-", ".replaced-", ".discarded-"
_FINAL = "update-"
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
    learner: str = ""
    """Class of the learner; empty in checkpoints of runs that did not write it."""


class RunFolder:
    """Writes one run's files. A checkpoint appears whole or not at all, and none goes before the next is there."""

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
        self._tidy()
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
        partial = self._aside(_PARTIAL)
        partial.mkdir()  # not mkdtemp, whose folders nobody else may read
        return partial

    def commit_checkpoint(self, partial: Path, progress: Progress) -> Path:
        """Give a complete checkpoint its final name and remove all but the newest."""
        write_atomically(partial / "progress.json", msgspec.json.encode(progress))  # last: it says that all is there
        final = self._install(partial, progress)
        for old in self._complete()[:-_KEEP_CHECKPOINTS]:
            self._discard(old)
        return final

    def latest_checkpoint(self) -> tuple[Path, Progress] | None:
        """Return the newest complete checkpoint, or None."""
        for folder in reversed(self._complete()):
            progress = _read_progress(folder)
            if progress is not None:  # else damaged by whatever stopped the machine: the one before it is whole
                return folder, progress
        return None

    def _install(self, partial: Path, progress: Progress) -> Path:
        """Rename a complete folder to its final name; at every moment it or what it replaces is there, whole."""
        final = self.checkpoints / f"{_FINAL}{progress.update:06d}"
        replaced = None
        if final.exists():
            replaced = self._aside(_REPLACED)
            final.rename(replaced)
        partial.rename(final)
        if replaced is not None:
            self._discard(replaced)
        return final

    def _tidy(self) -> None:
        """Finish, or undo, what a process was doing here when it died."""
        for partial in self.checkpoints.glob(f"{_PARTIAL}*"):
            progress, latest = _read_progress(partial), self.latest_checkpoint()
            # At the same update the partial is the later one: it was about to take the other's place.
            if progress is not None and (latest is None or progress.update >= latest[1].update):
                self._install(partial, progress)
            else:
                self._discard(partial)
        for replaced in self.checkpoints.glob(f"{_REPLACED}*"):
            progress = _read_progress(replaced)
            if progress is not None and not (self.checkpoints / f"{_FINAL}{progress.update:06d}").exists():
                self._install(replaced, progress)
            else:
                self._discard(replaced)
        for discarded in self.checkpoints.glob(f"{_DISCARDED}*"):
            shutil.rmtree(discarded, ignore_errors=True)
        shutil.rmtree(self.path / "weights", ignore_errors=True)  # on their way to a server that has them or never will

    def _discard(self, folder: Path) -> None:
        """Delete a folder; renamed first, so that a half deleted one is never taken for a checkpoint."""
        discarded = self._aside(_DISCARDED)
        folder.rename(discarded)
        shutil.rmtree(discarded, ignore_errors=True)

    def _aside(self, prefix: str) -> Path:
        return self.checkpoints / f"{prefix}{uuid.uuid4().hex}"

    def _complete(self) -> list[Path]:
        """Finished checkpoints, oldest first; folders that people made beside them are theirs."""
        named = [(p.name.removeprefix(_FINAL), p) for p in self.checkpoints.glob(f"{_FINAL}*")]
        numbered = [(int(n), p) for n, p in named if n.isdecimal() and (p / "progress.json").exists()]
        return [p for _, p in sorted(numbered)]


def _read_progress(folder: Path) -> Progress | None:
    """Return the progress saved in a folder; None says that the folder is not a whole checkpoint."""
    try:
        return msgspec.json.decode((folder / "progress.json").read_bytes(), type=Progress)
    except (OSError, msgspec.MsgspecError):
        return None
