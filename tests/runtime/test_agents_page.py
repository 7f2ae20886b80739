"""docs/agents.md stays true: its code runs as printed, and says what is printed."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from turngate.runtime import Agent, Runtime
from turngate.runtime.testing import FakeEndpoint

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "agents.md").read_text()


def test_code_of_the_page_runs_and_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        exec(block, names)
    (shown,) = re.findall(r"^```\n(trajectory.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert capsys.readouterr().out == shown

    async def others() -> float:
        runtime = Runtime(FakeEndpoint(["4", "4"]))
        trajectory = await runtime.rollout(Agent(names["with_openai"]), names["task"])
        await names["by_hand"](runtime)
        await runtime.aclose()
        return trajectory.reward

    assert asyncio.run(others()) == 1.0
    assert capsys.readouterr().out == "End.success\n"


def test_the_example_is_as_short_as_the_page_says() -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "own_agent.py"
    lines = len(example.read_text().splitlines())
    assert f"in {lines} lines" in PAGE
    assert lines < 60
