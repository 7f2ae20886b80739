"""What `turngate evaluate` and `turngate rollout` share: arguments, the collection, its progress."""

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from turngate.runtime.commands.check import add_server_arguments, api_key_of, renderer_of
from turngate.runtime.errors import ConfigError

if TYPE_CHECKING:
    from turngate.runtime.episode_summary import EpisodeSummary
    from turngate.runtime.types import Trajectory

__all__ = ["Progress", "add_arguments", "collect_episodes", "write_figures"]

_EVERY_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the server, the episodes, how they are played and where they go."""
    add_server_arguments(parser)
    what = parser.add_argument_group("episodes")
    what.add_argument(
        "--env",
        required=True,
        metavar="MODULE:NAME",
        help="environment class, or async def agent(session, task); also FILE.py:NAME",
    )
    what.add_argument("--env-options", default="{}", metavar="JSON", help="keyword arguments of the environment")
    what.add_argument(
        "--tasks",
        required=True,
        metavar="MODULE:NAME",
        help="list of tasks, or function of (n, seed); also FILE.py:NAME, or FILE.jsonl with a task a line",
    )
    what.add_argument("--n", type=int, help="how many tasks")
    what.add_argument("--seed", type=int, default=0, help="root of all randomness (default: %(default)s)")
    what.add_argument("--samples", type=int, default=1, help="episodes of each task (default: %(default)s)")
    how = parser.add_argument_group("how they are played")
    how.add_argument("--max-turns", type=int, default=16, help="(default: %(default)s)")
    how.add_argument("--max-concurrent", type=int, default=32, help="live episodes (default: %(default)s)")
    how.add_argument("--temperature", type=float, default=1.0, help="(default: %(default)s)")
    how.add_argument("--top-p", type=float, default=1.0, help="(default: %(default)s)")
    how.add_argument("--max-tokens", type=int, default=256, help="generated tokens a turn (default: %(default)s)")
    how.add_argument(
        "--request-timeout", type=float, default=600.0, metavar="S", help="seconds a completion (default: %(default)s)"
    )
    how.add_argument(
        "--context", default="full", help="what the model sees: full, last_turns:3, MODULE:NAME (default: %(default)s)"
    )
    where = parser.add_argument_group("where they go")
    where.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl", help="an episode a line; gone on with")
    where.add_argument("--retry-failed", action="store_true", help="play episodes again that the machinery failed")
    where.add_argument("--json", type=Path, metavar="PATH", help="write the figures as JSON, too")
    where.add_argument("--price-in", type=float, default=0.0, metavar="X", help="of a million prompt tokens")
    where.add_argument("--price-out", type=float, default=0.0, metavar="X", help="of a million generated tokens")


def collect_episodes(arguments: argparse.Namespace) -> "tuple[EpisodeSummary, str]":
    """Play what the arguments ask for; return the figures and the token mode.

    Raises: KeyboardInterrupt, SystemExit: after saying on stderr how to go on. ConfigError, EndpointError, EnvError: as
        `collect`.
    """
    if arguments.json is not None:
        write_figures(arguments.json, b"{}")  # before the work: afterwards is too late to learn that it cannot be
    progress = Progress(sys.stderr)
    try:
        return asyncio.run(_collect(arguments, progress))
    except (KeyboardInterrupt, SystemExit):  # the latter after SIGTERM
        progress.say(f"interrupted; the same command goes on after the episodes in {arguments.out}")
        raise


def write_figures(path: Path, line: bytes) -> None:
    """Write the figures as indented JSON. Raises ConfigError: the file cannot be written."""
    import msgspec

    try:
        path.write_bytes(msgspec.json.format(line, indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"--json must be a file that can be written: got {error}") from error


async def _collect(arguments: argparse.Namespace, progress: "Progress") -> "tuple[EpisodeSummary, str]":
    # Late: --help needs none of it.
    from turngate.runtime.collecting import collect
    from turngate.runtime.connect import connect
    from turngate.runtime.episode_summary import Prices
    from turngate.runtime.limits import Limits
    from turngate.runtime.loading import load_context, load_env, load_tasks
    from turngate.runtime.runtime import Runtime
    from turngate.runtime.sigterm import exit_on_sigterm
    from turngate.runtime.types import Sampling

    # 1. All that can be wrong without the server.
    env = load_env(arguments.env, options := _options(arguments.env_options))
    tasks = load_tasks(arguments.tasks, arguments.n, arguments.seed)
    context = load_context(arguments.context)
    prices = Prices(arguments.price_in, arguments.price_out)
    sampling = Sampling(temperature=arguments.temperature, top_p=arguments.top_p, max_tokens=arguments.max_tokens)
    limits = Limits(max_turns=arguments.max_turns, request_timeout_s=arguments.request_timeout)
    # 2. The server.
    connected = await connect(
        arguments.url,
        model=arguments.model,
        api_key=api_key_of(arguments),
        renderer=renderer_of(arguments),
        timeout_s=arguments.timeout,
    )
    async with connected as endpoint:
        mode = endpoint.dialect.token_mode
        progress.say(f"{endpoint.model} at {endpoint.url}, token mode {mode!r}")
        runtime = Runtime(
            endpoint, limits=limits, sampling=sampling, context=context, max_concurrent=arguments.max_concurrent
        )
        # 3. The episodes. SIGTERM, as Ctrl-C, leaves whole lines behind.
        with exit_on_sigterm():
            summary = await collect(
                runtime,
                env,
                tasks,
                arguments.out,
                samples=arguments.samples,
                seed=arguments.seed,
                prices=prices,
                described={"env": arguments.env, "env_options": options, "context": arguments.context},
                retry_failed=arguments.retry_failed,
                on_episode=progress.on_episode,
            )
    return summary, mode


def _options(text: str) -> dict[str, Any]:
    import msgspec

    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--env-options must be a JSON object: {error}, got {text!r:.80}") from error


class Progress:
    """Says every few seconds how far the collection is, when an episode has ended."""

    # Changed by on_episode(): all of it.
    _said_s: float
    _successes: int
    _failed: int
    _new: int

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._said_s, self._successes, self._failed, self._new = time.monotonic(), 0, 0, 0

    def say(self, line: str) -> None:
        """Print one line."""
        print(f"turngate: {line}", file=self._file, flush=True)

    def on_episode(self, trajectory: "Trajectory", done: int, total: int) -> None:
        """Count one episode, and say so when it is time."""
        from turngate.envs.base import End

        self._new += 1
        self._successes += trajectory.end is End.success
        self._failed += trajectory.end.is_failure
        if trajectory.end.is_failure and self._failed == 1:
            self.say(f"first failure: {trajectory.end.value}: {' '.join(trajectory.error.split())[:300]}")
        now = time.monotonic()
        if done < total and now - self._said_s < _EVERY_S:
            return
        self._said_s = now
        scored = self._new - self._failed
        rate = f"success {self._successes / scored:.2f}" if scored else "nothing scored"
        failed = f", {self._failed} failed" if self._failed else ""
        self.say(f"{done} of {total} episodes, {rate} of {scored} new ones{failed}")
