"""Starting Python processes of Quire, and ending them with their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

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
