"""State files are whole or not there, hold no code, and say so when they cannot be read."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from turngate.learners.checkpoint import read_state, write_state
from turngate.runtime.errors import LearnerError


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    read_state(path, found.update)
    return found


def test_what_was_written_is_read(tmp_path: Path) -> None:
    state = {"n": 3, "rates": [0.5, 1.5], "inner": {"weights": torch.arange(4.0)}}
    write_state(tmp_path / "deep" / "state.pt", state)
    found = read(tmp_path / "deep" / "state.pt")
    assert (found["n"], found["rates"]) == (3, [0.5, 1.5])
    assert torch.equal(found["inner"]["weights"], torch.arange(4.0))


def test_a_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    torch.rand(7, generator=generator)
    write_state(tmp_path / "state.pt", {"generator": generator.get_state()})
    again = torch.Generator()
    read_state(tmp_path / "state.pt", lambda saved: _set(again, saved))
    assert torch.equal(torch.rand(3, generator=again), torch.rand(3, generator=generator))


def _set(generator: torch.Generator, saved: dict[str, Any]) -> None:
    generator.set_state(saved["generator"])


class Evil:
    """Would run code when unpickled."""

    def __reduce__(self) -> Any:
        return (print, ("gotcha",))


def test_code_is_never_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"n": Evil()}, tmp_path / "state.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"n": Evil()}, protocol=2))
    for name in ("state.pt", "plain.pt"):
        with pytest.raises(LearnerError, match="checkpoint must be readable"):
            read(tmp_path / name)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("content", [None, b"", b"no checkpoint", b"PK\x03\x04 half a zip"])
def test_a_file_that_is_none_is_refused_by_name(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(LearnerError, match=r"state\.pt.*use an older one"):
        read(tmp_path / "state.pt")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    write_state(tmp_path / "state.pt", {"weights": torch.arange(1000.0)})
    content = (tmp_path / "state.pt").read_bytes()
    (tmp_path / "state.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(LearnerError, match="checkpoint must be readable"):
        read(tmp_path / "state.pt")


@pytest.mark.parametrize("saved", [{"other": 1}, [1, 2], 5])
def test_state_of_another_kind_is_refused(tmp_path: Path, saved: object) -> None:
    torch.save(saved, tmp_path / "state.pt")
    with pytest.raises(LearnerError, match="checkpoint must be readable"):
        read_state(tmp_path / "state.pt", lambda found: print(found["generator"]))


def test_an_error_that_says_it_better_is_kept(tmp_path: Path) -> None:
    def refuse(saved: dict[str, Any]) -> None:
        raise LearnerError("rates must be those of the run")

    write_state(tmp_path / "state.pt", {})
    with pytest.raises(LearnerError, match=r"^rates must be those of the run$"):
        read_state(tmp_path / "state.pt", refuse)


def test_a_write_that_fails_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_state(tmp_path / "state.pt", {"n": 1})

    def fail(saved: object, target: Any) -> None:
        target.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        write_state(tmp_path / "state.pt", {"n": 2})
    assert read(tmp_path / "state.pt") == {"n": 1}
