"""Folders that end with their process: one that is killed cannot remove its own, others do."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "quire-"
"""Beginning of the folders' names."""
MEMORY = "/dev/shm"
"""A folder whose files are memory, which a GPU can be given to read."""
_OWNER = "owner"


def mark(folder: Path) -> None:
    """Makes this process the owner of a folder."""
    (folder / _OWNER).write_text(str(os.getpid()))


def remove_stale() -> None:
    """Removes folders of this user whose owner is gone."""
    for folder in _candidates():
        with contextlib.suppress(OSError, ValueError):
            if folder.stat().st_uid != os.getuid():
                continue
            owner = int((folder / _OWNER).read_text())
            if not _alive(owner):
                shutil.rmtree(folder, ignore_errors=True)


def _candidates() -> Iterator[Path]:
    for parent in {tempfile.gettempdir(), "/tmp", "/var/tmp", MEMORY}:
        yield from Path(parent).glob(PREFIX + "*")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
