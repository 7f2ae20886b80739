"""The example of a learner of one's own: short, importable by its process, exact after a checkpoint, and it learns."""

import argparse
import ast
import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from turngate.envs.base import End, Task
from turngate.runtime import Batch, Group, Segment, Trajectory, Turn
from turngate.runtime.engine.model import ModelConfig, PolicyModel
from turngate.runtime.engine.packing import pack
from turngate.runtime.engine.tokenizer import Tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_LINES = 40


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module that the learner's process can import, too: it gets this process's path."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("custom_learner")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = ModelConfig(vocab_size=12, width=16, layers=1, heads=2, head_dim=8, mlp_width=16, max_context=32)
    PolicyModel(config, seed=1).save(tmp_path / "model")
    Tokenizer([]).save(tmp_path / "model" / "tokenizer.json")
    return tmp_path / "model"


def batch(*rewards: float | None) -> Batch:
    """Return one-turn episodes that say token 3 for the first reward, 4 for the next, and so on; None is cut short."""

    def episode(number: int, reward: float | None) -> Trajectory:
        segment = Segment.of([1, 2, 3 + number], [0, 0, 1], [0.0, 0.0, -2.5], [-1, -1, 0], [-1, -1, 0])
        turn = Turn(index=0, segment=0, start=2, length=1, text="a", rewards={"outcome": reward} if reward else {})
        end = End.turn_limit if reward is None else End.success if reward else End.failure
        return Trajectory(id=f"t{number}", task=Task("t"), end=end, segments=(segment,), turns=(turn,))

    groups = [
        Group(id=f"g{i}", task=Task("t"), order=i, trajectories=(episode(i, reward),))
        for i, reward in enumerate(rewards)
    ]
    return Batch(groups=tuple(groups), policy_version=0)


def probabilities(policy: PolicyModel) -> list[float]:
    """Return how likely each token is after the two that the batch's episodes begin with."""
    with torch.no_grad():
        return policy.logits(pack([[1, 2, 0]], [[0, 0, 1]])).softmax(-1)[0].tolist()


def loaded(example: ModuleType, model: Path, checkpoint: Path | None = None):
    learner = example.Reinforce(model)
    learner.load(checkpoint)
    return learner


def test_the_learner_is_at_most_forty_lines_of_code() -> None:
    source = (EXAMPLES / "custom_learner.py").read_text()
    (node,) = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "Reinforce"]
    assert node.end_lineno is not None
    lines = [line.strip() for line in source.splitlines()[node.lineno - 1 : node.end_lineno]]
    assert len([line for line in lines if line and not line.startswith(("#", '"""'))]) <= MAX_LINES


def test_what_paid_becomes_likelier_and_the_baseline_follows_the_rewards(example: ModuleType, folder: Path) -> None:
    learner = loaded(example, folder)
    learner.update(batch(1.0, 0.0))
    assert learner.baseline == 0.5
    before = probabilities(learner.policy)
    report = learner.update(batch(1.0, 0.0))
    after = probabilities(learner.policy)
    assert after[3] > before[3]
    assert after[4] < before[4]
    assert report.metrics["baseline"] == pytest.approx(0.5)


def test_episodes_that_were_cut_short_train_nothing_and_move_no_baseline(example: ModuleType, folder: Path) -> None:
    learner, other = loaded(example, folder), loaded(example, folder)
    learner.update(batch(1.0, 0.0, None))
    other.update(batch(1.0, 0.0))
    assert learner.baseline == other.baseline == 0.5
    assert probabilities(learner.policy) == probabilities(other.policy)
    learner.update(batch(None, None))
    assert learner.baseline == 0.5


def test_save_load_update_equals_update_bit_for_bit(example: ModuleType, folder: Path, tmp_path: Path) -> None:
    learner = loaded(example, folder)
    learner.update(batch(1.0, 0.0))
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    learner.save(checkpoint)
    assert (checkpoint / "model" / "tokenizer.json").exists()
    again = loaded(example, folder, checkpoint)
    for one in (learner, again):
        one.update(batch(0.0, 1.0))
    assert probabilities(learner.policy) == probabilities(again.policy)
    assert learner.baseline == again.baseline


def test_the_agent_learns_which_digit_opens_which_lock(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main(argparse.Namespace(updates=40, run_dir=str(tmp_path / "run"), json=str(tmp_path / "figures.json")))
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "figures.json").read_text()) == figures
    assert list(figures) == ["success_before", "success_after", "updates", "run_dir"]
    for name in figures:
        assert name in str(example.__doc__)
    assert figures["updates"] == 40
    # Two blind tries at five digits open 0.36 of the locks; measured after 40 updates: 0.9.
    assert figures["success_before"] < 0.45
    assert figures["success_after"] > 0.5


def blocks() -> list[str]:
    page = (EXAMPLES.parent / "docs" / "custom-learner.md").read_text()
    return re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def test_the_page_quotes_the_example_as_it_is() -> None:
    source = (EXAMPLES / "custom_learner.py").read_text()
    quoted = [block for block in blocks() if block.startswith("    ")]
    assert len(quoted) == 3
    assert [block for block in quoted if block not in source] == []


def test_the_page_s_own_functions_and_learner_work(folder: Path) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks():
        if not block.startswith("    "):
            exec(block, names)
    group = Group(
        id="g", task=Task("t"), order=0, trajectories=tuple(g.trajectories[0] for g in batch(1.0, 0.0).groups)
    )
    assert names["against_siblings"](group).tolist() == [1.0, -1.0]

    learner = names["RewardToGo"](folder, off_policy="decoupled", parity="report", minibatches=1)
    learner.load(None)
    before = probabilities(learner._loaded.model)
    report = learner.update(batch(1.0, 0.0))
    after = probabilities(learner._loaded.model)
    assert report.metrics["baseline"] == 0.5
    assert after[3] > before[3]
    assert after[4] < before[4]
