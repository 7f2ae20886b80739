"""Runs the command line: `python -m turngate` does what `turngate` does."""

from turngate.runtime.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
