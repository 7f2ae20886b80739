import asyncio
import copy
import itertools
import os

import aiohttp
import pytest
import safetensors.torch
import torch

from turngate.runtime.engine.config import EngineConfig
from turngate.runtime.engine.packing import pack
from turngate.runtime.engine.server import EngineServer
from turngate.runtime.errors import PublishError
from turngate.runtime.publishers import EnginePublisher


@pytest.fixture
def versions(tiny_model):
    """Four models, the served one first."""
    models = [copy.deepcopy(tiny_model) for _ in range(4)]
    for version, model in enumerate(models):
        with torch.no_grad():
            model.embed.weight.mul_(1 + version / 4)
    return models


@pytest.fixture
async def server(versions, tokenizer):
    async with EngineServer(copy.deepcopy(versions[0]), tokenizer, EngineConfig(seed=0)) as server:
        yield server


@pytest.fixture
def publisher(server):
    return EnginePublisher(f"http://127.0.0.1:{server.port}", retry_delay_s=0, attempts=2)


async def score(http, server, ids) -> list[float]:
    body = {"prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 0}
    async with http.post(f"http://127.0.0.1:{server.port}/v1/completions", json=body) as reply:
        return (await reply.json())["choices"][0]["logprobs"]["token_logprobs"][1:]


def reference(model, ids) -> list[float]:
    with torch.no_grad():
        return model.score(pack([ids])).logprobs_M.tolist()


async def test_published_weights_are_what_answers(http, server, versions, publisher, tokenizer, tmp_path):
    ids = tokenizer.encode("buy the red one")
    for version in (1, 2, 3):
        versions[version].save_weights(tmp_path / "w.safetensors")
        await publisher.publish(tmp_path / "w.safetensors", version)
        assert await score(http, server, ids) == pytest.approx(reference(versions[version], ids), abs=1e-4)
    assert (await server.statistics())["updates"] == 3


async def test_folder_of_a_model_can_be_published(server, versions, publisher, tmp_path):
    versions[1].save(tmp_path)
    await publisher.publish(tmp_path, 1)
    assert (await server.statistics())["policy_version"] == 1


async def test_update_in_flight_labels_every_token_with_the_weights_that_drew_it(
    http, server, versions, publisher, tmp_path
):
    """The log-prob of each token equals the training pass of exactly its version: nothing is torn or mislabelled."""

    async def sample(number: int) -> dict:
        body = {
            "prompt": [40 + number % 8, 266, 267, 268],
            "max_tokens": 60,
            "seed": number,
            "logprobs": 0,
            "return_token_ids": True,
        }
        async with http.post(f"http://127.0.0.1:{server.port}/v1/completions", json=body) as reply:
            return (await reply.json())["choices"][0]

    async def publish_all() -> None:
        for version in (1, 2, 3):
            versions[version].save_weights(tmp_path / f"{version}.safetensors")
            await publisher.publish(tmp_path / f"{version}.safetensors", version)

    numbers = itertools.count()
    choices = [await sample(next(numbers))]  # before any update, on a busy machine, too
    publishing = asyncio.create_task(publish_all())
    while not publishing.done() or len(choices) < 64:
        choices += await asyncio.gather(*(sample(next(numbers)) for _ in range(16)))
    await publishing
    choices.append(await sample(next(numbers)))
    seen: set[int] = set()
    for choice in choices:
        labels, ids = choice["policy_versions"], [*choice["prompt_token_ids"], *choice["token_ids"]]
        assert labels == sorted(labels)
        seen.update(labels)
        expected = [reference(model, ids)[-len(labels) :] for model in versions]
        own = [expected[label][index] for index, label in enumerate(labels)]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(own, abs=1e-4)
    assert seen >= {0, 3}
    assert any(len(set(choice["policy_versions"])) > 1 for choice in choices), "no update fell into a sequence"


def broken_file(kind, model, path):
    """Write weights that must be refused."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if kind == "NaN":
        state["embed.weight"][3, 3] = float("nan")
    elif kind == "infinite":
        state["embed.weight"][3, 3] = float("inf")
    elif kind == "misshapen":
        state["embed.weight"] = state["embed.weight"][:-1].clone()
    elif kind == "incomplete":
        del state["embed.weight"]
    elif kind == "another model's":
        state["extra"] = torch.zeros(1)
    elif kind == "integers":
        state = {name: tensor.int() for name, tensor in state.items()}
    elif kind == "too wide":
        state = {name: tensor.double() * 1e200 for name, tensor in state.items()}
    elif kind == "NaN in eight bits":
        state["embed.weight"] = torch.full_like(state["embed.weight"], float("nan")).to(torch.float8_e4m3fn)
    elif kind == "finite until used":
        state["layers.0.up.weight"] *= 1e24
    data = safetensors.torch.save(state)
    if kind == "half written":
        data = data[: len(data) // 2]
    if kind == "not weights":
        data = b"weights? no"
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind != "missing":
        path.write_bytes(data)


@pytest.mark.parametrize(
    "kind",
    [
        *("NaN", "infinite", "misshapen", "incomplete", "another model's", "half written", "not weights", "missing"),
        *("integers", "too wide", "NaN in eight bits", "finite until used", "a pipe"),
    ],
)
async def test_broken_weights_are_refused_and_the_old_ones_serve(
    http, server, versions, publisher, tokenizer, tmp_path, kind
):
    ids = tokenizer.encode("buy the red one")
    broken_file(kind, versions[1], tmp_path / "w.safetensors")
    with pytest.raises(PublishError, match=r"w\.safetensors"):
        await publisher.publish(tmp_path / "w.safetensors", 1)
    assert await score(http, server, ids) == pytest.approx(reference(versions[0], ids), abs=1e-4)
    statistics = await server.statistics()
    assert (statistics["policy_version"], statistics["updates"], statistics["failed_updates"]) == (0, 0, 1)
    versions[1].save_weights(tmp_path / "w.safetensors")
    await publisher.publish(tmp_path / "w.safetensors", 1)
    assert await score(http, server, ids) == pytest.approx(reference(versions[1], ids), abs=1e-4)


async def post_weights(http, server, body) -> tuple[int, str | None]:
    async with http.post(f"http://127.0.0.1:{server.port}/admin/weights", json=body) as reply:
        return reply.status, (await reply.json()).get("error", {}).get("param")


@pytest.mark.parametrize("path", ["a\0b", "/" + "x" * 5000, "\u20ac" * 200, ""])
async def test_a_path_that_no_file_can_have_is_the_clients_mistake(http, server, path):
    assert await post_weights(http, server, {"path": path, "policy_version": 1}) == (400, "path")
    assert (await server.statistics())["policy_version"] == 0


async def test_versions_fit_the_field_that_carries_them(http, server, versions, tmp_path):
    """One more would be served, and break whatever stores a token's version as an int32."""
    versions[1].save_weights(tmp_path / "w")
    for version in (-1, 2**31, 2**64):
        body = {"path": str(tmp_path / "w"), "policy_version": version}
        assert await post_weights(http, server, body) == (400, "policy_version")
    assert await post_weights(http, server, {"path": str(tmp_path / "w"), "policy_version": 2**31 - 1}) == (200, None)


async def test_versions_only_grow(server, versions, publisher, tmp_path):
    path = tmp_path / "w.safetensors"
    versions[2].save_weights(path)
    await publisher.publish(path, 2)
    with pytest.raises(PublishError, match=r"status 409.*must not go back"):
        await publisher.publish(path, 1)
    assert (await server.statistics())["policy_version"] == 2


async def test_same_version_may_be_published_again_only_as_what_it_is(server, versions, publisher, tmp_path):
    path = tmp_path / "w.safetensors"
    versions[0].save_weights(path)
    await publisher.publish(path, 0)
    versions[1].save_weights(path)
    with pytest.raises(PublishError, match=r"status 409.*other weights"):
        await publisher.publish(path, 0)
    await publisher.publish(path, 1)
    await publisher.publish(path, 1)
    assert (await server.statistics())["updates"] == 1


async def test_update_finishes_although_its_client_hung_up(server, versions, tmp_path):
    path = tmp_path / "w.safetensors"
    versions[1].save_weights(path)
    async with server._updates._one_at_a_time:
        async with aiohttp.ClientSession() as session:
            body = {"path": str(path), "policy_version": 1}
            post = asyncio.ensure_future(session.post(f"http://127.0.0.1:{server.port}/admin/weights", json=body))
            async with asyncio.timeout(20):
                while not server._updates._tasks:  # noqa: ASYNC110 - the request crosses a socket
                    await asyncio.sleep(0)
            post.cancel()
            await asyncio.wait({post})
        (task,) = server._updates._tasks
    assert await task == 1
    assert (await server.statistics())["policy_version"] == 1


async def test_concurrent_updates_take_turns(server, versions, publisher, tmp_path):
    for version in (1, 2, 3):
        versions[version].save_weights(tmp_path / f"{version}.safetensors")
    outcomes = await asyncio.gather(
        *(publisher.publish(tmp_path / f"{version}.safetensors", version) for version in (1, 2, 3)),
        return_exceptions=True,
    )
    assert all(outcome is None or "must not go back" in str(outcome) for outcome in outcomes)
    assert (await server.statistics())["policy_version"] == 3
