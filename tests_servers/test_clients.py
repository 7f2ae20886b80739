"""Agents on packages that others wrote, through `turngate gateway`: they finish, and their episodes can be trained on.

Each script in `clients/` is what its package's users write: of us it has a URL and a key.
"""

import asyncio
import contextlib
import shutil
import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest
import torch

from tests_servers.client_scripts import CLIENTS, Client, Played, play
from tests_servers.launch import Server, running
from tests_servers.proxy import Fault, Proxy
from tests_servers.tap import recorded, replied
from tests_servers.warehouse_policy import ANSWERS, TEMPERATURE, clone_policy, rehearse
from turngate.envs import Task
from turngate.learners import GRPO
from turngate.runtime import Batch, Group, Sampling, Trajectory
from turngate.runtime.engine.model import PolicyModel
from turngate.runtime.engine.packing import pack

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="one of the clients is curl")

FLOAT32_NATS = 1e-4
ADMIN_KEY = "the-admin-key"
EPISODES = 2
"""Per way to play."""
MODES = ("server", "tokens")
"""Who renders chats: the server, or the gateway."""
WRITES_ANEW = {"langchain-openai": "compact", "pydantic-ai": "spaced"}
"""Packages that write the arguments of a call anew, and the way to write JSON that does not survive it."""
KEEPS = {("langchain-openai", "responses")}
"""Ways to play that do not."""
FAULTS: dict[str, list[Fault]] = {
    # What becomes of each attempt, turn by turn; SDKs try three times.
    "statuses": ["500", "", "500 after", "", "500", "500 after", ""],
    "connections": ["drop", "", "drop after", "", "drop under way", ""],
}


class Episode(NamedTuple):
    """What an agent says it has done, and what the gateway has recorded."""

    played: Played
    trajectory: Trajectory


class Door:
    """`turngate gateway`, with a proxy on either side."""

    def __init__(self, agents: Proxy, engine: Proxy, http: aiohttp.ClientSession, url: str) -> None:
        self.agents, self.engine, self._http, self._url = agents, engine, http, url
        agents.when_under_way = self._under_way
        self._seen = 0

    async def play(self, client: Client, *, episodes: int = 1, seed: int = 0) -> list[Episode]:
        """Let a client play every way it can, each in sessions of its own, rewarded for what it says in the end."""
        agents = [agent for agent in client.agents for _ in range(episodes)]
        keys = [
            (await self._post("/sessions", {"seed": seed + i, "group_id": client.name}))["key"]
            for i in range(len(agents))
        ]
        played = await play(client, self.agents.url, list(zip(agents, keys, strict=True)))
        trajectories: list[Trajectory] = []
        for key, one in zip(keys, played, strict=True):
            if one.answer:
                await self._post(f"/sessions/{key}/reward", {"value": float(one.answer == ANSWERS[0])})
            await self._post(f"/sessions/{key}/end", {})
            trajectories.append(await self._trajectory(key))
        return [Episode(*pair) for pair in zip(played, trajectories, strict=True)]

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self._http.post(self._url + path, json=body) as reply:
            assert reply.status == 200, await reply.text()
            return await reply.json()

    async def _trajectory(self, key: str) -> Trajectory:
        async with self._http.get(f"{self._url}/sessions/{key}/trajectory") as reply:
            return msgspec.json.decode(await reply.read(), type=Trajectory)

    async def _under_way(self) -> None:
        await self.engine.wait_for_request(self.engine.requests + 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clone_policy(asyncio.run(rehearse()), tmp_path_factory.mktemp("warehouse") / "model")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with running("engine", folder) as server:
        yield server


@contextlib.asynccontextmanager
async def gateway_to(url: str, folder: Path, *options: str) -> AsyncGenerator[str]:
    """Run the command, and yield the URL that it prints."""
    key_file = folder.parent / "admin.key"
    key_file.write_text(ADMIN_KEY)
    program = "import sys; from turngate.runtime.cli import main; sys.exit(main())"
    arguments = ["gateway", "--upstream", url, "--port", "0", "--key-file", str(key_file)]
    arguments += ["--temperature", str(TEMPERATURE), "--max-tokens", "64", *options]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
        assert line.startswith("gateway to policy"), line
        yield line.split()[-1]
        assert process.returncode is None
    finally:
        process.terminate()
        async with asyncio.timeout(30):
            await process.wait()


@pytest.fixture(params=MODES)
async def door(request: pytest.FixtureRequest, server: Server, folder: Path) -> AsyncIterator[Door]:
    options = ["--tokenizer", str(folder)] if request.param == "tokens" else []
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with Proxy(server.url) as engine, gateway_to(engine.url, folder, *options) as url, Proxy(url) as agents:
        engine.exchanges.clear()  # what the probe asked
        async with aiohttp.ClientSession(headers=headers) as http:
            yield Door(agents, engine, http, url)


def check_finished(episode: Episode) -> None:
    """Check that the agent did its task, with the tools, in three turns."""
    played, trajectory = episode
    assert (played.error, trajectory.error) == ("", "")
    finds = [("find", "lamp"), ("find", "rope")]
    assert sorted(played.calls[:-1]) == finds  # packages may call tools side by side
    name, shelves = played.calls[-1]
    assert (name, sorted(shelves)) == ("fetch", [3, 7])
    assert played.answer in ANSWERS
    assert [len(turn.tool_calls) for turn in trajectory.turns] == [2, 1, 0]
    assert trajectory.turns[-1].text == played.answer
    assert trajectory.trainable, trajectory.untrainable_because


def check_usage(episode: Episode) -> None:
    """Check that the package was told of as many tokens as were recorded."""
    played, trajectory = episode
    assert played.output_tokens == trajectory.policy_tokens
    assert played.input_tokens == sum(turn.start for turn in trajectory.turns)


def style_of(trajectory: Trajectory) -> str:
    """Return how the model wrote JSON."""
    return "spaced" if '": ' in trajectory.turns[0].tool_calls[0].arguments else "compact"


def largest_error(folder: Path, trajectories: Sequence[Trajectory]) -> float:
    """Return how far behaviour log-probs are from the model's own forward pass on the recorded ids, in nats."""
    segments = [segment for t in trajectories for segment in t.segments]
    packed = pack([s.ids() for s in segments], [s.policy_mask for s in segments])
    with torch.no_grad():
        expected = PolicyModel.load(folder).score(packed, temperature=TEMPERATURE).logprobs_M
    sampled = [v for s in segments for v, mask in zip(s.logprob_values(), s.policy_mask, strict=True) if mask]
    assert len(sampled) == sum(t.policy_tokens for t in trajectories)
    return float((expected - torch.tensor(sampled)).abs().max())


def update_with(folder: Path, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the metrics of one update."""
    task = Task("warehouse")
    group = Group(id="g", task=task, order=0, trajectories=tuple(trajectories))
    learner = GRPO(folder, sampling=Sampling(temperature=TEMPERATURE))
    learner.load(None)
    return learner.update(Batch(groups=(group,), policy_version=0)).metrics


def check_exact(door: Door, folder: Path, trajectories: Sequence[Trajectory]) -> None:
    """Check that the record holds what the engine sampled, all of it and once, with the log-probs of the model."""
    assert recorded(trajectories) == replied(door.engine.exchanges)
    assert largest_error(folder, trajectories) < FLOAT32_NATS


def expected_drifts(client: Client, episode: Episode) -> int:
    """Return how often a chat is other ids the second time, because the SDK wrote the model's JSON anew.

    Once: the model goes on in the style that it is shown. Where we keep the ids, it does not matter at all.
    """
    played, trajectory = episode
    is_kept = trajectory.token_mode == "tokens" or (client.name, played.agent) in KEEPS
    return int(not is_kept and WRITES_ANEW.get(client.name) == style_of(trajectory))


async def test_every_client_plays_and_its_episodes_are_exact_and_trainable(door: Door, folder: Path) -> None:
    for client in CLIENTS:
        door.engine.exchanges.clear()
        episodes = await door.play(client, episodes=EPISODES, seed=100 * CLIENTS.index(client))
        for episode in episodes:
            check_finished(episode)
            check_usage(episode)
            drifts = expected_drifts(client, episode)
            assert (episode.trajectory.drifts, len(episode.trajectory.segments)) == (drifts, 1 + drifts)
        trajectories = [episode.trajectory for episode in episodes]
        check_exact(door, folder, trajectories)
        metrics = update_with(folder, trajectories)
        shapes = Counter((style_of(t), f"{len(t.segments)} segments", f"{t.drifts} drifts") for t in trajectories)
        print(client.name, dict(shapes), f"parity {metrics['parity_max_abs']:.1e}")
        assert metrics["parity_tokens"] == sum(t.policy_tokens for t in trajectories)
        assert metrics["parity_max_abs"] < FLOAT32_NATS


@pytest.mark.parametrize(
    ("door", "faults"), list(zip(MODES, FAULTS.values(), strict=True)), ids=FAULTS, indirect=["door"]
)
async def test_what_an_sdk_repeats_is_one_turn(door: Door, folder: Path, faults: list[Fault]) -> None:
    for client in CLIENTS:
        door.engine.exchanges.clear()
        some = client._replace(agents=client.agents[::2])
        door.agents.faults.extend(faults * len(some.agents))
        episodes = await door.play(some)
        assert not door.agents.faults, client.name
        for episode in episodes:
            check_finished(episode)
        check_exact(door, folder, [episode.trajectory for episode in episodes])
