"""The page about guided training: its numbers are what its code prints, and its calls are those that exist."""

import re
from pathlib import Path

import pytest

from tests.test_documentation import misfits

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guided-training.md"
TEXT = PAGE.read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_the_experiment_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    (script,) = [block for block in BLOCKS if "print(" in block]
    exec(script, {})
    printed = capsys.readouterr().out
    assert f"```\n{printed}```" in TEXT
    best, with_weights, without = (re.findall(r"0\.\d+", line) for line in printed.splitlines())
    assert best == with_weights != without


@pytest.mark.parametrize("script", BLOCKS)
def test_scripts_import_what_exists_and_call_it_as_it_is_declared(script: str) -> None:
    assert misfits(script) == []
