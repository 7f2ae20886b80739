"""Whole files or none: writing that a crash or a concurrent reader can never see half done."""

import os
import uuid
from pathlib import Path

__all__ = ["write_atomically"]


def write_atomically(path: Path, data: bytes, *, outlives_power: bool = True) -> None:
    """Replace `path` by a file holding `data`; readers see the old content or the new, never a part.

    Missing parent folders are made. outlives_power: wait for the disk; without it the file outlives its process, which
    is enough for what is written often. Raises: OSError: the disk refuses; the old file is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own per call: two processes may write the same file. Not a NamedTemporaryFile, which only the
    # owner may read: other users' servers load what a run writes.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            if outlives_power:
                os.fsync(file.fileno())  # else a power cut could leave a renamed but empty file
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
