"""HTTP on aiohttp: as many connections as requests, none kept too long, none leaked."""

import asyncio
import gc
import resource

import msgspec
import pytest

from turngate.runtime.errors import MalformedReply
from turngate.runtime.testing import HostileServer
from turngate.runtime.testing.hostile import answer, broken, hang, raw, reset, status
from turngate.runtime.transport import HttpTransport, raise_file_limit

BODY = msgspec.json.encode({"model": "m", "messages": []})


async def post(transport, timeout_s=30.0):
    return await transport.post("/chat/completions", BODY, timeout_s=timeout_s)


async def test_hundreds_of_requests_are_under_way_at_once():
    """aiohttp's own limit of 100 connections would serialise them silently."""
    arrived, everyone = 0, asyncio.Event()

    async def wait_for_all(request, writer):
        nonlocal arrived
        arrived += 1
        if arrived == 300:
            everyone.set()
        await everyone.wait()
        return await answer()(request, writer)

    async with HostileServer(wait_for_all) as server:
        transport = HttpTransport(server.url)
        replies = await asyncio.gather(*(post(transport) for _ in range(300)))
        await transport.aclose()
    assert {reply.status for reply in replies} == {200}


async def test_connections_are_reused_one_after_the_other():
    async with HostileServer() as server:
        transport = HttpTransport(server.url)
        for _ in range(5):
            await post(transport)
        await transport.aclose()
        assert server.connections == 1


async def test_replies_of_any_status_come_back_whole_with_case_insensitive_headers():
    async with HostileServer(status(429, "slow down", Retry_After="7")) as server:
        transport = HttpTransport(server.url)
        reply = await post(transport)
        await transport.aclose()
    assert (reply.status, reply.headers["retry-after"]) == (429, "7")
    assert b"slow down" in reply.body


async def test_redirects_are_not_followed():
    async with HostileServer(status(302, "elsewhere", Location="http://127.0.0.1:9/")) as server:
        transport = HttpTransport(server.url)
        assert (await post(transport)).status == 302
        await transport.aclose()


async def test_a_server_that_only_resets_is_a_connection_error_after_one_retry():
    async with HostileServer(reset()) as server:
        transport = HttpTransport(server.url)
        with pytest.raises(ConnectionError):
            await post(transport)
        await transport.aclose()
        assert len(server.requests) == 2


async def test_a_timeout_is_no_connection_error():
    async with HostileServer(hang()) as server:
        transport = HttpTransport(server.url)
        with pytest.raises(TimeoutError):
            await post(transport, timeout_s=0.02)
        await transport.aclose()


def endless(code):
    """Answer with a body of no announced length that never ends."""

    async def behave(request, writer):
        writer.write(b"HTTP/1.1 %d X\r\nTransfer-Encoding: chunked\r\n\r\n" % code)
        while True:
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()

    return behave


@pytest.mark.parametrize("behaviour", [endless(200), raw(b"x" * 200_001)], ids=["endless", "announced"])
async def test_a_reply_longer_than_any_can_be_is_malformed_and_not_read_to_its_end(behaviour):
    async with HostileServer(behaviour, raw(b"y" * 200_000)) as server:
        transport = HttpTransport(server.url, max_body_bytes=200_000)
        with pytest.raises(MalformedReply, match="reply must have at most 200000 bytes"):
            await post(transport)
        assert len((await post(transport)).body) == 200_000
        await transport.aclose()


@pytest.mark.parametrize("behaviour", [endless(500), raw(b"x" * 200_000, 500)], ids=["endless", "announced"])
async def test_of_an_error_reply_only_the_start_is_read(behaviour):
    async with HostileServer(behaviour) as server:
        transport = HttpTransport(server.url)
        reply = await post(transport)
        await transport.aclose()
    assert (reply.status, len(reply.body)) == (500, 64 * 1024)


async def test_a_reply_that_does_not_say_how_long_it_is_comes_whole_and_the_connection_lives_on():
    async def chunked(request, writer):
        writer.write(b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await writer.drain()
        writer.write(b"2\r\nde\r\n0\r\n\r\n")
        await writer.drain()
        return True

    async with HostileServer(chunked) as server:
        transport = HttpTransport(server.url)
        assert [(await post(transport)).body for _ in range(2)] == [b"abcde"] * 2
        await transport.aclose()
        assert server.connections == 1


def test_a_loop_that_ends_without_aclose_leaves_no_session_open():
    async def main():
        async with HostileServer(reset(), answer()) as server:
            await post(HttpTransport(server.url))

    asyncio.run(main())
    gc.collect()  # an unclosed session warns here, and warnings are errors


async def test_closed_it_opens_again_when_needed_and_closing_twice_is_fine():
    async with HostileServer() as server:
        transport = HttpTransport(server.url)
        await transport.aclose()
        await post(transport)
        await transport.aclose()
        await transport.aclose()
        assert (await post(transport)).status == 200
        await transport.aclose()


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_streamed_reply_comes_piece_by_piece_and_its_connection_lives_on():
    go_on = asyncio.Event()

    async def in_two(request, writer):
        writer.write(b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await writer.drain()
        await go_on.wait()
        writer.write(b"2\r\nde\r\n0\r\n\r\n")
        await writer.drain()
        return True

    async with HostileServer(in_two) as server:
        transport = HttpTransport(server.url)
        reply = await transport.open("/chat/completions", BODY, timeout_s=30)
        first = await reply.read(timeout_s=30)
        go_on.set()
        rest = await reply.read(timeout_s=30), await reply.read(timeout_s=30)
        reply.close()
        await post(transport)
        await transport.aclose()
        assert server.connections == 1
    assert (reply.status, first, rest) == (200, b"abc", (b"de", b""))


async def read_all(reply, timeout_s):
    while await reply.read(timeout_s=timeout_s):
        pass


async def test_a_stream_that_stalls_times_out_and_one_that_breaks_off_is_a_connection_error():
    async def stall(request, writer):
        writer.write(b"HTTP/1.1 200 X\r\nContent-Length: 9\r\n\r\nabc")
        await writer.drain()
        return await hang()(request, writer)

    async with HostileServer(stall, broken()) as server:
        transport = HttpTransport(server.url)
        for error in (TimeoutError, ConnectionError):
            reply = await transport.open("/chat/completions", BODY, timeout_s=30)
            with pytest.raises(error):
                await read_all(reply, 0.02)
            reply.close()
        await transport.aclose()


async def test_an_error_in_place_of_a_stream_is_read_at_once():
    async with HostileServer(status(503, "later", Retry_After="2")) as server:
        transport = HttpTransport(server.url)
        reply = await transport.open("/chat/completions", BODY, timeout_s=30)
        await transport.aclose()
    assert (reply.status, reply.headers["retry-after"], b"later" in reply.body) == (503, "2", True)
    assert await reply.read(timeout_s=1) == b""


async def test_a_stream_longer_than_any_can_be_is_read_no_further():
    async with HostileServer(endless(200)) as server:
        transport = HttpTransport(server.url, max_body_bytes=200_000)
        reply = await transport.open("/chat/completions", BODY, timeout_s=30)
        with pytest.raises(MalformedReply, match="at most 200000 bytes"):
            await read_all(reply, 30)
        reply.close()
        await transport.aclose()
