import logging

import pytest

from turngate.runtime import Message, Sampling
from turngate.runtime.connect import connect
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.engine_renderer import EngineRenderer
from turngate.runtime.errors import EndpointError
from turngate.runtime.testing.fake_server import FakeServer, Traits


async def connected(renderer=None, **traits):
    async with FakeServer(Traits(**traits)) as server:
        async with await connect(server.url, renderer=renderer) as endpoint:
            completion = await endpoint.conversation().complete([Message("user", "hi")], Sampling(max_tokens=4), seed=1)
    return endpoint, completion


@pytest.fixture(scope="module")
def renderer():
    return EngineRenderer(Tokenizer.train(["a b c d"]))


async def test_ids_come_from_the_server_when_it_returns_them(caplog):
    with caplog.at_level(logging.INFO, "turngate.connect"):
        endpoint, completion = await connected()
    assert endpoint.dialect.token_mode == "server"
    assert len(completion.token_ids) == len(completion.logprobs) == 4
    assert endpoint.capabilities.chat.is_yes
    assert "token mode 'server'" in caplog.text


async def test_ids_come_from_us_when_there_is_a_renderer_and_a_route_for_ids(renderer):
    endpoint, completion = await connected(renderer)
    assert (endpoint.dialect.token_mode, endpoint.renderer) == ("tokens", renderer)
    assert list(completion.prompt_token_ids) == renderer.render([Message("user", "hi")])


async def test_a_renderer_is_not_used_where_ids_are_not_taken(renderer):
    endpoint, _ = await connected(renderer, id_prompts=False)
    assert (endpoint.dialect.token_mode, endpoint.renderer) == ("server", None)


async def test_without_ids_there_is_text_and_the_log_says_why_it_cannot_train(caplog):
    with caplog.at_level(logging.INFO, "turngate.connect"):
        endpoint, completion = await connected(token_ids=False, id_strings=False, logprobs="with_top")
    assert (endpoint.dialect.token_mode, endpoint.dialect.top_logprobs) == ("text", 1)
    assert completion.text
    assert not completion.token_ids
    assert "no training: token ids must come back" in caplog.text


async def test_a_server_that_cannot_chat_is_refused():
    async with FakeServer(Traits(chat=False)) as server:
        with pytest.raises(EndpointError, match="must be able to chat"):
            await connect(server.url)
