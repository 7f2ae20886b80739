"""Settings shared by the tests against servers that others wrote."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")
