import json
import os
import shutil
from pathlib import Path

import pytest

from turngate.runtime.errors import ConfigError
from turngate.runtime.ledger import LedgerTotals
from turngate.runtime.run_folder import Progress, RunFolder


def _checkpoint(folder: RunFolder, update: int) -> None:
    partial = folder.begin_checkpoint()
    (partial / "weights").write_text(str(update))
    folder.commit_checkpoint(partial, Progress(update=update, policy_version=update, ledger=LedgerTotals(drawn=3)))


def test_the_newest_two_checkpoints_are_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for update in (1, 2, 30):
        _checkpoint(folder, update)
    assert sorted(p.name for p in folder.checkpoints.iterdir()) == ["update-000002", "update-000030"]
    latest = folder.latest_checkpoint()
    assert latest is not None
    assert (latest[0] / "weights").read_text() == "30"
    assert latest[1] == Progress(update=30, policy_version=30, ledger=LedgerTotals(drawn=3))


def test_a_half_written_checkpoint_does_not_count(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    _checkpoint(folder, 1)
    (folder.begin_checkpoint() / "weights").write_text("2")  # and then the machine dies
    latest = RunFolder(tmp_path, resume=True).latest_checkpoint()
    assert latest is not None
    assert latest[1].update == 1
    assert [p.name for p in folder.checkpoints.iterdir()] == ["update-000001"]


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    _checkpoint(folder, 1)
    _checkpoint(folder, 2)
    (folder.checkpoints / "update-000002" / "progress.json").write_text('{"upd')
    latest = folder.latest_checkpoint()
    assert latest is not None
    assert latest[1].update == 1


def test_two_checkpoints_under_way_at_once_do_not_meet(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.begin_checkpoint() != folder.begin_checkpoint()


def test_a_checkpoint_taken_again_replaces_the_first(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    _checkpoint(folder, 1)
    _checkpoint(folder, 1)
    assert [p.name for p in folder.checkpoints.iterdir()] == ["update-000001"]


class Killed(BaseException):
    """What kill -9 looks like from inside: nothing runs after it."""


def _count_down(monkeypatch: pytest.MonkeyPatch, steps: int) -> list[str]:
    """Kill the process at its `steps`-th change of a folder, deletions half done; return what was called."""
    called: list[str] = []
    rename, rmtree = Path.rename, shutil.rmtree

    def step(name: str) -> None:
        called.append(name)
        if len(called) == steps:
            raise Killed

    def counted_rename(self: Path, target: Path) -> Path:
        step("rename")
        return rename(self, target)

    def counted_rmtree(path: Path, ignore_errors: bool = False) -> None:
        (path / "weights").unlink(missing_ok=True)
        step("rmtree")
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(Path, "rename", counted_rename)
    monkeypatch.setattr(shutil, "rmtree", counted_rmtree)
    return called


@pytest.mark.parametrize("before", [[0], [3], [1, 3], [2, 3], [1, 2]])
def test_a_kill_at_any_step_of_a_checkpoint_leaves_a_whole_one(tmp_path: Path, before: list[int]) -> None:
    update = before[-1] if before[-1] != 2 else 3  # the same update again, or a later one
    for steps in range(1, 20):
        folder = RunFolder(tmp_path / str(steps))
        for number in before:
            _checkpoint(folder, number)
        partial = folder.begin_checkpoint()
        (partial / "weights").write_text(f"new {update}")
        with pytest.MonkeyPatch.context() as patch:
            called = _count_down(patch, steps)
            try:
                folder.commit_checkpoint(partial, Progress(update=update, policy_version=update))
            except Killed:
                pass
        opened = RunFolder(folder.path, resume=True)
        latest = opened.latest_checkpoint()
        assert latest is not None, f"nothing is left after {called}"
        assert (latest[0] / "weights").read_text() == f"new {update}"  # it was complete before the first step
        assert latest[0].name == f"update-{update:06d}"
        assert all(p.name.startswith("update-") for p in opened.checkpoints.iterdir())
        assert all((p / "weights").exists() for p in opened.checkpoints.iterdir())
        if len(called) < steps:
            assert len(called) >= 2
            return
    pytest.fail("the checkpoint never came to its end")


def test_a_replaced_checkpoint_comes_back_when_its_successor_is_damaged(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    _checkpoint(folder, 4)
    (folder.checkpoints / "update-000004").rename(folder.checkpoints / ".replaced-1")
    partial = folder.begin_checkpoint()
    (partial / "progress.json").write_text('{"upd')  # the power went as well
    latest = RunFolder(tmp_path, resume=True).latest_checkpoint()
    assert latest is not None
    assert (latest[0] / "weights").read_text() == "4"
    assert [p.name for p in folder.checkpoints.iterdir()] == ["update-000004"]


def test_a_complete_partial_that_is_older_than_a_checkpoint_is_removed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    _checkpoint(folder, 4)
    partial = folder.begin_checkpoint()
    (partial / "progress.json").write_bytes(b'{"update":3}')
    assert [p.name for p in RunFolder(tmp_path, resume=True).checkpoints.iterdir()] == ["update-000004"]


def test_checkpoints_are_sorted_by_number_not_by_name(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for update in (999_998, 999_999, 1_000_000, 1_000_001):
        _checkpoint(folder, update)
    latest = folder.latest_checkpoint()
    assert latest is not None
    assert latest[1].update == 1_000_001
    assert sorted(p.name for p in folder.checkpoints.iterdir()) == ["update-1000000", "update-1000001"]


def test_a_copy_that_somebody_made_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    _checkpoint(folder, 1)
    shutil.copytree(folder.checkpoints / "update-000001", folder.checkpoints / "update-000001-best")
    for update in (2, 3, 4):
        _checkpoint(folder, update)
    assert sorted(p.name for p in folder.checkpoints.iterdir()) == [
        "update-000001-best",
        "update-000003",
        "update-000004",
    ]


def test_checkpoints_can_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        folder = RunFolder(tmp_path)
        _checkpoint(folder, 1)
    finally:
        os.umask(umask)
    assert (folder.checkpoints / "update-000001").stat().st_mode & 0o777 == 0o755


def test_weights_that_a_killed_run_left_on_their_way_are_removed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "000007.safetensors").write_bytes(b"half")
    assert RunFolder(tmp_path, resume=True).path == folder.path
    assert not (tmp_path / "weights").exists()


def test_metrics_are_one_json_object_a_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics({"update": 1})
    folder.append_metrics({"update": 2})
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        {"update": 1},
        {"update": 2},
    ]


def test_rows_that_a_crash_undid_are_removed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for update in (1, 2, 3):
        folder.append_metrics({"update": update})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"update":')  # torn by the crash
    assert folder.rewind_metrics(2) == [{"update": 1}, {"update": 2}]
    assert [json.loads(line)["update"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_a_folder_with_a_run_is_opened_only_to_resume(tmp_path: Path) -> None:
    RunFolder(tmp_path).append_metrics({"update": 1})
    with pytest.raises(ConfigError, match="already holds a run; pass resume=True"):
        RunFolder(tmp_path)
    assert RunFolder(tmp_path, resume=True).latest_checkpoint() is None
