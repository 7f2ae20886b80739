"""Episodes in a file that is appended to, one whole line each, and gone on with after any end of the process."""

import os
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgspec

from turngate.runtime.episode_summary import EpisodeRow
from turngate.runtime.errors import ConfigError, RecordError
from turngate.runtime.files import write_atomically
from turngate.runtime.json_ids import DECODE_ERRORS
from turngate.runtime.transcript import read_trajectories, trajectory_json
from turngate.runtime.types import Trajectory

__all__ = ["EpisodeFile", "cut_last_line", "lock_file"]

_BLOCK_BYTES = 1 << 16


class _Header(msgspec.Struct, kw_only=True):
    """The file beside the episodes: what they were collected with, and what they have cost."""

    config: dict[str, Any]
    prompt_tokens: int = 0
    completion_tokens: int = 0


class EpisodeFile:
    """JSON lines as `write_trajectories` writes them, and a `.config.json` beside them. One process at a time.

    with EpisodeFile(path, {"seed": 0}) as file: file.append(trajectory)
    """

    # State, known after entry.
    rows: dict[str, EpisodeRow]
    """By episode id, in the order of the file."""
    prompt_tokens: int
    completion_tokens: int
    """Counted by earlier processes, and by `count_tokens`."""

    def __init__(self, path: Path, config: dict[str, Any], *, retry_failed: bool = False) -> None:
        """Hold what is needed; nothing is read before entry.

        Args: config: what makes two episodes comparable; a file with another one is refused. retry_failed: leave out
            episodes that the machinery failed, so that they are run again.
        """
        self.path = path
        self.config_path = path.with_name(path.name + ".config.json")
        self._config: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(config))
        self._retry_failed = retry_failed
        self.rows = {}
        self.prompt_tokens = self.completion_tokens = 0

    def __repr__(self) -> str:
        return f"<EpisodeFile {self.path}, {len(self.rows)} episodes>"

    def __enter__(self) -> Self:
        """Open the file, cut off a half-written last line, and read what is there.

        Raises: ConfigError: it belongs to another configuration or another process, is none of ours, or cannot be
            written. RecordError: a line is no trajectory.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = self.path.open("a+b")
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            lock_file(self._file, self.path)
            header = self._header()
            cut_last_line(self._file)
            self._read()
            self.prompt_tokens, self.completion_tokens = header.prompt_tokens, header.completion_tokens
            self._write_header()
        except OSError as error:
            self._file.close()
            raise self._unwritable(error) from error
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            try:
                self._write_header()
            finally:
                self._file.close()
        except OSError as problem:
            if error is None:  # else it is the same disk, or matters less
                raise self._lost(problem) from problem

    def append(self, trajectory: Trajectory) -> EpisodeRow:
        """Write one episode as a whole line, at once, with the tokens counted so far, and return its row.

        Raises: RecordError: it cannot be written; the file holds the episodes before it.
        """
        row = EpisodeRow.of(trajectory)
        try:
            self._write_header(outlives_power=False)
            self._file.write(trajectory_json(trajectory) + b"\n")
            self._file.flush()
        except OSError as error:
            raise self._lost(error) from error
        self.rows[row.id] = row
        return row

    def count_tokens(self, prompt: int, completion: int) -> None:
        """Add to what the episodes have cost; written with the next of them, and when the file is closed."""
        self.prompt_tokens += prompt
        self.completion_tokens += completion

    def _header(self) -> _Header:
        """Return the header that is there, or a new one for a file that is empty."""
        if not self.config_path.exists():
            if os.fstat(self._file.fileno()).st_size:
                raise ConfigError(
                    f"output must be new, or come with {self.config_path.name}: {self.path} has lines and does not; "
                    "choose another file"
                )
            return _Header(config=self._config)
        try:
            header = msgspec.json.decode(self.config_path.read_bytes(), type=_Header)
        except (*DECODE_ERRORS, OSError) as error:
            raise ConfigError(f"{self.config_path} must be readable: {error}; choose another output") from error
        if header.config != self._config:
            names = sorted(header.config.keys() | self._config.keys())
            differ = [n for n in names if header.config.get(n) != self._config.get(n)]
            was = "; ".join(f"{n} was {header.config.get(n)!r:.80}, now {self._config.get(n)!r:.80}" for n in differ)
            raise ConfigError(f"episodes in one file must be alike: {was} ({self.path}); choose another output")
        return header

    def _read(self) -> None:
        rows = [EpisodeRow.of(trajectory) for trajectory in read_trajectories(self.path)]
        self.rows = {row.id: row for row in rows}
        if not self._retry_failed or not any(row.end.is_failure for row in rows):
            return
        with self.path.open("rb") as file:
            kept = [line for line, row in zip(file, rows, strict=True) if not row.end.is_failure]
        write_atomically(self.path, b"".join(kept))
        self._file.close()
        self._file = self.path.open("a+b")
        lock_file(self._file, self.path)
        self.rows = {row.id: row for row in rows if not row.end.is_failure}

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(f"output must be a file that can be written: got {error} ({self.path}); choose another")

    def _lost(self, error: OSError) -> RecordError:
        return RecordError(
            f"episodes must be written: got {error} ({self.path}); make room, and run it again to go on after "
            f"{len(self.rows)} episodes"
        )

    def _write_header(self, *, outlives_power: bool = True) -> None:
        header = _Header(
            config=self._config, prompt_tokens=self.prompt_tokens, completion_tokens=self.completion_tokens
        )
        told = msgspec.json.format(msgspec.json.encode(header), indent=2) + b"\n"
        write_atomically(self.config_path, told, outlives_power=outlives_power)


def cut_last_line(file: BinaryIO) -> None:
    """Remove what follows the last end of line: a process died while it wrote that."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    file.truncate(end)


def lock_file(file: BinaryIO, path: Path) -> None:
    """Refuse a file that another process writes; the lock ends with the process. Raises ConfigError."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(f"output must be written by one process: another one is writing {path}") from error
