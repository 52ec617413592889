"""Files of a model, and how files that a user names are read."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

MOST_SETTINGS = 16 << 20
"""Bytes of a file of settings, such as config.json, or of a chat template."""
MOST_TABLE = 256 << 20
"""Bytes of a file with a row for each token or tensor: a tokenizer, or an index of shards."""


def stored_weights(folder: Path) -> list[Path]:
    """Returns the files of weights, by name; none if there are none."""
    return sorted((*folder.glob("*.safetensors"), *folder.glob("*.gguf")))


def open_regular(path: str | Path) -> BufferedReader:
    """Opens a file for reading bytes.

    Raises:
        OSError: it cannot be opened, or is no regular file. A pipe could block for ever, and a
            device could have no end.
    """
    # Without O_NONBLOCK, opening a pipe waits for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_bounded(path: str | Path, most: int = MOST_SETTINGS) -> bytes:
    """Returns the content of a regular file. Raises OSError as `open_regular` does, and for more
    bytes than `most`."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than the {most} bytes that are read", str(path))
    return data
