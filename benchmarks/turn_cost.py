"""What one turn costs in CPU: `run_rollout` with the real client against a bare aiohttp + msgspec loop.

Both play the same episodes against one OpenAI-compatible server in another process that answers at once from memory,
so the same bytes travel in both; both are measured in this process, in turns, and compared by CPU time. The bare loop
encodes the request, posts it, decodes the reply into typed structs and appends the messages; it records, checks and
bounds nothing.

Prints one JSON object, last line: for each number of agents N, `bare_us_N` and `rollout_us_N` (CPU microseconds per
turn) and `turn_cost_N_ratio` (rollout / bare, median over rounds); `turn_cost_ratio` is the worst of them.
"""

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec
from yarl import URL

from turngate.envs.base import Action, End, Observation, Step, Task
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.limits import Limits
from turngate.runtime.rollout import run_rollout
from turngate.runtime.transport import HttpTransport, raise_file_limit
from turngate.runtime.types import Message, Sampling
from turngate.runtime.wire import ChatRequest

TURNS = 12
"""Turns per episode, as in the shopping example."""
ANSWER = "item_7  waterproof hiking backpack  price 69  rating 4.5  colors red, blue, grey; " * 3
ACTION = 'click["item_7"] after thinking about it'
ANSWER_TOKENS, ACTION_TOKENS = 60, 24
KEEPALIVE_S = 300.0
"""So long that neither side loses its connections while the other is measured."""
SAMPLING = Sampling(max_tokens=64)
TASK = Task("backpack", "Find a red hiking backpack under $80 with a rating of at least 4 stars.")


class BackpackEnv:
    """The cheapest environment there can be: fixed answers."""

    def __init__(self) -> None:
        self.left = TURNS

    async def reset(self, task: Task, seed: int) -> Observation:
        return Observation(task.prompt, system="You are shopping.")

    async def step(self, action: Action) -> Step:
        self.left -= 1
        if self.left:
            return Step(Observation(ANSWER))
        return Step(Observation(ANSWER), {"outcome": 1.0}, End.success)

    async def aclose(self) -> None:
        pass


def canned_replies() -> list[bytes]:
    """Return the reply to the request of each turn; prompts extend each other exactly, as in a real episode."""
    replies = []
    prompt = list(range(1000, 1000 + ANSWER_TOKENS))
    for turn in range(TURNS):
        ids = [7000 + 13 * turn + i for i in range(ACTION_TOKENS)]
        entries = [{"token": f"tok{i}", "logprob": -0.1234567 - 0.01 * i, "bytes": [116, 111, 107]} for i in ids]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": ACTION},
            "finish_reason": "stop",
            "logprobs": {"content": [{**entry, "top_logprobs": []} for entry in entries]},
            "token_ids": ids,
            "policy_versions": [3] * len(ids),
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        reply = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        body = msgspec.json.encode({**reply, "prompt_token_ids": prompt, "policy_version": 3, "usage": usage})
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        replies.append(head.encode() + body)
        prompt = [*prompt, *ids, *range(2000, 2000 + ANSWER_TOKENS)]
    return replies


class CannedServer(asyncio.Protocol):
    """Answers each request from memory; the number of assistant messages says which turn it is."""

    replies = canned_replies()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.received = b""

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, found, body = self.received.partition(b"\r\n\r\n")
        if found:
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            if len(body) >= length:
                self.received = body[length:]
                self.transport.write(self.replies[body.count(b'"role":"assistant"')])


async def serve() -> None:
    """Print the port, then answer until killed."""
    raise_file_limit()
    server = await asyncio.get_running_loop().create_server(CannedServer, "127.0.0.1", 0, backlog=8192)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class Token(msgspec.Struct):
    logprob: float


class Logprobs(msgspec.Struct):
    content: list[Token]


class Choice(msgspec.Struct):
    message: Message
    finish_reason: str
    logprobs: Logprobs
    token_ids: list[int]
    policy_versions: list[int]


class BareReply(msgspec.Struct):
    choices: list[Choice]
    prompt_token_ids: list[int]


encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(BareReply).decode


async def play_bare(session: aiohttp.ClientSession, url: URL) -> None:
    """Play one episode with nothing but the client libraries."""
    messages = [Message("system", "You are shopping."), Message("user", TASK.prompt)]
    for turn in range(TURNS):
        request = ChatRequest(
            model="m",
            messages=messages,
            temperature=1.0,
            top_p=1.0,
            max_tokens=64,
            logprobs=True,
            top_k=0,
            return_token_ids=True,
            seed=(1 << 62) + turn,
        )
        async with session.post(url, data=encode(request)) as response:
            body = await response.read()
        reply = decode(body)
        messages.append(Message("assistant", reply.choices[0].message.content))
        messages.append(Message("user", ANSWER))


async def measure(agents: int, play: Callable[[int], Awaitable[object]]) -> float:
    """Return CPU microseconds per turn of `agents` episodes at once."""
    gc.collect()
    began = time.process_time()
    async with asyncio.TaskGroup() as group:
        for agent in range(agents):
            group.create_task(_as_coroutine(play(agent)))
    return (time.process_time() - began) / (agents * TURNS) * 1e6


async def _as_coroutine(awaitable: Awaitable[object]) -> None:
    await awaitable


async def compare(url: str, agents: int, rounds: int) -> tuple[float, float, float]:
    """Return (bare, rollout, ratio): medians over rounds, each of which measures both."""
    bare_url = URL(f"{url}/chat/completions")
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
    )
    limits = Limits(max_turns=TURNS)
    bare_us, rollout_us = [], []
    transport = HttpTransport(url, keepalive_s=KEEPALIVE_S)
    async with session, Endpoint(url, model="m", transport=transport) as endpoint:

        async def play_rollout(agent: int) -> None:
            trajectory = await run_rollout(BackpackEnv, TASK, endpoint, limits=limits, sampling=SAMPLING, seed=agent)
            assert trajectory.end is End.success
            assert trajectory.policy_tokens == TURNS * ACTION_TOKENS
            assert len(trajectory.segments) == 1

        for _ in range(rounds + 1):  # the first opens the connections
            bare_us.append(await measure(agents, lambda agent: play_bare(session, bare_url)))
            rollout_us.append(await measure(agents, play_rollout))
    ratios = [ours / bare for ours, bare in zip(rollout_us[1:], bare_us[1:], strict=True)]
    return statistics.median(bare_us[1:]), statistics.median(rollout_us[1:]), statistics.median(ratios)


def main(args: argparse.Namespace) -> dict[str, float]:
    """Start the server, compare, stop the server."""
    raise_file_limit()
    server = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = {}
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
        for agents in args.agents:
            bare_us, rollout_us, ratio = asyncio.run(compare(url, agents, args.rounds))
            print(f"{agents:5d} agents: bare {bare_us:6.1f} us, rollout {rollout_us:6.1f} us a turn, ratio {ratio:.3f}")
            figures[f"bare_us_{agents}"] = round(bare_us, 2)
            figures[f"rollout_us_{agents}"] = round(rollout_us, 2)
            figures[f"turn_cost_{agents}_ratio"] = round(ratio, 4)
    finally:
        server.kill()
        server.wait()
    figures["turn_cost_ratio"] = max(figures[f"turn_cost_{agents}_ratio"] for agents in args.agents)
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--serve", action="store_true", help="be the server; used internally")
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve())
    else:
        line = json.dumps(main(arguments))
        if arguments.json:
            Path(arguments.json).write_text(line + "\n")
        print(line)
