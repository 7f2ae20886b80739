"""vLLM as it is by default: log-probs before temperature and top-p, which the probe sees and training refuses."""

from collections.abc import Iterator

import pytest

from tests_servers.checks import TEMPERATURE, assert_whole, play, verdicts
from tests_servers.launch import Options, Server, running
from tests_servers.reference import Reference
from turngate.runtime import Sampling, connect, probe
from turngate.runtime.capabilities import check_trainable
from turngate.runtime.errors import ConfigError


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("vllm", "digits", Options(raw_logprobs=True)) as server:
        yield server


async def test_the_probe_sees_that_log_probs_are_raw(server: Server) -> None:
    capabilities = await probe(server.url)

    found = verdicts(capabilities)
    missing = {name for name, verdict in found.items() if verdict == "no"}
    assert missing == {"follows_temperature", "follows_truncation", "versions"}, capabilities.table()
    assert any("processed_logprobs" in problem for problem in capabilities.problems("train"))
    assert capabilities.problems("train", Sampling()) == []  # at temperature 1 over everything both are the same


async def test_training_is_refused_where_it_would_be_wrong_and_allowed_where_it_is_right(server: Server) -> None:
    reference = Reference(server.folder)
    async with await connect(server.url) as endpoint:
        check_trainable(endpoint, Sampling())
        for sampling in (Sampling(temperature=TEMPERATURE), Sampling(top_p=0.9)):
            with pytest.raises(ConfigError, match="processed_logprobs"):
                check_trainable(endpoint, sampling)
        plain, cooler = await play(endpoint, temperature=1.0), await play(endpoint)

    assert_whole([*plain])
    assert reference.errors(plain).largest < 1e-4
    assert reference.errors(cooler, temperature=TEMPERATURE).largest > 0.01
    assert reference.errors(cooler).largest < 1e-4  # raw: as if it had been sampled at temperature 1
