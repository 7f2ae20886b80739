"""Settings and options shared by all tests."""

import os

# Read when torch or matplotlib is first imported, so they are set before any test module is.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

from hypothesis import settings

# A slow machine is no failure, and CI must find the same examples as the machine that tries to reproduce them.
settings.register_profile("turngate", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("turngate")
