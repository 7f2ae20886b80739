"""A scripted batcher, a tiny model, and engines to talk to."""

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
import msgspec
import pytest

from turngate.runtime.engine.request import BatcherConfig, BatcherStatistics, Finished, Progress, Rejection, Request
from turngate.runtime.engine.tokenizer import Tokenizer


class FakeBatcher:
    """Keeps the batcher's contract without a model: every step gives every sequence the next token of its script."""

    def __init__(
        self, model: Any, tokenizer: Tokenizer, config: BatcherConfig | None = None, *, policy_version=0, **values: Any
    ):
        self.tokenizer = tokenizer
        self.config = config or BatcherConfig()
        self.policy_version = policy_version
        self.running: dict[int, tuple[Request, list[int]]] = {}
        self.script = [*tokenizer.encode("buy the red one"), tokenizer.end]
        self.requests: list[Request] = []
        self.cancelled: list[int] = []
        self.steps = 0
        self.is_paused = False
        self.step_error: Exception | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.running) and not self.is_paused

    def submit(self, request: Request) -> int | Rejection:
        if len(self.running) >= self.config.max_running + self.config.max_waiting:
            return Rejection("", "the queue is full", "overloaded")
        if request.seed == 666:
            return Rejection("seed", "seed must not be 666")
        self.requests.append(request)
        self.running[len(self.requests)] = request, []
        return len(self.requests)

    def swap_critic(self, state: Mapping[str, Any], value_version: int) -> None: ...

    def cancel(self, sequence_id: int) -> bool:
        self.cancelled.append(sequence_id)
        return self.running.pop(sequence_id, None) is not None

    def step(self) -> list[Progress | Finished]:
        if self.step_error is not None:
            raise self.step_error
        self.steps += 1
        reports: list[Progress | Finished] = []
        for key, (request, ids) in list(self.running.items()):
            is_scoring = request.max_tokens == 0
            if not is_scoring:
                ids.append(self.script[len(ids)])
            if request.stream:
                reports.append(
                    Progress(id=key, token_ids=(ids[-1],), logprobs=(-0.5,), versions=(self.policy_version,), text="x")
                )
            is_stop = bool(ids) and ids[-1] == self.tokenizer.end
            if is_stop or len(ids) >= request.max_tokens:
                del self.running[key]
                reports.append(self._finish(key, request, ids, "stop" if is_stop else "length"))
        return reports

    def _finish(self, key: int, request: Request, ids: list[int], reason: Any) -> Finished:
        prompt = len(request.prompt_ids)
        return Finished(
            id=key,
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            versions=[self.policy_version] * len(ids),
            text=self.tokenizer.decode(ids),
            finish_reason=reason,
            cached_tokens=3,
            prompt_logprobs=[None, *[-1.5] * (prompt - 1)] if request.echo else None,
            policy_version=self.policy_version,
        )

    def swap_weights(self, state: Mapping[str, Any], policy_version: int) -> None:
        self.policy_version = policy_version

    def statistics(self) -> BatcherStatistics:
        zeros = dict.fromkeys(BatcherStatistics.__struct_fields__, 0)
        return msgspec.convert({**zeros, "running": len(self.running), "steps": self.steps}, BatcherStatistics)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["buy the red one", 'search["backpack"] under $80'])


@pytest.fixture
def fake_batcher(tokenizer: Tokenizer) -> FakeBatcher:
    return FakeBatcher(None, tokenizer)


@pytest.fixture
def tiny_model(tokenizer: Tokenizer):
    """A model of few weights that says something: fresh models only repeat their last token."""
    import torch

    from turngate.runtime.engine.model import ModelConfig, PolicyModel

    config = ModelConfig(
        vocab_size=len(tokenizer), width=16, layers=1, heads=2, head_dim=8, mlp_width=32, max_context=64
    )
    model = PolicyModel(config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.5 * torch.randn(weight.shape, generator=generator))
    return model


@pytest.fixture
def start_server(tiny_model, tokenizer, monkeypatch) -> Callable[..., Any]:
    """Return a function that makes a server on the scripted batcher; the batcher is its `fake` attribute."""
    from turngate.runtime.engine import server
    from turngate.runtime.engine.config import EngineConfig

    monkeypatch.setattr(server, "Batcher", FakeBatcher)

    def start(**settings: Any) -> server.EngineServer:
        made = server.EngineServer(tiny_model, tokenizer, EngineConfig(**settings))
        made.fake = made._thread._batcher
        return made

    return start


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def make_policy() -> Callable[..., Any]:
    """Return a function that makes a two-layer model whose every weight matters: fresh models have silent writers."""
    import torch

    from turngate.runtime.engine.model import ModelConfig, PolicyModel

    def make(vocab_size: int = 300, *, seed: int = 0, **sizes: Any) -> PolicyModel:
        settings = {"width": 32, "heads": 4, "head_dim": 16, "mlp_width": 64, "max_context": 256, **sizes}
        model = PolicyModel(ModelConfig(vocab_size=vocab_size, **settings), seed=seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)
        return model

    return make
