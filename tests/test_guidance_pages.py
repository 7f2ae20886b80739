"""The pages about guidance stay true: the script of the README runs, and so does the code of docs/guidance.md."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.test_documentation import misfits, python_blocks
from turngate.envs import ToolCall
from turngate.envs.shopping import ShoppingEnv, demonstrations, held_out_tasks
from turngate.runtime import Completion, EngineRenderer, Limits, Runtime, connect
from turngate.runtime.engine import Engine
from turngate.runtime.engine.model import ModelConfig, PolicyModel
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.guidance import DecisionPoint

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "guidance.md"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a policy that knows nothing."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer.train(message for chat in demonstrations(8, seed=1) for _, message in chat)
    PolicyModel(ModelConfig(vocab_size=len(tokenizer), width=32, layers=1, head_dim=8, mlp_width=32)).save(folder)
    tokenizer.save(folder / "tokenizer.json")
    return folder


async def test_the_script_of_the_readme_and_the_code_of_the_page_run(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (script,) = [block for block in python_blocks(ROOT / "README.md") if "async def look_first(" in block]
    script = script.replace("train_tasks(8192", "train_tasks(24").replace("held_out_tasks(256", "held_out_tasks(2")
    names: dict[str, Any] = {"__name__": "readme"}
    exec(script.replace("Engine.start(model", "Engine.start(model, mode='thread'"), names)
    for _ in range(2):  # the second time the critic is there
        await names["look_first"](model, tmp_path / "critic")
    said = [line[:7] for line in capsys.readouterr().out.splitlines()]
    assert said == [*["ValueFi"] * 4, "critic,", *["alone  ", "actions", "tokens "] * 2]

    for block in python_blocks(PAGE):
        exec(block.replace("Engine.start(model", "Engine.start(model, mode='thread'"), names)
    await names["compare"](model, tmp_path / "critic", ShoppingEnv, held_out_tasks(2, seed=0))
    assert re.fullmatch(r"success 0\.\d\d -> 0\.\d\d\n", capsys.readouterr().out)
    calls = [Completion("", tool_calls=(ToolCall("a", name, "{}"),)) for name in ("delete", "read")]
    assert await names["never_deletes"](DecisionPoint(messages=()), calls) == [-float("inf"), 0.0]

    async with (
        Engine.start(model, mode="thread", critic=tmp_path / "critic") as engine,
        names["CriticQ"].of(engine) as q,
    ):
        async with await connect(f"{engine.url}/v1", renderer=EngineRenderer(model)) as endpoint:
            runtime = Runtime(endpoint, limits=Limits(max_turns=1), guidance=names["guided"](q))
            trajectory = await runtime.rollout(ShoppingEnv, held_out_tasks(1, seed=0)[0])
    assert [one.text for one in trajectory.turns[0].decision.candidates] == ["left", "right", "stay"]
    assert trajectory.turns[0].decision.fallback == ""


@pytest.mark.parametrize("script", python_blocks(PAGE))
def test_the_code_of_the_page_imports_what_exists_and_calls_it_as_it_is_declared(script: str) -> None:
    assert misfits(script) == []
