"""The command line: `turngate COMMAND`, one module of `turngate.runtime.commands` per command."""

import argparse
import sys
from collections.abc import Sequence

from turngate.runtime.commands import check, evaluate, gateway, rollout, serve
from turngate.runtime.errors import TurngateError

__all__ = ["main"]

_COMMANDS = (check, evaluate, gateway, rollout, serve)
"""In the order of the help text."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 asked for something that cannot work."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except TurngateError as error:
        print(f"turngate: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="turngate", description="Reinforcement learning of language model agents.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add(commands)
    return parser
