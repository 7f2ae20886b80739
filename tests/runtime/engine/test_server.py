import asyncio
import json
import logging

import aiohttp
import pytest

from turngate.runtime.engine.config import EngineConfig
from turngate.runtime.engine.server import EngineServer, load_model
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.errors import ConfigError

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "red"}]}


def url(server, path):
    return f"http://127.0.0.1:{server.port}{path}"


async def ask(http, server, path, body=None, **options):
    method = "GET" if body is None and "data" not in options else "POST"
    async with http.request(method, url(server, path), json=body, **options) as reply:
        text = await reply.text()
        return reply, json.loads(text) if text.startswith("{") else text


async def until(condition):
    """Let the loop turn until the condition holds; the test's own time limit is the only clock."""
    async with asyncio.timeout(20):
        while not await condition():  # noqa: ASYNC110 - the condition itself asks the server
            await asyncio.sleep(0)


async def test_models_are_listed(http, start_server):
    async with start_server(model_name="shopper") as server:
        _, listed = await ask(http, server, "/v1/models")
        _, one = await ask(http, server, "/v1/models/shopper")
        missing, _ = await ask(http, server, "/v1/models/other")
    assert [card["id"] for card in listed["data"]] == ["shopper"]
    assert one["max_model_len"] == 64
    assert missing.status == 404


async def test_chat_reply_has_everything_asked_for_and_aligned(http, start_server, tokenizer):
    body = {**CHAT, "logprobs": True, "return_token_ids": True, "n": 2}
    async with start_server(policy_version=4) as server:
        _, told = await ask(http, server, "/v1/chat/completions", body)
    assert told["object"] == "chat.completion"
    assert tokenizer.decode(told["prompt_token_ids"], skip_special=False) == "<|user|>red<|end|><|assistant|>"
    assert [choice["index"] for choice in told["choices"]] == [0, 1]
    for choice in told["choices"]:
        assert choice["message"] == {"role": "assistant", "content": "buy the red one"}
        assert choice["finish_reason"] == "stop"
        assert choice["token_ids"] == [*tokenizer.encode("buy the red one"), tokenizer.end]
        content = choice["logprobs"]["content"]
        assert [token["token"] for token in content] == ["buy", " the", " red", " one", "<|end|>"]
        assert [token["logprob"] for token in content] == [-0.5] * 5
        assert bytes(content[1]["bytes"]) == b" the"
        assert choice["policy_versions"] == [4] * 5
    assert told["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 10,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert told["policy_version"] == 4


async def test_reply_leaves_out_what_was_not_asked_for(http, start_server):
    async with start_server() as server:
        _, told = await ask(http, server, "/v1/chat/completions", CHAT)
    assert told["choices"][0]["logprobs"] is None
    assert "token_ids" not in told["choices"][0]
    assert "prompt_token_ids" not in told


async def test_request_reaches_the_batcher_as_asked(http, start_server):
    body = {**CHAT, "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "seed": 7, "stop": "one", "n": 2}
    async with start_server() as server:
        await ask(http, server, "/v1/chat/completions", body)
        first, second = server.fake.requests
    assert (first.max_tokens, first.temperature, first.top_p, first.top_k) == (9, 0.5, 0.9, 0)
    assert (first.seed, first.stop, first.stream, first.echo) == (7, ("one",), False, False)
    assert second.seed not in (7, None)


async def test_uncapped_chat_may_fill_the_context(http, start_server):
    async with start_server() as server:
        await ask(http, server, "/v1/chat/completions", CHAT)
        assert server.fake.requests[0].max_tokens == 64 - 4


@pytest.mark.parametrize(("words", "max_tokens"), [(2, 16), (60, 4)])
async def test_uncapped_text_completion_is_short_and_fits(http, start_server, words, max_tokens):
    async with start_server() as server:
        await ask(http, server, "/v1/completions", {"prompt": " ".join(["red"] * words)})
        assert server.fake.requests[0].max_tokens == max_tokens


async def test_tool_calls_are_read_from_the_reply(http, start_server, tokenizer):
    tool = {"type": "function", "function": {"name": "buy", "description": "buys"}}
    for stream in (False, True):
        async with start_server() as server:
            script = [*tokenizer.encode("yes"), tokenizer.special("<|call|>"), *tokenizer.encode('buy {"item":3}')]
            server.fake.script = [*script, tokenizer.end]
            _, told = await ask(http, server, "/v1/chat/completions", {**CHAT, "tools": [tool], "stream": stream})
        if stream:
            chunks = events(told)
            last = chunks[-1]["choices"][0]
            calls, finish_reason = last["delta"]["tool_calls"], last["finish_reason"]
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            assert text == "x" * len(tokenizer.encode("yes"))  # the scripted batcher says x for every token
            assert calls[0]["index"] == 0
        else:
            message, finish_reason = told["choices"][0]["message"], told["choices"][0]["finish_reason"]
            calls = message["tool_calls"]
            assert message["content"] == "yes"
        assert finish_reason == "tool_calls"
        assert [call["function"] for call in calls] == [{"name": "buy", "arguments": '{"item":3}'}]


async def test_tools_are_shown_to_the_model_unless_tool_choice_is_none(http, start_server, tokenizer):
    tool = {"type": "function", "function": {"name": "buy", "description": "buys"}}
    async with start_server() as server:
        for choice in ("auto", "none"):
            await ask(http, server, "/v1/chat/completions", {**CHAT, "tools": [tool], "tool_choice": choice})
        shown, hidden = (tokenizer.decode(request.prompt_ids) for request in server.fake.requests)
    assert "buys" in shown
    assert "buys" not in hidden


async def test_completion_takes_texts_and_ids(http, start_server, tokenizer):
    ids = tokenizer.encode("red one")
    async with start_server() as server:
        for prompt in ("red one", ids, ["red one", "red one"], [ids, ids]):
            _, told = await ask(http, server, "/v1/completions", {"prompt": prompt, "return_token_ids": True})
            assert [choice["prompt_token_ids"] for choice in told["choices"]] == [ids] * len(told["choices"])
        assert all(request.prompt_ids == ids for request in server.fake.requests)
    assert [choice["index"] for choice in told["choices"]] == [0, 1]
    assert told["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize("echo", [False, True])
async def test_text_continues_the_prompt_with_its_space(http, start_server, echo):
    body = {"prompt": "under", "logprobs": 0, "max_tokens": 4, "echo": echo}
    async with start_server() as server:
        _, told = await ask(http, server, "/v1/completions", body)
    (choice,) = told["choices"]
    prompt = "under" if echo else ""
    assert choice["text"] == prompt + " buy the red one"
    assert choice["logprobs"]["tokens"] == [prompt] * echo + [" buy", " the", " red", " one"]


async def test_echo_scores_the_prompt(http, start_server, tokenizer):
    body = {"prompt": "buy the red one", "echo": True, "max_tokens": 0, "logprobs": 0}
    async with start_server() as server:
        _, scored = await ask(http, server, "/v1/completions", body)
        _, longer = await ask(http, server, "/v1/completions", {**body, "max_tokens": 2})
    choice = scored["choices"][0]
    assert choice["text"] == "buy the red one"
    assert choice["logprobs"]["tokens"] == ["buy", " the", " red", " one"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -1.5, -1.5]
    assert choice["logprobs"]["text_offset"] == [0, 3, 7, 11]
    assert scored["usage"]["completion_tokens"] == 0
    assert longer["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.5, -1.5, -1.5, -0.5, -0.5]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/v1/chat/completions", {**CHAT, "model": "gpt-9"}, 404, "model", "model_not_found"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 61}, 400, "messages", "context_length_exceeded"),
        ("/v1/completions", {"prompt": "red " * 64}, 400, "prompt", "context_length_exceeded"),
        ("/v1/completions", {"prompt": ""}, 400, "prompt", None),
        ("/v1/completions", {"prompt": [5, 10**6]}, 400, "prompt", None),
        ("/v1/completions", {"prompt": [5, -1]}, 400, "prompt", None),
        ("/v1/completions", {"prompt": [[5], [5, -1]], "stream": True}, 400, "prompt", None),
        ("/v1/completions", {"prompt": "red", "echo": True, "stream": True}, 400, "echo", None),
        ("/v1/chat/completions", {**CHAT, "seed": 666}, 400, "seed", None),
        ("/v1/chat/completions", {**CHAT, "seed": 666, "stream": True}, 400, "seed", None),
        ("/v1/nothing", {}, 404, None, "not_found"),
        ("/health", {}, 405, None, None),
    ],
)
async def test_refusal_names_what_is_wrong(http, start_server, path, body, status, param, code):
    async with start_server() as server:
        reply, told = await ask(http, server, path, body)
    assert (reply.status, told["error"]["param"], told["error"]["code"]) == (status, param, code)
    assert told["error"]["message"]
    assert told["error"]["type"] == "invalid_request_error"


async def test_nan_is_traced_to_its_field(http, start_server):
    data = b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}'
    async with start_server() as server:
        reply, told = await ask(http, server, "/v1/chat/completions", data=data)
    assert (reply.status, told["error"]["param"]) == (400, "temperature")


async def test_nesting_too_deep_for_any_step_is_a_bad_request(http, start_server):
    answers: set[tuple[int, str]] = set()
    async with start_server() as server:
        for levels in (10, 500, *range(900, 1010, 4), 5000, 100_000):
            schema = b'{"a":' * levels + b"1" + b"}" * levels
            data = b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "tools": [{"type": "function", '
            data += b'"function": {"name": "buy", "parameters": %s}}]}' % schema
            reply, told = await ask(http, server, "/v1/chat/completions", data=data)
            answers.add((reply.status, told["error"]["message"].split(" must ")[0]))
    # The shallow ones can be read, and are too long for the context of this model.
    assert answers == {(400, "the body"), (400, "prompt and completion")}


async def test_large_body_is_refused_before_it_is_kept(http, start_server):
    async with start_server(max_body_bytes=1000) as server:
        reply, told = await ask(http, server, "/v1/completions", {"prompt": "x" * 2000})
    assert (reply.status, told["error"]["code"]) == (413, "body_too_large")


async def test_large_body_of_unknown_length_is_refused(http, start_server):
    async def chunks():
        for _ in range(20):
            yield b"x" * 100

    async with start_server(max_body_bytes=1000) as server:
        reply, told = await ask(http, server, "/v1/completions", data=chunks())
    assert (reply.status, told["error"]["code"]) == (413, "body_too_large")


async def test_request_that_can_never_fit_is_not_asked_to_retry(http, start_server):
    async with start_server(max_running=2, max_waiting=2) as server:
        reply, told = await ask(http, server, "/v1/completions", {"prompt": ["red"] * 3, "n": 2})
    assert (reply.status, told["error"]["param"]) == (400, "n")


async def test_full_engine_answers_429_with_a_time_to_retry(http, start_server):
    async with start_server(max_running=1, max_waiting=1) as server:
        server.fake.is_paused = True
        waiting = [asyncio.ensure_future(ask(http, server, "/v1/chat/completions", CHAT)) for _ in range(2)]

        async def is_full():
            return (await server.statistics())["open"] == 2

        await until(is_full)
        reply, told = await ask(http, server, "/v1/chat/completions", CHAT)
        assert (reply.status, reply.headers["Retry-After"], told["error"]["code"]) == (429, "1", "engine_overloaded")
        await server._thread.call(lambda batcher: setattr(batcher, "is_paused", False))
        assert [(await one)[0].status for one in waiting] == [200, 200]


async def test_key_is_required_except_for_health(http, start_server):
    async with start_server(api_key="s3cret") as server:
        assert (await ask(http, server, "/health"))[0].status == 200
        for path in ("/v1/models", "/metrics", "/nothing"):
            assert (await ask(http, server, path))[0].status == 401
        for key in ("", "s3cre", "s3crets", "ключ"):
            reply, told = await ask(http, server, "/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert (reply.status, told["error"]["code"]) == (401, "invalid_api_key")
        reply, _ = await ask(http, server, "/admin/weights", {"path": "x", "policy_version": 1})
        assert reply.status == 401
        reply, _ = await ask(http, server, "/v1/models", headers={"Authorization": "Bearer s3cret"})
        assert reply.status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_hangs_up_frees_its_slot(start_server, stream):
    async with start_server() as server:
        server.fake.is_paused = True
        async with aiohttp.ClientSession() as session:
            request = session.post(url(server, "/v1/chat/completions"), json={**CHAT, "stream": stream, "n": 3})
            task = asyncio.ensure_future(request)

            async def is_running():
                return (await server.statistics())["running"] == 3

            await until(is_running)
            task.cancel()
            await asyncio.wait({task})

            async def is_free():
                return (await server.statistics())["running"] == 0

            await until(is_free)
        assert sorted(server.fake.cancelled) == [1, 2, 3]


def events(text):
    """Return the JSON events of a stream, which must end with [DONE]."""
    blocks = text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


async def test_stream_has_one_chunk_per_token(http, start_server, tokenizer):
    options = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "return_token_ids": True}
    async with start_server(policy_version=2) as server:
        reply, text = await ask(http, server, "/v1/chat/completions", {**CHAT, **options})
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    opening, *tokens, finish, usage = events(text)
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert tokenizer.decode(opening["prompt_token_ids"], skip_special=False) == "<|user|>red<|end|><|assistant|>"
    assert [token["choices"][0]["token_ids"][0] for token in tokens] == server.fake.script
    assert [token["choices"][0]["policy_versions"] for token in tokens] == [[2]] * 5
    assert tokens[1]["choices"][0]["logprobs"]["content"][0]["token"] == " the"
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 5)
    assert all(chunk["usage"] is None for chunk in (opening, *tokens, finish))


async def test_token_is_sent_before_the_next_is_sampled(http, start_server):
    async with start_server() as server:
        fake, step = server.fake, server.fake.step

        def step_once():
            fake.is_paused = True
            return step()

        fake.step = step_once
        async with http.post(url(server, "/v1/completions"), json={"prompt": "red", "stream": True}) as reply:
            seen = [await reply.content.readline() for _ in range(2)]
            assert fake.steps == 1
            await server._thread.call(lambda batcher: setattr(batcher, "is_paused", False))
            seen += [await reply.content.readline() for _ in range(2)]
            assert fake.steps == 2
    assert [json.loads(line[6:])["choices"][0]["text"] for line in seen[::2]] == [" x", "x"]


async def test_failure_halfway_through_a_stream_is_an_event(http, start_server, caplog):
    caplog.set_level(logging.CRITICAL)
    async with start_server() as server:
        fake = server.fake

        class Halfway(Exception):
            pass

        step = fake.step

        def fail_later():
            if fake.steps == 2:
                raise Halfway("lost")
            return step()

        fake.step = fail_later
        async with http.post(url(server, "/v1/chat/completions"), json={**CHAT, "stream": True}) as reply:
            text = await reply.text()
    last = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["code"] == "engine_failed"
    assert "[DONE]" not in text


async def test_broken_batcher_is_reported_everywhere(http, start_server, caplog):
    caplog.set_level(logging.CRITICAL)
    async with start_server() as server:
        server.fake.step_error = RuntimeError("out of luck")
        first, told = await ask(http, server, "/v1/chat/completions", CHAT)
        second, _ = await ask(http, server, "/v1/chat/completions", CHAT)
        health, state = await ask(http, server, "/health")
        _, metrics = await ask(http, server, "/metrics")
    assert (first.status, second.status, health.status) == (500, 500, 503)
    assert "out of luck" in told["error"]["message"]
    assert "out of luck" in state["error"]
    assert "turngate_engine_up 0" in metrics.splitlines()


async def test_bug_in_a_handler_costs_one_request(http, start_server, caplog, monkeypatch):
    caplog.set_level(logging.CRITICAL)
    async with start_server() as server:
        with monkeypatch.context() as patch:
            patch.setattr(server._completions, "_check", lambda ask: 1 / 0)
            broken, told = await ask(http, server, "/v1/chat/completions", CHAT)
        fine, _ = await ask(http, server, "/v1/chat/completions", CHAT)
    assert (broken.status, told["error"]["type"], fine.status) == (500, "server_error", 200)


async def test_stopping_answers_what_is_open(http, start_server):
    async with start_server() as server:
        server.fake.is_paused = True
        waiting = asyncio.ensure_future(ask(http, server, "/v1/chat/completions", CHAT))

        async def is_running():
            return (await server.statistics())["running"] == 1

        await until(is_running)
    reply, told = await waiting
    assert (reply.status, told["error"]["code"]) == (500, "engine_failed")


async def test_metrics_count_requests_by_path_and_status(http, start_server):
    async with start_server() as server:
        await ask(http, server, "/v1/chat/completions", CHAT)
        await ask(http, server, "/v1/chat/completions", {})
        await ask(http, server, "/nope")
        _, metrics = await ask(http, server, "/metrics")
    lines = metrics.splitlines()
    assert 'turngate_engine_http_requests_total{path="/v1/chat/completions",status="200"} 1' in lines
    assert 'turngate_engine_http_requests_total{path="/v1/chat/completions",status="400"} 1' in lines
    assert 'turngate_engine_http_requests_total{path="other",status="404"} 1' in lines
    assert "turngate_engine_running 0" in lines
    assert "# TYPE turngate_engine_steps_total counter" in lines


async def test_weights_are_not_taken_from_a_web_page(http, start_server):
    async with start_server() as server:
        data = b'{"path": "x", "policy_version": 1}'
        reply, _ = await ask(http, server, "/admin/weights", data=data, headers={"Content-Type": "text/plain"})
    assert reply.status == 415


async def test_taken_port_is_a_clear_error(start_server):
    async with start_server() as server:
        with pytest.raises(ConfigError, match="choose another host or port"):
            async with start_server(port=server.port):
                pass


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 70000}, "port must be in"),
        ({"max_running": 0}, "max_running must be positive"),
        ({"max_cached_tokens": -1}, "max_cached_tokens must be 0 or more"),
        ({"policy_version": -1}, "policy_version must be in"),
        ({"api_key": ""}, "api_key must not be empty"),
    ],
)
def test_bad_setting_is_a_clear_error(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_model_and_tokenizer_must_fit_each_other(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match="share one vocabulary"):
        EngineServer(tiny_model, Tokenizer([]), EngineConfig())
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(tmp_path)
