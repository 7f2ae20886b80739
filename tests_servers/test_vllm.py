"""vLLM on CPU: ids and log-probs as the server sampled them, rendered there or here."""

from collections.abc import Iterator

import pytest

from tests_servers.game import DigitGame, tasks
from tests_servers.launch import Options, Server, running
from tests_servers.reference import Reference
from tests_servers.tap import Tap, recorded, replied
from turngate.runtime import Endpoint, Limits, Runtime, Sampling
from turngate.runtime.types import Trajectory

TEMPERATURE = 0.8  # other than 1, so that log-probs before temperature would show
FLOAT32_NATS = 1e-4


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("vllm", "digits", Options(lora=True)) as server:
        yield server


@pytest.fixture(scope="module")
def reference(server: Server) -> Reference:
    return Reference(server.folder)


async def play(endpoint: Endpoint) -> list[Trajectory]:
    runtime = Runtime(endpoint, limits=Limits(max_turns=8), sampling=Sampling(temperature=TEMPERATURE, max_tokens=6))
    evaluation = await runtime.evaluate(DigitGame, tasks(32))
    return list(evaluation.trajectories)


async def test_ids_of_a_server_that_renders_are_recorded_as_sampled(server: Server, reference: Reference) -> None:
    tap = Tap(server.url)
    async with Endpoint(server.url, model=server.model, transport=tap) as endpoint:
        trajectories = await play(endpoint)

    assert all(t.trainable and len(t.turns) == 3 for t in trajectories), [t.error for t in trajectories]
    assert recorded(trajectories) == replied(tap.exchanges)
    errors = reference.errors(trajectories, temperature=TEMPERATURE)
    print(errors, sum(t.drifts for t in trajectories))
    assert errors.largest < FLOAT32_NATS
