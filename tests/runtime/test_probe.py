import asyncio

import msgspec
import pytest
import torch

from turngate.runtime import Endpoint, Sampling
from turngate.runtime.capabilities import USES, Capabilities
from turngate.runtime.engine import Engine
from turngate.runtime.engine.model import ModelConfig, PolicyModel
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.errors import ConfigError, EndpointError, EndpointRefused
from turngate.runtime.probe import probe
from turngate.runtime.probing.asking import MAX_REQUESTS
from turngate.runtime.testing.fake_server import FakeServer, Traits


async def probed(**traits):
    async with FakeServer(Traits(**traits)) as server:
        found = await probe(server.url)
        assert found.requests == len(server.requests) <= MAX_REQUESTS
        assert not server.changed  # looking changes nothing
    return found


def verdicts(found):
    return {name: f.verdict for name in found.__struct_fields__ if hasattr(f := getattr(found, name), "verdict")}


async def test_a_server_that_can_everything_shows_all_of_it():
    found = await probed()
    assert {name: verdict for name, verdict in verdicts(found).items() if verdict != "yes"} == {}
    assert (found.model, found.server, found.max_context) == ("toy", "vLLM", 2048)
    assert found.weight_routes == ("/collective_rpc",)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Capabilities) == found


@pytest.mark.parametrize(
    ("traits", "expected"),
    [
        ({"token_ids": False}, {"sampled_ids": "no", "prompt_ids": "no", "completion_ids": "no", "id_strings": "yes"}),
        ({"id_strings": False}, {"id_strings": "no", "sampled_ids": "yes"}),
        ({"logprobs": "no"}, {"logprobs": "no", "completion_logprobs": "no", "follows_temperature": "unknown"}),
        ({"logprobs": "with_top"}, {"logprobs": "yes", "plain_logprobs": "no", "follows_temperature": "yes"}),
        ({"after_temperature": False}, {"follows_temperature": "no", "follows_truncation": "yes"}),
        ({"after_truncation": False}, {"follows_temperature": "yes", "follows_truncation": "no"}),
        (
            {"after_temperature": False, "after_truncation": False},
            {"follows_temperature": "no", "follows_truncation": "no"},
        ),
        ({"sharpness": 0.0}, {"follows_temperature": "unknown"}),
        ({"sharpness": 1e5}, {"follows_truncation": "unknown", "seeds": "unknown"}),
        ({"echo": False}, {"prompt_logprobs": "no"}),
        ({"top_k": False}, {"top_k": "no"}),
        ({"n": False}, {"n": "no"}),
        ({"seeds": False}, {"seeds": "no"}),
        ({"stream": "no"}, {"streaming": "no", "stream_ids": "unknown"}),
        ({"stream": "one_chunk"}, {"streaming": "no"}),
        ({"stream": "no_end"}, {"streaming": "no"}),
        ({"stream": "garbled"}, {"streaming": "no"}),
        ({"tools": "text"}, {"tools": "yes", "tool_calls": "no"}),
        ({"tools": "silent"}, {"tools": "yes", "tool_calls": "unknown"}),
        ({"tools": "refused"}, {"tools": "no", "tool_calls": "unknown"}),
        ({"stop": "no"}, {"stop": "no"}),
        ({"stop": "kept"}, {"stop": "no", "stop_ids": "unknown"}),
        ({"versions": False}, {"versions": "no"}),
        ({"cached_tokens": None}, {"prefix_cache": "unknown"}),
        ({"routes": ()}, {"weights": "no"}),
        ({"routes": ("/v1/load_lora_adapter",), "schema": False}, {"weights": "yes"}),
        ({"id_prompts": False}, {"id_prompts": "no", "completions": "yes"}),
        ({"completions": False}, {"completions": "no", "id_prompts": "no", "chat": "yes"}),
        ({"chat": False}, {"chat": "no", "id_prompts": "yes", "follows_temperature": "yes"}),
        (
            {"chat": False, "after_temperature": False, "after_truncation": False},
            {"chat": "no", "follows_temperature": "no", "follows_truncation": "no"},
        ),
    ],
    ids=str,
)
async def test_each_trait_that_is_missing_is_found_missing(traits, expected):
    found = verdicts(await probed(**traits))
    assert {name: found[name] for name in expected} == expected


async def test_a_server_that_refuses_unknown_fields_is_asked_for_them_one_by_one():
    found = await probed(refuses_unknown=True, token_ids=False, id_strings=False, top_k=False)
    assert found.logprobs.is_yes
    assert found.seeds.is_yes
    assert found.follows_temperature.is_yes
    assert "return_token_ids" in found.sampled_ids.seen
    assert (found.top_k.verdict, found.id_strings.verdict) == ("no", "no")


async def test_a_server_that_knows_nothing_beyond_text_can_be_evaluated():
    found = await probed(
        refuses_unknown=True, token_ids=False, id_strings=False, top_k=False, logprobs="no", tools="refused", n=False
    )
    assert found.problems("evaluate") == []
    assert any("return_token_ids" in problem for problem in found.problems("train", Sampling()))


async def test_an_endpoint_is_probed_with_its_own_model_and_key():
    async with FakeServer(Traits(api_key="secret-1")) as server:
        async with Endpoint(server.url, model="toy", api_key="secret-1") as endpoint:
            assert (await probe(endpoint)).chat.is_yes


async def test_a_wrong_key_is_refused_and_not_repeated():
    async with FakeServer(Traits(api_key="right")) as server:
        with pytest.raises(EndpointRefused, match="key") as caught:
            await probe(server.url, api_key="wrong-and-long")
    assert "wrong-and-long" not in str(caught.value)


async def test_a_server_that_is_not_there_is_an_error():
    with pytest.raises(EndpointError, match="must answer"):
        await probe("http://127.0.0.1:1/v1", timeout_s=5)
    with pytest.raises(ConfigError, match="url must be"):
        await probe("127.0.0.1:8000")


async def test_a_url_that_lacks_its_end_is_suspected_where_no_model_is_listed():
    async with FakeServer() as server:
        with pytest.raises(ConfigError, match="mostly ends in /v1"):
            await probe(server.url.removesuffix("/v1"))


async def test_a_name_and_password_in_the_url_are_used_and_never_shown():
    async with FakeServer() as server:
        found = await probe(server.url.replace("http://", "http://me:pass-word@"))
    assert found.chat.is_yes
    assert "pass-word" not in msgspec.json.encode(found).decode()


NONSENSE = [
    b"",
    b"\x00\xff\xfe",
    b"null",
    b"[]",
    b"[[[[" * 5000,
    b'{"choices": []}',
    b'{"choices": {"0": 1}, "data": 7, "paths": [1], "version": {}}',
    b'{"choices": [{"message": {"content": 7, "tool_calls": "x"}, "logprobs": {"content": [1, null]}}]}',
    b'{"choices": [{"message": {"content": "\\ud800\\u001b[31m"}, "token_ids": [true, -1], "logprobs": []}]}',
    b'{"choices": [{"message": {"content": "hi"}, "logprobs": {"content": [{"token": 1, "logprob": 1e400}]}}]}',
    b'{"data": [null, {"id": 5}, {"id": "x", "max_model_len": "many"}], "choices": [{"message": {}}]}',
    b'{"choices": [{"text": "a", "message": {"content": "ab"}, "logprobs": {"token_logprobs": ["x"]}}]}',
]


@pytest.mark.parametrize("body", NONSENSE, ids=lambda body: repr(body[:30]))
@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
async def test_nonsense_of_any_kind_becomes_findings(body, status, kind):
    async def serve(reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if b"content-length:" in head:
                    await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
                writer.write(b"HTTP/1.1 %d X\r\nContent-Type: %s\r\n" % (status, kind.encode()))
                writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        found = await probe(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", "any")
    assert found.requests <= MAX_REQUESTS
    assert not found.sampled_ids.is_yes
    assert found.table().replace("\n", "").isprintable()


async def test_a_server_that_says_nothing_is_given_up():
    held = []

    async def serve(reader, writer):
        held.append(writer)
        await reader.read()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        with pytest.raises(EndpointError, match=r"within 0\.05 s"):
            await probe(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", "any", timeout_s=0.05)
        for writer in held:
            writer.close()


async def test_the_embedded_engine_can_all_that_training_needs():
    tokenizer = Tokenizer.train(["count from one to ten, and call the tool"])
    config = ModelConfig(
        vocab_size=len(tokenizer), width=16, layers=1, heads=1, head_dim=16, mlp_width=16, max_context=512
    )
    torch.manual_seed(0)
    model = PolicyModel(config)
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(3.0)  # as opinionated as a trained one
    async with Engine.start(model, tokenizer, mode="thread") as engine:
        found = await probe(engine.endpoint)
        assert engine.endpoint.policy_version == await engine.publisher.served_version() == 0
    others = {name: verdict for name, verdict in verdicts(found).items() if verdict != "yes"}
    # This model's greedy reply has no text, and it calls no tools: nothing to see there.
    assert others.keys() <= {"top_k", "stop", "stop_ids", "tool_calls", "id_strings"}
    assert {verdict for name, verdict in others.items() if name != "id_strings"} <= {"unknown"}
    assert (found.server, found.max_context, found.weight_routes) == ("turngate engine", 512, ("/admin/weights",))
    for use in USES:
        assert found.problems(use, Sampling(temperature=0.7, top_p=0.9), has_renderer=False) == []
