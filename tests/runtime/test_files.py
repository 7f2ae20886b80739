import os

import pytest

from turngate.runtime.files import write_atomically


def test_a_file_is_replaced_whole_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "deep" / "file"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(path.parent) == ["file"]


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def refuse(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_that_cannot_be_renamed_into_place_leaves_nothing_behind(tmp_path):
    (tmp_path / "target").mkdir()
    with pytest.raises(OSError, match="target"):
        write_atomically(tmp_path / "target", b"new")
    assert os.listdir(tmp_path) == ["target"]


def test_a_new_file_has_the_usual_permissions(tmp_path):
    (tmp_path / "usual").touch()
    write_atomically(tmp_path / "written", b"")
    assert (tmp_path / "written").stat().st_mode == (tmp_path / "usual").stat().st_mode
