"""Policies that change as if they were trained, and what a server samples from them."""

import copy
from functools import partial
from pathlib import Path

import msgspec
import torch

from tests_servers.game import DigitGame, tasks
from tests_servers.launch import Server
from turngate.learners import GRPO, HuggingFaceModel, LoRA
from turngate.learners.causal_lm import CausalLM
from turngate.runtime import Endpoint, Limits, Runtime, Sampling, TrainReport, WeightPublisher, train
from turngate.runtime.engine.packing import pack

__all__ = ["FLOAT32_NATS", "LONG", "PROMPT", "Policy", "generate", "trained", "worst"]

FLOAT32_NATS = 1e-4
PROMPT = [5 + 7 * i % 900 for i in range(320)]
"""Long enough to fill blocks of the prefix cache (128 tokens on a CPU)."""
LONG = 1500
"""Tokens that take seconds: an update falls in between."""


class Policy:
    """A model that changes as if it were trained."""

    def __init__(self, server: Server, folder: Path, *, lora: LoRA | None = None) -> None:
        self.model: CausalLM = HuggingFaceModel(server.folder, lora=lora, gradient_checkpointing=False).load(None)
        self.folder = folder
        self._random = torch.Generator().manual_seed(1)

    @torch.no_grad()
    def step(self, size: float = 0.05) -> Path:
        """Move every weight a little, and return the file that a learner would publish."""
        for weight in self.model.parameters():
            if weight.requires_grad and weight.numel() > 1:
                scale = max(float(weight.std()), 0.02) * size
                weight.add_(torch.randn(weight.shape, generator=self._random), alpha=scale)
        self.model.save_weights(path := self.folder / "new.safetensors")
        return path

    def file(self) -> Path:
        """Return the file of the weights as they are."""
        self.model.save_weights(path := self.folder / "same.safetensors")
        return path

    @torch.no_grad()
    def logprobs(self, prompt: list[int], ids: list[int]) -> list[float]:
        """Return what each of `ids` should have been sampled with."""
        return self.model.score(pack([tuple(prompt + ids)])).logprobs_M.tolist()[len(prompt) - 1 :]

    def frozen(self) -> "Policy":
        """Return a copy that stays as this one is now."""
        return copy.deepcopy(self)


async def generate(server: Server, count: int, *, model: str | None = None, seed: int = 0) -> tuple[str, list, list]:
    """Sample exactly `count` tokens after PROMPT; return why they ended, the ids and their log-probs."""
    body = {"model": model or server.model, "prompt": PROMPT, "max_tokens": count, "ignore_eos": True, "seed": seed}
    body |= {"logprobs": 0, "return_token_ids": True}
    async with Endpoint(server.url, model=server.model) as endpoint:
        told = msgspec.json.decode(await endpoint.request("/completions", msgspec.json.encode(body)))
    choice = told["choices"][0]
    return choice["finish_reason"], choice["token_ids"], choice["logprobs"]["token_logprobs"]


def worst(policy: Policy, ids: list[int], logprobs: list[float]) -> float:
    expected = policy.logprobs(PROMPT, ids)
    return max(abs(a - b) for a, b in zip(expected, logprobs, strict=True))


async def trained(
    server: Server, folder: Path, publisher: WeightPublisher, *, updates: int, adamw_lr: float, lora: LoRA | None = None
) -> TrainReport:
    """Train the digit game asynchronously; the learner's parity check is on: lag 0 within 1e-4, or the run fails."""
    model = HuggingFaceModel(server.folder, lora=lora, gradient_checkpointing=False)
    async with Endpoint(server.url, model=server.model, publisher=publisher) as endpoint:
        sampling = Sampling(max_tokens=4)
        runtime = Runtime(endpoint, limits=Limits(max_turns=4), sampling=sampling, max_concurrent=48)
        return await train(
            runtime,
            partial(DigitGame, 0.4),  # seconds a turn: episodes go on for longer than an update takes
            tasks(256),
            learner=GRPO(model, off_policy="decoupled", updates=updates, muon_lr=None, adamw_lr=adamw_lr),
            updates=updates,
            run_dir=folder / "run",
            group_size=8,
            groups_per_batch=6,
            max_staleness=2,
            worker="thread",
        )
