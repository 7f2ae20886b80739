import subprocess
import sys

import pytest

from turngate.envs.base import End, Task
from turngate.runtime.episode_file import EpisodeFile
from turngate.runtime.errors import ConfigError, RecordError
from turngate.runtime.transcript import read_trajectories
from turngate.runtime.types import Trajectory


def episode(name, end=End.success):
    return Trajectory(id=name, task=Task(name), end=end, error="boom" if end.is_failure else "")


def written(path, *episodes, config=None, **options):
    with EpisodeFile(path, config or {"seed": 1}, **options) as file:
        for one in episodes:
            file.append(one)
        return list(file.rows)


def test_episodes_are_whole_lines_that_can_be_gone_on_with(tmp_path):
    path = tmp_path / "new" / "out.jsonl"
    assert written(path, episode("a"), episode("b")) == ["a", "b"]
    assert written(path, episode("c")) == ["a", "b", "c"]
    assert list(read_trajectories(path)) == [episode("a"), episode("b"), episode("c")]


def test_an_episode_is_in_the_file_as_soon_as_it_is_appended(tmp_path):
    with EpisodeFile(tmp_path / "out.jsonl", {}) as file:
        file.append(episode("a"))
        assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 1


@pytest.mark.parametrize("half", [b'{"id": "c', b"x" * 200_000, b"\n"[:0] + b"{"])
@pytest.mark.parametrize("whole", [(), ("a", "b")])
def test_a_half_written_last_line_is_cut_off(tmp_path, half, whole):
    path = tmp_path / "out.jsonl"
    written(path, *map(episode, whole))
    before = path.read_bytes()
    path.write_bytes(before + half)
    assert written(path) == list(whole)
    assert path.read_bytes() == before


def test_a_line_that_is_whole_and_no_trajectory_is_an_error(tmp_path):
    path = tmp_path / "out.jsonl"
    written(path, episode("a"))
    path.write_bytes(path.read_bytes() + b"garbage\n")
    with pytest.raises(RecordError, match=r"out\.jsonl:2"):
        written(path)


def test_another_configuration_is_refused_and_told_apart(tmp_path):
    path = tmp_path / "out.jsonl"
    written(path, episode("a"), config={"seed": 1, "model": "x"})
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"seed was 1, now 2; temperature was None, now 0\.5"):
        written(path, config={"seed": 2, "model": "x", "temperature": 0.5})
    assert path.read_bytes() == before


def test_a_file_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"precious")
    with pytest.raises(ConfigError, match="choose another file"):
        written(path)
    assert path.read_bytes() == b"precious"
    path.with_name("out.jsonl.config.json").write_bytes(b"[]")
    with pytest.raises(ConfigError, match="must be readable"):
        written(path)


def test_failed_episodes_are_left_out_when_they_are_to_be_played_again(tmp_path):
    path = tmp_path / "out.jsonl"
    written(path, episode("a"), episode("b", End.endpoint_error), episode("c"))
    assert written(path) == ["a", "b", "c"]
    assert written(path, episode("b"), retry_failed=True) == ["a", "c", "b"]
    assert [t.id for t in read_trajectories(path)] == ["a", "c", "b"]


def test_tokens_add_up_over_processes(tmp_path):
    for _ in range(2):
        with EpisodeFile(tmp_path / "out.jsonl", {}) as file:
            file.count_tokens(10, 3)
    with EpisodeFile(tmp_path / "out.jsonl", {}) as file:
        assert (file.prompt_tokens, file.completion_tokens) == (20, 6)


def test_tokens_are_counted_although_the_process_is_killed(tmp_path):
    file = EpisodeFile(tmp_path / "out.jsonl", {}).__enter__()
    file.count_tokens(10, 3)
    file.append(episode("a"))
    file._file.close()  # and nothing else: nobody leaves the block
    with EpisodeFile(tmp_path / "out.jsonl", {}) as file:
        assert (file.prompt_tokens, file.completion_tokens) == (10, 3)


def test_what_cannot_be_written_says_so(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="output must be a file that can be written: got"):
            EpisodeFile(path, {}).__enter__()


def test_a_disk_that_is_full_loses_no_episode_but_the_one_it_has_no_room_for(tmp_path):
    path = tmp_path / "out.jsonl"
    program = (
        "import pathlib, resource, sys\n"
        "from turngate.runtime.episode_file import EpisodeFile\n"
        "from turngate.envs.base import End, Task\n"
        "from turngate.runtime.types import Trajectory\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "try:\n"
        "    with EpisodeFile(pathlib.Path(sys.argv[1]), {}) as file:\n"
        "        for name in 'abc':\n"
        "            file.append(Trajectory(id=name, task=Task(name, 'x' * 1000), end=End.success))\n"
        "except ValueError as error:\n"
        "    print(type(error).__name__, error)"
    )
    found = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert found.stdout.startswith("RecordError episodes must be written: got ")
    assert "go on after 1 episodes" in found.stdout
    with EpisodeFile(path, {}) as file:
        assert list(file.rows) == ["a"]


def test_two_processes_cannot_write_one_file(tmp_path):
    path = tmp_path / "out.jsonl"
    program = (
        "import sys, pathlib; from turngate.runtime.episode_file import EpisodeFile\n"
        "try:\n    EpisodeFile(pathlib.Path(sys.argv[1]), {}).__enter__()\n"
        "except ValueError as error:\n    print(error)"
    )
    with EpisodeFile(path, {}):
        found = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert "must be written by one process" in found.stdout
