"""The search over saved states, as its user runs it, at a tiny size."""

import argparse
import functools
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from turngate.envs import End, Observation, Step, Task
from turngate.envs.fakes import CoinFlipEnv
from turngate.learners import CloningConfig
from turngate.learners.recipes.shopping import shopping_policy
from turngate.runtime import Limits, Runtime
from turngate.runtime.guidance import Guidance
from turngate.runtime.testing import FakeEndpoint, run_virtual

EXAMPLE = Path(__file__).parents[2] / "examples" / "search_shopping.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module, with a warm start of seconds."""
    spec = importlib.util.spec_from_file_location("search_shopping", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tiny = functools.partial(shopping_policy, config=CloningConfig(steps=20), settling=CloningConfig(steps=20))
    monkeypatch.setattr(module, "shopping_policy", tiny)
    return module


def arguments(run_dir: Path, **changes: object) -> argparse.Namespace:
    settings = {
        "seed": 1,
        "tasks": 3,
        "simulations": 4,
        "draws": 2,
        "exploration": 0.7,
        "max_rollouts": None,
        "model": None,
        "run_dir": str(run_dir),
        "json": str(run_dir / "figures.json"),
    }
    return argparse.Namespace(**(settings | changes))


def test_base_and_search_play_the_same_tasks_and_the_ledger_says_what_it_took(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main(arguments(tmp_path))
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == json.loads((tmp_path / "figures.json").read_text())
    assert (last["tasks"], last["fallbacks"]) == (3, 0)
    assert 0 < last["rollouts"] * 3 <= last["decisions"] * 4
    assert last["search"]["tokens"] > last["model_tokens"] > 0
    for name in last | last["base"]:
        assert f"`{name}`" in str(script.__doc__)

    # The warm start is found again; a spent ledger leaves decisions to the base, and says so.
    script.main(arguments(tmp_path, max_rollouts=1))
    capped = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (capped["rollouts"] * 3, capped["base"]) == (1, last["base"])
    assert capped["fallbacks"] > 0


def test_what_cannot_work_is_refused_before_anything_runs(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--model must be the folder of a model: .*warm does not exist"):
        script.main(arguments(tmp_path, model=str(tmp_path / "warm")))
    assert not (tmp_path / "warm").exists()
    with pytest.raises(argparse.ArgumentTypeError, match="must be 1 or more: got 0"):
        script.count("0")
    for odd in ("nan", "inf", "-1"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"got {odd}"):
            script.constant(odd)
    assert (script.count("1"), script.constant("0")) == (1, 0.0)


class Corner(CoinFlipEnv):
    """Right is the way out, if one then goes on to the left: seldom right for a policy that prefers one word."""

    async def step(self, action):
        self.flipped.append(action.text)
        if len(self.flipped) < 2:
            return Step(Observation("on"))
        is_out = self.flipped == ["right", "left"]
        return Step(Observation("end"), {"outcome": float(is_out)}, End.success if is_out else End.failure)


def test_search_finds_what_takes_two_good_actions_and_leaves_nothing_behind(script: ModuleType) -> None:
    counter = iter(range(10_000))

    async def play() -> float:
        endpoint = FakeEndpoint(lambda messages: "right" if next(counter) % 4 == 0 else "left")
        runtime = Runtime(endpoint, limits=Limits(max_turns=4))
        search = script.TreeSearch(runtime, Corner, simulations=24, draws=4, exploration=0.7, cap=None)
        guidance = Guidance(search, beta=float("inf"), draws=4)
        found = await runtime.evaluate(Corner, [Task(str(n)) for n in range(8)], guidance=guidance)
        assert (search.ledger.snapshot_bytes, runtime.slots.held) == (0, 0)
        assert search.ledger.most_snapshot_bytes > 0
        assert all(turn.decision.source == "uct" for t in found.trajectories for turn in t.turns)
        return found.success

    assert run_virtual(play()) == 1.0
