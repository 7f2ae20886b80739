import pytest

from tests.runtime.publishers.conftest import canary
from turngate.runtime.errors import PublishError, PublishRefused
from turngate.runtime.publishers import VLLMPublisher
from turngate.runtime.publishers.folders import LORA_KEY
from turngate.runtime.testing.weight_servers import Failure, FakeVLLM
from turngate.runtime.weights import move_endpoint

CONFIG = '{"r": 8, "peft_type": "LORA"}'


@pytest.fixture
async def server(base_model):
    server = FakeVLLM(base_model, name="base")
    async with server.serving():
        yield server


@pytest.fixture
def publisher(server):
    return VLLMPublisher(server.url, mode="lora", retry_delay_s=0)


@pytest.fixture
def adapter(weights):
    return lambda version: weights(version, **{LORA_KEY: CONFIG})


async def test_each_version_is_an_adapter_under_a_name_of_its_own(server, publisher, adapter, tmp_path):
    await publisher.publish(adapter(1), 1)
    assert server.adapters == {"policy-1": canary(1)}
    assert (publisher.model, publisher.in_flight) == ("policy-1", "continues")
    (folder,) = (tmp_path / "served").iterdir()
    assert (folder / "adapter_config.json").read_text() == CONFIG
    assert {file.name for file in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


async def test_the_newest_adapters_stay_for_requests_that_still_name_them(server, publisher, adapter, tmp_path):
    for version in (1, 2, 3, 4, 5):
        await publisher.publish(adapter(version), version)
    assert set(server.adapters) == {"policy-3", "policy-4", "policy-5"}
    assert len(list((tmp_path / "served").iterdir())) == 3
    assert await publisher.served_version() == 5


async def test_a_version_may_be_published_again(server, publisher, adapter):
    await publisher.publish(adapter(1), 1)
    await publisher.publish(adapter(1), 1)
    assert server.adapters == {"policy-1": canary(1)}


async def test_a_lost_reply_is_repeated(server, publisher, adapter):
    server.failures["/v1/load_lora_adapter"] = [Failure(-1)]
    await publisher.publish(adapter(1), 1)
    assert server.adapters == {"policy-1": canary(1)}


async def test_an_adapter_that_answers_wrongly_is_unloaded_before_any_request_names_it(server, publisher, adapter):
    await publisher.publish(adapter(1), 1)
    server.keeps_weights = True
    with pytest.raises(PublishRefused, match=r"another model.*what served before still does"):
        await publisher.publish(adapter(2), 2)
    assert (publisher.model, list(server.adapters)) == ("policy-1", ["policy-1"])


async def test_weights_that_are_no_adapter_are_refused(server, publisher, weights):
    with pytest.raises(PublishRefused, match="must be a LoRA adapter"):
        await publisher.publish(weights(1), 1)
    assert server.calls == []


async def test_a_server_without_runtime_adapters_is_named(server, publisher, adapter):
    server.failures["/v1/load_lora_adapter"] = [Failure(404, "Not Found")]
    with pytest.raises(PublishRefused, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        await publisher.publish(adapter(1), 1)


async def test_a_failed_load_leaves_the_name_as_it_was(server, publisher, adapter):
    await publisher.publish(adapter(1), 1)
    server.failures["/v1/load_lora_adapter"] = [Failure(500, "rank")] * 4
    with pytest.raises(PublishError, match="rank"):
        await publisher.publish(adapter(2), 2)
    assert publisher.model == "policy-1"


async def test_before_the_first_adapter_the_base_model_is_asked(server, publisher, adapter):
    assert await publisher.is_serving(adapter(0))
    assert not await publisher.is_serving(adapter(1))
    assert await publisher.served_version() == 0


async def test_an_endpoint_is_moved_to_version_and_name_at_once(server, publisher, adapter):
    class Moved:
        policy_version = 0
        model = "base"

    endpoint = Moved()
    await publisher.publish(adapter(1), 1)
    move_endpoint(endpoint, publisher, 1)
    assert (endpoint.policy_version, endpoint.model) == (1, "policy-1")


async def test_the_check_makes_do_with_the_likelier_part_of_the_canary(server, publisher, adapter):
    server.unlikely = {1, 3}
    await publisher.publish(adapter(1), 1)
    server.keeps_weights = True
    with pytest.raises(PublishRefused, match="over 1 tokens"):
        await publisher.publish(adapter(2), 2)


async def test_a_canary_without_any_likely_token_tells_nothing_and_that_is_said(server, publisher, adapter):
    server.unlikely = {1, 2, 3}
    with pytest.raises(
        PublishError, match=r"none of its 3 tokens is among the likeliest.*what served before still does"
    ):
        await publisher.publish(adapter(1), 1)
    assert server.adapters == {}
