"""What lets us in upstream stays here: no agent, no record and no log has it, whatever the server says."""

import logging

import msgspec
import pytest
from aiohttp import web

from tests.runtime.gateway.doors import ADMIN, CHAT, door_to
from tests.runtime.gateway.test_server import CHAT_PATH, error
from turngate.runtime.gateway import GatewayConfig
from turngate.runtime.transcript import trajectory_json

KEY = "sk-upstream-5ecret"


def leaks(status):
    """Answer as a server does that is careless with what it was given."""
    return error(status, f"Incorrect API key provided: {KEY}. You sent Authorization: Bearer {KEY}")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_upstreams_key_reaches_neither_agent_nor_record_nor_log(caplog, stream):
    caplog.set_level(logging.DEBUG)
    async with door_to(endpoint={"api_key": KEY, "max_retries": 0}) as door:
        session = door.session()
        seen = []
        for reply in (
            *[leaks(status) for status in (400, 401, 403, 404, 422, 429, 500, 503)],
            web.Response(body=f"key {KEY} <html>".encode()),
            web.Response(body=f'data: {{"error": {{"message": "{KEY}"}}}}\n\n'.encode()),
        ):
            door.server.failures = [reply]
            seen.append(repr(await door.post(CHAT_PATH, session.key, {**CHAT, "stream": stream})))
            door.server.failures = []
        seen.append(repr(await door.post(CHAT_PATH, session.key, {**CHAT, "stream": stream})))
        assert door.server.headers[0]["Authorization"] == f"Bearer {KEY}"
        door.server.failures = [leaks(400)]
        await door.post(CHAT_PATH, session.key)
        seen += [repr(door.gateway), repr(session), repr(door.endpoint), repr(door.gateway.statistics())]
        seen.append(trajectory_json(session.seal()).decode())
    assert KEY not in "".join(seen)
    assert KEY not in caplog.text
    assert "[hidden]" in "".join(seen)


async def test_an_episode_that_ends_with_the_servers_failure_does_not_tell_the_key():
    async with door_to(endpoint={"api_key": KEY, "max_retries": 0}) as door:
        session = door.session()
        door.server.failures = [leaks(500)]
        await door.post(CHAT_PATH, session.key)
        trajectory = session.seal()
    assert "[hidden]" in trajectory.error
    assert KEY not in trajectory_json(trajectory).decode()


async def test_what_agents_send_of_themselves_does_not_reach_the_upstream():
    async with door_to(endpoint={"api_key": KEY}) as door:
        session = door.session()
        headers = {"x-turngate-role": "critic", "Cookie": "me=1", "OpenAI-Organization": "org"}
        await door.post(CHAT_PATH, session.key, headers=headers)
        sent = door.server.headers[0]
    assert sent["Authorization"] == f"Bearer {KEY}"
    assert not any(session.key in value or ADMIN in value for value in sent.values())
    assert not {"Cookie", "OpenAI-Organization", "x-turngate-role"} & set(sent)


async def test_session_keys_are_in_no_log_and_no_record(caplog):
    caplog.set_level(logging.DEBUG)
    async with door_to() as door:
        session = door.session()
        door.server.failures = [web.Response(body=b"nonsense")]
        for _ in range(2):
            await door.post(CHAT_PATH, session.key)
        line = trajectory_json(session.seal()).decode()
        door.server.failures = [web.Response(body=b"nonsense")]
        _, told, _ = await door.post(CHAT_PATH, session.key)
    assert session.key not in caplog.text + line + msgspec.json.encode(told).decode()
    assert ADMIN not in caplog.text


def test_settings_are_shown_without_the_admin_key():
    shown = repr(GatewayConfig(admin_key="very-secret", port=8100))
    assert ("port=8100" in shown, "very-secret" in shown) == (True, False)
