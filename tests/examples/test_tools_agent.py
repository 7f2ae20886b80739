"""The example of an agent with tools: its demonstrations succeed, and it runs on both kinds of server."""

import argparse
import importlib
from pathlib import Path
from types import ModuleType

import pytest

from turngate.envs import Action, End
from turngate.runtime.engine import Engine

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("tools_agent")


async def test_a_demonstration_is_an_episode_that_succeeds(example):
    for number in range(20):
        task = example.make_task(number)
        messages = example.demonstration(task)
        env = example.Warehouse()
        assert (await env.reset(task, 0)).text == messages[0].content
        found = await env.step(Action("", messages[1].tool_calls))
        assert [r.text for r in found.observation.results] == [m.content for m in messages[2:4]]
        assert (await env.step(Action("", messages[4].tool_calls))).end is End.success


async def test_it_runs_on_an_engine_of_its_own_and_on_a_url(example, tmp_path, capsys):
    settings = {"model": "policy", "api_key": None, "episodes": 3, "steps": 2, "seed": 0, "updates": 0}
    await example.main(argparse.Namespace(url=None, **settings))
    async with Engine.start(example.clone_policy(tmp_path, 2, 0), mode="thread") as engine:
        await example.main(argparse.Namespace(url=engine.url, **settings))
    said = capsys.readouterr().out
    assert said.count("success ") == said.count("tools {") == 2
