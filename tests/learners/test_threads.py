"""The number of threads that small models train with."""

from pathlib import Path

import pytest
import torch

from turngate.learners import CloningConfig, clone
from turngate.learners.threads import one_thread


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_one_thread_computes_and_the_number_before_comes_back_even_after_an_error(two_threads: None) -> None:
    seen: list[int] = []

    @one_thread()
    def fails() -> None:
        seen.append(torch.get_num_threads())
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fails()
    assert seen == [1]
    assert torch.get_num_threads() == 2


def test_whoever_set_the_number_has_it(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with one_thread():
        assert torch.get_num_threads() == 2


def test_cloning_computes_on_one_thread(two_threads: None, tmp_path: Path) -> None:
    seen: list[int] = []
    clone(
        [[("user", "a"), ("assistant", "b")]] * 4, tmp_path / "model", config=CloningConfig(steps=1),
        progress=lambda _: seen.append(torch.get_num_threads()),
    )  # fmt: skip
    assert seen == [1]
    assert torch.get_num_threads() == 2
