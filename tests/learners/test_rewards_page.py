"""docs/rewards.md stays true: its code runs as printed, one block after the other, and its table is the code's."""

import re
from pathlib import Path
from typing import Any

from turngate.envs.shopping import ShoppingEnv, running_example
from turngate.learners.hacking import ALARMS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text()


async def test_code_of_the_page_runs_and_does_what_it_says() -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        exec(block, names)
    trajectory = await names["runtime"].rollout(ShoppingEnv, running_example())
    assert trajectory.turns
    assert all("progress" in turn.scores for turn in trajectory.turns)
    rewards = names["scheme"].rewards(trajectory, gamma=1.0)
    assert rewards.is_scorable
    assert {"penalty_turn", "penalty_invalid", "penalty_repeat", "shaping_progress"} <= set(rewards.components)
    assert names["watch"]([trajectory])["hacking_alarms"] == 0.0
    assert names["judged"].scorers.names == ("judge",)


def test_every_alarm_is_explained_on_the_page() -> None:
    assert (
        dict(re.findall(r"^\| `(\w+)` \| (the .*|one .*|what .*|episodes .*|an .*) \|$", PAGE, re.MULTILINE)) == ALARMS
    )
