"""The thread that builds the masks of steps."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

_PATIENCE = 1.0
"""Seconds that the end of the thread is waited for."""

Work = Callable[[], None]


class MaskThread:
    """Runs works in order.

    One thread is enough, because llguidance's own threads build the masks. Several were slower:
    each waited for the interpreter's lock for every row.
    """

    def __init__(self) -> None:
        self._works = SimpleQueue[Work | None]()
        # It may wait for a step that never runs, which must not keep a program from ending.
        args = (self._works,)
        thread = threading.Thread(target=_run_all, args=args, name="masks", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _end, self._works, thread)

    def put(self, work: Work) -> None:
        self._works.put(work)


def _run_all(works: SimpleQueue[Work | None]) -> None:
    """Runs what comes, until None comes."""
    while (work := works.get()) is not None:
        work()


def _end(works: SimpleQueue[Work | None], thread: threading.Thread) -> None:
    """Ends the thread, which must not wake while the interpreter ends."""
    works.put(None)
    if thread is not threading.current_thread():
        thread.join(_PATIENCE)
