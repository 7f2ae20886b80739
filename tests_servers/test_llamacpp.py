"""llama.cpp's server in Python: no ids and log-probs before temperature, so episodes are collected, not trained on."""

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
    with running("llamacpp", "digits.gguf") as server:
        yield server


async def test_probe_finds_what_is_missing(server: Server) -> None:
    capabilities = await probe(server.url)

    found = verdicts(capabilities)
    assert {name for name, verdict in found.items() if verdict == "no"} == {
        "prompt_ids",
        "sampled_ids",
        "id_prompts",
        "id_strings",
        "plain_logprobs",
        "follows_temperature",
        "follows_truncation",
        "n",
        "stream_ids",
        "weights",
        "versions",
    }, capabilities.table()
    wanted = ("models", "chat", "completions", "logprobs", "top_k", "seeds", "streaming", "tools")
    assert {name: found[name] for name in wanted} == dict.fromkeys(wanted, "yes"), capabilities.table()
    assert capabilities.problems("evaluate") == capabilities.problems("guide") == []
    assert "token ids" in capabilities.problems("train")[0]


async def test_episodes_are_played_and_say_why_they_cannot_be_trained_on(server: Server) -> None:
    async with await connect(server.url) as endpoint:
        assert (endpoint.dialect.token_mode, endpoint.dialect.top_logprobs) == ("text", 1)
        trajectories = await play(endpoint)
        with pytest.raises(ConfigError, match="no token ids"):
            check_trainable(endpoint, Sampling())

    assert_whole(trajectories)
    assert not any(t.trainable or t.policy_tokens for t in trajectories)
    assert {t.untrainable_because for t in trajectories} == {trajectories[0].untrainable_because}
    assert "token ids" in trajectories[0].untrainable_because
    assert sum(t.reward for t in trajectories) > 0.2 * len(trajectories)  # it does say digits
