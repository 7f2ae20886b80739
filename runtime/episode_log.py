"""Episodes appended to a file by a process that goes on, whatever becomes of its disk."""

import logging
import os
from pathlib import Path

from turngate.runtime.episode_file import cut_last_line, lock_file
from turngate.runtime.errors import ConfigError
from turngate.runtime.transcript import trajectory_json
from turngate.runtime.types import Trajectory

__all__ = ["EpisodeLog"]

_log = logging.getLogger("turngate.episodes")


class EpisodeLog:
    """JSON lines as `write_trajectories` writes them, whole ones only: a torn one would spoil all that follow.

    Unlike an `EpisodeFile` it asks nothing of what is there already, and an episode it has no room for is lost alone.
    """

    # Changed by write(): lost.

    def __init__(self, path: Path) -> None:
        """Open the file and cut off a line that a killed process has left half-written.

        Raises: ConfigError: it cannot be written, or another process writes it.
        """
        self.path = path
        self.lost = 0
        """Episodes that could not be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise ConfigError(f"--record must be a folder that can be written to: {error}") from error
        try:
            lock_file(self._file, path)
            cut_last_line(self._file)
        except BaseException:
            self._file.close()
            raise

    def __repr__(self) -> str:
        return f"<EpisodeLog {self.path}, {self.lost} lost>"

    def close(self) -> None:
        """Let go of the file; twice is fine."""
        self._file.close()

    def write(self, trajectory: Trajectory) -> None:
        """Append one episode. One that cannot be written is logged and counted, and leaves no trace in the file."""
        line = trajectory_json(trajectory) + b"\n"
        end = os.fstat(self._file.fileno()).st_size
        try:
            written = 0
            while written < len(line):  # a disk that runs full takes a part first
                written += self._file.write(line[written:])
        except OSError as error:
            os.ftruncate(self._file.fileno(), end)
            self.lost += 1
            _log.error("episode %s is lost: got %s (%s)", trajectory.id, error, self.path)
