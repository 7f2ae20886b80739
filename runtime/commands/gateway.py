"""`turngate gateway --upstream URL`: a door for agents that bring their own loop, in front of any server."""

import argparse
import asyncio
import signal
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from turngate.runtime.commands import Commands
from turngate.runtime.commands.check import add_server_arguments, api_key_of, read_key, renderer_of
from turngate.runtime.commands.guiding import add_guidance_arguments, check_guidance_arguments, guidance_of

if TYPE_CHECKING:
    from turngate.runtime.events import Events
    from turngate.runtime.gateway import GatewayConfig

__all__ = ["add"]

_FILE = "trajectories.jsonl"
_MAX_TOKENS = 1024


def add(commands: Commands) -> None:
    """Declare the command."""
    gateway = commands.add_parser(
        "gateway",
        help="let agents of any kind talk to a server, and record their episodes",
        description="An OpenAI-compatible gateway: point an agent's base URL at it. Sessions are opened over HTTP with "
        "the admin key, or, with --record, by the agents' own API keys: each key is an episode.",
    )
    add_server_arguments(gateway, url_option="--upstream")
    gateway.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    gateway.add_argument("--port", type=int, default=8100, help="port, 0 for a free one (default: %(default)s)")
    gateway.add_argument(
        "--key-file",
        type=Path,
        metavar="FILE",
        help="file with the gateway's own key, which opens sessions; a random one is made and printed without it",
    )
    gateway.add_argument(
        "--record",
        type=Path,
        metavar="DIR",
        help=f"write every episode to DIR/{_FILE}, and let every API key be a session: any key, or with --key-file "
        "that key or KEY.NAME",
    )
    gateway.add_argument("--idle", type=float, default=900.0, metavar="S", help="end of a silent session (%(default)s)")
    gateway.add_argument("--deadline", type=float, default=3600.0, metavar="S", help="of a session (%(default)s)")
    gateway.add_argument("--max-turns", type=int, default=1000, help="per session (default: %(default)s)")
    gateway.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="pins how replies are drawn, whatever agents ask for; 1 makes episodes that can be trained on",
    )
    gateway.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"where agents name no cap, with --temperature (default: {_MAX_TOKENS}, or a quarter of the server's "
        "context where that is less); without it the server's own",
    )
    gateway.add_argument("--agents-may-reward", action="store_true", help="a session's own key rewards and ends it")
    add_guidance_arguments(gateway)
    gateway.set_defaults(run=_gateway)


def _gateway(arguments: argparse.Namespace) -> int:
    # Late: --help and the other commands need no server.
    from turngate.runtime.events import Events
    from turngate.runtime.gateway.config import LOOPBACK, GatewayConfig

    check_guidance_arguments(arguments)
    record: Path | None = arguments.record
    config = GatewayConfig(
        host=arguments.host,
        port=arguments.port,
        admin_key=read_key(arguments.key_file, "--key-file") if arguments.key_file is not None else None,
        agents_may_reward=arguments.agents_may_reward,
        sessions_by_key=record is not None,
        idle_timeout_s=arguments.idle,
    )
    if config.sessions_by_key and config.admin_key is None and config.host not in LOOPBACK:
        print(
            f"turngate: listening on {config.host} without --key-file: everybody who reaches it can use the model",
            file=sys.stderr,
        )
    events = Events()
    with _episodes_written(record, events):
        asyncio.run(_run(arguments, config, events))
    return 0


async def _run(arguments: argparse.Namespace, config: "GatewayConfig", events: "Events") -> None:
    from turngate.runtime.connect import connect
    from turngate.runtime.gateway import Gateway
    from turngate.runtime.gateway.drawing import default_cap
    from turngate.runtime.limits import Limits
    from turngate.runtime.session_table import SessionTable
    from turngate.runtime.types import Sampling

    pinned = None
    if arguments.temperature is not None:
        cap = _MAX_TOKENS if arguments.max_tokens is None else arguments.max_tokens
        pinned = Sampling(temperature=arguments.temperature, max_tokens=cap)
    limits = Limits(max_turns=arguments.max_turns, rollout_timeout_s=arguments.deadline)
    endpoint = await connect(
        arguments.url,
        model=arguments.model,
        api_key=api_key_of(arguments),
        renderer=renderer_of(arguments),
        timeout_s=arguments.timeout,
    )
    if pinned is not None and arguments.max_tokens is None:
        pinned = msgspec.structs.replace(pinned, max_tokens=default_cap(endpoint))
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    table = SessionTable(endpoint, limits=limits, sampling=pinned, events=events)
    async with (
        endpoint,
        guidance_of(arguments, endpoint) as guidance,
        Gateway(table, config, guidance=guidance) as door,
    ):
        mode = endpoint.dialect.token_mode
        print(f"gateway to {endpoint.model} (token mode {mode!r}) at {door.url}", flush=True)
        if config.admin_key is None:
            print(f"admin key: {door.admin_key}", flush=True)
        if guidance is not None:
            print(f"guided model: {endpoint.model}@guided, {guidance!r}", flush=True)
        await stop.wait()
        door.seal_sessions()
        if guidance is not None and (told := guidance.statistics()).decisions:
            left = "".join(f", {count} left to the base: {why}" for why, count in told.fallbacks.items())
            print(f"{told.guided} of {told.decisions} decisions guided{left}", flush=True)


@contextmanager
def _episodes_written(folder: Path | None, events: "Events") -> Generator[None]:
    """Append every episode that has turns to the folder's file, as it ends. Raises: ConfigError: that cannot be."""
    from turngate.runtime.episode_log import EpisodeLog
    from turngate.runtime.events import RolloutFinished

    if folder is None:
        yield
        return
    log = EpisodeLog(folder / _FILE)
    kinds = Counter[bool]()

    def write(finished: RolloutFinished) -> None:
        if finished.trajectory.turns:
            log.write(finished.trajectory)
            kinds[finished.trajectory.trainable] += 1

    events.subscribe(RolloutFinished, write)
    try:
        yield
        lost = f", {log.lost} lost" if log.lost else ""
        print(f"{kinds.total()} episodes for {log.path}{lost}; {kinds[True]} can be trained on", flush=True)
    finally:
        log.close()
