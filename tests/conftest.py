"""Settings and options shared by all tests."""

import os
from pathlib import Path

# Read when torch or matplotlib is first imported, so they are set before any test module is.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
from hypothesis import settings

# A slow machine is no failure, and CI must find the same examples as the machine that tries to reproduce them.
settings.register_profile("turngate", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("turngate")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the suite."""
    parser.addoption(
        "--vectors",
        type=Path,
        default=Path(__file__).parent / "vectors" / "vectors.json",
        help="file of golden cases to run through the adapters in tests/learners/vector_adapters",
    )
