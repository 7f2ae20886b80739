"""The official client, unmodified, against the engine with a real (tiny) model."""

import asyncio
import copy

import openai
import pytest
import torch

from turngate.runtime.engine.config import EngineConfig
from turngate.runtime.engine.packing import pack
from turngate.runtime.engine.server import EngineServer

MESSAGES = [{"role": "user", "content": "buy the red one"}]


@pytest.fixture
async def server(tiny_model, tokenizer):
    async with EngineServer(tiny_model, tokenizer, EngineConfig(api_key="k", max_running=8, seed=0)) as server:
        yield server


@pytest.fixture
async def client(server):
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="k", max_retries=0) as client:
        yield client


async def test_synchronous_client(server):
    def talk() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="k") as client:
            reply = client.chat.completions.create(model="policy", messages=MESSAGES, max_tokens=5, seed=3)
            return client.models.list().data[0].id, reply.choices[0].finish_reason

    assert await asyncio.to_thread(talk) == ("policy", "length")


async def test_chat_with_everything(client, tokenizer):
    reply = await client.chat.completions.create(
        model="policy",
        messages=MESSAGES,
        max_tokens=6,
        temperature=0.7,
        top_p=0.9,
        seed=1,
        n=3,
        logprobs=True,
        top_logprobs=4,
        stop=["zzz"],
        extra_body={"top_k": 20, "return_token_ids": True},
    )
    assert len(reply.choices) == 3
    assert reply.usage.completion_tokens == sum(len(choice.token_ids) for choice in reply.choices)
    for choice in reply.choices:
        content = choice.logprobs.content
        assert len(content) == len(choice.token_ids) == len(choice.policy_versions)
        assert choice.message.content == tokenizer.decode(choice.token_ids)
        named = tokenizer.decode(choice.token_ids, skip_special=False)
        assert b"".join(bytes(token.bytes) for token in content).decode(errors="replace") == named
        for token in content:
            assert 1 <= len(token.top_logprobs) <= 4
            values = [alternative.logprob for alternative in token.top_logprobs]
            assert values == sorted(values, reverse=True)
            assert token.logprob <= values[0] + 1e-6


async def test_equal_seeds_repeat_and_choices_differ(client):
    async def draw(n):
        reply = await client.chat.completions.create(model="policy", messages=MESSAGES, max_tokens=8, seed=5, n=n)
        return [choice.message.content for choice in reply.choices]

    (alone,) = await draw(1)
    first, second = await draw(2), await draw(2)
    assert first == second
    assert first[0] == alone
    assert first[0] != first[1]


async def test_stream_adds_up_to_the_whole_reply(client):
    options = {"model": "policy", "messages": MESSAGES, "max_tokens": 8, "seed": 2, "logprobs": True}
    whole = await client.chat.completions.create(**options, extra_body={"return_token_ids": True})
    stream = await client.chat.completions.create(
        **options,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    )
    chunks = [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    (choice,) = whole.choices
    assert "".join(one.delta.content or "" for one in choices) == choice.message.content
    assert [i for one in choices for i in getattr(one, "token_ids", None) or ()] == choice.token_ids
    assert choices[-1].finish_reason == choice.finish_reason
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    streamed = [token for one in choices if one.logprobs for token in one.logprobs.content]
    assert [token.token for token in streamed] == [token.token for token in choice.logprobs.content]
    assert [token.logprob for token in streamed] == pytest.approx(
        [token.logprob for token in choice.logprobs.content], abs=1e-5
    )


async def test_text_completion_and_its_stream_agree(client):
    options = {"model": "policy", "prompt": "buy the", "max_tokens": 8, "seed": 4, "logprobs": 2}
    whole = await client.completions.create(**options)
    stream = await client.completions.create(**options, stream=True)
    pieces = [chunk.choices[0] async for chunk in stream]
    assert "".join(piece.text for piece in pieces) == whole.choices[0].text
    assert [t for piece in pieces if piece.logprobs for t in piece.logprobs.tokens] == whole.choices[0].logprobs.tokens


async def test_completions_of_ids_and_of_the_same_text_agree(client, tokenizer):
    ids = tokenizer.encode("buy the red")
    options = {"model": "policy", "max_tokens": 4, "seed": 1, "extra_body": {"return_token_ids": True}}
    by_text = await client.completions.create(prompt="buy the red", **options)
    by_ids = await client.completions.create(prompt=ids, **options)
    by_list = await client.completions.create(prompt=[ids, ids], n=2, **options)
    assert by_text.choices[0].token_ids == by_ids.choices[0].token_ids
    assert [choice.prompt_token_ids for choice in by_list.choices] == [ids] * 4
    assert by_list.choices[0].token_ids == by_list.choices[2].token_ids == by_ids.choices[0].token_ids


async def test_echo_scores_equal_the_training_pass(client, tokenizer, tiny_model):
    ids = tokenizer.encode("buy the red one under $80")
    scored = await client.completions.create(
        model="policy", prompt=ids, max_tokens=0, echo=True, logprobs=1, extra_body={"return_token_ids": True}
    )
    (choice,) = scored.choices
    own = reference_logprobs(tiny_model, ids)
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(own, abs=1e-4)
    assert choice.text == "buy the red one under $80"
    assert choice.token_ids == []


async def test_sampled_logprobs_equal_the_training_pass(client, tiny_model):
    reply = await client.chat.completions.create(
        model="policy",
        messages=MESSAGES,
        max_tokens=12,
        seed=8,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    (choice,) = reply.choices
    own = reference_logprobs(tiny_model, [*reply.prompt_token_ids, *choice.token_ids])[-len(choice.token_ids) :]
    assert [token.logprob for token in choice.logprobs.content] == pytest.approx(own, abs=1e-4)


def reference_logprobs(model, ids):
    """Return log-probs of ids[1:] by the training pass."""
    with torch.no_grad():
        return copy.deepcopy(model).score(pack([ids])).logprobs_M.tolist()


@pytest.mark.parametrize(
    ("options", "kind", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": -5}, openai.BadRequestError, "max_tokens"),
        ({"model": "gpt-9"}, openai.NotFoundError, "model"),
        ({"logit_bias": {"4": 50}}, openai.BadRequestError, "logit_bias"),
        ({"max_tokens": 1000}, openai.BadRequestError, "messages"),
    ],
)
async def test_errors_are_the_clients_own(client, options, kind, param):
    with pytest.raises(kind) as caught:
        await client.chat.completions.create(**{"model": "policy", "messages": MESSAGES, **options})
    assert caught.value.param == param


async def test_wrong_key_is_an_authentication_error(client):
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").chat.completions.create(model="policy", messages=MESSAGES)


async def test_unknown_path_is_not_found(client):
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model="policy", input="x")


async def test_closed_stream_frees_its_slot(server, client):
    stream = await client.chat.completions.create(model="policy", messages=MESSAGES, stream=True, n=4)
    await anext(aiter(stream))
    await stream.close()
    async with asyncio.timeout(20):
        while (await server.statistics())["running"]:  # noqa: ASYNC110 - the condition itself asks the server
            await asyncio.sleep(0)
