import asyncio
import os
from pathlib import Path

import pytest
from aiohttp import web

from turngate.runtime.errors import ConfigError, PublishError
from turngate.runtime.publishers import EnginePublisher, FolderPublisher


async def _served(version: int) -> None:
    """A server that takes new weights at once."""


class FakeEngine:
    """Answers /admin/weights with the next scripted reply; the last one is repeated."""

    def __init__(self) -> None:
        self.script = [(200, {"policy_version": 7})]
        self.asked: list[dict] = []
        self.headers: list[str | None] = []
        self.gate: asyncio.Event | None = None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.headers.append(request.headers.get("Authorization"))
        if self.gate is not None:
            await self.gate.wait()
        status, told = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if status == 0:  # hang up without a word
            assert request.transport is not None
            request.transport.abort()
        if status == 302:
            raise web.HTTPFound("/elsewhere")
        return web.json_response(told, status=status) if isinstance(told, dict) else web.Response(text=told)


@pytest.fixture
async def engine():
    engine = FakeEngine()
    app = web.Application()
    app.router.add_post("/admin/weights", engine.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield engine
    await runner.cleanup()


def publisher(engine, **settings):
    return EnginePublisher(engine.url, retry_delay_s=0, **settings)


async def test_publish_posts_path_version_and_key(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    await EnginePublisher(engine.url + "/v1", api_key="k").publish("weights.safetensors", 7)
    assert engine.asked == [{"path": str(tmp_path / "weights.safetensors"), "policy_version": 7}]
    assert engine.headers == ["Bearer k"]


async def test_server_errors_and_resets_are_retried(engine, tmp_path):
    engine.script = [(503, {}), (0, {}), (500, {}), (200, {"policy_version": 7})]
    await publisher(engine).publish(tmp_path, 7)
    assert len(engine.asked) == 4


async def test_persistent_failure_is_a_publish_error_with_the_servers_words(engine, tmp_path):
    engine.script = [(500, {"error": {"message": "disk on fire"}})]
    with pytest.raises(PublishError, match=r"disk on fire.*old version keeps serving"):
        await publisher(engine, attempts=2).publish(tmp_path, 7)
    assert len(engine.asked) == 2


async def test_refusal_is_not_retried(engine, tmp_path):
    engine.script = [(409, {"error": {"message": "must not go back"}})]
    with pytest.raises(PublishError, match="must not go back"):
        await publisher(engine).publish(tmp_path, 7)
    assert len(engine.asked) == 1


@pytest.mark.parametrize("told", [{"policy_version": 6}, {}, "<html>hello</html>"])
async def test_success_must_name_the_version(engine, tmp_path, told):
    engine.script = [(200, told)]
    with pytest.raises(PublishError, match="must be confirmed"):
        await publisher(engine).publish(tmp_path, 7)


async def test_redirect_is_not_followed(engine, tmp_path):
    engine.script = [(302, {})]
    with pytest.raises(PublishError, match="status 302"):
        await publisher(engine).publish(tmp_path, 7)


async def test_silence_ends_at_the_deadline(engine, tmp_path):
    engine.gate = asyncio.Event()
    with pytest.raises(PublishError, match=r"within 0\.05 s"):
        await publisher(engine, timeout_s=0.05).publish(tmp_path, 7)


async def test_nobody_listening_is_a_publish_error(tmp_path):
    with pytest.raises(PublishError, match="ClientConnectorError"):
        await EnginePublisher("http://127.0.0.1:1", attempts=2, retry_delay_s=0).publish(tmp_path, 7)


def test_limits_must_be_positive():
    with pytest.raises(ConfigError, match="publisher limits"):
        EnginePublisher("http://x", timeout_s=0)
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
