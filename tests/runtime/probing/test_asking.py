import asyncio
import contextlib
import gzip

import pytest

from turngate.runtime.errors import ConfigError
from turngate.runtime.probing.asking import MAX_REQUESTS, Asker, as_ids, as_number, at, shown, together
from turngate.runtime.testing.fake_server import FakeServer


@contextlib.asynccontextmanager
async def serving(answer):
    """Let `answer(writer)` answer every request; yield the URL."""
    connections = set()

    async def handle(reader, writer):
        connections.add(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while await reader.readuntil(b"\r\n\r\n"):
                if not await answer(writer):
                    break

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def test_no_more_is_asked_than_a_probe_may():
    async with FakeServer() as server, Asker(server.url) as asker:
        answers = [await asker.get("/models") for _ in range(MAX_REQUESTS + 2)]
    assert len(server.requests) == asker.requests == MAX_REQUESTS
    assert [answer.ok for answer in answers[-3:]] == [True, False, False]
    assert "at most" in answers[-1].problem


async def test_a_server_that_lets_requests_hang_is_asked_no_more():
    asked = []

    async def hang(writer):
        asked.append(1)
        await asyncio.Event().wait()

    async with serving(hang) as url, Asker(url, timeout_s=0.02) as asker:
        answers = [await asker.get("/models") for _ in range(5)]
    assert len(asked) == asker.timeouts == 3
    assert "went unanswered" in answers[-1].problem


async def test_a_body_without_end_is_cut_off():
    async def pour(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        while True:
            writer.write(b"x" * 100_000)
            await writer.drain()

    async with serving(pour) as url, Asker(url) as asker:
        assert "more than" in (await asker.get("/models")).problem


async def test_compressed_bodies_are_not_unpacked():
    body = gzip.compress(b"{}" * 1_000_000)

    async def send(writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        return True

    async with serving(send) as url, Asker(url) as asker:
        answer = await asker.get("/models")
    assert "not a JSON object" in answer.problem
    assert len(answer.text) <= len(body)


async def test_redirects_are_not_followed():
    async def send(writer):
        writer.write(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/v1\r\nContent-Length: 0\r\n\r\n")
        return True

    async with serving(send) as url, Asker(url) as asker:
        assert (await asker.get("/models")).status == 302
    assert asker.requests == 1


@pytest.mark.parametrize("line", [b"nonsense\r\n\r\n", b"HTTP/1.1 200\r\nContent-Length: -5\r\n\r\n", b""])
async def test_what_is_no_http_is_a_problem_and_no_exception(line):
    async def send(writer):
        writer.write(line)
        await writer.drain()

    async with serving(send) as url, Asker(url, timeout_s=5) as asker:
        assert not (await asker.get("/models")).ok


async def test_a_cancelled_question_leaves_the_others_cancelled_too():
    done = []

    async def wait():
        try:
            await asyncio.Event().wait()
        finally:
            done.append(1)

    task = asyncio.create_task(together(wait(), wait()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [1, 1]


def test_what_servers_say_is_shown_without_control_characters_and_keys():
    assert shown("\x1b[31mred\n\tand  \ud800 wide") == "?[31mred and ? wide"
    assert shown("key sk-abcdefghijklmnop is wrong") == "key *** is wrong"
    assert len(shown("x" * 1000)) == 160


def test_values_shaped_otherwise_are_none():
    assert at({"a": [{"b": 1}]}, "a", 0, "b") == 1
    assert at({"a": [{"b": 1}]}, "a", 1, "b") is None
    assert at([1], "a") is None
    assert [as_ids(v) for v in ([1, 2], [True], [-1], [2**31], "12", [1.0])] == [[1, 2], [], [], [], [], []]
    assert [as_number(v) for v in (1, 1.5, True, "1", float("nan"), None)] == [1.0, 1.5, None, None, None, None]


@pytest.mark.parametrize(("url", "timeout_s"), [("ftp://x/v1", 1.0), ("localhost:8000", 1.0), ("http://x/v1", 0.0)])
def test_what_cannot_be_asked_is_refused(url, timeout_s):
    with pytest.raises(ConfigError):
        Asker(url, timeout_s=timeout_s)
