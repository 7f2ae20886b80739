"""Sessions for agents and harnesses that speak nothing but HTTP."""

import msgspec
import pytest

from tests.runtime.gateway.doors import ADMIN, door_to
from tests.runtime.gateway.test_server import CHAT_PATH
from turngate.envs.base import End
from turngate.runtime.types import Trajectory

TASK = {"id": "shop-1", "prompt": "buy it", "data": {"goal": [1]}}


async def open_session(door, **asked):
    status, told, _ = await door.post("/v1/sessions", ADMIN, asked)
    assert status == 200
    return told


async def test_an_episode_from_beginning_to_end_over_http():
    async with door_to() as door:
        opened = await open_session(door, task=TASK, id="ep-1", seed=7)
        assert opened["base_url"] == door.gateway.url
        path = opened["session_url"].removeprefix(door.gateway.url.removesuffix("/v1"))
        assert (await door.post(f"{path}/chat/completions", "EMPTY"))[0] == 200
        one = f"/v1/sessions/{opened['key']}"
        assert (await door.get(one, ADMIN))[1] == {"id": "ep-1", "state": "open", "turns": 1}
        assert (await door.post(f"{one}/reward", ADMIN, {"value": 0.5, "name": "progress", "turn": 0}))[0] == 200
        assert (await door.post(f"{one}/reward", ADMIN, {"value": 1}))[0] == 200
        assert (await door.get(f"{one}/trajectory", ADMIN))[0] == 409
        _, ended, _ = await door.post(f"{one}/end", ADMIN, {})
        assert (ended["end"], ended["reward"], ended["outcome"], ended["trainable"]) == ("success", 1.5, 1.0, True)
        _, told, _ = await door.get(f"{one}/trajectory", ADMIN)
        trajectory = msgspec.convert(told, Trajectory)
        assert (await door.post(CHAT_PATH, opened["key"]))[0] == 409
        assert (await door.get(one, ADMIN))[1] == (await door.post(f"{one}/end", ADMIN, {"end": "failure"}))[1]
    assert (trajectory.id, trajectory.seed, trajectory.task.data, trajectory.end) == (
        "ep-1",
        7,
        {"goal": [1]},
        End.success,
    )
    assert trajectory.turns[0].rewards == {"progress": 0.5, "outcome": 1.0}


async def test_sessions_without_a_seed_get_different_replies_and_a_seed_gives_equal_ones():
    async with door_to(sessions_by_key=True) as door:
        opened = [
            (await door.post("/v1/sessions", ADMIN, body))[1]["key"] for body in ({}, {}, {"seed": 7}, {"seed": 7})
        ]
        for key in (*opened, f"{ADMIN}.one", f"{ADMIN}.two"):
            await door.post("/v1/chat/completions", key)
        seeds = [request["seed"] for request in door.server.requests]
        assert seeds[2] == seeds[3]
        assert len(set(seeds)) == 5


async def test_a_session_takes_sampling_limits_and_a_deadline_of_its_own():
    async with door_to() as door:
        asked = {"task": "buy", "sampling": {"temperature": 0.5, "max_tokens": 3}, "limits": {"max_turns": 1}}
        opened = await open_session(door, **asked, timeout_s=100)
        await door.post(CHAT_PATH, opened["key"])
        assert (await door.post(CHAT_PATH, opened["key"]))[0] == 409
        assert (door.server.requests[0]["temperature"], door.server.requests[0]["max_tokens"]) == (0.5, 3)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"task": 7}, "task"),
        ({"task": {"prompt": "no id"}}, "task.id"),
        ({"seed": "x"}, "seed"),
        ({"sampling": {"temperature": -1}}, "sampling"),
        ({"limits": {"max_turns": 0}}, "limits"),
        ({"tsak": "typo"}, None),
    ],
)
async def test_a_session_that_cannot_be_is_a_bad_request(asked, param):
    async with door_to() as door:
        status, told, _ = await door.post("/v1/sessions", ADMIN, asked)
        assert (status, told["error"]["param"]) == (400, param)
        assert len(door.gateway.sessions) == 0


@pytest.mark.parametrize("asked", [{"value": "much"}, {"value": 1, "turn": 5}, {}, {"value": 1e400}])
async def test_a_reward_that_cannot_be_changes_nothing(asked):
    async with door_to() as door:
        session = door.session()
        data = msgspec.json.encode(asked).replace(b"null", b"1e400")
        status, _, _ = await door.post(f"/v1/sessions/{session.key}/reward", ADMIN, data=data)
        assert status == 400
        assert session.seal().reward == 0


async def test_an_agents_key_does_not_reward_it_unless_that_is_wanted():
    async with door_to() as door:
        session = door.session()
        one = f"/v1/sessions/{session.key}"
        assert (await door.post(f"{one}/reward", session.key, {"value": 1}))[0] == 401
        assert (await door.post(f"{one}/end", session.key, {}))[0] == 401
        assert (await door.get(one, session.key))[0] == 401
        assert (await door.post("/v1/sessions", session.key, {}))[0] == 401
        assert session.seal().reward == 0
    async with door_to(agents_may_reward=True) as door:
        session = door.session()
        assert (await door.post(f"/v1/sessions/{session.key}/reward", session.key, {"value": 1}))[0] == 200
        assert (await door.post("/v1/sessions", session.key, {}))[0] == 401
        assert session.seal().end is End.success


async def test_unknown_sessions_are_not_found():
    async with door_to() as door:
        assert (await door.get("/v1/sessions/nobody", ADMIN))[0] == 404
        assert (await door.post("/v1/sessions/nobody/reward", ADMIN, {"value": 1}))[0] == 404
        assert (await door.post("/v1/sessions/nobody/end", ADMIN, {}))[0] == 404


async def test_trajectories_are_kept_for_the_newest_sessions_only():
    async with door_to(kept_trajectories=1) as door:
        keys = [(await open_session(door))["key"] for _ in range(2)]
        for key in keys:
            await door.post(f"/v1/sessions/{key}/end", ADMIN, {})
        statuses = [(await door.get(f"/v1/sessions/{key}/trajectory", ADMIN))[0] for key in keys]
    assert statuses == [409, 200]
