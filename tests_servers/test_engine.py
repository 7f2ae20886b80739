"""The embedded engine, asked like any other server: from its own process, over HTTP."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests_servers.checks import TEMPERATURE, assert_whole, play, verdicts
from tests_servers.launch import Server, running
from tests_servers.tap import Tap, recorded, replied
from turngate.runtime import Dialect, Endpoint, Sampling
from turngate.runtime.capabilities import check_trainable
from turngate.runtime.connect import connect
from turngate.runtime.engine.model import ModelConfig, PolicyModel
from turngate.runtime.engine.packing import pack
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.engine_renderer import EngineRenderer
from turngate.runtime.probe import probe
from turngate.runtime.types import Trajectory

FLOAT32_NATS = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights large enough to say varied things."""
    folder = tmp_path_factory.mktemp("engine") / "model"
    folder.mkdir()
    tokenizer = Tokenizer.train([f"Say the digit {digit}." for digit in range(10)])
    model = PolicyModel(ModelConfig(vocab_size=len(tokenizer), max_context=1024), seed=1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn(weight.shape, generator=generator))
    tokenizer.save(folder / "tokenizer.json")
    model.save(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with running("engine", folder) as server:
        yield server


def largest_error(folder: Path, trajectories: Sequence[Trajectory]) -> float:
    """Return how far behaviour log-probs are from the learner's own forward pass, in nats."""
    segments = [segment for t in trajectories for segment in t.segments]
    packed = pack([s.ids() for s in segments], [s.policy_mask for s in segments])
    with torch.no_grad():
        expected = PolicyModel.load(folder).score(packed, temperature=TEMPERATURE).logprobs_M
    sampled = [
        v for s in segments for v, is_sampled in zip(s.logprob_values(), s.policy_mask, strict=True) if is_sampled
    ]
    return float((expected - torch.tensor(sampled)).abs().max())


async def test_probe_finds_everything(server: Server) -> None:
    capabilities = await probe(server.url)

    missing = {name for name, verdict in verdicts(capabilities).items() if verdict == "no"}
    assert missing == set(), capabilities.table()
    for use in ("evaluate", "record", "train", "guide", "publish"):
        assert capabilities.problems(use, has_renderer=False) == [], use


async def test_ids_of_a_server_that_renders_are_recorded_as_sampled(server: Server, folder: Path) -> None:
    async with await connect(server.url) as endpoint:
        assert endpoint.dialect.token_mode == "server"
        check_trainable(endpoint, Sampling(temperature=TEMPERATURE, top_p=0.9))
    tap = Tap(server.url)
    async with Endpoint(server.url, model=server.model, dialect=endpoint.dialect, transport=tap) as endpoint:
        trajectories = await play(endpoint)

    assert_whole(trajectories)
    assert recorded(trajectories) == replied(tap.exchanges)
    assert sum(t.drifts for t in trajectories) > 0  # random words, some of which are one token when read again
    assert largest_error(folder, trajectories) < FLOAT32_NATS


async def test_our_renderer_keeps_every_id(server: Server, folder: Path) -> None:
    tap = Tap(server.url)
    renderer, dialect = EngineRenderer(folder), Dialect(token_mode="tokens")
    async with Endpoint(server.url, model=server.model, dialect=dialect, renderer=renderer, transport=tap) as endpoint:
        trajectories = await play(endpoint)

    assert_whole(trajectories)
    assert recorded(trajectories) == replied(tap.exchanges)
    assert [(t.drifts, len(t.segments)) for t in trajectories] == [(0, 1)] * len(trajectories)
    assert largest_error(folder, trajectories) < FLOAT32_NATS
