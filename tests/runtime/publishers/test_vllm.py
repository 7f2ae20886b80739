"""vLLM, as a fake with its routes; the real one is met in tests_servers."""

import asyncio
import json

import anyio
import pytest

from tests.runtime.publishers.conftest import canary
from turngate.runtime.errors import ConfigError, PublishError, PublishRefused
from turngate.runtime.publishers import VLLMPublisher
from turngate.runtime.publishers.folders import Version, VersionFolders
from turngate.runtime.publishers.vllm_reload import VLLMReload
from turngate.runtime.testing import cancel_everywhere
from turngate.runtime.testing.weight_servers import Failure, FakeVLLM


@pytest.fixture
async def server(base_model):
    server = FakeVLLM(base_model)
    async with server.serving():
        yield server


@pytest.fixture
def publisher(server, base_model):
    return VLLMPublisher(server.url, base_model=base_model, retry_delay_s=0)


SWITCH = ["/pause?keep", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]


async def test_weights_are_loaded_between_pause_and_resume_and_then_checked(server, publisher, weights):
    assert await publisher.served_version() == 0
    server.calls.clear()
    await publisher.publish(weights(1), 1)
    assert server.calls == [*SWITCH, "/server_info", "/v1/models", "/v1/completions"]
    assert server.loaded == canary(1)
    assert await publisher.served_version() == 1
    assert publisher.model is None


async def test_nothing_that_old_weights_computed_answers_under_the_new_ones(server, publisher, weights):
    assert server.generate() == canary(0)
    await publisher.publish(weights(1), 1)
    assert server.generate() == canary(1)


@pytest.mark.parametrize(("in_flight", "mode"), [("continues", "keep"), ("pauses", "wait"), ("restarts", "abort")])
async def test_requests_under_way_are_treated_as_asked(server, base_model, weights, in_flight, mode):
    publisher = VLLMPublisher(server.url, base_model=base_model, in_flight=in_flight)
    await publisher.publish(weights(1), 1)
    assert publisher.in_flight == in_flight
    assert f"/pause?{mode}" in server.calls


async def test_a_version_is_a_whole_model_folder_and_only_the_last_two_stay(server, publisher, weights, tmp_path):
    for version in (1, 2, 3):
        path = weights(version)
        await publisher.publish(path, version)
        path.unlink()  # as a run does once it serves
    folders = sorted((tmp_path / "served").iterdir())
    assert [folder.name[:13] for folder in folders] == ["policy-000002", "policy-000003"]
    assert {file.name for file in folders[1].iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}


@pytest.mark.parametrize("route", ["/pause", "/reset_prefix_cache", "/resume"])
@pytest.mark.parametrize("failure", [Failure(503), Failure(0), Failure(-1)])
async def test_what_may_pass_is_tried_again(server, publisher, weights, route, failure):
    server.failures[route] = [failure]
    await publisher.publish(weights(1), 1)
    assert server.loaded == canary(1)
    assert server.running.is_set()
    assert server.generate() == canary(1)


async def test_a_reload_that_fails_for_good_brings_the_old_weights_back_and_goes_on(server, publisher, weights):
    await publisher.publish(weights(1), 1)
    server.loaded = canary(9)  # half loaded
    server.failures["/collective_rpc"] = [Failure(500, "shapes")]
    publisher._attempts = 1
    with pytest.raises(PublishError, match=r"shapes; the old weights serve.*policy-000001"):
        await publisher.publish(weights(2), 2)
    assert server.loaded == canary(1)
    assert server.running.is_set()
    assert await publisher.served_version() == 1


@pytest.mark.parametrize(
    "failures",
    [
        {"/collective_rpc": [Failure(-1), Failure(-1)]},
        {"/collective_rpc": [Failure(-1), Failure(500)]},
        {"/collective_rpc": [Failure(-1)], "/reset_prefix_cache": [Failure(503), Failure(503), Failure(503)]},
        {"/resume": [Failure(500), Failure(503), Failure(500), Failure(503)]},
    ],
    ids=str,
)
async def test_what_a_failed_publication_says_of_the_server_is_so(server, publisher, weights, failures):
    server.failures |= {path: list(scripted) for path, scripted in failures.items()}
    publisher._attempts = 2
    server.generate()
    with pytest.raises(PublishError) as caught:
        await publisher.publish(weights(1), 1)
    if "the old weights serve" in str(caught.value):
        assert (server.loaded, server.weight_version) == (canary(0), "0")
    else:
        assert "may be" in str(caught.value)
    assert server.running.is_set() or "it may be paused" in str(caught.value)
    server.failures.clear()
    await publisher.publish(weights(2), 2)
    assert (server.generate(), server.running.is_set()) == (canary(2), True)


async def test_weights_are_never_put_back_into_a_server_that_is_not_held(server, publisher, weights):
    publisher._attempts = 1
    server.failures["/collective_rpc"] = [Failure(-1)]
    with pytest.raises(PublishError, match="the new weights may be serving under the old version's name"):
        await publisher.publish(weights(1), 1)
    server.failures["/pause"] = [Failure(500)]
    server.calls.clear()
    with pytest.raises(PublishError, match="the new weights may be serving under the old version's name"):
        await publisher.publish(weights(2), 2)
    assert "/collective_rpc" not in server.calls


async def test_a_server_goes_on_although_the_scope_around_a_publication_is_cancelled(server, publisher, weights):
    server.failures["/collective_rpc"] = [Failure(-1)]
    async with anyio.create_task_group() as group:
        group.start_soon(publisher.publish, weights(1), 1)
        await server.called("/collective_rpc")
        group.cancel_scope.cancel()
    assert server.running.is_set()
    assert server.generate() == server.loaded


async def test_a_server_that_can_load_nothing_any_more_is_said_to_be_unknown(server, publisher, weights):
    server.failures["/collective_rpc"] = [Failure(500, "broken")] * 8
    with pytest.raises(PublishError, match=r"what the server serves is not known, and it may be paused.*restart it"):
        await publisher.publish(weights(1), 1)
    assert not server.running.is_set()  # half-loaded weights answer nobody


async def test_weights_of_another_shape_never_reach_the_server(server, publisher, weights):
    with pytest.raises(PublishRefused, match=r"must have the model's shapes: expected \(4, 2\), got \(4, 3\)"):
        await publisher.publish(weights(1, width=3), 1)
    assert server.calls == []


async def test_a_server_without_development_mode_is_named(server, publisher, weights):
    server.failures["/pause"] = [Failure(404)]
    with pytest.raises(PublishRefused, match="VLLM_SERVER_DEV_MODE=1"):
        await publisher.publish(weights(1), 1)


async def test_a_server_that_keeps_its_weights_is_caught_and_the_cause_named(server, publisher, weights):
    server.keeps_weights = True
    with pytest.raises(PublishRefused, match=r"got mean 0\.5.*another model.*weights before serve again"):
        await publisher.publish(weights(1), 1)
    assert await publisher.served_version() == 0


async def test_a_tied_head_is_the_likely_cause(server, base_model, weights):
    (base_model / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    server.keeps_weights = True
    publisher = VLLMPublisher(server.url, base_model=base_model)
    with pytest.raises(PublishRefused, match=r"tie_word_embeddings.*untied copy.*weights before serve again"):
        await publisher.publish(weights(1), 1)
    assert server.loaded == canary(0)
    assert server.running.is_set()


async def test_weights_that_had_no_effect_are_told_from_other_weights(server, publisher, weights):
    await publisher.publish(weights(1), 1)
    server.keeps_weights = True
    with pytest.raises(PublishRefused, match="still answers like the weights before"):
        await publisher.publish(weights(2), 2)
    assert await publisher.served_version() == 1  # undone, and labelled so


async def test_going_back_that_fails_is_said(server, publisher, weights):
    server.keeps_weights = True
    publish = asyncio.create_task(publisher.publish(weights(1), 1))
    await server.called("/v1/completions")
    server.failures["/pause"] = [Failure(500, "on fire")] * 9
    server.failures["/resume"] = [Failure(500, "on fire")] * 9
    with pytest.raises(PublishRefused, match=r"could not be put back, and what serves is not known.*on fire"):
        await publish


@pytest.mark.parametrize("route", ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume", "/v1/completions"])
async def test_cancelled_anywhere_the_server_goes_on_and_publishing_again_works(server, publisher, weights, route):
    server.failures[route] = [Failure(-1)]
    publish = asyncio.create_task(publisher.publish(weights(1), 1))
    await server.called(route)
    publish.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publish
    assert server.running.is_set()
    assert server.generate() == server.loaded  # nothing stale
    await publisher.publish(weights(1), 1)
    assert server.loaded == canary(1)


async def test_a_server_is_asked_whether_it_answers_like_a_file(server, publisher, weights):
    assert await publisher.is_serving(weights(0))
    assert not await publisher.is_serving(weights(1))


async def test_the_tolerance_follows_the_first_agreement(server, publisher, weights):
    assert publisher.canary_tolerance == 0.2
    assert await publisher.is_serving(weights(0))
    assert publisher.canary_tolerance == 1e-3
    server.loaded = canary(0.01)
    server.keeps_weights = True
    with pytest.raises(PublishRefused, match=r"within 0\.001"):
        await publisher.publish(weights(0), 1)


@pytest.mark.parametrize(
    ("dtype", "device", "tied", "tolerance"),
    [
        ("float32", "cuda", False, 1e-3),
        ("bfloat16", "cuda", True, 0.2),
        ("bfloat16", "cpu", False, 0.2),
        ("bfloat16", "cpu", True, 1e-3),
    ],
)
async def test_agreement_must_be_close_where_noise_would_hide_a_fault(
    server, base_model, weights, dtype, device, tied, tolerance
):
    (base_model / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    server.dtype, server.device, server.keeps_weights = dtype, device, True
    publisher = VLLMPublisher(server.url, base_model=base_model)
    with pytest.raises(PublishRefused, match=f"within {tolerance}"):
        await publisher.publish(weights(1), 1)
    assert publisher.canary_tolerance == tolerance


async def test_a_cache_that_is_not_dropped_is_no_publication(server, publisher, weights):
    server.keeps_cache = True
    with pytest.raises(PublishError, match="prefix cache must be empty"):
        await publisher.publish(weights(1), 1)


async def test_a_small_difference_is_put_down_to_precision(server, publisher, weights):
    publisher._tolerance = 0.01
    server.loaded = canary(0.1)
    server.keeps_weights = True
    with pytest.raises(PublishRefused, match="different precisions"):
        await publisher.publish(weights(0), 1)


def test_settings_that_cannot_work_are_refused(base_model, tmp_path):
    with pytest.raises(ConfigError, match="mode must be"):
        VLLMPublisher("http://x", base_model=base_model, mode="nccl")
    with pytest.raises(ConfigError, match="needs base_model"):
        VLLMPublisher("http://x")
    with pytest.raises(ConfigError, match="Hugging Face model folder"):
        VLLMPublisher("http://x", base_model=tmp_path)
    with pytest.raises(ConfigError, match="in_flight must be one of"):
        VLLMPublisher("http://x", base_model=base_model, in_flight="stops")
    with pytest.raises(ConfigError, match="in_flight must be one of 'continues'"):
        VLLMPublisher("http://x", mode="lora", in_flight="pauses")
    with pytest.raises(ConfigError, match="keep_adapters"):
        VLLMPublisher("http://x", mode="lora", keep_adapters=0)
    with pytest.raises(ConfigError, match="http"):
        VLLMPublisher("x", base_model=base_model)
    with pytest.raises(ConfigError, match="canary_tolerance"):
        VLLMPublisher("http://x", base_model=base_model, canary_tolerance=0)


class AdminInMemory:
    """A vLLM without a network: what it serves, what its cache holds, and whether it runs."""

    url = "http://memory"

    def __init__(self):
        self.serves = self.cache = "old"
        self.runs = True

    async def post(self, path, body=None, *, params=None):
        await asyncio.sleep(0)  # cancelled here, the server has heard nothing
        if path == "/pause":
            self.runs = False
        elif path == "/collective_rpc":
            assert body is not None
            self.serves = body["kwargs"]["weights_path"]
        elif path == "/reset_prefix_cache":
            self.cache = ""
        elif path == "/resume":
            self.runs = True
            self.cache = self.cache or self.serves
        await asyncio.sleep(0)  # and here it has done it
        return b""


def test_cancelled_at_every_wait_the_server_runs_and_its_cache_is_of_the_weights_that_serve(base_model):
    runs = []

    async def switch():
        admin = AdminInMemory()
        runs.append(admin)
        control = VLLMReload(admin, base_model, VersionFolders(None), in_flight="continues", model="m", is_tied=False)
        await control._switch(Version(base_model, "1"))

    def check(outcome):
        assert runs[-1].runs
        assert runs[-1].cache == runs[-1].serves

    assert cancel_everywhere(switch, check) >= 10
