"""`turngate evaluate URL`: how well a model plays, without a trainer."""

import argparse

from turngate.runtime.commands import Commands
from turngate.runtime.commands.episodes import add_arguments, collect_episodes, write_figures

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Declare the command."""
    evaluate = commands.add_parser(
        "evaluate",
        help="play episodes against a server and report success",
        description="Play episodes against a server; report success with intervals, by end, pass@k, tokens and cost. "
        "The last line on stdout is JSON. Exit code 0: some episodes could be scored; 1: none; 2: it cannot work; "
        "130: interrupted, run it again to go on.",
    )
    add_arguments(evaluate)
    evaluate.set_defaults(run=_evaluate)


def _evaluate(arguments: argparse.Namespace) -> int:
    import msgspec

    summary, mode = collect_episodes(arguments)
    print(summary)
    figures = {**msgspec.structs.asdict(summary), "token_mode": mode, "out": str(arguments.out)}
    line = msgspec.json.encode(figures)
    print(line.decode(), flush=True)
    if arguments.json is not None:
        write_figures(arguments.json, line)
    return 0 if summary.scored else 1
