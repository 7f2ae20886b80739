import json
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
