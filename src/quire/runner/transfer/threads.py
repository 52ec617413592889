"""Threads that may hang forever in a system call."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TypeVar

T = TypeVar("T")

_Job = tuple[Future[T], Callable[..., T], tuple[object, ...]]


class DaemonThreads:
    """Runs jobs on threads that the interpreter does not wait for at its end.

    `ThreadPoolExecutor` would wait, so a thread that hangs in a dead file system would keep the
    process alive.
    """

    def __init__(self, count: int, name: str) -> None:
        self.abandoned = False
        self._jobs: queue.SimpleQueue[_Job[object] | None] = queue.SimpleQueue()
        self._open: dict[Future[object], float] = {}
        """Running jobs, and the times when they began."""
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, daemon=True, name=f"{name}-{i}")
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[..., T], *given: object) -> Future[T]:
        """Runs a job. Returns its future, which is cancelled after `abandon`."""
        outcome: Future[T] = Future()
        with self._lock:
            if self.abandoned:
                outcome.cancel()
            else:
                self._jobs.put((outcome, job, given))  # type: ignore[arg-type]
        return outcome

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            outcome, job, given = entry
            if self.abandoned or not outcome.set_running_or_notify_cancel():
                outcome.cancel()
                continue
            self._open[outcome] = time.monotonic()
            try:
                result = job(*given)
            except BaseException as error:
                self._open.pop(outcome, None)
                outcome.set_exception(error)
            else:
                self._open.pop(outcome, None)
                outcome.set_result(result)

    @property
    def longest(self) -> float:
        """Returns the seconds that the oldest running job has run; 0 without jobs."""
        began = list(self._open.values())
        return time.monotonic() - min(began) if began else 0.0

    def abandon(self) -> None:
        """Starts no more jobs, and cancels waiting jobs. Idempotent."""
        with self._lock:
            self.abandoned = True
        while True:
            try:
                entry = self._jobs.get_nowait()
            except queue.Empty:
                break
            if entry is not None:
                entry[0].cancel()
        for _ in self._threads:
            self._jobs.put(None)

    def close(self, patience: float) -> None:
        """Waits at most `patience` seconds for the running jobs, and cancels the others."""
        self.abandon()
        deadline = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def succeeded(outcome: Future[bool]) -> bool:
    """Whether a job has ended with the result True."""
    try:
        return outcome.result(0)
    except (CancelledError, TimeoutError):
        return False
