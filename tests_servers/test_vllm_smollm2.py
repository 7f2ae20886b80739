"""vLLM on CPU with SmolLM2: a real vocabulary, whose sampled texts are not always tokenised as they were sampled."""

import random
from collections.abc import Iterator

import pytest

from tests_servers.checks import EPISODES, TEMPERATURE, assert_whole, play, verdicts
from tests_servers.launch import Server, running
from tests_servers.reference import Reference
from tests_servers.tap import Tap, recorded, replied
from turngate.envs import Action, End, Observation, Step, Task
from turngate.runtime import Dialect, Endpoint
from turngate.runtime.huggingface_renderer import HuggingFaceRenderer
from turngate.runtime.probe import probe

FLOAT32_NATS = 1e-3
"""Thirty layers in float32, computed by two implementations; 5e-5 was measured."""
MAX_TOKENS = 24
QUESTIONS = (
    "Name a colour.",
    "What is 2 + 3?",
    "Tell me a joke.",
    "Name a city in Europe.",
    "What do cats eat?",
    "Write a rhyme.",
    "Count to five.",
    "Say hello in French.",
)


class SmallTalk:
    """Asks three questions and is content with any answer."""

    async def reset(self, task: Task, seed: int) -> Observation:
        self._left = list(task.data["questions"])
        return Observation(self._left.pop(0))

    async def step(self, action: Action) -> Step:
        if not self._left:
            return Step(Observation(), {"outcome": 1.0}, End.success)
        return Step(Observation(self._left.pop(0)))

    async def aclose(self) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("vllm", "smollm2") as server:
        yield server


@pytest.fixture(scope="module")
def reference(server: Server) -> Reference:
    return Reference(server.folder)


@pytest.fixture(scope="module")
def games() -> list[Task]:
    rng = random.Random(0)
    return [Task(f"talk-{i}", data={"questions": rng.sample(QUESTIONS, 3)}) for i in range(EPISODES)]


async def test_probe_finds_all_but_versions(server: Server) -> None:
    capabilities = await probe(server.url)

    found = verdicts(capabilities)
    assert {name for name, verdict in found.items() if verdict == "no"} <= {"versions"}, capabilities.table()
    unknown = {name for name, verdict in found.items() if verdict == "unknown"}
    # It makes no call, and its answer to the probe has no word in the middle to stop at.
    assert unknown <= {"tool_calls", "stop", "stop_ids"}, capabilities.table()


async def test_a_server_that_renders_tokenises_some_answers_anew(
    server: Server, reference: Reference, games: list[Task]
) -> None:
    tap = Tap(server.url)
    async with Endpoint(server.url, model=server.model, transport=tap) as endpoint:
        trajectories = await play(endpoint, env=SmallTalk, games=games, max_tokens=MAX_TOKENS)

    assert_whole(trajectories)
    assert recorded(trajectories) == replied(tap.exchanges)
    # Each time a segment ends, and the next holds the ids that the model saw instead.
    assert sum(t.drifts for t in trajectories) == sum(len(t.segments) - 1 for t in trajectories) > 0
    assert reference.errors(trajectories, temperature=TEMPERATURE).largest < FLOAT32_NATS


async def test_our_renderer_keeps_every_id(server: Server, reference: Reference, games: list[Task]) -> None:
    tap = Tap(server.url)
    renderer, dialect = HuggingFaceRenderer(server.folder), Dialect(token_mode="tokens")
    async with Endpoint(server.url, model=server.model, dialect=dialect, renderer=renderer, transport=tap) as endpoint:
        trajectories = await play(endpoint, env=SmallTalk, games=games, max_tokens=MAX_TOKENS)

    assert_whole(trajectories)
    assert recorded(trajectories) == replied(tap.exchanges)
    assert [(t.drifts, len(t.segments)) for t in trajectories] == [(0, 1)] * EPISODES
    assert reference.errors(trajectories, temperature=TEMPERATURE).largest < FLOAT32_NATS
