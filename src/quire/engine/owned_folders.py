"""Folders that end with their process: one that is killed cannot remove its own, others do.

An owner holds a lock on a file of its folder, which the kernel gives up when it ends. Process ids
would not do: in a container they name others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from quire.weight_files import open_regular

PREFIX = "quire-"
"""Beginning of the folders' names."""
MEMORY = "/dev/shm"
"""A folder whose files are memory, which a GPU can be given to read."""
_LOCK = "lock"


def take_ownership(folder: Path) -> BufferedReader | None:
    """Makes this process the owner of a folder, until the returned file is closed. None: the folder
    takes no locks, and so nobody removes it."""
    new = folder / f"{_LOCK}.new"
    new.touch(mode=0o600)
    lock = open_regular(new)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    # Others see the file only once it is locked.
    new.rename(folder / _LOCK)
    return lock


def remove_stale() -> None:
    """Removes folders of this user whose owner is gone."""
    for folder in _candidates():
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            with open_regular(folder / _LOCK) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails where its owner lives
                shutil.rmtree(folder, ignore_errors=True)


def _candidates() -> Iterator[Path]:
    for parent in {tempfile.gettempdir(), "/tmp", "/var/tmp", MEMORY}:
        yield from Path(parent).glob(PREFIX + "*")
