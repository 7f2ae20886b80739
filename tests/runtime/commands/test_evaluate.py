import json
import os
import signal
import subprocess
import sys

import pytest

from turngate.runtime import cli
from turngate.runtime.transcript import read_trajectories

SCRIPT = """
import asyncio
import os
from turngate.envs.base import End, Observation, Step, Task


def tasks(n, seed):
    return [Task(f"{seed}-{i}", "say something") for i in range(n)]


class Once:
    played = 0

    def __init__(self, hold=""):
        self.hold = hold

    async def reset(self, task, seed):
        self.wins = task.id.endswith(("0", "2"))
        return Observation(task.prompt)

    async def step(self, action):
        Once.played += 1
        while Once.played > 5 and os.path.exists(self.hold):  # five episodes, and no more until the file is gone
            await asyncio.sleep(0.01)
        return Step(Observation("ok"), {"outcome": float(self.wins)}, End.success if self.wins else End.failure)

    async def aclose(self): ...


class Broken(Once):
    async def step(self, action):
        raise RuntimeError("no screwdriver")


async def agent(session, task):
    await session.chat([{"role": "user", "content": task.prompt}])
    return 1.0
"""


@pytest.fixture
def asked(tmp_path, serve):
    """Return the arguments that most tests use, without the command."""
    (tmp_path / "mine.py").write_text(SCRIPT)
    script = tmp_path / "mine.py"
    url = serve(max_model_len=None).url
    return [url, "--env", f"{script}:Once", "--tasks", f"{script}:tasks", "--n", "4", "--out", f"{tmp_path}/out.jsonl"]


def last_line(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_evaluate_reports_success_and_leaves_the_episodes(asked, tmp_path, capsys):
    options = ["--samples", "3", "--seed", "7", "--json", f"{tmp_path}/figures.json", "--price-in", "1000000"]
    assert cli.main(["evaluate", *asked, *options]) == 0
    found = last_line(capsys)
    assert (found["success"], found["scored"], found["tasks"], found["pass_at"]["3"]) == (0.5, 12, 4, 0.5)
    assert found["cost"] == found["prompt_tokens"] > 0
    assert found["token_mode"] == "server"
    assert json.loads((tmp_path / "figures.json").read_text()) == found
    assert {t.task.id for t in read_trajectories(tmp_path / "out.jsonl")} == {"7-0", "7-1", "7-2", "7-3"}


def test_rollout_says_where_the_episodes_are(asked, tmp_path, capsys):
    assert cli.main(["rollout", *asked]) == 0
    said = capsys.readouterr()
    assert f"4 episodes in {tmp_path / 'out.jsonl'} (4 can be trained on" in said.out
    assert json.loads(said.out.splitlines()[-1])["trainable"] == 4
    assert "4 of 4 episodes" in said.err


def test_agents_are_evaluated_as_environments_are(asked, tmp_path, capsys):
    asked[2] = f"{tmp_path}/mine.py:agent"
    assert cli.main(["evaluate", *asked]) == 0
    assert last_line(capsys)["success"] == 1.0


def test_a_second_run_plays_nothing_again_and_another_configuration_is_refused(asked, capsys):
    assert cli.main(["evaluate", *asked]) == 0
    first = last_line(capsys)
    assert cli.main(["evaluate", *asked]) == 0
    assert last_line(capsys) == first
    assert cli.main(["evaluate", *asked, "--temperature", "0.5"]) == 2
    assert "choose another output" in capsys.readouterr().err


def test_nothing_scored_is_a_failure_that_names_the_first_error(asked, tmp_path, capsys):
    asked[2] = f"{tmp_path}/mine.py:Broken"
    assert cli.main(["evaluate", *asked]) == 1
    said = capsys.readouterr()
    assert "4 failed by the machinery, first: " in said.out
    assert "no screwdriver" in said.out
    assert "first failure: env_error" in said.err
    assert json.loads(said.out.splitlines()[-1])["success"] is None


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--env", "nowhere:Env"], "--env must be importable"),
        (["--env-options", "[1]"], "--env-options must be a JSON object"),
        (["--context", "last_turns:x"], "last_turns:3"),
        (["--temperature", "-1"], "temperature must be"),
        (["--max-turns", "0"], "max_turns must be positive"),
        (["--samples", "0"], "samples must be 1 or more"),
        (["--price-in", "nan"], "prices must be"),
        (["--max-concurrent", "0"], "max_concurrent"),
        (["--json", "/nowhere/figures.json"], "--json must be a file that can be written"),
        (["--out", "/dev/null/out.jsonl"], "output must be a file that can be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_explained_without_a_traceback(asked, capsys, more, told):
    assert cli.main(["evaluate", *asked, *more]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_evaluation_leaves_a_file_that_the_next_one_goes_on_with(asked, tmp_path, capsys, number, code):
    asked[6] = "40"
    hold = tmp_path / "hold"
    hold.touch()
    held = [*asked, "--max-concurrent", "2", "--env-options", json.dumps({"hold": str(hold)})]
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # children of a shell's & do not
    program = f"{heeds}; import sys; from turngate.runtime.cli import main; sys.exit(main(sys.argv[1:]))"
    out = tmp_path / "out.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", program, "evaluate", *held], stderr=subprocess.PIPE, text=True
    ) as process:
        while not (out.exists() and out.stat().st_size):
            assert process.poll() is None
            os.sched_yield()
        process.send_signal(number)
        said = process.communicate(timeout=30)[1]
    assert process.returncode == code
    assert "the same command goes on" in said
    played = len(list(read_trajectories(out)))
    assert 0 < played < 40
    hold.unlink()
    assert cli.main(["evaluate", *held]) == 0
    assert last_line(capsys)["episodes"] == 40
