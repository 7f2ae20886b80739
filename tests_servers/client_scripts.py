"""Agents on packages that others wrote, as scripts that know nothing of us: one per package, in `clients/`."""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests_servers.launch import HOME

__all__ = ["CLIENTS", "Client", "Played", "play"]

SCRIPTS = Path(__file__).parent / "clients"
TIMEOUT_S = 180.0
"""For all episodes of a script; importing the larger packages alone takes seconds."""


class Client(NamedTuple):
    """A package, or the lack of one."""

    name: str
    environment: str
    """Under `.servers/`; empty for no packages at all."""
    script: str
    agents: tuple[str, ...]
    """Ways to play that the script has."""

    @property
    def python(self) -> str:
        """The interpreter that has the package."""
        if not self.environment:
            return sys.executable
        python = HOME / self.environment / "bin" / "python"
        if not python.exists():
            raise RuntimeError(f"the environment {self.environment} must be installed; run `make servers`")
        return str(python)


_OPENAI = ("sync", "async", "stream", "sync_stream", "responses", "responses_stream")
CLIENTS = (
    Client("openai 2", "openai2", "openai_client.py", _OPENAI),
    Client("openai 3", "agents", "openai_client.py", _OPENAI),
    Client("openai-agents", "agents", "agents_client.py", ("responses", "responses_stream", "chat", "chat_stream")),
    Client("pydantic-ai", "agents", "pydantic_client.py", ("chat", "chat_stream", "responses", "responses_stream")),
    Client("langchain-openai", "agents", "langchain_client.py", ("chat", "chat_stream", "responses", "graph")),
    Client("curl", "", "curl_client.py", ("chat", "chat_stream")),
)


class Played(msgspec.Struct, frozen=True):
    """What a script says of one episode."""

    agent: str
    error: str
    calls: list[tuple[str, Any]]
    """Tools that were really called, with their argument."""
    answer: str
    input_tokens: int
    output_tokens: int
    """As the package counts them."""


async def play(client: Client, url: str, episodes: Sequence[tuple[str, str]]) -> list[Played]:
    """Run a script for (agent, API key) pairs, one after the other.

    Raises: RuntimeError: it did not come to its end; the message has what it printed.
    """
    arguments = [f"{agent}={key}" for agent, key in episodes]
    process = await asyncio.create_subprocess_exec(
        client.python,
        str(SCRIPTS / client.script),
        url,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "NO_PROXY": "127.0.0.1"},
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            told, complaints = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = told.splitlines()
    if process.returncode or len(lines) != len(episodes):
        raise RuntimeError(f"{client.script} must end well: got status {process.returncode}\n{complaints.decode()}")
    played = [msgspec.json.decode(line, type=Played) for line in lines]
    if any(one.error for one in played):
        print(complaints.decode())
    return played
