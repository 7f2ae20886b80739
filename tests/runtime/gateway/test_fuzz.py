"""Requests as nobody should send them: a 4xx, and nothing has changed."""

import asyncio
import contextlib
import io

import aiohttp
import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.runtime.gateway.doors import ADMIN, CHAT, HI, TOOLS, door_to
from tests.runtime.gateway.test_server import CHAT_PATH

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
GOOD = {
    "/v1/chat/completions": {**CHAT, "tools": TOOLS, "n": 2, "stop": ["x"], "temperature": 0.5},
    "/v1/completions": {"model": "m", "prompt": "hi", "max_tokens": 4, "logprobs": 1},
    "/v1/responses": {"model": "m", "input": HI, "instructions": "be", "max_output_tokens": 4},
}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = """messages model n stop stream temperature top_p max_tokens tools prompt input seed echo logprobs text
    previous_response_id stream_options tool_choice instructions"""
fields = st.sampled_from(NAMES.split())


async def unchanged(door, session):
    """Nothing was recorded or left under way."""
    assert session.turns == 0
    guest = next(iter(door.gateway._guests), None)
    assert guest is None or guest.exchanges.attached == 0
    assert door.gateway.statistics().in_flight == 0


async def check_refused(path, data, *, key=None, headers=None):
    async with door_to() as door:
        session = door.session()
        status, told, _ = await door.post(path, session.key if key is None else key, data=data, headers=headers)
        assert 400 <= status < 500, (status, told)
        assert told["error"]["message"]
        await unchanged(door, session)
        assert door.server.requests == []


few = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])


@few
@given(st.sampled_from(PATHS), st.data())
async def test_truncated_requests(path, data):
    whole = msgspec.json.encode(GOOD[path])
    await check_refused(path, whole[: data.draw(st.integers(0, len(whole) - 1))])


@few
@given(st.sampled_from(PATHS), st.binary(max_size=200))
async def test_bytes_that_are_no_json(path, body):
    await check_refused(path, b"{" + body.replace(b"}", b"") + b"\xff")


@few
@given(st.sampled_from(PATHS), st.data())
async def test_bad_utf8_anywhere(path, data):
    whole = msgspec.json.encode({**GOOD[path], "unknown": "field"})
    at = data.draw(st.sampled_from([i for i, byte in enumerate(whole) if chr(byte).isalpha()]))
    await check_refused(path, whole[:at] + data.draw(st.sampled_from([b"\xff", b"\xc3", b"\xed\xa0\x80"])) + whole[at:])


@few
@given(st.sampled_from(PATHS), fields, json_values)
async def test_any_value_in_any_field_is_an_answer_or_a_refusal_and_never_a_bug(path, name, value):
    async with door_to() as door:
        session = door.session()
        status, told, _ = await door.post(path, session.key, {**GOOD[path], name: value})
        assert status == 200 or 400 <= status < 500, (status, told)
        if status != 200:
            await unchanged(door, session)


@few
@given(st.sampled_from(PATHS), st.booleans(), st.integers(900, 200_000))
async def test_deep_nesting(path, is_unknown, depth):
    name = "anything" if is_unknown else {PATHS[0]: "messages", PATHS[1]: "prompt", PATHS[2]: "input"}[path]
    rest = {key: value for key, value in GOOD[path].items() if key != name}
    body = msgspec.json.encode({**rest, name: 0}).removesuffix(b"0}") + b"[" * depth + b"]" * depth + b"}"
    async with door_to() as door:
        session = door.session()
        status, told, _ = await door.post(path, session.key, data=body)
        # In a field that nobody knows, what can be read at all is the server's to judge.
        assert 400 <= status < 500 or (is_unknown and status == 200), (status, told)


@few
@given(st.sampled_from(PATHS), st.text(max_size=40))
async def test_wrong_keys(path, key):
    with contextlib.suppress(ValueError):  # a client refuses to send some characters
        await check_refused(path, msgspec.json.encode(GOOD[path]), headers={"Authorization": f"Bearer {key}"})


@few
@given(st.sampled_from(["", "/reward", "/end"]), st.binary(max_size=50))
async def test_the_routes_of_sessions(route, body):
    async with door_to() as door:
        session = door.session()
        path = f"/v1/sessions/{session.key}{route}" if route else "/v1/sessions"
        status, _, _ = await door.post(path, ADMIN, data=b"[" + body)
        assert 400 <= status < 500
        assert (session.state, len(door.gateway.sessions)) == ("open", 1)


async def test_a_hundred_megabytes():
    size = 100 * 1024 * 1024

    async def huge():
        for _ in range(size // 65536):
            yield b" " * 65536

    async with door_to() as door:
        session = door.session()
        for data in (io.BytesIO(b" " * size), huge()):
            # The answer comes before the body is through; a client may notice only that the connection is closed.
            with contextlib.suppress(aiohttp.ClientError):
                assert (await door.post(CHAT_PATH, session.key, data=data))[0] == 413
        assert (await door.post(CHAT_PATH, session.key))[0] == 200
        assert door.gateway.statistics().requests == {f"{CHAT_PATH} 200": 1, f"{CHAT_PATH} 413": 2}


async def test_heads_and_bodies_that_come_drop_by_drop_are_cut_off():
    async with door_to(body_timeout_s=0.1, keep_alive_s=0.1) as door:
        session = door.session()
        host, port = door.gateway.url.removeprefix("http://").removesuffix("/v1").split(":")
        head = (
            f"POST {CHAT_PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\n"
            "Content-Type: application/json\r\nContent-Length: 1000\r\n"
        )
        for sent, status in ((head, b""), (f"{head}\r\n{{", b"HTTP/1.1 408")):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent.encode())
            async with asyncio.timeout(20):
                assert (await reader.read()).startswith(status)
            writer.close()
            await writer.wait_closed()
        await unchanged(door, session)


async def test_nonsense_in_place_of_http():
    async with door_to() as door:
        host, port = door.gateway.url.removeprefix("http://").removesuffix("/v1").split(":")
        for sent in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"\x00" * 100_000):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent + b"\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(20):
                    assert (await reader.read())[9:10] == b"4"
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        assert (await door.post(CHAT_PATH, door.session().key))[0] == 200
