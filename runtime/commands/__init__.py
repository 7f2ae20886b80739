"""The commands of the command line, one module each: `add(commands)` declares it, and its `run` returns an exit code.

Modules are imported for `--help`: what a command itself needs it imports when it runs.
"""

import argparse
from typing import TypeAlias

__all__ = ["Commands"]

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""What commands are added to."""
