"""SGLang, as a fake written from its documentation: no real one has been run."""

import json

import pytest

from tests.runtime.publishers.conftest import canary
from turngate.runtime.errors import ConfigError, PublishError, PublishRefused
from turngate.runtime.publishers import SGLangPublisher
from turngate.runtime.testing.weight_servers import Failure, FakeSGLang


@pytest.fixture
async def server(base_model):
    server = FakeSGLang(base_model)
    async with server.serving():
        yield server


def publisher(server, base_model, **settings):
    return SGLangPublisher(server.url, base_model=base_model, retry_delay_s=0, **settings)


async def test_requests_are_retracted_while_weights_change_and_the_cache_is_flushed(server, base_model, weights):
    server.generate()
    await publisher(server, base_model).publish(weights(1), 1)
    assert server.calls == ["/pause_generation", "/update_weights_from_disk", "/continue_generation", "/generate"]
    assert server.generate() == canary(1)
    assert server.running.is_set()
    (update,) = server.updates
    assert (update["flush_cache"], update["abort_all_requests"], update["weight_version"]) == (True, False, "1")


@pytest.mark.parametrize(("in_flight", "aborts"), [("pauses", False), ("restarts", True)])
async def test_the_server_itself_waits_or_aborts(server, base_model, weights, in_flight, aborts):
    await publisher(server, base_model, in_flight=in_flight).publish(weights(1), 1)
    assert server.calls[0] == "/update_weights_from_disk"
    assert server.updates[0]["abort_all_requests"] is aborts


async def test_the_server_says_which_version_it_serves(server, base_model, weights):
    sglang = publisher(server, base_model)
    assert await sglang.served_version() == 0
    await sglang.publish(weights(3), 3)
    assert await sglang.served_version() == 3


async def test_a_refusal_is_not_repeated_and_generation_goes_on(server, base_model, weights):
    server.failures["/update_weights_from_disk"] = [Failure(400, "cannot load")]
    with pytest.raises(PublishRefused, match=r"cannot load; the old weights serve \("):
        await publisher(server, base_model).publish(weights(1), 1)
    assert server.running.is_set()
    assert [update["model_path"] for update in server.updates] == [str(base_model)]  # to be sure of it


async def test_failures_that_may_pass_are_repeated(server, base_model, weights):
    server.failures["/update_weights_from_disk"] = [Failure(503), Failure(0)]
    await publisher(server, base_model).publish(weights(1), 1)
    assert server.loaded == canary(1)


@pytest.mark.parametrize(
    "failures",
    [
        {"/update_weights_from_disk": [Failure(-1), Failure(400)]},
        {"/update_weights_from_disk": [Failure(-1), Failure(500)]},
        {"/continue_generation": [Failure(400)]},
        {"/continue_generation": [Failure(503), Failure(503), Failure(503)]},
    ],
    ids=str,
)
async def test_what_a_failed_publication_says_of_the_server_is_so(server, base_model, weights, failures):
    server.failures |= {path: list(scripted) for path, scripted in failures.items()}
    with pytest.raises(PublishError) as caught:
        await publisher(server, base_model, attempts=2).publish(weights(1), 1)
    if "the old weights serve" in str(caught.value):
        assert (server.loaded, server.generate(), server.weight_version) == (canary(0), canary(0), "0")
        assert server.running.is_set()
    else:
        assert "what the server serves is not known, and it may be paused" in str(caught.value)
        assert not server.running.is_set()
    server.failures.clear()
    await publisher(server, base_model).publish(weights(2), 2)
    assert (server.generate(), server.running.is_set()) == (canary(2), True)


async def test_a_server_that_keeps_its_weights_is_caught(server, base_model, weights):
    server.keeps_weights = True
    (base_model / "config.json").write_text(json.dumps({"text_config": {"tie_word_embeddings": True}}))
    with pytest.raises(PublishRefused, match=r"tie_word_embeddings.*weights before serve again"):
        await publisher(server, base_model).publish(weights(1), 1)
    assert server.updates[-1]["model_path"] == str(base_model)


async def test_a_reply_of_another_server_is_named(server, base_model, weights):
    server.weight_version = 7
    with pytest.raises(PublishError, match="must answer as documented"):
        await publisher(server, base_model).served_version()


def test_settings_that_cannot_work_are_refused(base_model):
    with pytest.raises(ConfigError, match="in_flight"):
        SGLangPublisher("http://x", base_model=base_model, in_flight="stops")
