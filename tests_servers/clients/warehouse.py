"""The task and the tools that every client's agent has, and the loop that runs agents for whoever started the script.

    python openai_client.py http://127.0.0.1:8100/v1 sync=KEY stream=KEY

plays one episode per argument, each with its own API key, and prints what came of it, a line of JSON per episode.
"""

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

INSTRUCTIONS = "You run a warehouse"
PROMPT = "fetch the lamp and the rope"
SHELVES = {"lamp": 3, "rope": 7}


@dataclass
class Warehouse:
    """The world of one episode, and what the agent did there."""

    calls: list[tuple[str, Any]] = field(default_factory=list)
    answer: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    """As the SDK counts them."""

    def find(self, thing: str) -> int:
        """Say which shelf a thing lies on."""
        self.calls.append(("find", thing))
        return SHELVES[thing]

    def fetch(self, shelves: list[int]) -> str:
        """Fetch what lies on these shelves."""
        self.calls.append(("fetch", shelves))
        return "fetched"

    def used(self, input_tokens: int, output_tokens: int) -> None:
        """Add to what the episode has cost."""
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens


def run(agents: dict[str, Callable[[str, str, Warehouse], Any]]) -> None:
    """Run the agents that the command line names, one after the other."""
    url, *episodes = sys.argv[1:]
    with asyncio.Runner() as runner:  # one loop for all: some packages keep connections from one client to the next
        for episode in episodes:
            name, _, key = episode.partition("=")
            warehouse, error = Warehouse(), ""
            try:
                said = agents[name](url, key, warehouse)
                warehouse.answer = runner.run(said) if inspect.iscoroutine(said) else said
            except Exception as problem:
                traceback.print_exc()
                error = f"{type(problem).__name__}: {problem}"
            print(json.dumps({"agent": name, "error": error, **asdict(warehouse)}), flush=True)
