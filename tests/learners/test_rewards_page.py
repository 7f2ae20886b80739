"""docs/rewards.md stays true: its code runs as printed, one block after the other, and its table is the code's."""

import math
import re
from pathlib import Path
from typing import Any

from turngate.envs.base import End
from turngate.envs.shopping import ShoppingEnv, running_example, train_tasks, vocabulary
from turngate.learners.critic import Critic, CriticConfig, with_value_head
from turngate.learners.hacking import ALARMS
from turngate.learners.hindsight import HindsightStep
from turngate.runtime.engine.model import ModelConfig, PolicyModel
from turngate.runtime.engine.tokenizer import Tokenizer

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

    tokenizer = Tokenizer.train([" ".join(vocabulary())])
    sizes = {"width": 16, "layers": 1, "heads": 2, "head_dim": 8, "mlp_width": 16, "max_context": 2048}
    model = with_value_head(PolicyModel(ModelConfig(vocab_size=len(tokenizer), **sizes)))
    critic = Critic(model, CriticConfig(), seed=0, microbatch_tokens=4096)
    goal = train_tasks(1, seed=0)[0]
    learned = names["learn_in_hindsight"](
        critic, tokenizer, trajectory, goal, lambda *_: HindsightStep(1.0, End.success)
    )  # the first turn reaches the new goal
    assert critic.version == 1
    assert 0 < learned["value_loss"] <= math.log(2)


def test_every_alarm_is_explained_on_the_page() -> None:
    assert (
        dict(re.findall(r"^\| `(\w+)` \| (the .*|one .*|what .*|episodes .*|an .*) \|$", PAGE, re.MULTILINE)) == ALARMS
    )
