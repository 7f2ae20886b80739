"""Full weights on their way into a real vLLM: while it generates, cancelled, broken, and into a tied head."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests_servers.launch import Server, running
from tests_servers.policies import FLOAT32_NATS, LONG, PROMPT, Policy, generate, trained, worst
from turngate.runtime import Endpoint, Sampling
from turngate.runtime.errors import PublishError, PublishRefused
from turngate.runtime.publishers import VLLMPublisher
from turngate.runtime.weights import InFlight, move_endpoint


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("vllm", "digits") as server:
        yield server


def publisher_of(server: Server, folder: Path, in_flight: InFlight = "continues", **options) -> VLLMPublisher:
    return VLLMPublisher(server.url, base_model=server.folder, in_flight=in_flight, folder=folder / "served", **options)


async def control(server: Server, path: str, body: dict | None = None) -> None:
    async with aiohttp.ClientSession() as session, session.post(server.root + path, json=body) as reply:
        assert reply.status == 200


async def test_a_server_answers_like_the_folder_it_was_started_with(server: Server, tmp_path: Path) -> None:
    publisher, policy = publisher_of(server, tmp_path), Policy(server, tmp_path)
    assert await publisher.is_serving(policy.file())
    assert publisher.canary_tolerance == 1e-3
    assert not await publisher.is_serving(policy.step())


async def test_no_key_or_value_of_old_weights_answers_under_new_ones(server: Server, tmp_path: Path) -> None:
    publisher, policy = publisher_of(server, tmp_path), Policy(server, tmp_path)
    for version in (1, 2, 3):
        await generate(server, 2)  # the prefix is cached
        await publisher.publish(policy.step(), version)
        _, ids, logprobs = await generate(server, 8)
        assert worst(policy, ids, logprobs) < FLOAT32_NATS
    assert await publisher.served_version() == 3


async def test_without_dropping_the_cache_it_would(server: Server, tmp_path: Path) -> None:
    """What the test before would see if publishing forgot a step, and that the canary alone would not see it."""
    publisher, policy = publisher_of(server, tmp_path), Policy(server, tmp_path)
    await publisher.publish(policy.file(), 1)
    await generate(server, 2)
    (tmp_path / "stale").mkdir()
    policy.step().rename(tmp_path / "stale" / "model.safetensors")
    await control(server, "/pause?mode=keep&clear_cache=false")
    kwargs = {"weights_path": str(tmp_path / "stale")}
    await control(server, "/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
    await control(server, "/resume")
    _, ids, logprobs = await generate(server, 8)
    assert worst(policy, ids, logprobs) > 100 * FLOAT32_NATS
    assert await publisher.is_serving(policy.file())
    await publisher.publish(policy.file(), 2)
    _, ids, logprobs = await generate(server, 8)
    assert worst(policy, ids, logprobs) < FLOAT32_NATS


@pytest.mark.parametrize("in_flight", ["continues", "pauses", "restarts"])
async def test_requests_under_way_meet_an_update_as_promised(
    server: Server, tmp_path: Path, in_flight: InFlight
) -> None:
    publisher, policy = publisher_of(server, tmp_path, in_flight), Policy(server, tmp_path)
    await publisher.publish(policy.file(), 1)
    met = 0
    # On busy cores the server may have answered all before it hears of the update: then there are more of them.
    for attempt in range(1 if in_flight == "pauses" else 6):
        old, path = policy.frozen(), policy.step()
        running = [asyncio.create_task(generate(server, LONG, seed=seed)) for seed in range(4 << attempt)]
        await asyncio.sleep(0.5)
        await publisher.publish(path, 2 + attempt)
        replies = await asyncio.gather(*running)
        met = (
            sum(reason == "abort" for reason, _, _ in replies)
            if in_flight == "restarts"
            else sum(spans(old, policy, reply) for reply in replies[:4])
        )
        if met:
            break
    assert met == 0 if in_flight == "pauses" else met > 0


def spans(old: Policy, new: Policy, reply: tuple[str, list, list]) -> bool:
    """Require that a reply is old weights' and then new ones', exactly, and return whether it is some of both."""
    reason, ids, logprobs = reply
    assert (reason, len(ids)) == ("length", LONG)
    before = [abs(a - b) < FLOAT32_NATS for a, b in zip(old.logprobs(PROMPT, ids), logprobs, strict=True)]
    after = [abs(a - b) < FLOAT32_NATS for a, b in zip(new.logprobs(PROMPT, ids), logprobs, strict=True)]
    # One switch, and on either side of it exactly one version: nothing comes from a mixture.
    switch = next((at for at, same in enumerate(before) if not same), len(before))
    assert all(after[switch:])
    return 0 < switch < len(ids)


async def test_an_aborted_request_is_answered_by_the_new_weights(server: Server, tmp_path: Path) -> None:
    publisher, policy = publisher_of(server, tmp_path, "restarts"), Policy(server, tmp_path)
    await publisher.publish(policy.file(), 1)
    async with Endpoint(server.url, model=server.model, policy_version=1) as endpoint:
        sampling = Sampling(max_tokens=600)
        running = [asyncio.create_task(endpoint.generate(PROMPT, sampling, seed=seed)) for seed in range(24)]
        await asyncio.sleep(0.1)
        await publisher.publish(policy.step(), 2)
        move_endpoint(endpoint, publisher, 2)
        for completion in await asyncio.gather(*running):
            assert completion.stop_reason in ("stop", "length")


async def test_a_cancelled_publication_leaves_a_server_that_answers(server: Server, tmp_path: Path) -> None:
    publisher, policy = publisher_of(server, tmp_path), Policy(server, tmp_path)
    await publisher.publish(policy.file(), 1)
    path = policy.step()
    for delay_s in (0.0, 0.01, 0.02, 0.03, 0.05):
        publication = asyncio.create_task(publisher.publish(path, 2))
        await asyncio.sleep(delay_s)
        publication.cancel()
        await asyncio.wait({publication})
        await asyncio.wait_for(generate(server, 2), timeout=20)
    await publisher.publish(path, 2)
    _, ids, logprobs = await generate(server, 8)
    assert worst(policy, ids, logprobs) < FLOAT32_NATS


async def test_what_cannot_be_loaded_leaves_the_old_weights(server: Server, tmp_path: Path) -> None:
    publisher, policy = publisher_of(server, tmp_path, attempts=1), Policy(server, tmp_path)
    await publisher.publish(policy.file(), 1)
    await generate(server, 2)
    truncated = tmp_path / "truncated.safetensors"
    truncated.write_bytes(policy.file().read_bytes()[:-1000])
    with pytest.raises(PublishError, match="the old weights serve"):
        await publisher.publish(truncated, 2)
    _, ids, logprobs = await generate(server, 8)
    assert worst(policy, ids, logprobs) < FLOAT32_NATS
    assert await publisher.served_version() == 1


async def test_training_raises_the_reward_with_updates_in_flight(server: Server, tmp_path: Path) -> None:
    publisher, policy = publisher_of(server, tmp_path), Policy(server, tmp_path)
    await publisher.publish(policy.file(), 1)
    report = await trained(server, tmp_path, publisher, updates=24, adamw_lr=1e-3)
    rows = report.history
    assert max(row["parity_max_abs"] for row in rows if row["parity_tokens"]) < FLOAT32_NATS
    assert report.policy_version == 2 + 24  # the server had version 1
    # Updates landed while episodes went on: some episodes have turns of several versions, none older than the bound.
    assert max(row["version_span_max"] for row in rows) > 0
    assert 0 < max(row["lag_max"] for row in rows) <= 2
    reward = [row["reward"] for row in rows]
    assert sum(reward[-4:]) / 4 > sum(reward[:4]) / 4 + 0.2, reward


async def test_a_tied_head_that_stayed_behind_is_caught_and_the_old_weights_serve_again(tmp_path: Path) -> None:
    with running("vllm", "tied") as server:
        publisher, policy = publisher_of(server, tmp_path), Policy(server, tmp_path)
        same = policy.file()
        with pytest.raises(PublishRefused, match=r"tie_word_embeddings.*untied copy.*weights before serve again"):
            await publisher.publish(policy.step(0.01), 1)
        assert await publisher.is_serving(same)
        assert await publisher.served_version() == 0
