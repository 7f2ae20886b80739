"""A thousand sessions whose agents die in every way there is leave nothing behind."""

import asyncio
import gc
import os
import random
from pathlib import Path

import aiohttp

from tests.runtime.gateway.doors import CHAT, door_to
from tests.runtime.gateway.test_server import CHAT_PATH, error, until
from turngate.envs.base import End

STREAM = {**CHAT, "stream": True}


class Deaths:
    """Ways to die, by name."""

    def __init__(self, door, rng):
        self.door, self.rng = door, rng
        self.url = f"{door.gateway.url}/chat/completions"

    async def ends_well(self, session, http):
        await self.read(session, http, CHAT)

    async def ends_a_stream_well(self, session, http):
        await self.read(session, http, STREAM)

    async def hangs_up_before_the_reply(self, session, http):
        task = asyncio.create_task(self.read(session, http, CHAT))
        for _ in range(self.rng.randrange(40)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def hangs_up_in_a_stream(self, session, http):
        async with http.post(self.url, json=STREAM, headers=self.headers(session)) as reply:
            await reply.content.readany()
            reply.close()

    async def hangs_up_and_comes_again(self, session, http):
        await self.hangs_up_before_the_reply(session, http)
        await self.read(session, http, CHAT)

    async def is_sealed_meanwhile(self, session, http):
        task = asyncio.create_task(self.read(session, http, self.rng.choice([CHAT, STREAM])))
        for _ in range(self.rng.randrange(40)):
            await asyncio.sleep(0)
        session.seal(End.cancelled)
        await asyncio.gather(task, return_exceptions=True)

    async def talks_after_its_end(self, session, http):
        session.seal()
        await self.read(session, http, CHAT)

    async def sends_nonsense(self, session, http):
        await self.read(session, http, {"messages": self.rng.choice([1, [], [{}], "x"])})

    async def sends_half_a_body(self, session, http):
        host, port = self.url.removeprefix("http://").split("/")[0].split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            f"POST {CHAT_PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\n"
            "Content-Type: application/json\r\nContent-Length: 500\r\n\r\n{".encode()
        )
        await writer.drain()
        writer.transport.abort()

    async def meets_a_failure(self, session, http):
        self.door.server.failures.append(error(self.rng.choice([400, 429, 500]), "no"))
        await self.read(session, http, CHAT)

    async def sends_many_at_once(self, session, http):
        tasks = [asyncio.create_task(self.read(session, http, {**CHAT, "n": 2})) for _ in range(4)]
        await tasks[0]
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def read(self, session, http, body):
        async with http.post(self.url, json=body, headers=self.headers(session)) as reply:
            await reply.read()

    def headers(self, session):
        return {"Authorization": f"Bearer {session.key}"}


WAYS = [name for name in vars(Deaths) if "_" in name and not name.startswith("__")]


async def test_a_thousand_sessions_that_die_in_every_way_leave_nothing_behind():
    rng = random.Random(1)
    async with door_to("one two three") as door:
        deaths = Deaths(door, rng)
        await door.post(CHAT_PATH, door.session().key)  # opens what stays open
        tasks_before = len(asyncio.all_tasks())
        slots = asyncio.Semaphore(50)
        turns = 0

        async def live(number):
            nonlocal turns
            async with slots, aiohttp.ClientSession() as http:
                timeout_s = 0.05 if number % 7 == 0 else None
                session = door.session(timeout_s=timeout_s)
                await getattr(deaths, WAYS[number % len(WAYS)])(session, http)
                if timeout_s is None:
                    turns += len(session.seal().turns)
                # The others are forgotten by their owners: their deadline ends them.

        async with asyncio.TaskGroup() as group:
            for number in range(1000):
                group.create_task(live(number))
        await until_soon(lambda: len(door.gateway.sessions) == 1)
        await until_soon(lambda: len(door.gateway._guests) == 1)
        await until_soon(lambda: door.gateway.statistics().in_flight == 0)
        await until_soon(lambda: door.server.open == 0)
        await until_soon(lambda: door.endpoint.statistics().in_flight == 0)
        await until_soon(lambda: len(asyncio.all_tasks()) <= tasks_before)
        statistics = door.gateway.sessions.statistics()
        assert (statistics.created, statistics.open) == (1001, 1)
        assert turns > 200
        assert not any("500" in name for name in door.gateway.statistics().requests)


async def test_opening_and_closing_gateways_leaves_no_file_open():
    def open_files():
        return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0

    async def once():
        async with door_to() as door:
            await door.post(CHAT_PATH, door.session().key, STREAM)
            door.server.before_answer = asyncio.Event().wait
            task = asyncio.create_task(door.post(CHAT_PATH, door.session().key))
            await until(lambda: door.server.open == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    await once()
    gc.collect()
    before, tasks = open_files(), len(asyncio.all_tasks())
    for _ in range(5):
        await once()
    await asyncio.sleep(0.05)  # closed transports let go of their sockets in the next turns of the loop
    gc.collect()
    assert open_files() <= before
    assert len(asyncio.all_tasks()) == tasks


async def until_soon(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - deadlines on the real clock
            await asyncio.sleep(0.01)
