"""What every server is asked for: many episodes at once, and the verdicts of the probe."""

from collections.abc import Sequence

from tests_servers.game import DigitGame, tasks
from turngate.envs import EnvFactory, Task
from turngate.runtime import Endpoint, Limits, Runtime, Sampling
from turngate.runtime.capabilities import Capabilities, Finding
from turngate.runtime.types import Trajectory

__all__ = ["EPISODES", "TEMPERATURE", "assert_whole", "play", "verdicts"]

EPISODES = 32
TEMPERATURE = 0.8
"""Other than 1, so that log-probs before temperature would show."""


async def play(
    endpoint: Endpoint,
    *,
    env: EnvFactory = DigitGame,
    games: Sequence[Task] = (),
    temperature: float = TEMPERATURE,
    max_tokens: int = 6,
) -> list[Trajectory]:
    """Run 32 episodes at once and return them."""
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
    runtime = Runtime(endpoint, limits=Limits(max_turns=8), sampling=sampling)
    return list((await runtime.evaluate(env, games or tasks(EPISODES))).trajectories)


def assert_whole(trajectories: Sequence[Trajectory], *, turns: int = 3) -> None:
    """Check that no episode was failed by the machinery or cut short."""
    assert [t.error for t in trajectories if t.error] == []
    assert [len(t.turns) for t in trajectories] == [turns] * EPISODES


def verdicts(capabilities: Capabilities) -> dict[str, str]:
    """Return every verdict by name, without those that the model's luck decides."""
    fields = {name: getattr(capabilities, name) for name in capabilities.__struct_fields__}
    return {name: field.verdict for name, field in fields.items() if isinstance(field, Finding)}
