"""LoRA adapters on their way into a real vLLM, one per version."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests_servers.launch import Options, Server, running
from tests_servers.policies import FLOAT32_NATS, LONG, Policy, generate, trained, worst
from turngate.learners import LoRA
from turngate.runtime.publishers import VLLMPublisher


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("vllm", "digits", Options(lora=True)) as server:
        yield server


async def test_adapters_serve_side_by_side_each_under_its_own_name(server: Server, tmp_path: Path) -> None:
    policy = Policy(server, tmp_path, lora=LoRA(rank=4))
    publisher = VLLMPublisher(server.url, mode="lora", model=server.model, folder=tmp_path / "adapters")
    await publisher.publish(policy.step(1.0), 1)
    old, path = policy.frozen(), policy.step(1.0)
    await generate(server, 2, model=publisher.model)
    under_way = asyncio.create_task(generate(server, LONG, model=publisher.model))
    await asyncio.sleep(0.3)
    await publisher.publish(path, 2)
    assert not under_way.done()
    _, ids, logprobs = await generate(server, 8, model=publisher.model)
    assert worst(policy, ids, logprobs) < FLOAT32_NATS
    assert worst(old, ids, logprobs) > 10 * FLOAT32_NATS
    _, ids, logprobs = await under_way  # to its end by the adapter that it named
    assert worst(old, ids, logprobs) < FLOAT32_NATS
    for version in (3, 4):
        await publisher.publish(policy.step(1.0), version)
    assert await publisher.served_version() == 4


async def test_adapters_are_trained_with_updates_in_flight(server: Server, tmp_path: Path) -> None:
    publisher = VLLMPublisher(server.url, mode="lora", folder=tmp_path / "adapters")
    before = await publisher.served_version()
    report = await trained(server, tmp_path, publisher, updates=12, adamw_lr=5e-3, lora=LoRA(rank=8))
    assert max(row["parity_max_abs"] for row in report.history if row["parity_tokens"]) < FLOAT32_NATS
    assert report.policy_version >= before + 12
    reward = [row["reward"] for row in report.history]
    assert sum(reward[-3:]) > sum(reward[:3]), reward
