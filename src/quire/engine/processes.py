"""Settings of an engine's processes: private folders, threads, and time limits."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path

from quire.system import open_regular

PREFIX = "quire-"
"""Beginning of the folders' names."""
MEMORY = "/dev/shm"
"""A folder whose files are memory. A GPU can map them."""
_LOCK = "lock"


def take_ownership(folder: Path) -> BufferedReader | None:
    """Makes this process the owner of a folder until the returned file is closed. Returns None if
    the folder's file system has no locks. Such a folder never counts as stale."""
    new = folder / f"{_LOCK}.new"
    new.touch(mode=0o600)
    lock = open_regular(new)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    # The file gets its name only after it is locked, so no process finds it unlocked.
    new.rename(folder / _LOCK)
    return lock


def remove_stale() -> None:
    """Removes folders of this user whose owner is gone."""
    for folder in _candidates():
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            with open_regular(folder / _LOCK) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Fails while the owner lives.
                shutil.rmtree(folder, ignore_errors=True)


def _candidates() -> Iterator[Path]:
    for parent in {tempfile.gettempdir(), "/tmp", "/var/tmp", MEMORY}:
        yield from Path(parent).glob(PREFIX + "*")


# Threads of the engine's process, chosen before PyTorch is imported there.


def thread_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables to start the engine's process with.

    By default OpenMP's threads spin between two parallel regions. Spinning threads take time from
    other processes on the same cores, such as the API process. Passive threads sleep instead.

    Args:
        environment: the parent's environment. Its own settings of OpenMP take precedence.
    """
    if any(name in environment for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")):
        return {}
    return {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


# When an engine whose loop does not turn counts as stuck.

_SECONDS = 20.0
_SECONDS_CPU = 300.0
"""A step of many prompt tokens may take minutes on a CPU."""


def stuck_limit(given: float | None, device: str) -> float:
    """Returns the seconds of silence after which an engine counts as stuck.

    Args:
        given: the setting `stuck_timeout`; None: the device's default.
        device: the engine's device.
    """
    if given is not None:
        return given
    return _SECONDS_CPU if device == "cpu" else _SECONDS
