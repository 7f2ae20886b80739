"""What the gateway costs in CPU: a recorded request through it against one through a bare aiohttp proxy.

Agents in one process play episodes of chat completions against a proxy in this one, which passes them on to an
OpenAI-compatible server in a third that answers at once from memory. The bare proxy reads the body, posts it, and
writes the reply; the gateway also finds the session, edits the request, strips the reply, and records the turn with
its tokens. Both are measured in this process, in turns, and compared by CPU time. Streamed replies have one chunk a
token, and each comes by itself.

Prints one JSON object, last line: `bare_us` and `gateway_us` (CPU microseconds per request, medians over rounds),
`extra_ms` (what the gateway adds), `ratio`; and the same with `stream_` in front, where a request has 24 chunks.
"""

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web
from turn_cost import ACTION, ACTION_TOKENS, ANSWER, KEEPALIVE_S, TURNS, canned_replies
from yarl import URL

from turngate.envs.base import End, Task
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.gateway import Gateway
from turngate.runtime.session_table import SessionTable
from turngate.runtime.transport import HttpTransport, raise_file_limit
from turngate.runtime.types import Sampling

SAMPLING = Sampling(max_tokens=64)
BACKLOG = 8192


def canned_streams() -> list[list[bytes]]:
    """Return the chunks of the streamed reply to the request of each turn, framed for HTTP."""
    streams = []
    for turn, whole in enumerate(canned_replies()):
        reply = msgspec.json.decode(whole.partition(b"\r\n\r\n")[2])
        (choice,) = reply["choices"]
        head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        events = [{**head, "choices": [first], "prompt_token_ids": reply["prompt_token_ids"]}]
        for at, token in enumerate(choice["token_ids"]):
            step = {
                "index": 0,
                "delta": {"content": ACTION[at * 2 : at * 2 + 2]},
                "logprobs": {"content": [choice["logprobs"]["content"][at]]},
                "token_ids": [token],
                "policy_versions": [3],
                "finish_reason": "stop" if at == ACTION_TOKENS - 1 else None,
            }
            events.append({**head, "choices": [step]})
        parts = [b"data: %b\n\n" % msgspec.json.encode(event) for event in events] + [b"data: [DONE]\n\n"]
        framed = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts]
        streams.append([*framed, b"0\r\n\r\n"])
        assert len(events) == ACTION_TOKENS + 1, turn
    return streams


class CannedServer(asyncio.Protocol):
    """Answers each request from memory; the number of assistant messages says which turn it is."""

    replies = canned_replies()
    streams = canned_streams()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.received = bytearray()
        self.left: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, found, body = bytes(self.received).partition(b"\r\n\r\n")
        if found:
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            if len(body) >= length:
                self.received = bytearray(body[length:])
                turn = body.count(b'"role":"assistant"')
                if b'"stream":true' in body:
                    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
                    self.left = [head, *self.streams[turn]]
                    self.write_next()
                else:
                    self.transport.write(self.replies[turn])

    def write_next(self) -> None:
        if self.left and not self.transport.is_closing():
            self.transport.write(self.left.pop(0))
            asyncio.get_running_loop().call_later(0.002, self.write_next)


async def serve() -> None:
    """Print the port, then answer until killed."""
    raise_file_limit()
    server = await asyncio.get_running_loop().create_server(CannedServer, "127.0.0.1", 0, backlog=BACKLOG)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def play(http: aiohttp.ClientSession, url: str, key: str, is_streamed: bool) -> None:
    """Play one episode as an agent does."""
    messages = [{"role": "system", "content": "You are shopping."}, {"role": "user", "content": "Find a backpack."}]
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    for _ in range(TURNS):
        body = {"model": "m", "messages": messages, "max_tokens": 64, "stream": is_streamed}
        async with http.post(url, data=msgspec.json.encode(body), headers=headers) as reply:
            told = await reply.read()
            assert reply.status == 200, told
            assert not is_streamed or told.endswith(b"data: [DONE]\n\n")
        messages += [{"role": "assistant", "content": ACTION}, {"role": "user", "content": ANSWER}]


async def be_agents() -> None:
    """Play what each line of stdin asks for; say so when it is done."""
    raise_file_limit()
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    async with aiohttp.ClientSession(connector=connector) as http:
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            async with asyncio.TaskGroup() as group:
                for key in asked["keys"]:
                    group.create_task(play(http, asked["url"], key, asked["stream"]))
            print("done", flush=True)


class Agents:
    """The process that plays agents."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, "--agents"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    async def play(self, url: str, keys: list[str], is_streamed: bool) -> float:
        """Have one episode played per key and return our CPU microseconds per request meanwhile."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        gc.collect()
        began = time.process_time()
        stdin.write(json.dumps({"url": url, "keys": keys, "stream": is_streamed}) + "\n")
        stdin.flush()
        assert (await asyncio.to_thread(stdout.readline)).strip() == "done"
        return (time.process_time() - began) / (len(keys) * TURNS) * 1e6


async def pass_on(http: web.Request) -> web.StreamResponse:
    """Proxy a request as plainly as aiohttp can."""
    upstream: aiohttp.ClientSession = http.app[SESSION]
    body = await http.read()
    async with upstream.post(http.app[UPSTREAM], data=body) as reply:
        if b'"stream":true' not in body:
            return web.Response(body=await reply.read(), headers={"Content-Type": "application/json"})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(http)
        async for piece in reply.content.iter_any():
            await answer.write(piece)
        await answer.write_eof()
        return answer


SESSION = web.AppKey("session", aiohttp.ClientSession)
UPSTREAM = web.AppKey("upstream", URL)


async def compare(upstream: str, agents: Agents, count: int, rounds: int) -> dict[str, float]:
    """Return the figures: medians over rounds, each of which measures both proxies in both ways."""
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
    )
    app = web.Application(client_max_size=1 << 24)
    app[SESSION], app[UPSTREAM] = session, URL(f"{upstream}/chat/completions")
    app.router.add_post("/v1/chat/completions", pass_on)
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=KEEPALIVE_S, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=BACKLOG).start()
    bare_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/chat/completions"
    transport = HttpTransport(upstream, keepalive_s=KEEPALIVE_S)
    costs: dict[tuple[str, bool], list[float]] = {}
    async with session, Endpoint(upstream, model="m", transport=transport) as endpoint:
        async with Gateway(SessionTable(endpoint, sampling=SAMPLING)) as gateway:
            for _ in range(rounds + 1):  # the first opens the connections
                for is_streamed in (False, True):
                    bare_us = await agents.play(bare_url, ["any"] * count, is_streamed)
                    sessions = [gateway.sessions.create(Task(f"t{n}")) for n in range(count)]
                    url = f"{gateway.url}/chat/completions"
                    ours_us = await agents.play(url, [each.key for each in sessions], is_streamed)
                    for each in sessions:
                        trajectory = each.seal(End.success)
                        assert (len(trajectory.turns), len(trajectory.segments)) == (TURNS, 1)
                        assert trajectory.policy_tokens == TURNS * ACTION_TOKENS
                    costs.setdefault(("bare", is_streamed), []).append(bare_us)
                    costs.setdefault(("gateway", is_streamed), []).append(ours_us)
    await runner.cleanup()
    return figures(costs)


def figures(costs: dict[tuple[str, bool], list[float]]) -> dict[str, float]:
    """Return medians over all rounds but the first."""
    found: dict[str, float] = {}
    for is_streamed, prefix in ((False, ""), (True, "stream_")):
        bare, ours = costs["bare", is_streamed][1:], costs["gateway", is_streamed][1:]
        found[f"{prefix}bare_us"] = round(statistics.median(bare), 1)
        found[f"{prefix}gateway_us"] = round(statistics.median(ours), 1)
        pairs = list(zip(ours, bare, strict=True))
        found[f"{prefix}extra_ms"] = round(statistics.median(o - b for o, b in pairs) / 1000, 4)
        found[f"{prefix}ratio"] = round(statistics.median(o / b for o, b in pairs), 3)
    return found


def main(args: argparse.Namespace) -> dict[str, float]:
    """Start server and agents, compare, stop them."""
    raise_file_limit()
    server = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    agents = Agents()
    try:
        assert server.stdout is not None
        upstream = f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
        return asyncio.run(compare(upstream, agents, args.count, args.rounds))
    finally:
        for process in (server, agents.process):
            process.kill()
            process.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=64, help="agents at once (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--serve", action="store_true", help="be the server; used internally")
    parser.add_argument("--agents", action="store_true", help="be the agents; used internally")
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve())
    elif arguments.agents:
        asyncio.run(be_agents())
    else:
        line = json.dumps(main(arguments))
        if arguments.json:
            Path(arguments.json).write_text(line + "\n")
        print(line)
