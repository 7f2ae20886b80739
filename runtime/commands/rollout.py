"""`turngate rollout URL`: trajectories in a file."""

import argparse

from turngate.runtime.commands import Commands
from turngate.runtime.commands.episodes import add_arguments, collect_episodes, write_figures

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Declare the command."""
    rollout = commands.add_parser(
        "rollout",
        help="play episodes against a server and keep them in a file",
        description="Play episodes against a server and write each to a file as soon as it ends. The last line on "
        "stdout is JSON. Exit codes as of evaluate.",
    )
    add_arguments(rollout)
    rollout.set_defaults(run=_rollout)


def _rollout(arguments: argparse.Namespace) -> int:
    import msgspec

    summary, mode = collect_episodes(arguments)
    print(
        f"{summary.episodes} episodes in {arguments.out} ({summary.trainable} can be trained on, token mode {mode!r}); "
        "read them with turngate.runtime.read_trajectories"
    )
    if summary.failed:
        print(f"{summary.failed} failed by the machinery, first: {summary.first_error}")
    figures = {
        "out": str(arguments.out),
        "episodes": summary.episodes,
        "failed": summary.failed,
        "trainable": summary.trainable,
        "prompt_tokens": summary.prompt_tokens,
        "completion_tokens": summary.completion_tokens,
        "cost": summary.cost,
        "token_mode": mode,
    }
    line = msgspec.json.encode(figures)
    print(line.decode(), flush=True)
    if arguments.json is not None:
        write_figures(arguments.json, line)
    return 0 if summary.scored else 1
