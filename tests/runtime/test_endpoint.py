"""The hot client against good, bad and hostile servers."""

import asyncio
import gc
import math
from random import Random
from types import SimpleNamespace

import msgspec
import pytest

from turngate.envs.base import ToolCall, ToolSpec
from turngate.runtime.dialect import OPENAI
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.errors import (
    ConfigError,
    ContextOverflow,
    EndpointError,
    EndpointRefused,
    EndpointTimeout,
    MalformedReply,
)
from turngate.runtime.publishers import EnginePublisher
from turngate.runtime.testing import FakeTransport, HostileServer, run_virtual
from turngate.runtime.testing.endpoints import fake_logprob, fake_reply
from turngate.runtime.testing.hostile import answer, broken, hang, raw, reset, status
from turngate.runtime.transport import Reply
from turngate.runtime.types import Message, Sampling
from turngate.runtime.wire_replies import check_logprobs

ASK = [Message("system", "be brief"), Message("user", "hi")]
SAMPLING = Sampling(max_tokens=8)


def good(path, request):
    return Reply(200, {}, msgspec.json.encode(fake_reply(request, "ok", policy_version=4)))


def endpoint_at(server, **options):
    return Endpoint(server.url, model="m", random=Random(0), **options)


async def test_completion_carries_ids_logprobs_and_versions_as_the_server_gave_them():
    async with HostileServer(answer("ok")) as server, endpoint_at(server, policy_version=3) as endpoint:
        completion = await endpoint.complete(ASK, SAMPLING, seed=5)
    assert completion.text == "ok"
    assert list(completion.token_ids) == [111, 107, 260]
    assert list(completion.logprobs) == [fake_logprob(111), fake_logprob(107), fake_logprob(260)]
    assert list(completion.versions) == [0, 0, 0]
    assert list(completion.prompt_token_ids) == [256, *b"be brief", 260, 257, *b"hi", 260, 258]
    assert (completion.version_sent, completion.version_received, completion.stop_reason) == (3, 3, "stop")


async def test_request_spells_out_sampling_and_leaves_unset_fields_out():
    async with HostileServer() as server, endpoint_at(server) as endpoint:
        await endpoint.complete(ASK, Sampling(temperature=0.5, max_tokens=8, stop=("\n",)), seed=5)
    assert server.requests == [
        {
            "model": "m",
            "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
            "temperature": 0.5,
            "top_p": 1.0,
            "max_tokens": 8,
            "logprobs": True,
            "top_k": 0,
            "return_token_ids": True,
            "seed": 5,
            "stop": ["\n"],
        }
    ]


async def test_tools_and_tool_calls_are_spelled_as_the_api_has_them():
    call = ToolCall("c1", "look", '{"at": 1}')
    said = [*ASK, Message("assistant", "", (call,)), Message("tool", "a wall", (), "c1")]
    tool = ToolSpec("look", "Look at something.", {"type": "object"})

    def call_back(reply):
        message = reply["choices"][0]["message"]
        message["content"] = None
        message["tool_calls"] = [{"id": "c2", "type": "function", "function": {"name": "look", "arguments": "{}"}}]

    async with HostileServer(answer("x", call_back)) as server, endpoint_at(server) as endpoint:
        completion = await endpoint.complete(said, SAMPLING, tools=[tool])
    assert server.requests[0]["tools"] == [
        {
            "type": "function",
            "function": {"name": "look", "description": "Look at something.", "parameters": {"type": "object"}},
        }
    ]
    assert server.requests[0]["messages"][2:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}],
        },
        {"role": "tool", "content": "a wall", "tool_call_id": "c1"},
    ]
    assert completion.text == ""
    assert completion.tool_calls == (ToolCall("c2", "look", "{}"),)


async def test_the_openai_dialect_sends_openai_fields_only():
    async with HostileServer() as server, endpoint_at(server, dialect=OPENAI) as endpoint:
        await endpoint.complete(ASK, SAMPLING)
        with pytest.raises(ConfigError, match="top_k needs a server that knows it"):
            await endpoint.complete(ASK, Sampling(top_k=5))
    assert set(server.requests[0]) == {"model", "messages", "temperature", "top_p", "max_tokens", "logprobs"}


async def test_server_errors_are_retried_until_it_answers():
    async with HostileServer(status(500), status(503), answer("fine")) as server, endpoint_at(server) as endpoint:
        completion = await endpoint.complete(ASK, SAMPLING)
        figures = endpoint.statistics()
    assert completion.text == "fine"
    assert (figures.completed, figures.retries, figures.in_flight, figures.failed) == (1, 2, 0, 0)


async def test_a_reset_before_the_first_byte_is_retried_at_once_on_a_fresh_connection():
    behaviours = [answer(), reset(), answer("again"), reset(), answer("and again")]
    async with HostileServer(*behaviours) as server, endpoint_at(server, max_retries=0) as endpoint:
        texts = [(await endpoint.complete(ASK, SAMPLING)).text for _ in range(3)]
    assert texts == ["ok", "again", "and again"]
    # One; the same again, reset, and a fresh one; a new one, reset, and another fresh one.
    assert (len(server.requests), server.connections) == (5, 4)


async def test_an_idle_connection_that_the_server_closed_costs_no_failure():
    async with HostileServer(answer("a", close=True)) as server, endpoint_at(server, max_retries=0) as endpoint:
        for _ in range(3):
            assert (await endpoint.complete(ASK, SAMPLING)).text == "a"


async def test_a_reply_broken_off_in_the_middle_is_retried():
    async with HostileServer(broken(), answer("whole")) as server, endpoint_at(server) as endpoint:
        assert (await endpoint.complete(ASK, SAMPLING)).text == "whole"
        assert endpoint.statistics().retries == 1


async def test_a_server_that_is_not_there_fails_with_its_address():
    async with HostileServer() as server:
        pass
    async with endpoint_at(server, max_retries=1) as endpoint:
        with pytest.raises(
            EndpointError, match=r"server must answer: got .*POST http://127.0.0.1:\d+/v1/chat/completions, 1 retries"
        ):
            await endpoint.complete(ASK, SAMPLING)
        assert endpoint.statistics().failed == 1


async def test_a_hanging_server_times_out_within_the_deadline():
    async with HostileServer(hang()) as server, endpoint_at(server) as endpoint:
        with pytest.raises(EndpointTimeout, match="reply must arrive within"):
            await endpoint.complete(ASK, SAMPLING, timeout_s=0.05)
        assert (endpoint.statistics().timeouts, endpoint.statistics().in_flight) == (1, 0)


async def test_cancelling_a_request_closes_its_connection_and_the_next_one_works():
    async with HostileServer(hang(), answer("next")) as server, endpoint_at(server) as endpoint:
        task = asyncio.create_task(endpoint.complete(ASK, SAMPLING))
        await server.received()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert endpoint.statistics().in_flight == 0
        assert (await endpoint.complete(ASK, SAMPLING)).text == "next"


@pytest.mark.parametrize("code", [400, 401, 404, 422])
async def test_a_refusal_is_not_retried_and_says_why(code):
    async with HostileServer(status(code, "top_p must be <= 1")) as server, endpoint_at(server) as endpoint:
        with pytest.raises(EndpointRefused, match=f"got status {code}: top_p must be <= 1") as caught:
            await endpoint.complete(ASK, SAMPLING)
        assert endpoint.statistics().refused == 1
    assert not isinstance(caught.value, ContextOverflow)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "body",
    [
        b'{"error": {"message": "This model\'s maximum context length is 8 tokens.", "code": null}}',
        b'{"error": {"message": "no room", "code": "context_length_exceeded"}}',
        b'{"object": "error", "message": "The input is longer than the model\'s context length"}',
        b'{"detail": "prompt is too long"}',
    ],
)
async def test_an_overlong_prompt_is_told_from_other_refusals(body):
    async with HostileServer(raw(body, 400)) as server, endpoint_at(server) as endpoint:
        with pytest.raises(ContextOverflow):
            await endpoint.complete(ASK, SAMPLING)


def test_backoff_is_jittered_doubles_and_respects_retry_after():
    async def main():
        loop = asyncio.get_running_loop()
        busy = Reply(429, {"Retry-After": "30"}, b"")
        transport = FakeTransport(Reply(500, {}, b""), Reply(500, {}, b""), busy, good)
        endpoint = Endpoint("http://x/v1", model="m", transport=transport, random=Random(1))
        await endpoint.complete(ASK, SAMPLING)
        return loop.time()

    random = Random(1)
    waits = [0.25 * (0.5 + 0.5 * random.random()), 0.5 * (0.5 + 0.5 * random.random()), 30.0]
    assert run_virtual(main()) == pytest.approx(sum(waits))


def test_retrying_never_outlasts_the_deadline():
    async def main():
        endpoint = Endpoint(
            "http://x/v1", model="m", transport=FakeTransport(Reply(503, {"Retry-After": "60"}, b"busy"))
        )
        with pytest.raises(EndpointError, match="got status 503: busy"):
            await endpoint.complete(ASK, SAMPLING, timeout_s=10)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 0.0  # it gives up at once: the server itself says that 10 s are not enough


@pytest.mark.parametrize("wanted", ["inf", "1e400", "9" * 400, "Fri, 31 Dec 9999 23:59:59 GMT"])
async def test_a_server_that_asks_us_to_wait_for_ever_is_taken_to_mean_a_day(wanted):
    endpoint = Endpoint("http://x/v1", model="m", transport=FakeTransport(Reply(429, {"Retry-After": wanted}, b"")))
    with pytest.raises(EndpointError) as caught:
        await endpoint.complete(ASK, SAMPLING)
    assert caught.value.retry_after_s == 86_400


def _shorten(reply):
    reply["choices"][0]["logprobs"]["content"].pop()


def _set_logprob(value):
    def edit(reply):
        reply["choices"][0]["logprobs"]["content"][1]["logprob"] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_shorten, r"logprobs must align with token_ids: expected 3, got 2 \(choices\[0\]\.logprobs\)"),
        (lambda r: r["choices"][0]["policy_versions"].pop(), "policy_versions must align with token_ids: expected 3"),
        (_set_logprob(None), r"Expected `float`, got `null` - at `\$\.choices\[0\]\.logprobs\.content\[1\]\.logprob`"),
        (_set_logprob(0.5), r"Expected `float` <= 1e-06 - at `\$\.choices\[0\]\.logprobs\.content\[1\]\.logprob`"),
        (lambda r: r["choices"][0]["token_ids"].__setitem__(2, -1), r"`int` >= 0 - at `\$\.choices\[0\]\.token_ids"),
        (lambda r: r.update(prompt_token_ids="abc"), "prompt_token_ids must be an array: got b'\"abc\"'"),
        (lambda r: r["choices"].clear(), "choices must hold one completion"),
        (lambda r: r["choices"][0].pop("message"), r"missing required field `message` - at `\$\.choices"),
        (lambda r: r["choices"][0].update(token_ids=["a"]), r"Expected `int`, got `str` - at `\$\.choices"),
    ],
)
async def test_a_reply_that_contradicts_itself_is_malformed_and_names_the_place(edit, message):
    async with HostileServer(answer("ok", edit)) as server, endpoint_at(server) as endpoint:
        with pytest.raises(MalformedReply, match=message) as caught:
            await endpoint.complete(ASK, SAMPLING)
        assert endpoint.statistics().malformed == 1
    assert f"POST {server.url}/chat/completions" in str(caught.value)


@pytest.mark.parametrize("logprob", ["NaN", "-Infinity", "-1e999", "-1e300"])
async def test_logprobs_that_are_no_finite_number_are_malformed(logprob):
    body = (
        '{"choices": [{"message": {"content": "a"}, "token_ids": [1], "logprobs": {"content": [{"logprob": %s}]}}],'
        ' "prompt_token_ids": [1]}'
    )
    async with HostileServer(raw((body % logprob).encode())) as server, endpoint_at(server) as endpoint:
        with pytest.raises(MalformedReply, match="reply must be a completion object"):
            await endpoint.complete(ASK, SAMPLING)


@pytest.mark.parametrize("bad", [-1, 2**31, 1.5, None])
async def test_prompt_ids_are_checked_when_they_are_looked_at(bad):
    edit = lambda reply: reply["prompt_token_ids"].__setitem__(0, bad)
    async with HostileServer(answer("ok", edit)) as server, endpoint_at(server) as endpoint:
        completion = await endpoint.complete(ASK, SAMPLING)
        with pytest.raises(MalformedReply, match=r"token ids must be integers from 0 to 2\*\*31 - 1: .* at `\$\[0\]`"):
            list(completion.prompt_token_ids)


def test_non_finite_logprobs_are_found_wherever_they_come_from():
    check_logprobs([-1.0, 0.0, 1e-7], "here")
    for bad in (math.nan, -math.inf, -1e300, math.inf, 2e-6):
        with pytest.raises(MalformedReply, match=r"\(here\[1\]\)"):
            check_logprobs([-1.0, bad], "here")


@pytest.mark.parametrize("body", [b"<html>proxy</html>", b"", b"[]", b'{"choices": 3}', b"\xff\xfe"])
async def test_garbage_is_malformed_not_a_crash(body):
    async with HostileServer(raw(body)) as server, endpoint_at(server) as endpoint:
        with pytest.raises(MalformedReply, match="reply must be a completion object"):
            await endpoint.complete(ASK, SAMPLING)


@pytest.mark.parametrize("aborts", [1, 8])
async def test_a_generation_that_was_aborted_for_new_weights_is_sent_again_under_the_version_of_then(aborts):
    answers = iter(range(aborts + 1))

    def answer(path, request):
        reply = fake_reply(request, "a")
        reply["choices"][0].pop("policy_versions")  # as of servers that do not say
        if next(answers) < aborts:
            endpoint.policy_version += 1
            endpoint.model = f"policy-{endpoint.policy_version}"  # where each version has a name of its own
            reply["choices"][0]["finish_reason"] = "abort"
        return Reply(200, {}, msgspec.json.encode(reply))

    transport = FakeTransport(answer)
    endpoint = Endpoint("http://x/v1", model="m", transport=transport)
    completion = await endpoint.complete([Message("user", "hi")], Sampling())
    assert (completion.version_sent, completion.version_received) == (aborts, aborts)
    assert set(completion.versions) == {aborts}
    assert len(transport.requests) == aborts + 1
    assert transport.requests[-1][1]["model"] == f"policy-{aborts}"


async def test_an_aborted_generation_is_an_error_not_a_completion():
    edit = lambda reply: reply["choices"][0].update(finish_reason="abort")
    async with HostileServer(answer("half", edit)) as server, endpoint_at(server) as endpoint:
        with pytest.raises(EndpointError, match="abort"):
            await endpoint.complete(ASK, SAMPLING)


def _plain(reply):
    del reply["prompt_token_ids"]
    choice = reply["choices"][0]
    choice["logprobs"] = None
    del choice["token_ids"], choice["policy_versions"]


async def test_a_plain_server_still_completes_without_ids():
    async with HostileServer(answer("ok", _plain)) as server, endpoint_at(server) as endpoint:
        completion = await endpoint.complete(ASK, SAMPLING)
    assert (completion.text, completion.token_ids, completion.logprobs) == ("ok", (), ())


async def test_without_versions_from_the_server_tokens_get_the_version_at_send():
    async with (
        HostileServer(answer("ok", lambda r: r["choices"][0].pop("policy_versions"))) as server,
        endpoint_at(server, policy_version=6) as endpoint,
    ):
        task = asyncio.create_task(endpoint.complete(ASK, SAMPLING))
        await server.received()
        endpoint.policy_version = 7  # published while the request was under way
        completion = await task
    assert list(completion.versions) == [6, 6, 6]
    assert (completion.version_sent, completion.version_received) == (6, 7)


async def test_what_is_sampled_while_new_weights_are_checked_is_theirs():
    async with (
        HostileServer(answer("ok", lambda r: r["choices"][0].pop("policy_versions"))) as server,
        endpoint_at(server, policy_version=6, publisher=SimpleNamespace(serving_version=None)) as endpoint,
    ):
        assert list((await endpoint.complete(ASK, SAMPLING)).versions) == [6, 6, 6]
        endpoint.publisher.serving_version = 7  # in service, and not confirmed yet
        completion = await endpoint.complete(ASK, SAMPLING)
        assert list(completion.versions) == [7, 7, 7]
        assert (completion.version_sent, completion.version_received) == (7, 7)
        endpoint.publisher.serving_version = None  # and taken back
        assert list((await endpoint.complete(ASK, SAMPLING)).versions) == [6, 6, 6]


def test_one_endpoint_serves_two_event_loops_and_leaks_nothing():
    async def find_port():
        async with HostileServer() as server:
            return int(server.url.split(":")[2].split("/")[0])

    port = asyncio.run(find_port())
    endpoint = Endpoint(f"http://127.0.0.1:{port}/v1", model="m")

    async def main(text):
        async with HostileServer(answer(text), port=port):
            return (await endpoint.complete(ASK, SAMPLING)).text

    assert asyncio.run(main("one")) == "one"
    assert asyncio.run(main("two")) == "two"
    gc.collect()  # a session left open would warn here, and warnings are errors


async def test_generate_continues_ids_and_score_aligns_with_them():
    generated = (
        b'{"choices": [{"text": "ab", "finish_reason": "length", "token_ids": [5, 6], '
        b'"logprobs": {"token_logprobs": [-0.5, -0.25]}}]}'
    )
    scored = b'{"choices": [{"text": "", "logprobs": {"token_logprobs": [null, -1.5, -2.0]}}]}'
    async with HostileServer(raw(generated), raw(scored), raw(generated)) as server, endpoint_at(server) as endpoint:
        completion = await endpoint.generate([1, 2], SAMPLING)
        assert await endpoint.score([1, 2, 3]) == [0.0, -1.5, -2.0]
        with pytest.raises(MalformedReply, match="echoed log-probs must cover the prompt: expected 3, got 2"):
            await endpoint.score([1, 2, 3])
    assert (list(completion.token_ids), list(completion.logprobs)) == ([5, 6], [-0.5, -0.25])
    assert list(completion.prompt_token_ids) == [1, 2]
    assert server.requests[0]["prompt"] == [1, 2]
    assert (server.requests[1]["echo"], server.requests[1]["max_tokens"]) == (True, 0)


async def test_api_key_is_sent_and_never_shown():
    endpoint = Endpoint("http://127.0.0.1:1/v1/", model="m", api_key="secret")
    assert repr(endpoint) == "<Endpoint m at http://127.0.0.1:1/v1, version 0, 0 in flight, 0 completed, 0 retries>"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "", "http://"])
def test_a_url_that_cannot_work_is_refused_at_once(url):
    with pytest.raises(ConfigError, match="url must be"):
        Endpoint(url, model="m")


def claiming(*versions):
    return answer("ok", lambda reply: reply["choices"][0].update(policy_versions=list(versions)))


@pytest.mark.parametrize(("newest", "accepted"), [(3, True), (4, True), (5, False), (2**31 - 1, False), (-1, False)])
async def test_versions_from_the_future_and_negative_ones_are_malformed(newest, accepted):
    """One above the published version can serve already, while its publication is being confirmed."""
    async with HostileServer(claiming(2, newest, 3)) as server, endpoint_at(server, policy_version=3) as endpoint:
        if accepted:
            assert list((await endpoint.complete(ASK, SAMPLING)).versions) == [2, newest, 3]
            return
        with pytest.raises(MalformedReply, match=r"policy_versions must have been published|Expected `int` >= 0"):
            await endpoint.complete(ASK, SAMPLING)
        assert endpoint.statistics().malformed == 1


async def test_an_endpoint_that_was_told_no_version_takes_what_the_server_says_unless_it_publishes():
    async with HostileServer(claiming(9, 9, 9)) as server:
        async with endpoint_at(server) as endpoint:
            assert list((await endpoint.complete(ASK, SAMPLING)).versions) == [9, 9, 9]
        async with endpoint_at(server, publisher=EnginePublisher(server.url)) as endpoint:
            with pytest.raises(MalformedReply, match="expected at most 1, got 9"):
                await endpoint.complete(ASK, SAMPLING)


async def test_a_5xx_reply_nested_too_deep_to_read_is_retried_like_any_other(monkeypatch):
    monkeypatch.setattr("turngate.runtime.retries._FIRST_DELAY_S", 0.001)
    deep = raw(b'{"error": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 503)
    async with HostileServer(deep, answer("ok")) as server, endpoint_at(server) as endpoint:
        assert (await endpoint.complete(ASK, SAMPLING)).text == "ok"
        assert endpoint.statistics().retries == 1


async def test_a_stream_is_retried_until_its_first_byte_and_then_comes_as_it_is():
    pieces = []
    async with HostileServer(status(500), raw(b"data: 1\n\ndata: 2\n\n")) as server:
        async with Endpoint(server.url, model="m", random=Random(0)) as endpoint:
            async with endpoint.stream("/chat/completions", b"{}", timeout_s=30) as reply:
                assert endpoint.statistics().in_flight == 1
                pieces += [piece async for piece in reply]
            assert (endpoint.statistics().in_flight, endpoint.statistics().retries) == (0, 1)
    assert b"".join(pieces) == b"data: 1\n\ndata: 2\n\n"


async def test_a_stream_that_breaks_off_is_an_endpoint_error_and_is_not_retried():
    async with HostileServer(broken()) as server, Endpoint(server.url, model="m") as endpoint:
        with pytest.raises(EndpointError, match="must come whole"):
            async with endpoint.stream("/chat/completions", b"{}", timeout_s=30) as reply:
                assert [piece async for piece in reply] == [b"{"]
        assert (endpoint.statistics().in_flight, endpoint.statistics().failed, len(server.requests)) == (0, 1, 1)


async def test_an_error_carries_what_the_server_said_apart_from_where_it_is():
    async with HostileServer(status(429, "slow down", Retry_After="9")) as server:
        async with Endpoint(server.url, model="m", max_retries=0) as endpoint:
            with pytest.raises(EndpointError) as caught:
                await endpoint.request("/chat/completions", b"{}")
    assert (caught.value.status, caught.value.told, caught.value.retry_after_s) == (429, "slow down", 9.0)


async def test_credentials_in_the_url_are_secrets_and_are_not_shown():
    endpoint = Endpoint("http://me:pa%20ss@127.0.0.1:9/v1", model="m", max_retries=0)
    with pytest.raises(EndpointError) as caught:
        await endpoint.request("/chat/completions", b"{}")
    await endpoint.aclose()
    assert set(endpoint.secrets) == {"pa%20ss", "pa ss", "me:pa%20ss"}
    assert Endpoint("http://127.0.0.1:9/v1", model="m", api_key="sk-1").secrets == ("sk-1",)
    assert not any(secret in f"{caught.value} {endpoint!r} {endpoint.url}" for secret in endpoint.secrets)


async def test_a_server_that_repeats_our_key_does_not_get_it_into_what_is_told():
    async with HostileServer(status(401, "wrong key sk-very-secret")) as server:
        async with Endpoint(server.url, model="m", api_key="sk-very-secret") as endpoint:
            with pytest.raises(EndpointRefused, match=r"wrong key \[hidden\]") as caught:
                await endpoint.complete(ASK, SAMPLING)
    assert "sk-very-secret" not in f"{caught.value.told} {caught.value}"


async def test_a_reply_that_repeats_our_key_instead_of_an_answer_does_not_get_it_into_errors():
    transport = FakeTransport(Reply(200, {}, b"you are hunter2"))
    endpoint = Endpoint("http://x/v1", model="m", api_key="hunter2", transport=transport)
    with pytest.raises(MalformedReply, match=r"you are \[hidden\]") as raised:
        await endpoint.complete([Message("user", "hi")], Sampling())
    assert "hunter2" not in str(raised.value)
