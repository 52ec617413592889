"""Files and processes of this machine: bounded reads of regular files, and children."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import sys
import threading
import time
from io import BufferedReader
from pathlib import Path

_ORPHAN_CHECK = 0.5
"""Seconds between checks that the parent still lives."""
_PR_SET_PDEATHSIG = 1


def python_command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module of Quire in a process of its own.

    With `-P` the process never imports from the current folder. That folder may be a downloaded
    model, and any of its files could have a standard module's name.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def end_with(owner: int) -> None:
    """Ends this process when its parent, `owner`, is gone.

    On Linux the kernel kills it, also where it is stopped or no thread of it has a turn. It does so
    as soon as the thread ends that started this process, so that must be one that stays. The parent
    may be gone already, because the imports before this call take a while.
    """

    def watch() -> None:
        while os.getppid() == owner:
            time.sleep(_ORPHAN_CHECK)
        os._exit(1)

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=watch, daemon=True, name="owner-watch").start()


def visible_devices() -> list[str] | None:
    """Returns the GPUs that `CUDA_VISIBLE_DEVICES` names; None if it is not set."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if names is None else [name.strip() for name in names.split(",")]


def cache_folder() -> Path:
    """Returns the folder for what Quire makes once and reads again: `QUIRE_CACHE_DIR`, or `quire`
    in the user's cache folder."""
    root = os.environ.get("QUIRE_CACHE_DIR")
    base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "quire"
    return base.expanduser()


# Files of a model, and how files that a user names are read.

MOST_SETTINGS = 16 << 20
"""Bytes of a file of settings, such as config.json, or of a chat template."""
MOST_TABLE = 256 << 20
"""Bytes of a file with a row for each token or tensor: a tokenizer, or an index of shards."""
MOST_DATA = 1 << 30
"""Bytes of a text or of a data set."""
_SMALL = 1 << 20


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
        # Some file systems do not know the size, and `read` sets aside what it is asked for.
        most = min(most, max(os.fstat(file.fileno()).st_size, _SMALL))
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than the {most} bytes that are read", str(path))
    return data
