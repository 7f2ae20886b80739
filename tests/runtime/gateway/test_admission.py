"""Keys that open sessions of their own, and when those end."""

import asyncio
from typing import Any

import pytest

from tests.runtime.gateway.doors import ADMIN, CHAT, door_to
from tests.runtime.gateway.test_server import CHAT_PATH, until
from turngate.envs.base import End
from turngate.runtime.events import Events, RolloutFinished


def recorded(table):
    finished = []
    table["events"] = Events()
    table["events"].subscribe(RolloutFinished, lambda event: finished.append(event.trajectory))
    return finished


async def test_each_key_is_a_session_of_its_own():
    async with door_to(sessions_by_key=True, admin_key=None) as door:
        for key in ("one", "two", "one:critic", "one", "", ""):
            assert (await door.post(CHAT_PATH, key))[0] == 200
        sessions = {guest.session.key: guest.session for guest in door.gateway._guests}
        assert {key: session.turns for key, session in sessions.items()} == {"one": 3, "two": 1, "anonymous": 2}
        assert [turn.role for turn in sessions["one"].seal().turns] == ["", "critic", ""]


async def test_with_an_admin_key_only_that_key_and_names_behind_it_open_sessions():
    async with door_to(sessions_by_key=True) as door:
        for key in (ADMIN, f"{ADMIN}.one", f"{ADMIN}.two:critic"):
            assert (await door.post(CHAT_PATH, key))[0] == 200
        for key in ("one", "", f"{ADMIN}x", f"{ADMIN}.", ADMIN[:-1], f"x{ADMIN}"):
            assert (await door.post(CHAT_PATH, key))[0] == 401
        assert len(door.gateway.sessions) == 3


async def test_the_name_behind_the_admin_key_names_the_episode_and_no_key_does():
    for config, key, told in (
        ({}, f"{ADMIN}.basket-7", ("basket-7", "basket-7.1")),
        ({}, f"{ADMIN}.not a name", ("agent-1", "agent-1")),
        ({}, ADMIN, ("agent-1", "agent-1")),
        ({"admin_key": None}, f"{ADMIN}.basket-7", ("agent-1", "agent-1")),
    ):
        table: dict[str, Any] = {}
        finished = recorded(table)
        async with door_to(sessions_by_key=True, table=table, **config) as door:
            await door.post(CHAT_PATH, key)
            door.gateway.seal_sessions()
        assert (finished[0].task.id, finished[0].id) == told


async def test_made_up_keys_do_not_open_sessions_without_end():
    async with door_to(sessions_by_key=True, admin_key=None, max_sessions=2) as door:
        statuses = [(await door.post(CHAT_PATH, key))[0] for key in ("one", "two", "three", "one")]
        assert statuses == [200, 200, 429, 200]
        door.gateway.sessions.find("one").seal()
        assert (await door.post(CHAT_PATH, "three"))[0] == 200


async def test_who_waits_for_a_reply_when_all_sessions_are_ended_has_not_failed():
    table: dict[str, Any] = {}
    finished = recorded(table)
    async with door_to(sessions_by_key=True, admin_key=None, table=table) as door:
        await door.post(CHAT_PATH, "done")
        gate = asyncio.Event()
        door.server.before_answer = gate.wait
        waiting = asyncio.create_task(door.post(CHAT_PATH, "waits"))
        await until(lambda: door.server.open == 1)
        assert door.gateway.seal_sessions() == 2
        assert (await waiting)[0] == 409
    assert [trajectory.end for trajectory in finished] == [End.failure, End.cancelled]
    assert "the gateway was closed while it was asked" in finished[1].error


async def test_an_idle_session_ends_and_its_key_begins_a_new_one():
    table: dict[str, Any] = {}
    finished = recorded(table)
    async with door_to(sessions_by_key=True, admin_key=None, idle_timeout_s=0.05, table=table) as door:
        await door.post(CHAT_PATH, "one")
        await until_finished(finished, 1)
        await door.post(CHAT_PATH, "one")
        await until_finished(finished, 2)
        assert (len(door.gateway.sessions), len(door.gateway._guests)) == (0, 0)
    assert [len(trajectory.turns) for trajectory in finished] == [1, 1]
    assert finished[0].id != finished[1].id


async def test_a_session_that_waits_for_the_model_is_not_idle():
    async with door_to(sessions_by_key=True, admin_key=None, idle_timeout_s=0.05) as door:
        gate = asyncio.Event()
        door.server.before_answer = gate.wait
        waiting = asyncio.create_task(door.post(CHAT_PATH, "one"))
        await until(lambda: door.server.open == 1)
        await asyncio.sleep(0.15)  # past its idle time, which only the clock can show
        gate.set()
        assert (await waiting)[0] == 200


async def test_sessions_that_others_have_opened_have_no_idle_time():
    async with door_to(sessions_by_key=True, admin_key=None, idle_timeout_s=0.05) as door:
        session = door.session()
        await door.post(CHAT_PATH, session.key)
        await asyncio.sleep(0.15)
        assert session.state == "open"


@pytest.mark.parametrize("body", [{"messages": []}, {"messages": 1}])
async def test_a_bad_request_of_an_unknown_key_leaves_a_session_without_turns(body):
    async with door_to(sessions_by_key=True, admin_key=None) as door:
        assert (await door.post(CHAT_PATH, "one", {**CHAT, **body}))[0] == 400
        assert next(iter(door.gateway._guests)).session.turns == 0


async def until_finished(finished, count):
    async with asyncio.timeout(20):
        while len(finished) < count:  # noqa: ASYNC110 - the idle clock is the loop's own
            await asyncio.sleep(0.01)
