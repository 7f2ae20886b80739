"""Training on vLLM with the Hugging Face learner: the reward rises while weights change in flight."""

import functools
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests_servers.game import DigitGame, tasks
from tests_servers.launch import Server, running
from tests_servers.reference import Reference
from turngate.learners import GRPO, HuggingFaceModel
from turngate.runtime import HuggingFaceRenderer, Limits, Runtime, Sampling, Trajectory, connect, train
from turngate.runtime.publishers import VLLMPublisher
from turngate.runtime.transcript import read_trajectories

FLOAT32_NATS = 1e-4
UPDATES = 24
SLOW_GAME = functools.partial(DigitGame, max_pause_s=0.8)
"""Episodes that take longer than an update."""


class KeepingPublisher(VLLMPublisher):
    """Keeps every version that it has published."""

    def __init__(self, server: Server, folder: Path) -> None:
        super().__init__(server.url, base_model=server.folder, folder=folder / "served")
        self.kept = {0: server.folder / "model.safetensors"}
        self._folder = folder

    async def publish(self, path: Path, policy_version: int) -> None:
        await super().publish(path, policy_version)
        self.kept[policy_version] = Path(shutil.copy(path, self._folder / f"{policy_version}.safetensors"))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("vllm", "digits") as server:
        yield server


def learner_of(server: Server, updates: int) -> GRPO:
    # Its own parity check stops the run when log-probs at lag 0 differ by more than 1e-4, so that ratios are not 1.
    return GRPO(HuggingFaceModel(server.folder), off_policy="decoupled", updates=updates)


def label_errors(reference: Reference, kept: dict[int, Path], played: Sequence[Trajectory]) -> "Counter[int]":
    """Return by how many versions labels are off, over the turns into which no update fell.

    A turn's own version is the one under which a forward pass gives the log-probs that were recorded.
    """
    errors: dict[int, list[list[float]]] = {}
    for version, path in kept.items():
        reference.load(path)
        errors[version] = [reference.turn_errors(trajectory) for trajectory in played]
    found: Counter[int] = Counter()
    for index, trajectory in enumerate(played):
        for turn in trajectory.turns:
            if turn.version_sent == turn.version_received:
                fitting = [version for version in kept if errors[version][index][turn.index] < FLOAT32_NATS]
                assert fitting, (trajectory.id, turn.index)
                found[min((version - turn.version_sent for version in fitting), key=abs)] += 1
    return found


async def test_reward_rises_while_updates_land_in_flight(server: Server, tmp_path: Path) -> None:
    publisher = KeepingPublisher(server, tmp_path)
    renderer = HuggingFaceRenderer(server.folder)
    async with await connect(server.url, renderer=renderer, publisher=publisher) as endpoint:
        sampling = Sampling(max_tokens=4)
        runtime = Runtime(endpoint, limits=Limits(max_turns=4), sampling=sampling, max_concurrent=64)
        before = await runtime.evaluate(DigitGame, tasks(64, seed=9))
        report = await train(
            runtime,
            SLOW_GAME,
            tasks(1024, seed=1),
            learner=learner_of(server, UPDATES),
            updates=UPDATES,
            run_dir=tmp_path / "run",
            group_size=8,
            groups_per_batch=8,
            max_staleness=4,
            keep_trajectories_every=1,
        )
        after = await runtime.evaluate(DigitGame, tasks(64, seed=9))
    rows = report.history
    assert endpoint.dialect.token_mode == "tokens"
    assert after.mean_reward > before.mean_reward + 0.25
    assert endpoint.policy_version == report.policy_version == await publisher.served_version() == UPDATES
    assert report.ledger.trained == UPDATES * 64
    assert max(row["version_span_max"] for row in rows) >= 1
    assert max(row["lag_max"] for row in rows) <= 4
    assert rows[0]["parity_tokens"] > 0
    assert all(row["parity_max_abs"] < FLOAT32_NATS for row in rows if row["parity_tokens"])

    files = sorted((tmp_path / "run" / "trajectories").iterdir())
    played = [trajectory for file in files for trajectory in read_trajectories(file)][::7]
    labels = label_errors(Reference(server.folder), publisher.kept, played)
    assert set(labels) <= {0, 1}
    assert labels[1] <= 0.05 * labels.total()


async def test_every_ratio_is_one_without_staleness(server: Server, tmp_path: Path) -> None:
    publisher = VLLMPublisher(server.url, base_model=server.folder, folder=tmp_path / "served")
    async with await connect(server.url, publisher=publisher) as endpoint:
        assert endpoint.dialect.token_mode == "server"
        sampling = Sampling(max_tokens=4, temperature=0.8)
        learner = GRPO(HuggingFaceModel(server.folder), off_policy="decoupled", sampling=sampling, updates=3)
        report = await train(
            Runtime(endpoint, limits=Limits(max_turns=4), sampling=sampling),
            DigitGame,
            tasks(64, seed=2),
            learner=learner,
            updates=3,
            run_dir=tmp_path / "run",
            group_size=8,
            groups_per_batch=4,
            max_staleness=0,
        )
    for row in report.history:
        assert row["parity_tokens"] == row["policy_tokens"] > 0
        assert row["parity_max_abs"] < FLOAT32_NATS
