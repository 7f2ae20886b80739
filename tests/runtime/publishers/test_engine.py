import asyncio

import pytest
from aiohttp import web
from safetensors.numpy import save_file

from turngate.runtime.errors import ConfigError, PublishError
from turngate.runtime.publishers import EnginePublisher


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
    save_file({}, "weights.safetensors")
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
