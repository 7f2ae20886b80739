import asyncio
import os
from pathlib import Path

import pytest

from tests.runtime.publishers.conftest import canary, write_weights
from turngate.runtime.errors import ConfigError, PublishError, PublishRefused
from turngate.runtime.publishers import FolderPublisher


async def _served(version: int) -> None:
    """A server that takes new weights at once."""


def test_the_number_of_versions_to_keep_must_be_positive():
    with pytest.raises(ConfigError, match="keep must be"):
        FolderPublisher(Path("x"), wait_until_served=_served, keep=0)


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "new.safetensors"
    path.write_bytes(b"weights")
    return path


async def test_folder_names_the_newest_version(tmp_path, weights):
    folder = FolderPublisher(tmp_path / "policies", wait_until_served=_served)
    assert folder.latest() is None
    await folder.publish(weights, 3)
    weights.write_bytes(b"better weights")
    await folder.publish(weights, 4)
    latest = folder.latest()
    assert latest is not None
    assert (latest[0].read_bytes(), latest[1]) == (b"better weights", 4)
    assert sorted(p.name for p in (tmp_path / "policies").iterdir()) == [
        "latest.json",
        "policy-00000003.safetensors",
        "policy-00000004.safetensors",
    ]


async def test_a_folder_publication_waits_until_the_server_has_taken_it(tmp_path, weights):
    asked, loaded = asyncio.Event(), asyncio.Event()

    async def load(version: int) -> None:
        assert version == await folder.served_version() == 3
        asked.set()
        await loaded.wait()

    folder = FolderPublisher(tmp_path / "policies", wait_until_served=load)
    publication = asyncio.create_task(folder.publish(weights, 3))
    await asked.wait()
    assert not publication.done()
    loaded.set()
    await publication
    assert await folder.served_version() == 3


async def test_an_empty_folder_has_served_nothing(tmp_path):
    assert await FolderPublisher(tmp_path / "new", wait_until_served=_served).served_version() == 0


async def test_folder_keeps_the_newest_versions_only(tmp_path, weights):
    folder = FolderPublisher(tmp_path / "policies", wait_until_served=_served, keep=2)
    for version in range(5):
        await folder.publish(weights, version)
    names = sorted(p.name for p in (tmp_path / "policies").glob("*.safetensors"))
    assert names == ["policy-00000003.safetensors", "policy-00000004.safetensors"]


async def test_the_newest_versions_are_those_of_the_largest_numbers(tmp_path, weights):
    folder = FolderPublisher(tmp_path / "policies", wait_until_served=_served, keep=2)
    await folder.publish(weights, 99_999_999)
    (tmp_path / "policies" / "policy-best.safetensors").write_bytes(b"somebody's own")
    for version in (100_000_000, 100_000_001):
        await folder.publish(weights, version)
    assert sorted(p.name for p in (tmp_path / "policies").glob("*.safetensors")) == [
        "policy-100000000.safetensors",
        "policy-100000001.safetensors",
        "policy-best.safetensors",
    ]


async def test_folder_refuses_an_older_version(tmp_path, weights):
    folder = FolderPublisher(tmp_path / "policies", wait_until_served=_served)
    await folder.publish(weights, 4)
    with pytest.raises(PublishError, match="must not go back: expected at least 4, got 3"):
        await folder.publish(weights, 3)
    await folder.publish(weights, 4)


@pytest.mark.parametrize("broken", ["fsync", "replace"])
async def test_failed_copy_leaves_the_old_version_and_no_litter(tmp_path, weights, monkeypatch, broken):
    folder = FolderPublisher(tmp_path / "policies", wait_until_served=_served)
    await folder.publish(weights, 1)

    def fail(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(PublishError, match="no space left"):
        await folder.publish(weights, 2)
    assert folder.latest() == (tmp_path / "policies" / "policy-00000001.safetensors", 1)
    assert len(list((tmp_path / "policies").iterdir())) == 2


async def test_missing_weights_are_a_publish_error(tmp_path):
    with pytest.raises(PublishError, match="must be copied"):
        await FolderPublisher(tmp_path / "policies", wait_until_served=_served).publish(tmp_path / "nothing", 1)


async def test_each_version_can_be_a_whole_model_folder(tmp_path, base_model):
    new = write_weights(tmp_path / "new.safetensors", 1)
    folder = FolderPublisher(tmp_path / "policies", wait_until_served=_served, keep=1, base_model=base_model)
    for version in (1, 2, 2):
        await folder.publish(new, version)
    latest = tmp_path / "policies" / "policy-00000002"
    assert folder.latest() == (latest, 2)
    assert {file.name for file in latest.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (latest / "model.safetensors").read_bytes() == new.read_bytes()
    assert {file.name for file in (tmp_path / "policies").iterdir()} == {"latest.json", "policy-00000002"}


class Scoring:
    """A server that answers like one version."""

    def __init__(self, version):
        self.version = version

    async def score(self, token_ids, *, timeout_s=60.0):
        return [0.0, *canary(self.version).logprobs]


async def test_an_endpoint_shows_whether_the_server_took_the_weights(tmp_path):
    new = write_weights(tmp_path / "new.safetensors", 1)
    endpoint = Scoring(1)
    folder = FolderPublisher(tmp_path / "policies", wait_until_served=_served, endpoint=endpoint)
    await folder.publish(new, 1)
    endpoint.version = 0
    with pytest.raises(PublishRefused, match=r"must answer like the weights.*what is served is not known"):
        await folder.publish(new, 2)


async def test_a_server_that_never_takes_the_weights_is_given_up(tmp_path, weights):
    never = asyncio.Event()
    folder = FolderPublisher(tmp_path / "policies", wait_until_served=lambda _: never.wait(), timeout_s=0.02)
    with pytest.raises(PublishError, match=r"policy version 3 must be served within 0.02 s"):
        await folder.publish(weights, 3)
    with pytest.raises(ConfigError, match="timeout_s must be positive"):
        FolderPublisher(tmp_path, wait_until_served=_served, timeout_s=0)


@pytest.mark.parametrize("garbled", [b"", b"{}", b'{"policy_version": "x", "file": "y"}', b"\xff"])
async def test_a_pointer_that_is_garbled_is_named(tmp_path, weights, garbled):
    (tmp_path / "latest.json").write_bytes(garbled)
    folder = FolderPublisher(tmp_path, wait_until_served=_served)
    with pytest.raises(PublishError, match=r"latest\.json must be readable"):
        await folder.served_version()
    with pytest.raises(PublishError, match=r"latest\.json must be readable"):
        await folder.publish(weights, 1)
