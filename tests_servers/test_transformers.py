"""`transformers serve`: refuses unknown fields and gives no ids and no log-probs, so episodes are only collected."""

from collections.abc import Iterator

import pytest

from tests_servers.checks import assert_whole, play, verdicts
from tests_servers.launch import Server, running
from turngate.runtime import Sampling
from turngate.runtime.capabilities import check_trainable
from turngate.runtime.connect import connect
from turngate.runtime.errors import ConfigError
from turngate.runtime.probe import probe


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running("transformers", "digits") as server:
        yield server


async def test_probe_finds_what_is_missing(server: Server) -> None:
    capabilities = await probe(server.url, server.model)

    found = verdicts(capabilities)
    wanted = ("chat", "completions", "tools")
    assert {name: found[name] for name in wanted} == dict.fromkeys(wanted, "yes"), capabilities.table()
    refused = ("prompt_ids", "sampled_ids", "id_prompts", "id_strings", "logprobs", "top_k", "n", "weights")
    assert {name: found[name] for name in refused} == dict.fromkeys(refused, "no"), capabilities.table()
    assert capabilities.problems("evaluate") == []
    assert "token ids" in capabilities.problems("train")[0]


async def test_episodes_are_played_and_say_why_they_cannot_be_trained_on(server: Server) -> None:
    async with await connect(server.url, model=server.model) as endpoint:
        dialect = endpoint.dialect
        assert (dialect.token_mode, dialect.logprobs, dialect.top_k) == ("text", False, False)
        trajectories = await play(endpoint)
        with pytest.raises(ConfigError, match="no token ids"):
            check_trainable(endpoint, Sampling())

    assert_whole(trajectories)
    assert not any(t.trainable or t.policy_tokens for t in trajectories)
    assert "token ids" in trajectories[0].untrainable_because
    assert sum(t.reward for t in trajectories) > 0.2 * len(trajectories)  # it does say digits
