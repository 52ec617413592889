"""Watches the ranks for a process that ends and for a step that does not end.

If a rank is gone, the others wait for it inside a collective. On a GPU only the end of the
collective interrupts that wait. So a thread watches the ranks, and aborts the collectives of this
process if one is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from quire.engine.ranks.remote_worker import RemoteWorker
from quire.engine.ranks.shared_memory import FlightRecorder
from quire.errors import ConfigError, EngineDeadError, ModelError

logger = logging.getLogger("quire.engine")

_GLANCE_MS = 500
_GRACE = 5.0
"""Seconds within which a wait must return after its collectives were aborted."""
_TOLD = 1.0
"""Seconds within which the end of a process is noticed after its connections broke."""


class RankWatch:
    """Watches workers from a thread until `close`.

    Args:
        abort: aborts this process's collectives.
        timeout: seconds that a step may take.

    Attributes:
        error: the error that has ended the ranks; None while they run.
        news: a descriptor that becomes readable when `error` is set.
    """

    def __init__(
        self,
        workers: Sequence[RemoteWorker],
        recorder: FlightRecorder,
        abort: Callable[[], None],
        timeout: float,
    ) -> None:
        self.error: EngineDeadError | None = None
        self.news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._workers = {worker.fileno(): worker for worker in workers}
        self._recorder = recorder
        self._abort = abort
        self._timeout = timeout
        self._deadline: float | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._broken = threading.Event()
        self._closing, self._closed = os.pipe()
        self._descriptors: tuple[int, ...] = self._closing, self._closed, self.news
        self._thread = threading.Thread(target=self._watch, daemon=True, name="rank-watch")
        self._thread.start()

    @contextlib.contextmanager
    def waiting(self, *, limited: bool = True) -> Iterator[None]:
        """Guards a call that waits for other ranks.

        Args:
            limited: the call may take at most as long as a step.

        Raises:
            EngineDeadError: a rank has ended, or the call took too long.
        """
        if self.error is not None:
            raise self.error
        self._idle.clear()
        self._deadline = time.monotonic() + self._timeout if limited else None
        try:
            yield
        except (ConfigError, ModelError):
            raise  # The error of this rank, and perhaps of the others too.
        except Exception as error:
            # The connections of a lost rank break before the thread notices its end.
            if self._broken.wait(_TOLD) and self.error is not None:
                raise self.error from error
            raise
        finally:
            self._deadline = None
            self._idle.set()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        if self._thread.is_alive():
            os.write(self._closed, b"x")
            self._thread.join()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = ()

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._closing, select.POLLIN)
        for descriptor in self._workers:
            poller.register(descriptor, select.POLLRDHUP)
        while True:
            events = poller.poll(_GLANCE_MS)
            gone = [self._workers[fd] for fd, _ in events if fd in self._workers]
            if len(gone) < len(events):
                return
            if gone:
                self._fail(gone[0].ended())
                return
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline:
                self._fail(self._stuck())
                return

    def _stuck(self) -> EngineDeadError:
        late = ", ".join(f"rank {rank}" for rank in self._recorder.late_ranks()) or "no rank"
        return EngineDeadError(
            f"a step has not ended within {self._timeout:g} s; {late} is behind ({self._recorder})"
        )

    def _fail(self, error: EngineDeadError) -> None:
        logger.error("%s", error)
        self.error = error
        os.eventfd_write(self.news, 1)
        self._broken.set()
        self._abort()
        if not self._idle.wait(_GRACE):
            logger.error("a wait for other ranks cannot be ended; this process ends instead")
            os._exit(1)
