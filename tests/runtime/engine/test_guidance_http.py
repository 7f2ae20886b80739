"""Guidance and values over HTTP, and critics that are replaced in flight."""

import asyncio
import copy
import json
import os
from typing import Any

import msgspec
import pytest
import torch

from turngate.runtime.connect import connect
from turngate.runtime.engine import Engine
from turngate.runtime.engine.config import EngineConfig
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.engine.server import EngineServer
from turngate.runtime.errors import ConfigError
from turngate.runtime.types import Message, Sampling, TokenGuidance


def with_head(model, seed):
    config = PolicyModel(model.config).config
    critic = PolicyModel(
        type(config)(**{f: getattr(config, f) for f in config.__struct_fields__} | {"value_head": True})
    )
    critic.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        critic.value_head.weight.normal_(generator=torch.Generator().manual_seed(seed))
    return critic


@pytest.fixture
def critic(tiny_model):
    return with_head(tiny_model, 1)


@pytest.fixture
async def server(tiny_model, critic, tokenizer):
    config = EngineConfig(seed=0, value_version=3)
    async with EngineServer(copy.deepcopy(tiny_model), tokenizer, config, copy.deepcopy(critic)) as server:
        yield server


async def post(http, server, path, body):
    async with http.post(f"http://127.0.0.1:{server.port}{path}", json=body) as reply:
        return reply.status, await reply.json()


CHAT = {"messages": [{"role": "user", "content": "buy"}], "max_tokens": 6, "seed": 1, "return_token_ids": True}


async def test_a_guided_chat_tells_both_log_probs_and_the_critics_version(http, server):
    body = {**CHAT, "logprobs": True, "guidance": {"beta": 5.0, "top_k": 4, "tail": "zero"}}
    status, told = await post(http, server, "/v1/chat/completions", body)
    choice = told["choices"][0]
    assert (status, told["value_version"]) == (200, 3)
    guided = [token["logprob"] for token in choice["logprobs"]["content"]]
    assert len(guided) == len(choice["base_logprobs"]) == len(choice["token_ids"])
    assert guided != pytest.approx(choice["base_logprobs"], abs=1e-3)


async def test_no_number_of_candidates_is_too_large(http, server):
    # An id, a beta and a K of any size pass through JSON: none of them may break the engine for everybody.
    for beta, top_k in [(1.7e308, 10**30), (0, 2**63), (1, 10**6)]:
        body = {**CHAT, "guidance": {"beta": beta, "top_k": top_k}}
        status, told = await post(http, server, "/v1/chat/completions", body)
        assert (status, len(told["choices"][0]["base_logprobs"])) == (200, len(told["choices"][0]["token_ids"]))
    assert (await post(http, server, "/pooling", {"input": "buy"}))[0] == 200


async def test_plain_replies_say_nothing_of_guidance(http, server):
    _, told = await post(http, server, "/v1/chat/completions", CHAT)
    assert "value_version" not in told
    assert "base_logprobs" not in told["choices"][0]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_streams_carry_the_base_log_probs_and_end_with_the_critics_version(http, server, path):
    ask = (
        CHAT if path.endswith("/chat/completions") else {"prompt": [1, 2, 3], "max_tokens": 4, "return_token_ids": True}
    )
    body = {**ask, "model": "policy", "stream": True, "n": 2, "guidance": {"beta": 5.0}}
    async with http.post(f"http://127.0.0.1:{server.port}{path}", json=body) as reply:
        chunks = [json.loads(line[6:]) for line in (await reply.text()).splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    base = [value for choice in choices for value in choice.get("base_logprobs", [])]
    ids = [value for choice in choices for value in choice.get("token_ids", [])]
    assert len(base) == len(ids) > 0
    ends = [chunk for chunk in chunks if any(choice.get("finish_reason") for choice in chunk["choices"])]
    assert [chunk["value_version"] for chunk in ends] == [3, 3]
    assert sum("value_version" in chunk for chunk in chunks) == 2


async def test_pooling_gives_the_value_of_every_input(http, server, tokenizer):
    ids = tokenizer.encode("buy the red one")
    status, told = await post(http, server, "/pooling", {"input": [ids, ids[:2]]})
    assert (status, told["object"], told["value_version"]) == (200, "list", 3)
    both = [entry["data"][0] for entry in told["data"]]
    assert (await post(http, server, "/v1/pooling", {"input": [ids]}))[0] == 200
    _, single = await post(http, server, "/pooling", {"input": ids, "model": "policy"})
    _, text = await post(http, server, "/pooling", {"input": "buy the red one"})
    assert single["data"][0]["data"][0] == text["data"][0]["data"][0] == pytest.approx(both[0], abs=1e-6)
    assert all(0 < value < 1 for value in both)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/pooling", {"input": []}, 400, "input"),
        ("/pooling", {"input": [10**6]}, 400, "input"),
        ("/pooling", {"input": [[3] * 1025]}, 400, "input"),
        ("/pooling", {"input": [[3]] * 9000}, 400, "input"),
        ("/pooling", {"input": [[3], []]}, 400, "input"),
        ("/pooling", {"input": [2**70]}, 400, "input"),
        ("/pooling", {"input": "x", "model": "other"}, 404, "model"),
        ("/pooling", {}, 400, "input"),
        ("/v1/chat/completions", {**CHAT, "guidance": {"beta": -1}}, 400, "guidance"),
        ("/v1/chat/completions", {**CHAT, "guidance": {"beta": 1, "top_k": 0}}, 400, "guidance"),
        ("/v1/chat/completions", {**CHAT, "guidance": {"beta": 10**400}}, 400, "guidance.beta"),
        ("/v1/chat/completions", {**CHAT, "guidance": {"beta": 1, "topk": 3}}, 400, "guidance"),
        ("/v1/chat/completions", {**CHAT, "guidance": {"beta": 1, "tail": "fat"}}, 400, "guidance.tail"),
        ("/v1/chat/completions", {**CHAT, "temperature": 0, "guidance": {"beta": 1}}, 400, "guidance"),
    ],
)
async def test_nonsense_is_refused_with_the_field_named(http, server, path, body, status, param):
    got, told = await post(http, server, path, body)
    assert (got, told["error"]["param"]) == (status, param)


async def test_a_server_without_values_refuses_both(http, tiny_model, tokenizer):
    async with EngineServer(copy.deepcopy(tiny_model), tokenizer, EngineConfig()) as server:
        assert (await post(http, server, "/pooling", {"input": "buy"}))[0] == 400
        status, told = await post(http, server, "/v1/chat/completions", {**CHAT, "guidance": {"beta": 1}})
        assert (status, "no critic" in told["error"]["message"]) == (400, True)
        assert (await post(http, server, "/admin/critic", {"path": "x", "value_version": 1}))[0] == 404


async def test_who_connects_can_guide_tokens_where_there_are_values(tiny_model, critic, tokenizer):
    critics = ((copy.deepcopy(tiny_model), copy.deepcopy(critic)), (copy.deepcopy(critic), None), (tiny_model, None))
    found = []
    for model, values in critics:
        async with EngineServer(model, tokenizer, EngineConfig(value_version=3), values) as server:
            async with await connect(f"http://127.0.0.1:{server.port}/v1") as endpoint:
                found.append(endpoint.capabilities.value_version)
                assert endpoint.dialect.guidance == (found[-1] is not None)
                assert ("or token by token" in str(endpoint.capabilities)) == endpoint.dialect.guidance
                if endpoint.dialect.guidance:
                    sampling = Sampling(max_tokens=4, guidance=TokenGuidance(beta=2.0))
                    done = await endpoint.conversation().complete([Message("user", "buy")], sampling, seed=1)
                    assert done.guided_tokens is not None
    assert found == [3, 0, None]


async def test_a_new_critic_is_taken_in_flight_and_versions_only_grow(http, server, tiny_model, tokenizer, tmp_path):
    ids = tokenizer.encode("buy the red one")
    before = (await post(http, server, "/pooling", {"input": ids}))[1]["data"][0]["data"][0]
    with_head(tiny_model, 2).save_weights(tmp_path / "critic.safetensors", value_head=True)
    body = {"path": str(tmp_path / "critic.safetensors"), "value_version": 4}
    assert await post(http, server, "/admin/critic", body) == (200, {"value_version": 4})
    assert await post(http, server, "/admin/critic", body) == (200, {"value_version": 4})
    _, told = await post(http, server, "/pooling", {"input": ids})
    assert told["value_version"] == 4
    assert told["data"][0]["data"][0] != pytest.approx(before, abs=1e-3)
    assert (await post(http, server, "/admin/critic", {**body, "value_version": 3}))[0] == 409
    async with http.get(f"http://127.0.0.1:{server.port}/health") as reply:
        assert (await reply.json())["value_version"] == 4


async def test_values_of_one_request_are_of_one_critic(http, server, tiny_model, tokenizer, monkeypatch):
    inputs, new = [[3 + i % 90] for i in range(700)], with_head(tiny_model, 2)  # more than are admitted in one step
    batcher = server._thread._batcher
    step = batcher.step
    steps: list[list[Any]] = []

    def swapping_step():
        if len(steps) == 1:
            batcher.swap_critic(new.state_dict(), 4)
        steps.append(step())
        return steps[-1]

    monkeypatch.setattr(batcher, "step", swapping_step)
    status, told = await post(http, server, "/pooling", {"input": inputs})
    assert (status, told["value_version"]) == (200, 4)
    assert {report.value_version for done in steps for report in done} == {3, 4}
    _, again = await post(http, server, "/pooling", {"input": inputs})
    values = [[entry["data"][0] for entry in reply["data"]] for reply in (told, again)]
    assert values[0] == pytest.approx(values[1], abs=1e-6)


async def test_a_critic_that_cannot_serve_is_refused_and_the_old_one_goes_on(
    http, server, tiny_model, critic, tmp_path
):
    broken = {}
    for name, change in {"overflow": lambda w: w.sign_().mul_(3e38), "nan": lambda w: w.fill_(float("nan"))}.items():
        new = copy.deepcopy(critic)
        with torch.no_grad():
            change(new.value_head.weight)
        broken[name] = tmp_path / f"{name}.safetensors"
        new.save_weights(broken[name], value_head=True)
    whole = broken["overflow"].read_bytes()
    for name, data in {"empty": b"", "cut": whole[:-7], "text": b"weights"}.items():
        broken[name] = tmp_path / name
        broken[name].write_bytes(data)
    broken["headless"] = tmp_path / "headless.safetensors"
    tiny_model.save_weights(broken["headless"])
    broken["wider"] = tmp_path / "wider.safetensors"
    wider = PolicyModel(msgspec.structs.replace(critic.config, width=2 * critic.config.width))
    wider.save_weights(broken["wider"], value_head=True)
    for name, other in {"value_kind": "scalar", "rope_base": 10.0}.items():
        broken[name] = tmp_path / name
        PolicyModel(msgspec.structs.replace(critic.config, **{name: other})).save(broken[name])
    broken |= {"missing": tmp_path / "nowhere", "folder": tmp_path, "pipe": tmp_path / "pipe"}
    os.mkfifo(broken["pipe"])
    ask = {**CHAT, "guidance": {"beta": 5.0}, "n": 4, "max_tokens": 40}
    before = (await post(http, server, "/v1/chat/completions", ask))[1]["choices"]
    replies = asyncio.gather(*(post(http, server, "/v1/chat/completions", ask) for _ in range(8)))
    swaps = [{"path": str(path), "value_version": 9} for path in broken.values()]
    refused = await asyncio.gather(*(post(http, server, "/admin/critic", swap) for swap in swaps))
    assert [(status, told["error"]["param"]) for status, told in refused] == [(400, "path")] * len(broken)
    kind = refused[list(broken).index("value_kind")][1]["error"]["message"]
    assert "must be of the served model's value_kind: expected success, got scalar" in kind
    for status, told in await replies:
        assert (status, told["value_version"]) == (200, 3)
        assert [one["token_ids"] for one in told["choices"]] == [one["token_ids"] for one in before]


@pytest.mark.parametrize("mode", ["thread", "process"])
async def test_an_engine_is_started_with_a_critic_folder(http, tiny_model, critic, tokenizer, tmp_path, mode):
    critic.save(tmp_path / "critic")
    async with Engine.start(tiny_model, tokenizer, critic=tmp_path / "critic", mode=mode) as engine:
        async with http.post(f"{engine.url}/pooling", json={"input": "buy"}) as reply:
            assert reply.status == 200


async def test_a_critic_folder_without_a_value_head_is_refused(tiny_model, tokenizer, tmp_path):
    tiny_model.save(tmp_path)
    with pytest.raises(ConfigError, match=r"^critic: model folder must hold a readable config\.json: "):
        async with Engine.start(tiny_model, tokenizer, critic=tmp_path / "nowhere", mode="thread"):
            pass
    with pytest.raises(ConfigError, match=r"must have a value head: .* make one with fit_critic"):
        async with Engine.start(tiny_model, tokenizer, critic=tmp_path, mode="thread"):
            pass


async def test_b6_7_a_head_that_puts_out_values_is_read_as_they_are_and_one_of_logits_as_probabilities(
    http, tiny_model, critic, tokenizer
):
    told = {}
    for kind in ("success", "scalar"):
        config = EngineConfig(seed=0, value_kind=kind)
        async with EngineServer(copy.deepcopy(tiny_model), tokenizer, config, copy.deepcopy(critic)) as server:
            _, reply = await post(http, server, "/pooling", {"input": ["buy", "the red one"]})
        told[kind] = torch.tensor([entry["data"][0] for entry in reply["data"]])
    assert not torch.allclose(told["scalar"], told["success"], atol=1e-3)
    torch.testing.assert_close(told["scalar"].sigmoid(), told["success"])
