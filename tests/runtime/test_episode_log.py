"""Episodes in a file that a process appends to for as long as it lives."""

import subprocess
import sys

import pytest

from turngate.envs.base import End, Task
from turngate.runtime.episode_log import EpisodeLog
from turngate.runtime.errors import ConfigError
from turngate.runtime.transcript import read_trajectories
from turngate.runtime.types import Trajectory


def episode(name, words=""):
    return Trajectory(id=name, task=Task(name, words), end=End.success)


def test_a_line_that_a_killed_process_left_half_written_spoils_nothing(tmp_path):
    path = tmp_path / "new" / "trajectories.jsonl"
    for half in (b"", b'{"id": "x', b"\0" * 100):
        log = EpisodeLog(path)
        log.write(episode("a"))
        log.close()
        with path.open("ab") as file:
            file.write(half)
    log = EpisodeLog(path)
    log.write(episode("b"))
    assert [one.id for one in read_trajectories(path)] == ["a", "a", "a", "b"]
    log.close()


def test_an_episode_that_the_disk_has_no_room_for_is_lost_alone(tmp_path):
    path = tmp_path / "trajectories.jsonl"
    program = (
        "import pathlib, resource, sys\n"
        "from tests.runtime.test_episode_log import EpisodeLog, episode\n"
        "log = EpisodeLog(pathlib.Path(sys.argv[1]))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n"
        "for name, words in (('a', ''), ('b', 'x' * 5000), ('c', '')):\n"
        "    log.write(episode(name, words))\n"
        "print(log.lost)"
    )
    found = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert found.stdout == "1\n"
    assert "episode b is lost: got [Errno 27] File too large" in found.stderr
    assert [one.id for one in read_trajectories(path)] == ["a", "c"]


def test_what_cannot_be_written_is_refused_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--record must be a folder that can be written to"):
        EpisodeLog(tmp_path / "file" / "trajectories.jsonl")
    log = EpisodeLog(tmp_path / "trajectories.jsonl")
    with pytest.raises(ConfigError, match="must be written by one process"):
        EpisodeLog(log.path)
    log.close()
