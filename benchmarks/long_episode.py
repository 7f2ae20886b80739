"""What a turn costs in CPU when the episode is long: at turns 1, 32 and 128, for each way of getting token ids.

`tokens` renders here and gets id strings back; `tokens_echo` too, but the server sends the whole prompt's ids back with
every reply, as those do that know `return_token_ids` alone; `server` sends all messages and gets all ids back, every
turn. `bare` is the hop alone: aiohttp posts a body as long as that of `tokens` at that turn, and reads a reply, with
nothing encoded, decoded or recorded.

All talk to one server in another process that answers from memory, in turns; episodes go through their turns in step,
and the CPU time of this process is read between two turns. Turn 1 stands for turns 2 to 5 (the first renders the whole
prompt), 32 for 29 to 32, 128 for 125 to 128.

Prints one JSON object, last line: `MODE_us_TURN` (CPU microseconds per turn and agent, median over rounds),
`MODE_over_bare_TURN_ratio`, and `MODE_growth_ratio`, which is turn 128 over turn 1.
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

from turngate.envs.base import Action, End, Observation, Step, Task
from turngate.runtime.dialect import Dialect
from turngate.runtime.endpoint import Endpoint
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.engine_renderer import EngineRenderer
from turngate.runtime.limits import Limits
from turngate.runtime.rollout import run_rollout
from turngate.runtime.transport import HttpTransport, raise_file_limit
from turngate.runtime.types import Message, Sampling

TURNS = 128
WINDOWS = {1: range(2, 6), 32: range(29, 33), 128: range(125, 129)}
"""Turns, from 1, of which each figure is the mean."""
ANSWER = "item_7  waterproof hiking backpack  price 69  rating 4.5  colors red, blue, grey; " * 2
ACTION = 'click["item_7"] after thinking about it for a while, as it looks good'
SYSTEM, PROMPT = "You are shopping.", "Find a red hiking backpack under $80 with a rating of at least 4 stars."
KEEPALIVE_S = 300.0
"""So long that no side loses its connections while the others are measured."""
RENDERER = EngineRenderer(Tokenizer.train([ANSWER, ACTION, SYSTEM, PROMPT]))
SAMPLED = [*RENDERER.tokenizer.encode(ACTION), RENDERER.tokenizer.end]
SAMPLING = Sampling(max_tokens=64)
TASK = Task("backpack", PROMPT)
MODES = {
    "server": Dialect(),
    "tokens": Dialect(token_mode="tokens", token_id_strings=True),
    "tokens_echo": Dialect(token_mode="tokens"),
}


class Turnstile:
    """Lets agents through together, turn by turn, and reads the CPU time between two turns."""

    def __init__(self, agents: int) -> None:
        self.barrier = asyncio.Barrier(agents)
        self.agents = agents
        self.times_s: list[float] = []

    async def pass_through(self) -> None:
        if await self.barrier.wait() == 0:
            self.times_s.append(time.process_time())

    def per_turn_us(self) -> dict[int, float]:
        """CPU microseconds per agent, by turn."""
        costs = [(b - a) / self.agents * 1e6 for a, b in zip(self.times_s[:-1], self.times_s[1:], strict=True)]
        # Reading number t stands at the end of turn t + 1.
        return {turn: statistics.mean(costs[t - 2] for t in window) for turn, window in WINDOWS.items()}


class LongEnv:
    """Fixed answers, given once all agents have acted."""

    def __init__(self, turnstile: Turnstile) -> None:
        self.turnstile, self.left = turnstile, TURNS

    async def reset(self, task: Task, seed: int) -> Observation:
        return Observation(task.prompt, system=SYSTEM)

    async def step(self, action: Action) -> Step:
        await self.turnstile.pass_through()
        self.left -= 1
        return Step(Observation(ANSWER), end=None if self.left else End.success)

    async def aclose(self) -> None:
        pass


def prompts() -> list[list[int]]:
    """Return the ids that the model sees at each turn."""
    messages = [Message("system", SYSTEM), Message("user", PROMPT)]
    seen = [RENDERER.render(messages)]
    for _ in range(TURNS - 1):
        seen.append([*seen[-1], *SAMPLED, *RENDERER.extend(SAMPLED, [Message("user", ANSWER)])])
    return seen


PROMPTS = prompts()
TURN_BY_COMMAS = {len(ids) - 1: turn for turn, ids in enumerate(PROMPTS)}


class CannedServer(asyncio.Protocol):
    """Answers from memory; the number of ids, or of assistant messages, says which turn it is."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.received = bytearray()
        self.missing = 0

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.missing -= len(data)
        if self.missing > 0:
            return
        head, found, body = bytes(self.received).partition(b"\r\n\r\n")
        if found:
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            self.missing = length - len(body)
            if self.missing <= 0:
                self.received.clear()
                self.missing = 0
                self.transport.write(self.reply(head, body))

    def reply(self, head: bytes, body: bytes) -> bytes:
        if b"/chat/" in head[:40]:
            return chat_reply(body.count(b'"role":"assistant"'))
        prompt = body[body.index(b'"prompt":[') :]
        commas = prompt[: prompt.index(b"]")].count(b",")
        return text_reply(TURN_BY_COMMAS.get(commas, 0), echo=b"return_token_ids" in body)


CACHE: dict[object, bytes] = {}


def http(reply: dict[str, object], key: object) -> bytes:
    """Return a reply as it goes over the wire; made once."""
    if key not in CACHE:
        usage = {"prompt_tokens": 1, "completion_tokens": len(SAMPLED)}
        body = msgspec.json.encode({"id": "x", "created": 0, "model": "m", "usage": usage, **reply})
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        CACHE[key] = head.encode() + body
    return CACHE[key]


def chat_reply(turn: int) -> bytes:
    """Return what a server that renders says at a turn."""
    entries = [{"token": "tok", "logprob": -0.1234567, "bytes": [116], "top_logprobs": []} for _ in SAMPLED]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": ACTION},
        "finish_reason": "stop",
        "logprobs": {"content": entries},
        "token_ids": SAMPLED,
    }
    return http({"choices": [choice], "prompt_token_ids": PROMPTS[turn]}, ("chat", turn))


def text_reply(turn: int, *, echo: bool) -> bytes:
    """Return what a server that was given ids says at a turn."""
    tokens = ["tok" if echo else f"token_id:{i}" for i in SAMPLED]
    choice = {"index": 0, "text": ACTION, "finish_reason": "stop"}
    choice["logprobs"] = {"tokens": tokens, "token_logprobs": [-0.1234567] * len(SAMPLED), "text_offset": [0]}
    if echo:
        choice |= {"token_ids": SAMPLED, "prompt_token_ids": PROMPTS[turn]}
    return http({"choices": [choice]}, ("text", turn if echo else 0, echo))


async def serve() -> None:
    """Print the port, then answer until killed."""
    raise_file_limit()
    server = await asyncio.get_running_loop().create_server(CannedServer, "127.0.0.1", 0, backlog=8192)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def play_bare(session: aiohttp.ClientSession, url: str, bodies: list[bytes], turnstile: Turnstile) -> None:
    """Send what is as long as the prompts, and read what is as long as the replies."""
    for body in bodies:
        async with session.post(url, data=body) as response:
            await response.read()
        await turnstile.pass_through()


async def play(endpoint: Endpoint, agent: int, turnstile: Turnstile) -> None:
    """Play one recorded episode, and see that it is one segment."""
    trajectory = await run_rollout(
        lambda: LongEnv(turnstile), TASK, endpoint, limits=Limits(max_turns=TURNS), sampling=SAMPLING, seed=agent
    )
    assert trajectory.end is End.success, trajectory.error
    assert (len(trajectory.segments), trajectory.drifts) == (1, 0)
    assert trajectory.policy_tokens == TURNS * len(SAMPLED)


async def measure(agents: int, start: Callable[[int, Turnstile], Awaitable[None]]) -> dict[int, float]:
    """Return the CPU cost of turns of `agents` episodes at once."""
    gc.collect()
    turnstile = Turnstile(agents)
    async with asyncio.TaskGroup() as group:
        for agent in range(agents):
            group.create_task(_as_coroutine(start(agent, turnstile)))
    return turnstile.per_turn_us()


async def _as_coroutine(awaitable: Awaitable[None]) -> None:
    await awaitable


async def compare(url: str, agents: int, rounds: int) -> dict[str, dict[int, float]]:
    """Return the cost of each mode by turn: medians over rounds, each of which measures all."""
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
    )
    bodies = [
        msgspec.json.encode({"model": "m", "prompt": ids, "return_tokens_as_token_ids": True}) for ids in prompts()
    ]
    seen: dict[str, list[dict[int, float]]] = {mode: [] for mode in ("bare", *MODES)}
    async with session:
        bare_url = f"{url}/completions"
        for _ in range(rounds + 1):  # the first opens connections and fills caches
            seen["bare"].append(await measure(agents, lambda _, gate: play_bare(session, bare_url, bodies, gate)))
            for mode, dialect in MODES.items():
                renderer = RENDERER if dialect.token_mode == "tokens" else None
                transport = HttpTransport(url, keepalive_s=KEEPALIVE_S)
                async with Endpoint(
                    url, model="m", dialect=dialect, renderer=renderer, transport=transport
                ) as endpoint:
                    seen[mode].append(await measure(agents, lambda agent, gate: play(endpoint, agent, gate)))
    return {
        mode: {turn: statistics.median(cost[turn] for cost in costs[1:]) for turn in WINDOWS}
        for mode, costs in seen.items()
    }


def main(args: argparse.Namespace) -> dict[str, float]:
    """Start the server, compare, stop the server."""
    raise_file_limit()
    server = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}/v1"
        costs_us = asyncio.run(compare(url, args.agents, args.rounds))
    finally:
        server.kill()
        server.wait()
    figures: dict[str, float] = {}
    for mode, by_turn in costs_us.items():
        shown = ", ".join(f"turn {turn} {cost:6.1f} us" for turn, cost in by_turn.items())
        growth = by_turn[128] / by_turn[1]
        print(f"{mode:12s} {shown}, growth {growth:.2f}")
        for turn, cost in by_turn.items():
            figures[f"{mode}_us_{turn}"] = round(cost, 1)
            if mode != "bare":
                figures[f"{mode}_over_bare_{turn}_ratio"] = round(cost / costs_us["bare"][turn], 3)
        figures[f"{mode}_growth_ratio"] = round(growth, 3)
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=32)
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
