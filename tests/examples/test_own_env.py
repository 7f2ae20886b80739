"""The example of a new environment is what a newcomer runs first: its agent must really learn."""

import importlib.util
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_env.py"


async def test_the_agent_learns_which_digit_opens_which_lock(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("own_env", EXAMPLE)
    assert spec is not None
    script = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(script)
    await script.main(tmp_path)
    last = capsys.readouterr().out.splitlines()[-1]
    success = float(last.split()[0])
    assert success > 0.5  # two blind tries at eight digits open 0.23 of the locks; measured after training: 0.99
