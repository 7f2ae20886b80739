"""Whole files or none: writing that a crash or a concurrent reader can never see half done."""

import os
from pathlib import Path
from tempfile import NamedTemporaryFile

__all__ = ["write_atomically"]


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by a file holding `data`; readers see the old content or the new, never a part.

    Missing parent folders are made. Raises: OSError: the disk refuses.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            os.unlink(file.name)
            raise
    os.replace(file.name, path)
