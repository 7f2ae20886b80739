"""A small model that plays the agents of `clients/`: cloned from what their packages have sent to a scripted server.

It is free to choose the order of the things, how it writes JSON and what it says in the end, so episodes differ, and
their log-probs are not all 0.
"""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests_servers.client_scripts import CLIENTS, play
from turngate.envs import ToolCall, ToolSpec
from turngate.learners.cloning import CloningConfig, clone, score_chats
from turngate.runtime import Endpoint, Message, Sampling
from turngate.runtime.engine.chat import render
from turngate.runtime.engine.model import ModelConfig, PolicyModel
from turngate.runtime.engine.tokenizer import Tokenizer
from turngate.runtime.gateway import Gateway
from turngate.runtime.session_table import SessionTable
from turngate.runtime.testing.scripted_server import Said, ScriptedServer

__all__ = ["ANSWERS", "STYLES", "TEMPERATURE", "Opening", "clone_policy", "rehearse"]

SHELVES = {"lamp": 3, "rope": 7}
ANSWERS = ("done", "all done", "here they are")
STYLES = {"spaced": (", ", ": "), "compact": (",", ":")}
"""Ways to write JSON: models and SDKs differ in them."""
TEMPERATURE = 0.5
"""Squares the odds of every slip, so that hardly an episode fails; the real choices are even at any temperature."""
_MAX_SLIPS = 0.06
"""Share of episodes at temperature 1 that go another way than those shown, for any opening."""
_STEPS = 600
"""At most; half of them do."""


class Opening(NamedTuple):
    """What an agent sends first, and how its package writes results of tools."""

    tools: tuple[ToolSpec, ...]
    messages: tuple[Message, ...]
    shelves: tuple[str, str]
    """What the tool says of the lamp and of the rope."""
    fetched: str


async def rehearse() -> list[Opening]:
    """Let every client play against a scripted server, and return how they open, without repetitions."""
    async with ScriptedServer(_scripted) as server, Endpoint(server.url, model="policy") as endpoint:
        async with Gateway(SessionTable(endpoint, sampling=Sampling())) as gateway:
            for client in CLIENTS:
                sessions = [gateway.sessions.create() for _ in client.agents]
                episodes = zip(client.agents, (session.key for session in sessions), strict=True)
                played = await play(client, gateway.url, list(episodes))
                assert [one.error for one in played if one.error] == []
        last = [request for request in server.requests if len(_results(request)) == 3]
    assert len(last) == sum(len(client.agents) for client in CLIENTS)
    return list({repr(opening): opening for opening in map(_opening, last)}.values())


def _scripted(request: dict[str, Any]) -> Said:
    results = _results(request)
    if not results:
        return Said("", _finds(("lamp", "rope"), STYLES["spaced"]))
    return Said("", (_fetch((3, 7), STYLES["spaced"]),)) if len(results) == 2 else Said(ANSWERS[0])


def _results(request: dict[str, Any]) -> list[dict[str, Any]]:
    return [message for message in request["messages"] if message["role"] == "tool"]


def _opening(request: dict[str, Any]) -> Opening:
    """Return how the episode opened whose last request this is."""
    messages = request["messages"]
    roles = [message["role"] for message in messages]
    head = tuple(Message(_role(m["role"]), m["content"]) for m in messages[: roles.index("assistant")])
    said = [message["content"] for message in _results(request)]
    functions = [tool["function"] for tool in request["tools"]]
    tools = tuple(ToolSpec(f["name"], f.get("description", ""), f["parameters"]) for f in functions)
    return Opening(tools, head, (said[0], said[1]), said[2])


def _role(role: str) -> str:
    return "system" if role == "developer" else role


def _finds(things: Sequence[str], style: tuple[str, str]) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(f"c{i}", "find", json.dumps({"thing": thing}, separators=style)) for i, thing in enumerate(things)
    )


def _fetch(shelves: Sequence[int], style: tuple[str, str]) -> ToolCall:
    return ToolCall("c2", "fetch", json.dumps({"shelves": list(shelves)}, separators=style))


def _episodes(opening: Opening) -> list[list[Message]]:
    """Return every way to play an episode."""
    told = dict(zip(SHELVES, opening.shelves, strict=True))
    return [
        [
            *_described(opening),
            Message("assistant", "", _finds(things, style)),
            *(Message("tool", told[thing], (), f"c{i}") for i, thing in enumerate(things)),
            Message("assistant", "", (_fetch([SHELVES[thing] for thing in things], style),)),
            Message("tool", opening.fetched, (), "c2"),
            Message("assistant", answer),
        ]
        for things in (("lamp", "rope"), ("rope", "lamp"))
        for style in STYLES.values()
        for answer in ANSWERS
    ]


def _described(opening: Opening) -> list[Message]:
    """Return the first messages with the tools in so many words, as the engine shows them to the model.

    Cloning takes one list of tools for all conversations; here every package describes them in its own way.
    """
    head = list(opening.messages)
    if head[0].role != "system":
        head.insert(0, Message("system", ""))
    lines = [
        f"{tool.name}: {tool.description} {json.dumps(tool.parameters, separators=(',', ':'))}"
        for tool in opening.tools
    ]
    content = "\n".join([*([head[0].content] if head[0].content else []), *lines])
    return [Message("system", content), *head[1:]]


def clone_policy(openings: Sequence[Opening], folder: Path) -> Path:
    """Return a folder with a model that plays the agents that open so."""
    episodes = [_episodes(opening) for opening in openings]
    every = [episode for of_opening in episodes for episode in of_opening]
    tokenizer = Tokenizer.train(
        text for episode in every for m in episode for text in (m.content, *(c.arguments for c in m.tool_calls))
    )
    for opening in openings:
        as_served = render(opening.messages, tokenizer, tools=opening.tools)
        assert render(_described(opening), tokenizer) == as_served

    def deal(step: int) -> list[list[Message]]:
        return random.Random(step).sample(every, 8)

    def slips(model: PolicyModel) -> float:
        scores = [score_chats(model, tokenizer, of_opening) for of_opening in episodes]
        return 1 - min(sum(math.exp(score.logprob) for score in of_opening) for of_opening in scores)

    model = ModelConfig(vocab_size=len(tokenizer), max_context=1024)
    config = CloningConfig(steps=_STEPS, gate_every=50)
    clone(deal, folder, tokenizer=tokenizer, model=model, config=config, gate=lambda m, _: slips(m) < _MAX_SLIPS)
    assert slips(PolicyModel.load(folder)) < _MAX_SLIPS
    return folder
